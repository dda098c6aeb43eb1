"""The READMEs say what the results say, and a claim that no longer holds is found."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def figures():
    path = ROOT / "recipes" / "benchmarks" / "figures.py"
    spec = importlib.util.spec_from_file_location("benchmark_figures", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclasses
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_the_readmes_say_what_the_results_say(figures, capsys):
    assert figures.main(["--check"]) == 0, capsys.readouterr().out


def test_every_table_is_in_a_readme_and_every_benchmark_claims_something(figures):
    text = "".join(page.read_text() for page in figures.PAGES)
    assert [name for name in figures.TABLES if text.count(figures.BEGIN.format(name)) != 1] == []
    assert text.count(figures.END) == len(figures.TABLES)
    for source in figures.SOURCES.values():
        claims = source.claims(source.read())
        assert claims and all(value > 0 for value in claims.values())


def test_a_changed_figure_is_found_and_put_right(figures, tmp_path, monkeypatch, capsys):
    page = tmp_path / "README.md"
    right = figures.filled(figures.PAGES[0].read_text())
    page.write_text(right.replace("x |", "1x |", 1))
    monkeypatch.setattr(figures, "PAGES", (page,))
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    assert page.read_text() != right
    assert figures.main(["--check"]) == 1
    assert "README.md does not say what the results say" in capsys.readouterr().out
    assert figures.main([]) == 0
    assert page.read_text() == right


def test_the_quickstarts_translations_stand_beside_the_score_of_the_unchanged_text(figures):
    content = figures.SOURCES["quickstart"].read()
    content |= {"bleu": 50.1, "chrf": 66.0, "unchanged_bleu": 60.7, "trained_updates": 1510}
    content |= {"samples": [["he saith", "he says", "he | says"]]}
    content["settings"]["minutes"] = 4.0
    text = figures.quickstart_table(content)
    assert (
        "After 4 minutes of training on (1,510 updates): BLEU 50.1, chrF 66.0; the old text as it is: BLEU 60.7" in text
    )
    assert "| he saith | he says | he \\| says |" in text
    ratio = content["over_stock"]["ls"]["ratio"]
    assert figures.quickstart_claims(content) == {"over stock": ratio}


def test_every_row_of_the_training_table_has_one_measure(figures):
    """Stock's ms over those of ls are the speed-up beside them."""
    content = figures.SOURCES["training"].read()
    for row in content["rows"]["results"].values():
        for kind in ("ls fp32", "ls bf16"):
            ratio = row["speedup"][kind]["over_stock"]["ratio"]
            assert figures.step_ms(row, "stock") / figures.step_ms(row, kind) == pytest.approx(ratio)


def test_claims_that_are_too_good(figures):
    claimed = {"holds": 1.15, "exaggerates": 1.16, "is modest": 0.5, "is gone": 1.0, "was nothing": 1.0}
    measured = {"holds": 1.0, "exaggerates": 1.0, "is modest": 1.0, "was nothing": float("nan")}
    assert [line.split(":")[0] for line in figures.too_good(claimed, measured)] == [
        "exaggerates",
        "is gone",
        "was nothing",
    ]


@pytest.mark.parametrize(("claim", "keep", "status"), [(1.5, False, 0), (2.5, False, 1), (2.5, True, 1)])
def test_measuring_runs_the_command_and_compares(figures, tmp_path, monkeypatch, capsys, claim, keep, status):
    """A benchmark that measures 2.0, beside a file of results that claims this or that."""
    script = tmp_path / "benchmark.py"
    script.write_text("import json, sys; json.dump({'speedup': 2.0}, open(sys.argv[1], 'w'))")
    results = tmp_path / "results"
    results.mkdir()
    (results / "it.json").write_text(json.dumps({"speedup": claim}))
    source = figures.Source("it.json", (str(script),), lambda content: {"it": content["speedup"]})
    monkeypatch.setattr(figures, "SOURCES", {"it": source})
    monkeypatch.setattr(figures, "RESULTS", results)
    monkeypatch.setattr(figures, "PAGES", ())
    assert figures.main(["--measure", "it", *(["--keep"] if keep else [])]) == status
    assert ("it: 2.50 claimed, 2.00 measured" in capsys.readouterr().out) == bool(status)
    assert json.loads((results / "it.json").read_text())["speedup"] == (2.0 if keep else claim)


def test_the_command_is_told_as_a_reader_would_type_it(figures):
    assert figures.SOURCES["train_step"].told == (
        "python recipes/benchmarks/train_step.py --out recipes/benchmarks/results/train_step_cpu_1_thread.json"
    )


def test_unknown_benchmarks_are_refused(figures, capsys):
    with pytest.raises(SystemExit):
        figures.main(["--measure", "nothing"])
    assert "nothing" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        figures.main(["--keep"])
