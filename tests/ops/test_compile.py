"""The ops under torch.compile, without a graph break, and under autocast."""

import pytest
import torch

from ls_plugin import ops
from tests.ops.accuracy import needs_library

pytestmark = needs_library
PAD = 1


def compiled(function):
    # aot_eager traces forward and backward through the fake kernels and functionalises mutations, without a C++ compiler.
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def run(function, leaves):
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    torch.manual_seed(5)
    loss = function(*leaves)
    return [loss, *torch.autograd.grad(loss, leaves)]


def layer_norm(x, weight, bias, residual):
    return ops.layer_norm(x, weight, bias).square().sum() + residual.sum()


def bias_dropout_residual(x, weight, bias, residual):
    return ops.bias_dropout_residual(x * weight, bias, residual, 0.3).square().sum()


def label_smoothed_cross_entropy(x, weight, bias, residual):
    logits = x * weight + bias + residual
    target = torch.tensor([3, PAD, 0, 7])
    loss, nll = ops.label_smoothed_cross_entropy(logits, target, 0.1, PAD, inplace=True)
    return loss.sum() + nll.detach().sum()


@pytest.mark.parametrize("function", [layer_norm, bias_dropout_residual, label_smoothed_cross_entropy])
def test_compiled_equals_eager(function):
    generator = torch.Generator().manual_seed(6)
    leaves = [torch.randn(shape, generator=generator) for shape in ((4, 24), (24,), (24,), (4, 24))]
    expected = run(function, leaves)
    actual = run(compiled(function), leaves)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


def test_compiled_adam_step_updates_in_place():
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.1, "step": 1}
    generator = torch.Generator().manual_seed(7)
    eager = [torch.rand(33, generator=generator) for _ in range(4)]
    traced = [t.clone() for t in eager]
    ops.adam_step(*eager, **options)
    compiled(lambda *tensors: ops.adam_step(*tensors, **options))(*traced)
    for a, e in zip(traced, eager, strict=True):
        torch.testing.assert_close(a, e)


def test_autocast():
    x, weight = torch.randn(6, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    linear = torch.nn.Linear(16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ops.layer_norm(linear(x), weight, None)
        z = ops.bias_dropout_residual(linear(y), linear.bias, x, 0.1)
        loss, _ = ops.label_smoothed_cross_entropy(linear(z), torch.arange(6), 0.1, inplace=True)
    # As stock's: layer norm and the residual stream are fp32, products bf16.
    assert y.dtype == torch.float32 and z.dtype == torch.float32 and loss.dtype == torch.float32
    loss.sum().backward()
    assert x.grad.dtype == torch.float32 and weight.grad.dtype == torch.float32
