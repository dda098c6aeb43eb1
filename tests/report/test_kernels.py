"""``lightseq-report kernels``: the op benchmarks run, and time the same thing on both sides."""

import argparse
import importlib
import importlib.machinery
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ls_plugin import _library
from ls_plugin.errors import UsageError
from ls_plugin.report import kernels, op_timing

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["--seconds", "0.02", "--threads", "1", "--no-compile", "--shape", "32 x"]

pytestmark = pytest.mark.skipif(not _library.status().loaded, reason=f"no compiled library: {_library.status().reason}")


@pytest.fixture(autouse=True)
def threads_and_a_small_copy(monkeypatch):
    """What a session sets in its process, set back; and a bandwidth that is measured in no time."""
    monkeypatch.setitem(op_timing.COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(op_timing, "keep_freed_memory", lambda: None)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def session(*flags: str) -> kernels.Session:
    parser = argparse.ArgumentParser()
    kernels.add_arguments(parser)
    return kernels.Session(parser.parse_args(flags))


def test_one_case_from_command_to_report(tmp_path):
    out = tmp_path / "kernels"
    flags = ["--out", str(out), "--ops", "layer_norm", "--dtypes", "bf16", *QUICK]
    command = [sys.executable, "-m", "ls_plugin.cli.report", "kernels", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "layer_norm, bf16" in done.stdout and "GB/s, of copy" in done.stdout
    content = json.loads((out / "kernels.json").read_text())
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
    page = (out / "report.html").read_text()
    assert "layer_norm" in page and "<svg" in page and "<script" not in page
    assert "| layer_norm | 32 x 512 |" in (out / "report.md").read_text()


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--ops", "layernorm"], "--ops layernorm: unknown; choose from adam, "),
        (["--device", "tpu"], "--device must be cpu or cuda, got tpu"),
        (["--device", "cpux"], "--device must be cpu or cuda, got cpux"),
        (["--seconds", "nan"], "--seconds must be more than 0, got nan"),
        (["--device", "cuda"], "torch sees no GPU"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
    ],
)
def test_refuses_what_it_cannot_do(tmp_path, flags, message):
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match=message):
        session("--out", str(tmp_path), *flags)


def test_a_shape_that_no_case_has_is_told(tmp_path):
    flags = ["--ops", "layer_norm", "--dtypes", "fp32", "--shape", "7 x 7", "--no-compile"]
    with pytest.raises(UsageError, match="--shape '7 x 7': no case has this"):
        session("--out", str(tmp_path), *flags).run()


def test_an_op_whose_cases_cannot_be_made_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ls_plugin.report.op_cases.adam", None)  # its import fails
    flags = ["--ops", "adam", "layer_norm", "--dtypes", "fp32", *QUICK]
    assert session("--out", str(tmp_path), *flags).run() == 1
    screen = capsys.readouterr().out
    assert "adam fp32: ModuleNotFoundError: import of ls_plugin.report.op_cases.adam halted" in screen
    assert "1 case in" in screen and "halted" in (tmp_path / "report.md").read_text()


def test_an_interrupt_leaves_the_report_of_what_has_run(tmp_path, monkeypatch):
    measure, left = op_timing.measure, [1]

    def interrupted(*arguments):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return measure(*arguments)

    monkeypatch.setattr(op_timing, "measure", interrupted)
    flags = ["--ops", "layer_norm", "--dtypes", "fp32", "bf16", *QUICK]
    assert session("--out", str(tmp_path), *flags).run() == 130
    text = (tmp_path / "report.md").read_text()
    assert "**Interrupted**" in text and text.count("| layer_norm |") == 1


@pytest.fixture
def stand_ins(monkeypatch):
    """Modules that stand for apex and Liger-Kernel, which compute the same with torch's own; one of them fails, as Triton does on a CPU."""

    def module(name: str, **contents) -> None:
        made = types.ModuleType(name)
        made.__spec__ = importlib.machinery.ModuleSpec(name, None)
        made.__path__ = []
        for key, value in contents.items():
            setattr(made, key, value)
        monkeypatch.setitem(sys.modules, name, made)

    def fused_layer_norm_affine(x, weight, bias, shape, eps):
        return F.layer_norm(x, shape, weight, bias, eps)

    def cross_entropy(logits, target, **options):
        return F.cross_entropy(logits, target, **options)

    class Loss:
        @staticmethod
        def apply(logits, target, epsilon, pad, half):
            return F.cross_entropy(logits, target, ignore_index=pad, label_smoothing=epsilon, reduction="none")

    class MaskedSoftmax:
        @staticmethod
        def apply(scores, mask, scale):
            return F.softmax((scale * scores).masked_fill(mask, -torch.inf), -1)

    class CausalSoftmax:
        @staticmethod
        def apply(scores, scale):
            return F.softmax((scale * scores) + torch.full(scores.shape[-2:], -torch.inf).triu(1), -1)

    def no_triton(*_):
        raise RuntimeError("0 active drivers")

    def linear_cross_entropy(x, weight, target, **options):
        return cross_entropy(F.linear(x, weight), target, **options)

    for name in (
        "apex",
        "apex.normalization",
        "apex.contrib",
        "apex.transformer",
        "liger_kernel",
        "liger_kernel.transformers",
    ):
        module(name)
    softmax = types.SimpleNamespace(ScaledMaskedSoftmax=MaskedSoftmax, ScaledUpperTriangMaskedSoftmax=CausalSoftmax)
    module("apex.normalization.fused_layer_norm", fused_layer_norm_affine=fused_layer_norm_affine)
    module("apex.contrib.xentropy", SoftmaxCrossEntropyLoss=Loss)
    module("apex.transformer.functional", fused_softmax=softmax)
    module(
        "liger_kernel.transformers.functional",
        liger_layer_norm=no_triton,
        liger_cross_entropy=cross_entropy,
        liger_fused_linear_cross_entropy=linear_cross_entropy,
    )


