"""The recipes: their flags, downloads, data and dry runs."""

import contextlib
import hashlib
import http.server
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from tests.recipes.conftest import ROOT

RECIPES = ("wmt14_en_de", "iwslt14_de_en", "language_model", "bart_finetune", "multi_gpu")
BEYOND_CI = ("iwslt14_de_en", "language_model", "bart_finetune", "multi_gpu")
TRANSLATION = ("wmt14_en_de", "iwslt14_de_en")


@pytest.fixture(scope="module")
def recipe():
    """Imports a module of recipes/common, or a recipe by the name of its folder."""
    sys.path.insert(0, str(ROOT / "recipes"))

    def load(name: str):
        if name not in RECIPES:
            return importlib.import_module(f"common.{name}")
        qualified = f"recipe_{name}"
        if qualified not in sys.modules:
            spec = importlib.util.spec_from_file_location(qualified, ROOT / "recipes" / name / "recipe.py")
            sys.modules[qualified] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[qualified])
        module = sys.modules[qualified]
        return next(c for c in vars(module).values() if isinstance(c, type) and getattr(c, "name", None) == name)

    yield load
    sys.path.remove(str(ROOT / "recipes"))


@pytest.fixture
def make(recipe, tmp_path):
    """A recipe of a name with command-line arguments."""

    def build(name: str, *arguments: str):
        kind = recipe(name)
        return kind(recipe("recipe").parse_args(kind, ["--out", str(tmp_path), *arguments]))

    return build


# ---- Flags


