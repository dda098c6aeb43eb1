"""The stop-watch's parts that a training on one CPU does not show: what is waited for, and what is counted."""

import importlib.util
import subprocess
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import Variable

from ls_plugin.report import dispatched, records, timed_train


@pytest.fixture
def clock(monkeypatch):
    """The stop-watch's time, which passes only while something sleeps: ``clock(seconds)``."""
    now = [100.0]
    monkeypatch.setattr(timed_train, "time", SimpleNamespace(perf_counter=lambda: now[0], time=lambda: now[0]))

    def sleep(seconds):
        now[0] += seconds

    return sleep


@pytest.fixture
def stopwatch(tmp_path, monkeypatch):
    made = timed_train.Stopwatch(str(tmp_path / "record.jsonl"), "stock", None)
    made.splitting = True
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    return made


def test_what_a_backward_waits_for_is_sync(stopwatch, clock):
    """As PyTorch's wrapper has it: a callback, asked for when the last gradient is there, waits for the other processes."""
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda grad: Variable._execution_engine.queue_callback(lambda: clock(0.1)))

    def backward(loss):
        clock(0.2)
        loss.backward()

    def forward():
        clock(0.3)
        timed_backward((x * 2).sum())

    timed_backward = stopwatch.timed("backward", stopwatch.waiting_apart(backward))
    stopwatch.timed("forward", forward)()
    stopwatch.timed("sync", lambda: clock(0.02))()
    phases = stopwatch.phase_ms(step_s=1.0)
    assert list(phases) == list(records.PHASES) and sum(phases.values()) == pytest.approx(1000, abs=0.01)
    expected = {"forward": 300, "backward": 200, "sync": 120, "clip": 0, "update": 0, "rest": 380}
    assert phases == pytest.approx(expected, abs=0.01)
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_updates_that_are_not_split_are_left_alone(stopwatch):
    stopwatch.splitting = False
    x = torch.ones(3, requires_grad=True)
    stopwatch.waiting_apart(lambda loss: loss.backward())(x.sum())
    assert not stopwatch.phase_s


def test_kernels_are_counted_without_views_and_allocations():
    x = torch.ones(2, 3)
    assert dispatched.count_kernels(lambda: torch.empty(3, 2).copy_(x.t()).sum()) == 2


def test_the_update_that_is_counted_is_not_timed(stopwatch, tmp_path):
    x = torch.ones(3)
    assert stopwatch.count(lambda: (x + 1).sum().item()) == 6
    stopwatch.hides_kernels = True
    assert stopwatch.count(lambda: "result") == "result"
    run = records.read_run(tmp_path / "record.jsonl")
    assert run.updates == [] and run.kernels is None
    assert (tmp_path / "record.jsonl").read_text().splitlines()[0] == '{"kernels": 3}'  # the item is a kernel too


def test_stock_trains_in_bf16(monkeypatch):
    """By itself it takes the flag for a TPU."""
    from fairseq import options

    stock = lambda parse_known=False: (Namespace(tpu=True), []) if parse_known else Namespace(tpu=True)  # noqa: E731
    monkeypatch.setattr(options, "parse_args_and_arch", stock)
    timed_train.keep_off_tpu()
    assert not options.parse_args_and_arch().tpu and not options.parse_args_and_arch(parse_known=True)[0].tpu


def test_flags_of_stock_under_torchrun_on_a_cpu(monkeypatch):
    monkeypatch.setattr(timed_train.sys, "argv", ["fairseq-train", "--cpu"])
    assert timed_train.join_launch() == []
    for name, value in (("TORCHELASTIC_RUN_ID", "1"), ("WORLD_SIZE", "2"), ("RANK", "1")):
        monkeypatch.setenv(name, value)
    flags = timed_train.join_launch()
    assert flags[flags.index("--distributed-rank") + 1] == "1" and flags[-1] == "gloo" and "env://" in flags


def test_stock_trains_without_the_plugin_and_without_apex():
    """What the script imports for stock; apex by name alone, and the modules beside it never by theirs. Its batches are those of ls."""
    script = f"""
import sys
sys.argv = [{str(records.STOPWATCH)!r}, "/dev/null", "stock", "--", "--help"]
sys.path.insert(0, {str(records.STOPWATCH.parent)!r})
import runpy
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit:
    pass
assert "fairseq" in sys.modules and not [name for name in sys.modules if name.startswith("ls_plugin")]
assert sys.modules["apex"] is None
from fairseq.data import data_utils
batches = data_utils.batch_by_size(range(21), lambda index: 3, required_batch_size_multiple=8)
assert list(map(len, batches)) == [16, 5]
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert importlib.util.find_spec("ls_plugin.report.timed_train")
