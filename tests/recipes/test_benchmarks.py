"""The op benchmarks run, and time the same thing on both sides."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ls_plugin import _library

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "recipes" / "benchmarks"
STEMS = sorted(path.stem for path in (BENCHMARKS / "ops").glob("*.py") if path.stem != "__init__")

pytestmark = pytest.mark.skipif(not _library.status().loaded, reason=f"no compiled library: {_library.status().reason}")


@pytest.fixture
def harness(monkeypatch):
    """harness.py and the files of ops/, which are scripts and import each other by their bare names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("harness")
    for name in [name for name in sys.modules if name == "harness" or name.split(".")[0] == "ops"]:
        del sys.modules[name]


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(BENCHMARKS / "run.py"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_one_case_from_command_to_json(tmp_path):
    out = tmp_path / "result.json"
    arguments = [
        "layer_norm",
        "--dtypes",
        "bf16",
        "--shape",
        "32 x",
        "--seconds",
        "0.02",
        "--threads",
        "1",
        "--no-compile",
    ]
    done = run(*arguments, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "layer_norm, bf16" in done.stdout and "GB/s, of copy" in done.stdout
    content = json.loads(out.read_text())
    assert content["machine"]["threads"] == 1 and content["machine"]["torch"] == torch.__version__
    assert content["bandwidth"]["copy_"] > 0 and content["bandwidth"]["in_place"] > 0
    (result,) = content["results"]
    assert (result["op"], result["dtype"]) == ("layer_norm", "bf16")
    for name in ("eager", "ls", "kernel"):
        assert result["times"][name]["forward_ms"] > 0 and result["times"][name]["backward_ms"] > 0
    assert result["times"]["compiled"]["why_not"] == "not asked for (--no-compile)"
    assert result["speedup"]["best"] == result["speedup"]["eager"]
    eager, ours = (result["times"][name] for name in ("eager", "ls"))
    total = (eager["forward_ms"] + eager["backward_ms"]) / (ours["forward_ms"] + ours["backward_ms"])
    assert result["speedup"]["eager"]["total"] == pytest.approx(total)
    assert out.with_suffix(".png").stat().st_size > 1000


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["layernorm"], "unknown op layernorm; choose from adam, "),
        (["layer_norm", "--out", "nowhere/result.json"], "there is no folder nowhere"),
        (["--device", "cuda"], "torch sees no GPU"),
    ],
)
def test_refuses_what_it_cannot_do(arguments, message):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run(*arguments)
    assert done.returncode == 2 and message in done.stderr


def test_an_op_whose_cases_cannot_be_made_does_not_stop_the_others():
    script = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import run
sys.modules["ops.adam"] = None  # its import fails
sys.argv = [*"run.py adam layer_norm --dtypes fp32 --seconds 0.02 --threads 1 --no-compile --shape".split(), "32 x"]
sys.exit(run.main())
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "adam fp32: ModuleNotFoundError: import of ops.adam halted" in done.stdout and "1 cases in" in done.stdout


def tiny_case(harness, **changes):
    x = torch.ones(4, 8, requires_grad=True)
    fields = {"eager": lambda x: x * 2, "ls": lambda x: x + x, "grad_outputs": (torch.ones(4, 8),)} | changes
    return harness.Case(op="twice", shape="4 x 8", leaves=(x,), forward_bytes=256, backward_bytes=None, **fields)


def measure(harness, case, with_compile=False):
    bandwidth = harness.Bandwidth(copy_=10.0, memmove=20.0, in_place=30.0)
    return harness.measure(case, "fp32", bandwidth, torch.device("cpu"), 0.01, with_compile)


def test_what_does_not_run_is_named_not_hidden(harness):
    def broken(x):
        raise RuntimeError("not today\nsecond line")

    result = measure(harness, tiny_case(harness, eager=broken, kernels=(broken, None)), with_compile=True)
    assert result.times["eager"].why_not == result.times["kernel"].why_not == "RuntimeError: not today"
    assert result.times["compiled"].why_not.startswith("torch.compile: ")
    assert result.times["ls"].forward_ms > 0
    assert result.speedup("eager") is None and result.speedup("best") is None


def test_share_is_of_the_fitting_yardstick(harness):
    for changes, yardstick in (({}, 20.0), ({"in_place": True}, 30.0)):
        result = measure(harness, tiny_case(harness, **changes))
        assert result.share[0] == pytest.approx(result.gb_per_s[0] / yardstick)
        assert result.gb_per_s[0] == pytest.approx(256 / result.times["ls"].forward_ms / 1e6)
        assert result.share[1] is None


@pytest.mark.parametrize("stem", STEMS)
def test_both_sides_of_a_case_compute_the_same(harness, stem):
    """Of the first case, which is the smallest: shapes, dtypes, and values; with dropout, mean and deviation of the values."""
    case = next(iter(importlib.import_module(f"ops.{stem}").cases(torch.device("cpu"), torch.float32)))
    assert case.op == stem

    def outcome(function, seed, lenient):
        torch.manual_seed(seed)
        leaves = case.leaves if case.prepare is None else case.prepare()
        outputs = function(*leaves)
        if case.grad_outputs is None:
            return []
        grads = harness.gradients(case, outputs, leaves, allow_unused=lenient)
        return [t.detach().clone() if t is not None else None for t in (*harness.as_tuple(outputs), *grads)]

    eager, again, ours = outcome(case.eager, 0, True), outcome(case.eager, 1, True), outcome(case.ls, 0, False)
    assert len(eager) == len(ours)
    for a, b, c in zip(eager, again, ours, strict=True):
        if a is None:  # eager does not compute this gradient
            continue
        assert (a.shape, a.dtype) == (c.shape, c.dtype)
        if torch.equal(a, b):
            torch.testing.assert_close(c, a, rtol=1e-4, atol=1e-4 * a.abs().max().item())
        else:
            assert c.mean().item() == pytest.approx(a.mean().item(), abs=0.05 * a.std().item())
            assert c.std().item() == pytest.approx(a.std().item(), rel=0.1)
    if case.kernels is not None:
        forward, backward = case.kernels
        with harness.below_autograd(True):
            saved = forward(*(case.leaves if case.prepare is None else case.prepare()))
            if case.grad_outputs is not None:
                backward(saved)