@pytest.mark.parametrize("name", RECIPES)
def test_help_needs_no_set_up(name):
    done = subprocess.run(
        ["bash", str(ROOT / "recipes" / name / "run.sh"), "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for word in (f"bash recipes/{name}/run.sh", "--train {stock,ls}", "--sweep", "--dry-run", "--evaluate"):
        assert word in done.stdout


@pytest.mark.parametrize("name", RECIPES)
def test_stock_and_ls_differ_by_three_names(make, name, monkeypatch):
    recipe = make(name, "--max-tokens", "512", "--", "--update-freq", "2")
    stock, ls = recipe.training("stock"), recipe.training("ls")
    assert len(stock) == len(ls)
    differing = {stock[i - 1]: (a, b) for i, (a, b) in enumerate(zip(stock, ls, strict=True)) if a != b}
    assert set(differing) == {"--arch", "--criterion", "--optimizer"}
    assert all(b == f"ls_{a}" for a, b in differing.values())
    assert stock[stock.index("--max-tokens") + 1] == "512" and stock[-2:] == ["--update-freq", "2"]
    assert "--fp16" in stock and "--cpu" not in stock
    assert recipe.training("ls", {"--update-freq": 1})[-4:] == [
        "--update-freq",
        "1",
        "--update-freq",
        "2",
    ]  # the last one counts
    on_cpu = make(name, "--cpu").training()
    assert "--cpu" in on_cpu and "--fp16" not in on_cpu
    for device in ([], ["--cpu"]):
        in_bf16 = make("multi_gpu", "--precision", "bf16", *device)
        assert "--bf16" in in_bf16.training("stock") and "--fp16" not in in_bf16.training("ls")
        assert "--bf16" not in in_bf16.device()


def test_the_twins_of_all_architectures_exist(recipe):
    from fairseq.models import ARCH_MODEL_REGISTRY

    import ls_plugin  # noqa: F401

    for name in RECIPES:
        assert {recipe(name).names["--arch"], f"ls_{recipe(name).names['--arch']}"} <= set(ARCH_MODEL_REGISTRY)


def test_wmt14_is_what_lightseq_trains(make):
    command = make("wmt14_en_de").training("ls")
    for flag, value in (("--arch", "ls_transformer_wmt_en_de_big_t2t"), ("--max-tokens", "8192"), ("--lr", "0.0005")):
        assert command[command.index(flag) + 1] == value


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--sweep", "512,x"], "--sweep: must be whole numbers of at least 1"),
        (["--updates", "1"], "--updates must be at least 4, got 1"),
        (
            ["--train", "ls", "--updates", "100"],
            "--updates has no meaning beside --train, drop it; -- --max-update N ends",
        ),
        (["--evaluate", "ls", "--contenders", "stock,ls"], "--contenders has no meaning beside --evaluate"),
        (["--sweep", "512", "--max-tokens", "64"], "--max-tokens has no meaning beside --sweep"),
        (["--dry-run", "--rounds", "3"], "--rounds has no meaning beside --dry-run"),
        (["--train", "ls", "--dry-run"], "not allowed with argument"),
        (["--", "--arch", "transformer"], "-- --arch: the recipe names it"),
        (["--cpu", "--precision", "fp16"], "--precision fp16: stock fairseq has it on GPUs only; take bf16 or fp32"),
        (
            ["--train", "stock", "--precision", "bf16"],
            "--precision bf16: by itself stock fairseq takes --bf16 for a TPU",
        ),
    ],
)
def test_flags_are_checked(recipe, capsys, flags, words):
    with pytest.raises(SystemExit) as stopped:
        recipe("recipe").parse_args(recipe("wmt14_en_de"), flags)
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_without_a_gpu_the_way_on_is_told(recipe, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    errors, module = recipe("errors"), recipe("recipe")
    with pytest.raises(errors.RecipeError, match=r"needs an NVIDIA GPU .*--cpu trains a small model.*--dry-run"):
        module.check_device(recipe("wmt14_en_de"), module.parse_args(recipe("wmt14_en_de"), []))
    args = module.parse_args(recipe("language_model"), [])
    module.check_device(recipe("language_model"), args)
    assert args.cpu


def test_what_does_not_fit_together_is_refused(recipe, make, tmp_path):
    error = recipe("errors").RecipeError
    short = tmp_path / "short.txt"
    short.write_text("one line\n")
    with pytest.raises(error, match="at least 400 lines that are not empty, got 1"):
        make("language_model", "--text", str(short)).splits()
    with pytest.raises(error, match="--text must be a file"):
        make("language_model", "--text", str(tmp_path / "none")).inputs()
    with pytest.raises(error, match="go together"):
        make("bart_finetune", "--restore", str(short)).inputs()
    with pytest.raises(error, match=r"found no dict\.source\.txt"):
        make("bart_finetune", "--restore", str(short), "--binarized", str(tmp_path)).inputs()
    with pytest.raises(error, match="--deepspeed: goes with --train ls"):
        make("multi_gpu", "--cpu", "--deepspeed", str(short)).inputs()
    with pytest.raises(error, match="--nproc must be at least 1, got 0"):
        make("multi_gpu", "--cpu", "--nproc", "0").inputs()
    with pytest.raises(error, match="stock fairseq has no such flag"):
        make("multi_gpu", "--cpu", "--deepspeed", str(short)).command("stock")
    with pytest.raises(error, match="cannot train in several processes on a CPU"):
        make("multi_gpu", "--cpu").command("stock")
    with pytest.raises(error, match="needs a training, found no checkpoint"):
        make("wmt14_en_de").evaluate("ls")


# ---- Downloads


def archive_bytes(tmp_path: Path, n_bytes: int = 300_000) -> bytes:
    data = tmp_path / "data.bin"
    data.write_bytes(os.urandom(n_bytes))  # does not compress
    with tarfile.open(tmp_path / "made.tgz", "w:gz") as tar:
        tar.add(data, "data.bin")
    return (tmp_path / "made.tgz").read_bytes()


class Server:
    """Serves one file, and cuts each connection after ``cuts`` bytes, as long as there are any; notes the ranges asked for."""

    def __init__(self, content: bytes, cuts=(), ranges: bool = True):
        self.content, self.cuts, self.ranges, self.asked = content, list(cuts), ranges, []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                asked = self.headers.get("Range")
                outer.asked.append(asked)
                start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and outer.ranges else 0
                total = len(outer.content)
                if asked and outer.ranges and start >= total:
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{total}")
                    self.end_headers()
                    return
                self.send_response(206 if asked and outer.ranges else 200)
                if asked and outer.ranges:
                    self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
                self.send_header("Content-Length", str(total - start))
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(outer.content[start:][: outer.cuts.pop(0) if outer.cuts else None])
                self.close_connection = True

            def log_message(self, *arguments):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/corpus.tgz"

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def download(recipe, monkeypatch):
    module = recipe("download")
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return module


def test_a_cut_download_goes_on_where_it_stopped(download, tmp_path):
    content, said, shown = archive_bytes(tmp_path), [], []
    sha = hashlib.sha256(content).hexdigest()
    with Server(content, cuts=[100_000, 50_000]) as server:
        archive = download.Archive(server.url, len(content), sha)
        path = download.fetch(archive, tmp_path / "d", said.append, lambda *progress: shown.append(progress))
        assert path.read_bytes() == content and not path.with_name("corpus.tgz.part").exists()
        assert server.asked == [None, "bytes=100000-", "bytes=150000-"]
        assert any("MiB/s" in note for _, note in shown) and len(said) == 1
        assert download.fetch(archive, tmp_path / "d", said.append) == path  # it is there now
        assert len(server.asked) == 3


def test_an_interrupted_download_is_kept_and_goes_on_in_the_next_run(download, recipe, tmp_path):
    content = archive_bytes(tmp_path)
    with Server(content, cuts=[120_000] + [0] * download.TRIES) as server:
        archive = download.Archive(server.url)
        with pytest.raises(recipe("errors").RecipeError, match=r"stopped at 0 MiB .*early.*run the same command again"):
            download.fetch(archive, tmp_path / "d")
        assert (tmp_path / "d" / "corpus.tgz.part").read_bytes() == content[:120_000]
        assert download.fetch(archive, tmp_path / "d").read_bytes() == content
        assert server.asked[-1] == "bytes=120000-"


def test_a_server_that_cannot_go_on_starts_over(download, tmp_path):
    content = archive_bytes(tmp_path)
    with Server(content, cuts=[100_000], ranges=False) as server:
        assert download.fetch(download.Archive(server.url), tmp_path / "d").read_bytes() == content


def test_a_whole_part_of_unknown_size_is_recognised(download, tmp_path):
    content = archive_bytes(tmp_path)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "corpus.tgz.part").write_bytes(content)
    with Server(content) as server:
        assert download.fetch(download.Archive(server.url), tmp_path / "d").read_bytes() == content


