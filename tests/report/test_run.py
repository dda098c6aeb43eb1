"""``lightseq-report run``: real commands at tiny size, interrupted and gone on with; its flags; what it refuses."""

import argparse
import json
import signal
import sys
from pathlib import Path

import pytest

from ls_plugin import _library
from ls_plugin.errors import UnsupportedError, UsageError
from ls_plugin.report import commands, run
from tests.interrupts import interrupt

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["--arch", "transformer", "--criterion", "label_smoothed_cross_entropy", "--optimizer", "adam"]
COMMAND = [
    *[
        "--task",
        "dummy_mt",
        "--dict-size",
        "200",
        "--src-len",
        "12",
        "--tgt-len",
        "12",
        "--label-smoothing",
        "0.1",
        "--lr",
        "1e-3",
        "--clip-norm",
        "1.0",
    ],
    *[
        "--encoder-layers",
        "1",
        "--decoder-layers",
        "1",
        "--encoder-attention-heads",
        "2",
        "--decoder-attention-heads",
        "2",
    ],
    *[
        "--encoder-embed-dim",
        "32",
        "--decoder-embed-dim",
        "32",
        "--encoder-ffn-embed-dim",
        "64",
        "--decoder-ffn-embed-dim",
        "64",
    ],
    *["--max-tokens", "240", "--dropout", "0.1", "--num-workers", "0", "--cpu"],
    *NAMES,
]
compiled = pytest.mark.skipif(not _library.status().loaded, reason=f"no compiled library: {_library.status().reason}")


def parse(*flags: str, command=COMMAND) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    return parser.parse_args([*flags, "--threads", "1", "--", *command])


def session(*flags: str, command=COMMAND) -> run.Session:
    return run.Session(parse(*flags, command=command))


@compiled
@pytest.mark.slow
def test_interrupted_and_gone_on_with(tmp_path, capsys):
    """Stock, then ls, which is interrupted; --resume keeps stock and runs ls, beside a baseline whose limit is too short."""
    out = tmp_path / "report"
    # Many, so that the second run is still at it when the signal comes.
    flags = ["--out", str(out), "--rounds", "1", "--updates", "100", "--warm-up", "2"]
    command = [
        sys.executable,
        "-m",
        "ls_plugin.cli.report",
        "run",
        *flags,
        "--contenders",
        "stock,ls",
        "--threads",
        "1",
    ]
    record = out / "runs" / "ls-1" / "record.jsonl"
    status, screen = interrupt([*command, "--", *COMMAND], record, '"start"', signal.SIGTERM, PYTHONPATH=str(ROOT))
    assert status == 130, screen
    assert "go on with --resume" in screen
    assert "Interrupted" in (out / "report.md").read_text() and "Interrupted" in (out / "report.html").read_text()
    before = json.loads((out / "report.json").read_text())
    assert before["interrupted"] and "stock" in before["contenders"]
    assert len({figures["updates"] for figures in before["contenders"].values()}) == 1  # of ls too, where it had enough
    stock = (out / "runs" / "stock-1" / "record.jsonl").stat().st_mtime_ns

    with pytest.raises(UsageError, match="holds a report already; go on with --resume"):
        session(*flags).start()
    with pytest.raises(UsageError, match="the same settings, changed: updates 100 -> 101"):
        session(*flags[:-4], "--updates", "101", "--warm-up", "2", "--resume").start()

    more = ["--contenders", "stock,stock+compile,ls", "--limit", "0.5", "--resume"]
    assert session(*flags, *more).run() == 0
    screen = capsys.readouterr().out
    assert "1 of 3 runs kept from before" in screen
    assert (out / "runs" / "stock-1" / "record.jsonl").stat().st_mtime_ns == stock
    content = json.loads((out / "report.json").read_text())
    assert not content["interrupted"] and list(content["contenders"]) == ["stock", "ls"]
    assert content["not_measured"] == {"stock+compile": "0 timed updates in 0.5 s (--limit)"}
    gain = content["over_stock"]["ls"]
    assert gain["ratio"] > 0 and abs(gain["loss_difference"]) < 0.02
    for figures in content["contenders"].values():
        assert figures["updates"] == 100 and figures["peak_rss_mib"] > 100
        assert figures["phase_ms"]["sync"] < 0.1 and figures["phase_ms"]["forward"] > 0
    assert 0 < content["contenders"]["ls"]["kernels"] < content["contenders"]["stock"]["kernels"]
    assert "--arch transformer" in content["commands"]["stock"] and "--arch ls_transformer" in content["commands"]["ls"]
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 6 and "stock+compile" in page and "0 timed updates" in page
    assert not any(word in page for word in ("<script", "<link", "src=", "@import"))

    # Of the same runs, no speed-up where the losses differ by more than asked for.
    assert session(*flags, *more[:2], "--tolerance", "0", "--resume", "--contenders", "stock,ls").run() == 1
    content = json.loads((out / "report.json").read_text())
    assert content["over_stock"]["ls"]["ratio"] is None and content["tolerance"] == 0
    text = (out / "report.md").read_text()
    assert "**no speed-up is claimed**, since losses part by" in text and "tolerance 0%" in text
    assert "the two do not train alike" in text and "times as fast" not in text


