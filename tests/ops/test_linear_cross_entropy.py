import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ls_plugin import ops, reference
from tests.ops.accuracy import (
    DTYPES,
    GRAD_FACTOR,
    VALUE_FACTOR,
    assert_as_accurate,
    dtype_name,
    needs_library,
    noncontiguous,
    shape_name,
)

module = importlib.import_module("ls_plugin.ops.linear_cross_entropy")
ROOT = Path(__file__).resolve().parents[2]
EPSILON, PAD = 0.1, 1
SHAPES = [(1, 1, 1), (3, 5, 7), (70, 24, 50), (33, 16, 300), (0, 8, 20)]  # N, C, V


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 32 rows: several even at the sizes of a test."""
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", 1)


def sample_inputs(shape, device, dtype):
    """x, weight, target."""
    n_rows, n_cols, n_classes = shape
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n_rows, n_cols, generator=generator)
    weight = torch.randn(n_classes, n_cols, generator=generator)
    target = torch.randint(n_classes, (n_rows,), generator=generator)
    return x.to(device, dtype), weight.to(device, dtype), target.to(device)


def torch_loss(x, weight, target, reduction="sum"):
    """What fairseq computes, in the dtype given."""
    log_q = F.log_softmax(x @ weight.t(), dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
    kept = target != PAD
    nll = -log_q.gather(1, target[:, None]).squeeze(1)
    n_classes = weight.shape[0]
    other = EPSILON / (n_classes - 1) if n_classes > 1 else 0.0
    loss = ((1 - EPSILON - other) * nll - other * log_q.sum(1) if n_classes > 1 else (1 - EPSILON) * nll) * kept
    nll = nll * kept
    return (loss.sum(), nll.sum()) if reduction == "sum" else (loss, nll)


def run(function, x, weight, grad_loss):
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    loss, nll = function(*leaves)
    return [loss, nll, *torch.autograd.grad(loss, leaves, grad_loss.to(loss).expand_as(loss))]


def compare(x, weight, target, reduction):
    generator = torch.Generator().manual_seed(4)
    grad_loss = torch.rand(target.shape if reduction == "none" else (), generator=generator).to(x.device)
    actual = run(lambda a, b: ops.linear_cross_entropy(a, b, target, EPSILON, PAD, reduction), x, weight, grad_loss)
    expected = run(lambda a, b: torch_loss(a, b, target, reduction), x, weight, grad_loss)
    exact = run(
        lambda a, b: torch_loss(a, b, target.cpu(), reduction), x.cpu().double(), weight.cpu().double(), grad_loss.cpu()
    )
    for name, a, t, e in zip(("loss", "nll", "grad_x", "grad_weight"), actual, expected, exact, strict=True):
        # fp16's smallest gradients: PyTorch's own vanish as well, at this weight of one.
        magnitude = 1e-3 if x.dtype == torch.float16 else 0.0
        assert_as_accurate(a, t, e, VALUE_FACTOR if name in ("loss", "nll") else GRAD_FACTOR, name, magnitude)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_name)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_as_accurate_as_torch(backend, small_blocks, shape, reduction, dtype):
    compare(*sample_inputs(shape, backend.device, dtype), reduction)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_ignored_rows_cost_and_give_nothing(backend, small_blocks, reduction):
    x, weight, target = sample_inputs((90, 12, 40), backend.device, torch.float32)
    target[::3] = PAD
    x[::3] = torch.nan
    loss, nll, grad_x, grad_weight = run(
        lambda a, b: ops.linear_cross_entropy(a, b, target, EPSILON, PAD, reduction),
        x,
        weight,
        torch.ones((), device=backend.device),
    )
    if backend.device.type == "cpu":  # a GPU computes them: NaN in, NaN out
        for t in (loss, nll, grad_x, grad_weight):
            assert torch.isfinite(t).all()
    assert (grad_x[::3] == 0).all() or backend.device.type == "cuda"


def test_all_rows_ignored(backend):
    x, weight, target = sample_inputs((5, 4, 6), backend.device, torch.float32)
    target.fill_(PAD)
    for t in run(lambda a, b: ops.linear_cross_entropy(a, b, target, EPSILON, PAD), x, weight, torch.ones(())):
        assert (t == 0).all()


def test_layouts(backend, small_blocks):
    x, weight, target = sample_inputs((40, 12, 30), backend.device, torch.float32)
    compare(noncontiguous(x), noncontiguous(weight), target, "sum")


def test_leading_dimensions(backend):
    x, weight, target = sample_inputs((12, 8, 20), backend.device, torch.float32)
    flat = ops.linear_cross_entropy(x, weight, target, EPSILON, PAD, "none")
    shaped = ops.linear_cross_entropy(x.view(3, 4, 8), weight, target.view(3, 4), EPSILON, PAD, "none")
    assert all(torch.equal(a.view(-1), b) for a, b in zip(shaped, flat, strict=True))


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_one_gradient_alone(backend, frozen):
    x, weight, target = sample_inputs((12, 8, 20), backend.device, torch.float32)
    leaf = (weight if frozen == "x" else x).requires_grad_()
    (actual,) = torch.autograd.grad(ops.linear_cross_entropy(x, weight, target, EPSILON, PAD)[0], leaf)
    (expected,) = torch.autograd.grad(torch_loss(x, weight, target)[0], leaf)
    torch.testing.assert_close(actual, expected)


def test_tied_table_receives_both_gradients(backend):
    table = torch.randn(20, 8, device=backend.device, requires_grad=True)
    target = torch.tensor([3, 4, 19, 0], device=backend.device)

    def gradient(loss):
        return torch.autograd.grad(loss(F.embedding(target, table), table, target), table)[0]

    actual = gradient(lambda *args: ops.linear_cross_entropy(*args, EPSILON, PAD)[0])
    torch.testing.assert_close(actual, gradient(lambda *args: torch_loss(*args)[0]))


def test_fp16_neither_overflows_nor_vanishes(backend, small_blocks):
    """A thousand tokens with one target, and a loss scale that comes only in the backward."""
    x, weight, _ = sample_inputs((1000, 8, 100), backend.device, torch.float16)
    target = torch.full((1000,), 7, device=backend.device)
    x, weight = x.abs() + 1, weight * 0.01
    grad_loss = torch.tensor(2.0**-3)
    actual = run(lambda a, b: ops.linear_cross_entropy(a, b, target, EPSILON, PAD), x, weight, grad_loss)
    exact = run(lambda a, b: torch_loss(a, b, target.cpu()), x.cpu().double(), weight.cpu().double(), grad_loss)
    for a, e in zip(actual[2:], exact[2:], strict=True):
        torch.testing.assert_close(a.cpu().double(), e, rtol=3e-3, atol=3e-3 * e.abs().max().item())


@pytest.mark.parametrize("loss_scale", [0.0, 2.0**-20, 1.0, 2.0**12])
def test_fp16_gradients_of_single_tokens_take_any_loss_scale(backend, small_blocks, loss_scale):
    x, weight, target = sample_inputs((37, 8, 100), backend.device, torch.float16)
    grad_loss = torch.full((37,), loss_scale) * torch.linspace(0.5, 1, 37)
    options = (EPSILON, PAD, "none")
    actual = run(lambda a, b: ops.linear_cross_entropy(a, b, target, *options), x, weight, grad_loss.to(x.device))
    exact = run(lambda a, b: torch_loss(a, b, target.cpu(), "none"), x.cpu().double(), weight.cpu().double(), grad_loss)
    for a, e in zip(actual[2:], exact[2:], strict=True):
        torch.testing.assert_close(a.cpu().double(), e, rtol=3e-3, atol=3e-3 * e.abs().max().item() + 1e-7)


def test_second_backward_is_refused():
    x, weight, target = sample_inputs((12, 8, 20), "cpu", torch.float32)
    loss, _ = ops.linear_cross_entropy(x.requires_grad_(), weight, target, EPSILON, PAD)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="consumed the stored gradients"):
        loss.backward()


def test_errors_name_what_was_expected(backend):
    x, weight, target = sample_inputs((12, 8, 20), backend.device, torch.float32)
    with pytest.raises(RuntimeError, match=r"weight must have shape \(V, C\) with C = 8, got \(20, 7\)"):
        ops.linear_cross_entropy(x, weight[:, :7], target, EPSILON, PAD)
    with pytest.raises(RuntimeError, match=r"target must have x's leading shape \(12,\), got \(11,\)"):
        ops.linear_cross_entropy(x, weight, target[:11], EPSILON, PAD)
    with pytest.raises(ValueError, match="reduction must be sum or none, got mean"):
        ops.linear_cross_entropy(x, weight, target, EPSILON, PAD, "mean")
    with pytest.raises(ValueError, match=r"epsilon must lie in \[0, 1\], got 2"):
        ops.linear_cross_entropy(x, weight, target, 2, PAD)
    if backend.device.type == "cpu":
        target[3] = 20
        with pytest.raises(RuntimeError, match="target 20 at position 3 is outside the vocabulary of 20 entries"):
            ops.linear_cross_entropy(x, weight, target, EPSILON, PAD)


def test_matches_the_reference_without_kernels():
    x, weight, target = sample_inputs((9, 6, 11), "cpu", torch.float64)
    expected = reference.linear_cross_entropy(x, weight, target, EPSILON, PAD)
    actual = ops.linear_cross_entropy(x, weight, target, EPSILON, PAD, "none")
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_oracle_gradcheck():
    x, weight, target = sample_inputs((4, 3, 5), "cpu", torch.float64)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    assert torch.autograd.gradcheck(
        lambda *args: reference.linear_cross_entropy(*args, target, EPSILON, PAD)[0], leaves
    )


@needs_library
def test_opcheck():
    x, weight, target = sample_inputs((6, 4, 9), "cpu", torch.float32)
    arguments = (x, weight, target, None, EPSILON, PAD, True, True)
    torch.library.opcheck(torch.ops.ls.linear_cross_entropy_forward.default, arguments)


@needs_library
@pytest.mark.slow
def test_peak_memory_falls_five_times():
    """Beside projection + fused cross entropy, which itself needs a third of what stock does."""
    command = [sys.executable, "recipes/benchmarks/peak_memory.py", "--columns", "64"]
    lines = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    peak = {way: float(mib) for way, mib, _ in map(str.split, lines)}
    assert peak["fused"] >= 5 * peak["blocks"]