def test_a_wrong_file_is_named_and_left_alone(download, recipe, tmp_path):
    error, content, folder = recipe("errors").RecipeError, archive_bytes(tmp_path), tmp_path / "d"
    with Server(content) as server:
        with pytest.raises(
            error, match=r"SHA-256 must be the published one, 0+, got \w{64}; nothing was deleted: move corpus"
        ):
            download.fetch(download.Archive(server.url, len(content), "0" * 64), folder)
        assert (folder / "corpus.tgz.part").read_bytes() == content
        with pytest.raises(error, match=r"must have 5 bytes, got [\d,]+; nothing was deleted"):
            download.fetch(download.Archive(server.url, 5), folder)
    (folder / "corpus.tgz.part").rename(folder / "corpus.tgz")  # as if the user had brought it
    with pytest.raises(error, match="nothing was deleted"):
        download.fetch(download.Archive(server.url, len(content), "0" * 64), folder)
    assert (folder / "corpus.tgz").read_bytes() == content


def test_an_unpublished_checksum_is_recorded_and_holds_from_then_on(download, recipe, tmp_path):
    content, folder = archive_bytes(tmp_path), tmp_path / "d"
    with Server(content) as server:
        archive = download.Archive(server.url)
        path = download.fetch(archive, folder)
        assert (folder / "SHA256SUMS").read_text() == f"{hashlib.sha256(content).hexdigest()}  corpus.tgz\n"
        path.write_bytes(content[:-1] + b"x")
        with pytest.raises(recipe("errors").RecipeError, match="SHA-256 must be the recorded in"):
            download.fetch(archive, folder)
        (folder / "SHA256SUMS").unlink()
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(recipe("errors").RecipeError, match="is no whole tar archive"):
            download.fetch(archive, folder)
        assert not (folder / "SHA256SUMS").exists()


def test_a_full_disk_is_told_before_it_is_filled(download, recipe, tmp_path, monkeypatch):
    content = archive_bytes(tmp_path)
    monkeypatch.setattr(download, "SPARE_MIB", 1 << 40)
    with (
        Server(content) as server,
        pytest.raises(recipe("errors").RecipeError, match=r"corpus.tgz: [\d,]+ MiB of free disk are needed"),
    ):
        download.fetch(download.Archive(server.url), tmp_path / "d")


# ---- Data


def test_lines_end_at_line_feeds_alone_and_are_cleaned(recipe, tmp_path):
    corpus = recipe("corpus")
    (tmp_path / "text").write_text("a\u2028b\r\n\ufeffc\u00ad d\u200b \t e\x85f\n\n", encoding="utf-8", newline="")
    lines = list(corpus.read_lines(tmp_path / "text"))
    assert lines == ["a\u2028b\r", "\ufeffc\u00ad d\u200b \t e\x85f", ""]
    assert [corpus.clean(line) for line in lines] == ["a b", "c d e f", ""]


def test_pairs_that_do_not_fit_are_dropped(recipe):
    fits = recipe("corpus").fits
    assert fits(1, 1) and fits(2, 3) and fits(250, 250)
    assert not fits(0, 1) and not fits(2, 4) and not fits(251, 250) and not fits(10, 16)