@compiled
@pytest.mark.slow
@pytest.mark.longest
def test_two_processes_wait_for_each_other(tmp_path):
    """Under torchrun with gloo: the phase of gradient sync is there. Stock fails for ls's sake no more than the other way about."""
    flags = ["--rounds", "1", "--updates", "6", "--warm-up", "1", "--contenders", "stock,ls", "--nproc", "2"]
    assert session("--out", str(tmp_path / "report"), *flags).run() in (
        0,
        1,
    )  # so few updates may part by more than 2 %
    content = json.loads((tmp_path / "report" / "report.json").read_text())
    assert list(content["contenders"]) == ["stock", "ls"], content["not_measured"]
    assert all(figures["phase_ms"]["sync"] > 0.1 for figures in content["contenders"].values())
    assert "torchrun --nproc_per_node 2 $(which lightseq-train)" in content["commands"]["ls"]
    # Both processes trained: each has half of the batches.
    records = (tmp_path / "report" / "runs").glob("*/record.jsonl")
    assert all(record.read_text().count('"start"') == 1 for record in records)


def test_a_failing_contender_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    """The processes are stand-ins: stock writes what it should, ls ends with an error."""
    from tests.recipes.test_report import update

    made = session("--out", str(tmp_path), "--contenders", "stock,stock+medium,ls", "--updates", "6", "--warm-up", "2")

    def command(contender, arguments, record, *_, **options):
        lines = [{"start": "stock", "startup_s": 5.0, "threads": 1, "device": "CPU"}]
        lines += [update(n) | {"batches": [{"target": [2, 3]}]} for n in range(1, 9)]
        lines += [{"kernels": 70}, {"end": "stock", "interrupted": False}]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        script = (
            "raise ValueError('no such luck')"
            if contender.kind == "ls"
            else f"open({str(record)!r}, 'w').write({text!r})"
        )
        return [sys.executable, "-c", script]

    monkeypatch.setattr(commands, "command", command)
    assert made.run() == 1
    content = json.loads((tmp_path / "report.json").read_text())
    assert list(content["contenders"]) == ["stock", "stock+medium"]
    assert content["not_measured"] == {"ls": "ended with status 1: ValueError: no such luck"}
    assert content["over_stock"]["stock+medium"]["ratio"] == 1 and content["contenders"]["stock"]["runs"] == 2
    assert capsys.readouterr().out.count("ls 2/2") == 0  # not tried again
    assert "No comparison" in (tmp_path / "report.md").read_text()


def test_contenders_differ_by_names_alone():
    arguments = ["data", "-a", "transformer", "--criterion=cross_entropy", "--optimizer", "adam", "--lr", "1"]
    made = commands.with_ls_names(arguments)
    assert made == [
        "data",
        "-a",
        "ls_transformer",
        "--criterion=ls_cross_entropy",
        "--optimizer",
        "ls_adam",
        "--lr",
        "1",
    ]
    flags = commands.added(arguments, updates=9, nproc=1, on_cuda=False, validate=False)
    stock, ours = (commands.train_arguments(commands.parse(name), arguments, flags) for name in ("stock", "ls"))
    assert [word.removeprefix("ls_").replace("=ls_", "=") for word in ours] == stock
    assert {"--no-save", "--disable-validation", "--max-update"} <= set(stock)
    validated = commands.added(arguments, updates=9, nproc=2, on_cuda=False, validate=True)
    assert "--disable-validation" not in validated and "legacy_ddp" in validated


@pytest.mark.parametrize(
    "command, words",
    [
        ([], "the arguments of fairseq-train are missing"),
        (NAMES[2:], "--arch: must be in the command"),
        (NAMES[:4], "--optimizer: must be in the command"),
        (["-a", "ls_transformer", *NAMES[2:]], "--arch ls_transformer: give stock's name, transformer"),
        (["--arch", "lightconv", *NAMES[2:]], "--arch lightconv: has no ls_ twin"),
        (
            [*NAMES[:4], "--optimizer=sgd"],
            "--optimizer sgd: has no ls_ twin to be held against it; those with one: adam",
        ),
        ([*NAMES, "--save-dir", "x"], "--save-dir: cannot be in the command of a report"),
        ([*NAMES, "--save-dir=x"], "--save-dir: cannot be"),
        ([*NAMES, "--max-update", "7"], "--max-update: .* --updates and --warm-up of the report decide"),
        ([*NAMES, "--distributed-world-size", "2"], "--distributed-world-size: .* use --nproc"),
        ([*NAMES, "--user-dir", "ls_plugin"], "--user-dir ls_plugin: stock must train without the plugin"),
        ([*NAMES, "--user-dir", str(ROOT / "ls_plugin")], "stock must train without the plugin"),
    ],
)
def test_commands_that_cannot_be_compared(tmp_path, command, words):
    with pytest.raises(UsageError, match=words):
        session("--out", str(tmp_path), command=command)
    assert issubclass(UnsupportedError, UsageError)


