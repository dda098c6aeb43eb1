"""The benchmark of a training step runs, and its instruments see what they are meant to see."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ls_plugin import _library

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "recipes" / "benchmarks"

pytestmark = pytest.mark.skipif(not _library.status().loaded, reason=f"no compiled library: {_library.status().reason}")


@pytest.fixture
def train_step(benchmark):
    return benchmark("train_step")


@pytest.mark.slow
@pytest.mark.longest
def test_all_parts_from_command_to_json(tmp_path):
    out = tmp_path / "step.json"
    flags = ["--layers", "2", "--rounds", "2", "--sizes", "T", "--out", str(out)]
    command = [sys.executable, str(BENCHMARKS / "train_step.py"), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for words in ("Ops dispatched", "encoder layer: kernels", "Trainer.train_step", "Activation memory", "RSS"):
        assert words in done.stdout
    content = json.loads(out.read_text())
    assert content["machine"]["threads"] == 1

    stock, ours = (content["ops"]["kinds"][kind] for kind in ("stock", "ls"))
    for kind in (stock, ours):
        for phase in ("forward", "backward", "clip", "update"):
            assert kind["totals"][phase]["kernel"] == sum(kind["kernels"][phase].values()) > 0
        for layer in kind["layers"].values():
            assert layer["forward"]["kernel"] > 0 and layer["backward"]["kernel"] > 0
            assert 2 * layer["forward"]["kernel"] < kind["totals"]["forward"]["kernel"]
    kernels = [sum(phase["kernel"] for phase in kind["totals"].values()) for kind in (ours, stock)]
    assert kernels[0] < kernels[1]

    for ms in content["time"]["ms"].values():
        assert ms["train_step"] > 0 and all(ms[phase] > 0 for phase in ("forward", "backward", "clip", "update"))

    stock, ours = (content["memory"]["T"]["bytes"][kind] for kind in ("stock", "ls"))
    for kind in (stock, ours):
        assert 0 < kind["saved"] <= kind["kept"] <= kind["peak"]
        # What is alive at the forward's end is there for the backward. A caller's view of all this costs some hundred bytes.
        assert kind["kept"] - kind["saved"] < 0.02 * kind["saved"]
    assert ours["kept"] < stock["kept"] and ours["peak"] < stock["peak"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["speed"], "unknown part speed; choose from ops, time, memory"),
        (["--layers", "1"], "--layers must be at least 2, got 1"),
        (["--out", "nowhere/step.json"], "there is no folder nowhere"),
    ],
)
def test_refuses_what_it_cannot_do(train_step, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["train_step.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        train_step.main()
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def test_kernels_views_and_allocations_are_told_apart(train_step):
    x = torch.ones(2, 3)
    with train_step.OpCounter() as counter:
        y = torch.empty(3, 2).copy_(x.t())
        torch.ops.aten._unsafe_view(y @ x, (9,)).sum()  # by its schema no view
    assert counter.counts == {
        "kernel": {"aten.copy_.default": 1, "aten.mm.default": 1, "aten.sum.default": 1},
        "view": {"aten.t.default": 1, "aten._unsafe_view.default": 1},
        "allocation": {"aten.empty.memory_format": 1},
    }


def test_memory_is_followed_until_it_is_freed(train_step):
    before = torch.ones(100)
    with train_step.LiveBytes() as tracker:
        x = before * 2
        view = x[:10]
        before.add_(1.0)
        assert tracker.live == 400
        del x
        assert tracker.live == 400
        y = view.repeat(3)
        assert tracker.live == 520 == tracker.bytes_of([view, [y], before])
        del view, y
    assert (tracker.live, tracker.peak) == (0, 520)


class KeepsOnItsContext(torch.autograd.Function):
    """A tensor saved in the usual way, and one in a list that hangs at the context."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x * 2)
        ctx.stash = [x * 3]
        return x * 4

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_the_graph_is_searched_everywhere(train_step):
    x = torch.ones(100, requires_grad=True)
    loss = (KeepsOnItsContext.apply(x.exp()) * torch.ones(100)).sum()
    # exp keeps its result, the product its second factor; two on the context
    assert sorted(s.nbytes() for s in train_step.saved_storages(loss).values()) == [400] * 4