def test_talks_lose_their_marks(make, tmp_path):
    recipe = make("iwslt14_de_en")
    train, test = tmp_path / "train.tags.de-en.en", tmp_path / "IWSLT14.TED.tst2010.de-en.en.xml"
    train.write_text("<url>http</url>\n<speaker>A</speaker>\n<title>On trees</title>\n<3 is a heart.\nOne & two.\n")
    test.write_text('<doc docid="1">\n<seg id="1"> Trees &amp; rivers. </seg>\n<seg id="2">Yes.</seg>\n</doc>\n')
    assert list(recipe.sentences(train)) == ["On trees", "<3 is a heart.", "One & two."]
    assert [text.strip() for text in recipe.sentences(test)] == ["Trees & rivers.", "Yes."]


@pytest.mark.parametrize("name, counts", [("wmt14_en_de", (1209, 20, 20, 3)), ("iwslt14_de_en", (386, 17, 100, 1))])
def test_archives_become_clean_text(make, tmp_path, name, counts):
    """The sample of a dry run, through download's checks, unpacking, cleaning and splitting."""
    recipe, text = make(name, "--dry-run"), tmp_path / "text"
    text.mkdir()
    told = recipe.write_splits(text)
    assert tuple(told[split] for split in ("train", "valid", "test", "empty")) == counts
    for split in ("train", "valid", "test"):
        sides = [(text / f"{split}.{side}").read_text(encoding="utf-8").splitlines() for side in ("en", "de")]
        assert len(sides[0]) == len(sides[1]) == told[split] and all(map(str.strip, sides[0] + sides[1]))
    dirty = "the old dog hears the child." if recipe.lower_case else "The old dog hears the child."
    assert dirty in (text / "train.en").read_text(encoding="utf-8") + (text / "valid.en").read_text(encoding="utf-8")
    assert (recipe.out / "downloads" / "SHA256SUMS").exists() and not (tmp_path / "raw").exists()


def test_sides_of_unequal_length_are_refused(make, tmp_path, monkeypatch, recipe):
    made = make("iwslt14_de_en", "--dry-run", "--out", str(tmp_path / "out"))
    made.write_sample(tmp_path / "sample")
    archives = {tmp_path / "sample" / archive.name: members for archive, members in made.archives.items()}
    sentences = type(made).sentences
    monkeypatch.setattr(
        type(made), "sentences", lambda self, path: iter(list(sentences(self, path))[path.name.endswith(".en") :])
    )
    (tmp_path / "text").mkdir()
    with pytest.raises(recipe("errors").RecipeError, match="must have as many sentences as one another"):
        made.write_text(archives, tmp_path / "text", tmp_path / "raw")


def test_another_archive_of_the_same_name_is_refused(recipe, tmp_path):
    sample, translation = recipe("sample"), recipe("translation")
    sample.write_archive(tmp_path / "corpus.tgz", {"./there.en": "a\n", "other.en": "b\n"})
    paths = translation.unpack(tmp_path / "corpus.tgz", ["there.en"], tmp_path / "raw")
    assert paths["there.en"].read_text() == "a\n"
    with pytest.raises(recipe("errors").RecipeError, match=r"must hold missing\.en"):
        translation.unpack(tmp_path / "corpus.tgz", ["there.en", "missing.en"], tmp_path / "raw2")


def test_a_users_text_is_split_at_its_end(make, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i}\n\n" for i in range(400)))
    splits = make("language_model", "--text", str(text)).splits()
    assert {split: len(lines) for split, lines in splits.items()} == {"train": 380, "valid": 10, "test": 10}
    assert splits["test"][-1] == "line 399" and splits["train"] + splits["valid"] + splits["test"] == [
        f"line {i}" for i in range(400)
    ]


def test_what_was_trained_never_goes_on_with_another_dictionary(recipe, make, monkeypatch):
    made = make("multi_gpu")
    content = {"dict.ja.txt": "a 1\n"}

    def make_data(folder):
        (folder / "bin").mkdir()
        for name, text in content.items():
            (folder / "bin" / name).write_text(text)
        return {}

    monkeypatch.setattr(made, "make_data", make_data)
    monkeypatch.setattr(made, "inputs", lambda: {"text": len(content["dict.ja.txt"])})
    made.prepare()
    made.save_dir("ls").mkdir(parents=True)
    content["dict.ja.txt"] = "b 1\nc 1\n"
    with pytest.raises(recipe("errors").RecipeError, match="another dictionary than before, so that train in"):
        made.prepare()
    assert (made.data / "bin" / "dict.ja.txt").read_text() == "a 1\n"
    made.save_dir("ls").rmdir()
    made.save_dir("ls").parent.rmdir()
    made.prepare()
    assert (made.data / "bin" / "dict.ja.txt").read_text() == "b 1\nc 1\n"


