"""The quality recipe: its flags, its data, its scores and its verdict. The trainings are fairseq's, tested by the quickstart."""

import importlib
import json
import sys

import pytest

from tests.recipes.conftest import QUICKSTART, ROOT
from tests.recipes.test_report import update, write_record


@pytest.fixture(scope="module")
def compare():
    """compare.py, with the neighbours that it imports by their bare names."""
    paths = [str(ROOT / "recipes" / "quality"), str(QUICKSTART)]
    sys.path[:0] = paths
    try:
        yield importlib.import_module("compare")
    finally:
        for name in ("compare", "run", "report", "prepare"):
            sys.modules.pop(name, None)
        for path in paths:
            sys.path.remove(path)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--epochs", "0"], "--epochs must be at least 1, got 0"),
        (["--sentences", "99"], "--sentences must be at least 100, got 99"),
        (["--width", "100"], "--width must be a multiple of 64, got 100"),
        (["--dropout", "1"], "--dropout must lie in [0, 1), got 1.0"),
    ],
)
def test_flags_are_checked(compare, capsys, flags, words):
    with pytest.raises(SystemExit) as stopped:
        compare.parse_args(flags)
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_both_train_by_the_same_flags(compare, tmp_path):
    args = compare.parse_args(["--out", str(tmp_path), "--layers", "2", "--width", "128"])
    quality = compare.Quality(args, compare.quickstart.Display())
    stock, ls = (quality.command(kind) for kind in ("stock", "ls"))
    different = [(a, b) for a, b in zip(stock, ls, strict=True) if a != b]
    names = {"transformer", "label_smoothed_cross_entropy", "adam"}
    assert {b for _, b in different} >= {f"ls_{name}" for name in names}
    assert {a for a, _ in different} - names == {
        "stock",
        *(str(tmp_path / "runs" / "stock" / name) for name in ("record.jsonl", "checkpoints")),
    }
    assert stock[stock.index("--decoder-ffn-embed-dim") + 1] == "512"


def test_continue_needs_the_same_settings(compare, tmp_path):
    def start(*flags):
        args = compare.parse_args(["--out", str(tmp_path), *flags])
        compare.Quality(args, compare.quickstart.Display()).start()

    with pytest.raises(compare.QualityError, match="--continue must go on with the settings of an earlier run"):
        start("--continue")
    start("--layers", "2")
    record = tmp_path / "runs" / "ls" / "record.jsonl"
    write_record(record, "ls", [update(1)])
    with pytest.raises(compare.QualityError, match="changed: layers 2 -> 3"):
        start("--continue")
    start("--continue", "--layers", "2", "--epochs", "20")
    assert record.exists()
    start("--layers", "2")
    assert not record.exists()


def test_sentences_are_drawn_once_and_counted(compare, tmp_path, monkeypatch):
    binarized = []
    monkeypatch.setattr(compare.prepare, "binarize", lambda pieces, *rest: binarized.append(pieces))
    (tmp_path / "pieces").mkdir()
    for side in ("ja", "en"):
        for split in ("train", "valid", "test"):
            lines = "".join(f"{side} {i}" + " x" * (i % 3) + "\n" for i in range(50))
            (tmp_path / "pieces" / f"{split}.{side}").write_text(lines)
    tokens = compare.take_sentences(tmp_path, tmp_path / "subset", 20)
    rows = {side: (tmp_path / "subset" / "pieces" / f"train.{side}").read_text().splitlines() for side in ("ja", "en")}
    assert len(rows["ja"]) == len(set(rows["ja"])) == 20
    assert [row.split()[1:] for row in rows["ja"]] == [row.split()[1:] for row in rows["en"]]
    assert tokens == sum(len(row.split()) + 1 for row in rows["en"])
    assert len((tmp_path / "subset" / "pieces" / "test.en").read_text().splitlines()) == 50
    assert compare.take_sentences(tmp_path, tmp_path / "subset", 20) == tokens and len(binarized) == 1


def test_scores_verdict_and_report(compare, tmp_path):
    """Stock as good as the reference, ls worse; then the two alike."""
    words = [f"the word number {i} is one of many words in this text of {i % 7} parts" for i in range(60)]
    worse = [line.replace("many words", "them") if i % 2 else line for i, line in enumerate(words)]
    apart = compare.paired_bootstrap({"stock": words, "ls": worse}, words)
    assert apart["BLEU"]["stock"]["score"] == pytest.approx(100)
    assert apart["BLEU"]["ls"]["score"] < 95 and apart["BLEU"]["ls"]["p"] < 0.05
    assert "ls is significantly WORSE" in compare.verdict(apart)
    better = compare.paired_bootstrap({"stock": worse, "ls": words}, words)
    assert "ls is significantly better" in compare.verdict(better)
    alike = compare.paired_bootstrap({"stock": worse, "ls": worse}, words)
    assert "no difference" in compare.verdict(alike)
    for scores in (apart, better, alike):
        json.dumps(scores)  # sacrebleu's figures are partly numpy's

    runs = {}
    for kind in ("stock", "ls"):
        path = tmp_path / kind / "record.jsonl"
        write_record(path, kind, [update(n) for n in range(1, 30)])
        with path.open("a") as record:
            record.write(json.dumps({"update": 29, "valid_loss": 5.5}) + "\n")
        runs[kind] = compare.records.read_run(path)
    quality = compare.Quality(compare.parse_args(["--out", str(tmp_path)]), compare.quickstart.Display())
    result = {
        "settings": quality.settings() | {"epochs": 1, "tokens_per_epoch": 9},
        "minutes": 1.0,
        "valid_loss": {"stock": [5.5], "ls": [5.25]},
        "updates": {"stock": 29, "ls": 29},
        "scores": apart,
    }
    text = compare.tell(result, {"stock": words, "ls": worse}, words)
    assert "| 1 | 5.500 | 5.250 | -0.250 |" in text and "- ls: the word number" in text
    compare.draw(runs, result, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000