@pytest.mark.parametrize(
    "flags, words",
    [
        (
            ["--contenders", "stock,ls+medium"],
            "--contenders ls\\+medium: must be stock, ls or stock\\+ with medium, fused_adam",
        ),
        (["--contenders", "stock+magic"], "got 'stock\\+magic'"),
        (["--contenders", "ls"], "stock and ls must be among them, got ls"),
        (["--contenders", "stock,stock+apex,ls"], "stock\\+apex: NVIDIA's apex is not installed; leave it out"),
        (["--updates", "2"], "--updates must be at least 4, got 2"),
        (["--updates", "0"], "--updates must be at least 4, got 0"),
        (["--limit", "nan"], "--limit must be at least 0, got nan"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--tolerance", "-1"], "--tolerance must be at least 0, got -1"),
    ],
)
def test_flags_that_mean_nothing(tmp_path, flags, words, monkeypatch):
    monkeypatch.setattr("ls_plugin.cli.doctor.find_apex", lambda *_: (None, False))
    with pytest.raises(UsageError, match=words):
        session("--out", str(tmp_path), *flags)


def test_threads_of_the_environment(tmp_path, monkeypatch):
    """OpenMP takes a list, a number for each nested level."""
    args = parse("--out", str(tmp_path), "--contenders", "stock,ls")
    args.threads = None
    monkeypatch.setenv("OMP_NUM_THREADS", "3,1")
    assert run.Session(args).threads == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "0")
    assert run.Session(args).threads >= 1


def test_resume_needs_something_to_go_on_from(tmp_path):
    with pytest.raises(UsageError, match="holds no report to go on with"):
        session("--out", str(tmp_path), "--resume").start()


def test_apex_is_a_contender_where_it_is_installed(tmp_path, monkeypatch):
    made = session("--out", str(tmp_path))
    assert [contender.name for contender in made.contenders] == [
        "stock",
        "ls",
        "stock+fused_adam",
    ]  # compile takes minutes
    assert list(made.skipped) == ["stock+apex"]
    (tmp_path / "apex" / "optimizers").mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").write_text("")
    (tmp_path / "apex" / "optimizers" / "__init__.py").write_text("class FusedAdam: ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    apex = commands.parse("stock+apex")
    assert commands.why_not(apex, on_cuda=True) == ""
    assert commands.why_not(apex, on_cuda=False) == "apex works on a GPU only"


def test_the_cause_is_found_in_a_log(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("Traceback (most recent call last):\n  File x\nRuntimeError: the real cause\n\nsomething after it\n")
    assert run.cause(log) == "RuntimeError: the real cause"
    log.write_text("2026 | INFO | begin\nlightseq-train: error: --amp: refused\n")
    assert run.cause(log) == "lightseq-train: error: --amp: refused"
    assert run.cause(tmp_path / "none.txt") == "it left no log"


def test_time_left(monkeypatch):
    """By the rate of the updates, start-up aside; and no figure while nothing tells."""
    now = [100.0]
    monkeypatch.setattr(run.time, "monotonic", lambda: now[0])
    clock = run.Clock()

    def told(at, fraction, left=("ls",), name="stock"):
        now[0] = 100.0 + at
        return clock.told(list(left), name, began=100.0, fraction=fraction)

    assert told(10, 0.0) == "time left: not known yet"
    assert told(20, 0.1) == "time left: not known yet"  # how much of it was the start?
    assert told(30, 0.3) == "about 1 min 40 s left"  # 5 s for each tenth: 35 of its own, 65 for ls
    assert told(40, 0.5) == "about 1 min 30 s left"
    clock.seconds["stock"] = 40.0
    clock.begin()
    assert clock.told(["stock"]) == "about 40 s left"
    # A contender that compiles for minutes before its first update: not for ever as long as the others took.
    assert told(10, 0.0, ["stock"], "stock+compile") == "about 1 min 10 s left"
    assert told(39, 0.0, ["stock"], "stock+compile") == "about 41 s left"
    assert told(200, 0.0, ["stock"], "stock+compile") == "time left: not known yet"
    assert told(300, 0.02, ["stock"], "stock+compile") == "time left: not known yet"
    assert told(301, 0.04, ["stock", "stock+compile"], "stock+compile") == "about 7 min 17 s left"  # 48, 40 and 349
    clock.seconds["ls"] = 600.0
    assert clock.told(["stock", "ls"]) == "about 11 min left"
    assert clock.told([]) == "all have run"


def test_progress_names_the_seconds_of_a_start():
    assert run._progress([], 50, 12.4) == (0.0, "starting for 12 s")
