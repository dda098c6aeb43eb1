"""The quickstart itself, on a little of its real data."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.interrupts import interrupt
from tests.limits import LIMIT_S, wait_until
from tests.recipes.conftest import QUICKSTART
from tests.recipes.test_report import update, write_record

UPDATES = 12


def test_flags_are_checked_before_anything_runs(run_module, capsys):
    for flags, words in (
        (["--updates", "3"], "--updates must be at least 12, got 3"),
        (["--minutes", "0"], "--minutes must be"),
    ):
        with pytest.raises(SystemExit) as stopped:
            run_module.parse_args(flags)
        assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_continue_needs_something_to_go_on_from(run_module, tmp_path):
    args = run_module.parse_args(["--continue", "--out", str(tmp_path), "--device", "cpu"])
    with pytest.raises(run_module.QuickstartError, match="needs an earlier quickstart"):
        run_module.Quickstart(args, run_module.Display()).start()
    (tmp_path / "settings.json").write_text(json.dumps({"seed": 7}))
    with pytest.raises(run_module.QuickstartError, match=r"the same settings, changed: .*seed 7 -> 1"):
        run_module.Quickstart(args, run_module.Display()).start()


def test_a_full_disk_is_told_before_anything_runs(run_module, tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "FREE_MIB", 1 << 40)
    args = run_module.parse_args(["--out", str(tmp_path), "--device", "cpu"])
    with pytest.raises(run_module.QuickstartError, match="MiB of free disk are needed"):
        run_module.Quickstart(args, run_module.Display()).start()


def test_a_failing_training_shows_the_end_of_its_log(run_module, tmp_path):
    args = run_module.parse_args(["--out", str(tmp_path), "--device", "cpu", "--threads", "1"])
    quickstart = run_module.Quickstart(args, run_module.Display())
    with pytest.raises(
        run_module.QuickstartError, match=r"(?s)ls training ended with status \d+; .*data: must be a directory"
    ):
        quickstart.train("ls", "ls-1", [], lambda *_: None, target=1)


@pytest.fixture(scope="module")
def small_data(run_module, tmp_path_factory):
    """The real data, cut: 400 training verses, 32 to validate, 32 to translate."""
    data = run_module.prepare
    books = data.read_verses("kjv")
    kept = {book: books[book][:8] for book in data.VALID_BOOKS + data.TEST_BOOKS} | {"Genesis": books["Genesis"][:400]}
    out, patch = tmp_path_factory.mktemp("quickstart"), pytest.MonkeyPatch()
    train = data.train_sentencepiece
    patch.setattr(data, "read_verses", lambda source: kept)
    patch.setattr(
        data, "train_sentencepiece", lambda text, model, source, _: train(text, model, source, vocabulary=1200)
    )
    data.prepare(out / "data", lambda _: None, source="kjv")
    patch.undo()
    return out


class FakeTraining:
    """In place of Quickstart.train: writes a whole record at once, and keeps the names in their order."""

    def __init__(self, out):
        self.out, self.names = out, []

    def __call__(self, kind, name, options, show, target=None, deadline=None):
        self.names.append(name)
        write_record(self.out / "runs" / name / "record.jsonl", kind, [update(n) for n in range(1, target + 1)])


def test_the_order_alternates_by_round(run_module, tmp_path, monkeypatch):
    args = run_module.parse_args(["--out", str(tmp_path), "--device", "cpu", "--updates", "12", "--rounds", "3"])
    quickstart = run_module.Quickstart(args, run_module.Display())
    quickstart.train = FakeTraining(tmp_path)
    quickstart.compare()
    assert quickstart.train.names == ["stock-1", "ls-1", "ls-2", "stock-2", "stock-3", "ls-3"]


def test_the_budget_is_what_b_trains(run_module, tmp_path):
    args, began = run_module.parse_args(["--out", str(tmp_path), "--device", "cpu", "--minutes", "7"]), time.time()
    quickstart, deadlines = run_module.Quickstart(args, run_module.Display()), []
    quickstart.train = lambda *_, deadline: deadlines.append(deadline)
    quickstart.train_on()
    assert began <= deadlines[0] - 7 * 60 <= time.time() and len(deadlines) == 1


def test_what_to_expect_is_said_before_anything_trains(run_module, tmp_path, capsys, monkeypatch):
    args = run_module.parse_args(["--out", str(tmp_path), "--device", "cpu"])
    quickstart, screen = run_module.Quickstart(args, run_module.Display()), []
    monkeypatch.setattr(run_module.prepare, "prepare", lambda folder, say, source: {"verses": {"train": 9}})

    def stop():
        screen.append(capsys.readouterr().out)
        raise KeyboardInterrupt

    quickstart.compare = stop
    assert quickstart.run() == 130
    assert "What to expect" in screen[0] and "BLEU 50 to 60" in " ".join(screen[0].split())
    assert max(map(len, screen[0].splitlines())) <= 100


def quickstart(run_module, out, *flags):
    arguments = [
        "--out",
        str(out),
        "--device",
        "cpu",
        "--threads",
        "1",
        "--updates",
        str(UPDATES),
        "--minutes",
        "0.05",
        *flags,
    ]
    return run_module.Quickstart(run_module.parse_args(arguments), run_module.Display()).run()


@pytest.mark.slow
@pytest.mark.longest
def test_all_of_it_twice(run_module, small_data, capsys):
    assert quickstart(run_module, small_data) == 0
    screen = capsys.readouterr().out
    assert "same seed, same losses: stock yes" in screen and ", ls yes" in screen
    assert "BLEU" in screen and screen.count("  ref  ") == 5
    told = run_module.report.collect(small_data)
    assert {len(run.updates) for runs in told.comparison.runs.values() for run in runs} == {UPDATES}
    assert told.comparison.alike
    assert told.training.updates[0]["update"] == UPDATES + 1  # (b) goes on from (a)'s checkpoint
    assert told.training.valid
    assert {path.name for path in small_data.iterdir()} >= {
        "report.html",
        "report.md",
        "quickstart.png",
        "checkpoints",
        "generate.txt",
    }

    last = told.training.updates[-1]["update"]
    digests = [run.loss_digest() for runs in told.comparison.runs.values() for run in runs]
    assert quickstart(run_module, small_data, "--continue") == 0
    assert capsys.readouterr().out.count("kept from before") == 4
    assert run_module.report.collect(small_data).training.updates[-1]["update"] > last

    assert quickstart(run_module, small_data, "--rounds", "1") == 0  # from scratch again: the same losses
    again = run_module.report.collect(small_data).comparison
    assert {run.loss_digest() for runs in again.runs.values() for run in runs} == set(digests)


@pytest.mark.slow
def test_an_interrupt_saves_and_the_next_run_goes_on_as_if_it_had_not_been(run_module, small_data, tmp_path):
    """Losses of an interrupted and continued ls training, against one that was not, bit for bit."""

    def start(name, max_update):
        record = tmp_path / name / "record.jsonl"
        record.parent.mkdir(exist_ok=True)
        options = {
            **run_module.KINDS["ls"],
            **run_module.MODEL,
            **run_module.TRAINING,
            "--seed": 1,
            "--max-update": max_update,
        }
        command = [
            sys.executable,
            str(run_module.STOPWATCH),
            str(record),
            "ls",
            "--",
            str(small_data / "data" / "bin"),
        ]
        command += [
            "--task",
            "translation",
            "--share-all-embeddings",
            "--no-progress-bar",
            "--cpu",
            "--disable-validation",
        ]
        command += [
            *run_module.flags(options),
            "--save-dir",
            str(record.parent / "checkpoints"),
            "--no-epoch-checkpoints",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (record.parent / "log.txt").open("a") as log:
            return record, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)

    cut, process = start("cut", 100_000)  # it is still at it whenever the signal comes
    wait_until(
        lambda: cut.exists() and '"update": 2,' in cut.read_text(), process, (tmp_path / "cut" / "log.txt").read_text
    )
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0
    stopped = run_module.report.read_run(cut)
    assert stopped.interrupted and len(stopped.updates) >= 2
    n_updates = len(stopped.updates) + 5
    assert (tmp_path / "cut" / "checkpoints" / "checkpoint_last.pt").exists()
    for name in ("cut", "whole"):
        whole, process = start(name, n_updates)
        assert process.wait(LIMIT_S) == 0
    losses = run_module.report.read_run(whole).losses
    assert len(losses) == n_updates and run_module.report.read_run(cut).losses == losses


def test_ctrl_c_in_the_comparison(run_module, small_data, tmp_path):
    """The whole command, interrupted in its ls run: status 130, a report, and how to go on."""
    flags = [
        "--out",
        str(tmp_path),
        "--device",
        "cpu",
        "--threads",
        "1",
        "--updates",
        "300",
        "--rounds",
        "1",
        "--continue",
    ]
    # It goes on from a finished stock run, made up to save its time.
    settings = run_module.Quickstart(run_module.parse_args(flags), run_module.Display()).settings()
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    (tmp_path / "data").symlink_to(small_data / "data")
    write_record(tmp_path / "runs" / "stock-1" / "record.jsonl", "stock", [update(n) for n in range(1, 301)])

    command = [sys.executable, str(QUICKSTART / "run.py"), *flags]
    record = tmp_path / "runs" / "ls-1" / "record.jsonl"
    status, screen = interrupt(command, record, '"update": 2,', signal.SIGINT)
    assert status == 130, screen
    assert "interrupted in: (a)" in screen and "run.sh --continue" in screen
    assert "Interrupted in: (a)" in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert run_module.report.read_run(record).interrupted