def test_apex_and_liger_join_where_they_are(tmp_path, stand_ins, capsys):
    flags = ["--ops", "layer_norm", "--dtypes", "fp32", *QUICK]
    assert session("--out", str(tmp_path), *flags).run() == 0
    (result,) = json.loads((tmp_path / "kernels.json").read_text())["results"]
    assert result["times"]["apex"]["backward_ms"] > 0 and result["speedup"]["apex"]["total"] > 0
    assert result["times"]["liger"]["why_not"] == "RuntimeError: 0 active drivers"
    screen = capsys.readouterr().out
    assert "Liger: RuntimeError: 0 active drivers" in screen and "not installed" not in screen
    assert "apex, ms" in (tmp_path / "report.md").read_text()


def test_where_they_are_not_it_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(op_timing, "absent", lambda name: f"{op_timing.PACKAGES[name]} is not installed")
    flags = ["--ops", "layer_norm", "--dtypes", "fp32", *QUICK]
    assert session("--out", str(tmp_path), *flags).run() == 0
    assert "liger_kernel is not installed" in capsys.readouterr().out
    assert "apex is not installed, liger_kernel is not installed" in (tmp_path / "report.md").read_text()


def test_a_package_is_absent_where_its_import_is_shut_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "apex", None)
    assert op_timing.absent("apex") == "apex is not installed"


@pytest.mark.parametrize(
    "stem", ["label_smoothed_cross_entropy", "linear_cross_entropy", "attention_softmax", "layer_norm"]
)
def test_other_contenders_compute_the_same(stand_ins, stem):
    """With the stand-ins: the same loss and gradient as eager's, fairseq's smoothing included."""
    for case in importlib.import_module(f"ls_plugin.report.op_cases.{stem}").cases(torch.device("cpu"), torch.float32):
        if "32,000" in case.shape or "256 x 256" in case.shape:  # large, and the same formula
            continue
        for name, function in case.others.items():
            if (stem, name) == ("layer_norm", "liger"):
                continue
            results = []
            for compute in (case.eager, function):
                torch.manual_seed(0)
                leaves = case.leaves if case.prepare is None else case.prepare()
                outputs = compute(*leaves)
                results.append([*op_timing.as_tuple(outputs), *op_timing.gradients(case, outputs, leaves)])
            for ours, theirs in zip(*results, strict=True):
                torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)


def tiny_case(**changes):
    x = torch.ones(4, 8, requires_grad=True)
    fields = {"eager": lambda x: x * 2, "ls": lambda x: x + x, "grad_outputs": (torch.ones(4, 8),)} | changes
    return op_timing.Case(op="twice", shape="4 x 8", leaves=(x,), forward_bytes=256, backward_bytes=None, **fields)


def measure(case, with_compile=False):
    bandwidth = op_timing.Bandwidth(copy_=10.0, memmove=20.0, in_place=30.0)
    return op_timing.measure(case, "fp32", bandwidth, torch.device("cpu"), 0.01, with_compile)


def test_what_does_not_run_is_named_not_hidden():
    def broken(x):
        raise RuntimeError("not today\nsecond line")

    result = measure(tiny_case(eager=broken, kernels=(broken, None)), with_compile=True)
    assert result.times["eager"].why_not == result.times["kernel"].why_not == "RuntimeError: not today"
    assert result.times["compiled"].why_not.startswith("torch.compile: ")
    assert result.times["ls"].forward_ms > 0
    assert result.speedup("eager") is None and result.speedup("best") is None


def test_share_is_of_the_fitting_yardstick():
    for changes, yardstick in (({}, 20.0), ({"in_place": True}, 30.0)):
        result = measure(tiny_case(**changes))
        assert result.share[0] == pytest.approx(result.gb_per_s[0] / yardstick)
        assert result.gb_per_s[0] == pytest.approx(256 / result.times["ls"].forward_ms / 1e6)
        assert result.share[1] is None


@pytest.mark.parametrize("stem", kernels.STEMS)
def test_both_sides_of_a_case_compute_the_same(stem):
    """Of the first case, which is the smallest: shapes, dtypes, and values; with dropout, mean and deviation of the values."""
    case = next(
        iter(importlib.import_module(f"ls_plugin.report.op_cases.{stem}").cases(torch.device("cpu"), torch.float32))
    )
    assert case.op == stem

    def outcome(function, seed, lenient):
        torch.manual_seed(seed)
        leaves = case.leaves if case.prepare is None else case.prepare()
        outputs = function(*leaves)
        if case.grad_outputs is None:
            return []
        grads = op_timing.gradients(case, outputs, leaves, allow_unused=lenient)
        return [t.detach().clone() if t is not None else None for t in (*op_timing.as_tuple(outputs), *grads)]

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
        with op_timing.below_autograd(True):
            saved = forward(*(case.leaves if case.prepare is None else case.prepare()))
            if case.grad_outputs is not None:
                backward(saved)