def test_processes_share_the_cores(make):
    assert make("multi_gpu", "--cpu", "--threads", "8", "--nproc", "4").report_options() == {
        "--nproc": 4,
        "--threads": 2,
    }


def test_an_interrupt_ends_the_sweep(make, monkeypatch):
    made, asked = make("wmt14_en_de", "--sweep", "512,1024,2048"), []

    def compare(folder, name):
        asked.append(int(folder.name))
        folder.mkdir(parents=True)
        (folder / "report.json").write_text(json.dumps({"contenders": {}, "over_stock": {}}))
        return 130 if len(asked) == 2 else 1

    monkeypatch.setattr(made, "compare", compare)
    assert made.sweep() == 130 and asked == [512, 1024]
    assert "| 1,024 | no claim |" in (made.out / "sweep" / "sweep.md").read_text()


def test_losses_that_must_agree(recipe):
    alike = sys.modules[recipe("multi_gpu").__module__].alike
    assert alike([7.985, 6.876], [7.985, 6.876], False) and not alike([7.985, 6.876], [7.985, 6.877], False)
    assert alike([7.985, 6.876], [7.985, 6.877], True) and not alike([7.985, 6.876], [7.985, 6.9], True)
    assert not alike([], [], True) and not alike([1.0], [1.0, 1.0], True)


def test_the_sweep_is_one_table(recipe):
    def report(gain, difference=0.001):
        contenders = {"stock": {"tokens_per_s": 1000.0}, "ls": {"tokens_per_s": 2000.0}}
        return {"contenders": contenders, "over_stock": {"ls": {"ratio": gain, "loss_difference": difference}}}

    rows = [(512, report(2.0)), (600, report(None, 0.5))]
    header, cells = recipe("recipe").sweep_table(rows, recipe("wmt14_en_de").published)
    assert header[:3] == ["tokens a batch", "stock, tokens/s", "ls, tokens/s"]
    assert cells[0] == ["512", "1,000", "2,000", "2.00x", "+0.10%", "3.08x"]
    assert cells[1] == ["600", "1,000", "2,000", "no claim", "+50.00%", "-"]


# ---- Dry runs


def start_dry_run(name: str, folder: Path) -> subprocess.Popen:
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(ROOT / "recipes" / name / "recipe.py"),
        "--dry-run",
        "--threads",
        "1",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            [*command, "--out", str(folder / name)], env=environment, stdout=log, stderr=subprocess.STDOUT
        )


# Half of each is the start of three to ten processes that import fairseq. What those left out of CI have of their own is tested above, in
# tests/train/test_distributed.py and in tests/train/test_deepspeed.py.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.longest] * (name in BEYOND_CI)) for name in RECIPES]
)
def test_dry_run(tmp_path, make, name):
    process, folder = start_dry_run(name, tmp_path), tmp_path / name / "dry_run"
    try:
        status = process.wait()
    finally:
        process.kill()
    output = (tmp_path / f"{name}.log").read_text()
    assert status == 0, output[-4000:]
    report = json.loads((folder / "report" / "report.json").read_text())
    assert set(report["contenders"]) == {"stock", "ls"} and (folder / "report" / "report.html").exists()
    result = json.loads((folder / "evaluation_ls" / "result.json").read_text())
    assert len(result["checkpoints"]) == 2 and "dry run" in output
    told = json.loads((folder / "data" / "manifest.json").read_text())["told"]
    if name in TRANSLATION:
        assert told["test"] == 20 * (5 if name == "iwslt14_de_en" else 1) and told["empty"] >= 1
        assert (
            result["bleu"] >= 0
            and len((folder / "evaluation_ls" / "hypotheses.txt").read_text().splitlines()) == told["test"]
        )
    if name == "language_model":
        assert 1 < result["perplexity_per_piece"] < result["perplexity_per_word"]
    if name == "bart_finetune":  # as if it were a user's checkpoint
        given = (
            "--restore",
            str(folder / "pretrain" / "checkpoint_last.pt"),
            "--binarized",
            str(folder / "data" / "bin"),
        )
        assert make(name, *given).shape() == make(name, "--dry-run").shape()
    if name == "multi_gpu" and importlib.util.find_spec("deepspeed"):
        assert "under ZeRO stage 2" in output
