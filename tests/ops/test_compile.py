"""The ops under torch.compile, without a graph break, and under autocast."""

import pytest
import torch

from ls_plugin import ops, reference
from tests.ops.accuracy import needs_library
from tests.ops.cases import all_cases

pytestmark = needs_library
PAD = 1
CASES = all_cases()
names = [case.name for case in CASES]


def compiled(function):
    # aot_eager traces forward and backward through the fake kernels and functionalises mutations, without a C++ compiler.
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("case", CASES, ids=names)
def test_compiled_equals_eager(case):
    expected = case.run(case.leaves())
    traced = type(case)(**{**vars(case), "function": compiled(case.function)})
    for a, e in zip(traced.run(case.leaves()), expected, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("case", CASES, ids=names)
def test_autocast(case):
    """The first leaf out of a bf16 product, the others (parameters, a residual stream) fp32."""
    leaves = case.leaves()
    exact = case.run(case.leaves())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = leaves[0] @ torch.eye(leaves[0].shape[-1])
        outputs = case.outputs([first, *leaves[1:]])
    assert first.dtype == torch.bfloat16
    assert [out.dtype for out in outputs] == [case.autocast_dtype] * len(outputs)
    generator = torch.Generator().manual_seed(8)
    grads = torch.autograd.grad(
        outputs, leaves, [torch.randn(out.shape, generator=generator).to(out.dtype) for out in outputs]
    )
    assert all(grad.dtype == torch.float32 for grad in grads)
    for a, e in zip([*outputs, *grads], exact, strict=True):
        torch.testing.assert_close(a.float(), e, rtol=0.05, atol=0.05 * max(1.0, e.abs().max().item()))


def test_compiled_cross_entropy_in_place():
    def function(x, weight):
        loss, nll = ops.label_smoothed_cross_entropy(x * weight, torch.tensor([3, PAD, 0, 7]), 0.1, PAD, inplace=True)
        return loss.sum() + nll.detach().sum()

    results = []
    for f in (function, compiled(function)):
        leaves = [torch.linspace(-1, 1, 96).view(4, 24).requires_grad_(), torch.ones(24, requires_grad=True)]
        loss = f(*leaves)
        results.append([loss, *torch.autograd.grad(loss, leaves)])
    for a, e in zip(*results, strict=True):
        torch.testing.assert_close(a, e)


def test_compiled_adam_step_updates_in_place():
    """With the norm before it, and with the parameter kept in two more ways."""
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.1, "step": 1, "zero_grad": True}

    def update(param, grad, exp_avg, exp_avg_sq, scale, **more):
        _, coefficient, overflow = ops.grad_norm([grad], scale, 0.5)
        ops.adam_step(param, grad, exp_avg, exp_avg_sq, grad_scale=coefficient, overflow=overflow, **more, **options)

    generator = torch.Generator().manual_seed(7)
    tensors = [torch.rand(33, generator=generator) for _ in range(4)]
    weight, low = reference.split_master(tensors[0])
    for param, more in ((tensors[0], {}), (tensors[0], {"param_copy": weight}), (weight, {"param_low": low})):
        results = []
        for function in (update, compiled(update)):
            arguments = [t.clone() for t in (param, *tensors[1:], torch.tensor(0.5))]
            extra = {key: t.clone() for key, t in more.items()}
            function(*arguments, **extra)
            results.append([*arguments, *extra.values()])
        for a, e in zip(*results, strict=True):
            torch.testing.assert_close(a, e)
