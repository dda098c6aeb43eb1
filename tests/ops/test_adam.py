import pytest
import torch
from fairseq.optim.adam import Adam as FairseqAdam

from ls_plugin import ops, reference
from tests.ops.accuracy import DTYPES, dtype_name, misaligned, needs_library

# Every tail of a vector, and sizes around a thread's and a block's share.
SIZES = [*range(1, 10), 31, 257, 4095, 4096, 4097]
OPTIONS = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.01}


def sample_inputs(n_elem, device, dtype=torch.float32, grad_dtype=None):
    """param, grad, exp_avg, exp_avg_sq."""
    generator = torch.Generator().manual_seed(4)
    param, grad, exp_avg, exp_avg_sq = (torch.randn(n_elem, generator=generator).to(device) for _ in range(4))
    return param.to(dtype), grad.to(grad_dtype or dtype), exp_avg * 0.1, exp_avg_sq.square() * 0.01


def fairseq_steps(param, grads, lr, beta1, beta2, eps, weight_decay):
    parameter = torch.nn.Parameter(param.clone())
    optimizer = FairseqAdam([parameter], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    state = optimizer.state[parameter]
    return parameter.detach(), state["exp_avg"], state["exp_avg_sq"]


@pytest.mark.parametrize("size", SIZES)
def test_equals_fairseq_over_steps(backend, size):
    param, _, exp_avg, exp_avg_sq = sample_inputs(size, backend.device)
    grads = [torch.randn(size, generator=torch.Generator().manual_seed(i)).to(backend.device) for i in range(5)]
    expected = fairseq_steps(param, grads, **OPTIONS)
    exp_avg.zero_(), exp_avg_sq.zero_()
    for step, grad in enumerate(grads, start=1):
        ops.adam_step(param, grad.clone(), exp_avg, exp_avg_sq, step=step, **OPTIONS)
    for name, actual, wanted in zip(
        ("param", "exp_avg", "exp_avg_sq"), (param, exp_avg, exp_avg_sq), expected, strict=True
    ):
        torch.testing.assert_close(actual, wanted, rtol=2e-6, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=dtype_name)
def test_dtypes(backend, dtype, grad_dtype):
    """Arithmetic is fp32 whatever is stored: the result is the oracle's, rounded once."""
    actual = sample_inputs(1003, backend.device, dtype, grad_dtype)
    expected = [t.clone() for t in actual]
    scale = torch.tensor(0.25, device=backend.device)
    ops.adam_step(*actual, step=3, grad_scale=scale, **OPTIONS)
    reference.adam_step(*expected, step=3, grad_scale=scale, **OPTIONS)
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(actual[0], expected[0], rtol=ulp, atol=1e-7)
    for a, e in zip(actual[2:], expected[2:], strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-8)


def test_misaligned_slices(backend):
    actual = [misaligned(t) for t in sample_inputs(4097, backend.device)]
    expected = [t.clone() for t in actual]
    ops.adam_step(*actual, step=1, **OPTIONS)
    reference.adam_step(*expected, step=1, **OPTIONS)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("zero_grad", [False, True])
def test_zero_grad(backend, zero_grad):
    param, grad, exp_avg, exp_avg_sq = sample_inputs(1001, backend.device)
    before = grad.clone()
    ops.adam_step(param, grad, exp_avg, exp_avg_sq, step=1, zero_grad=zero_grad, **OPTIONS)
    assert torch.equal(grad, torch.zeros_like(before) if zero_grad else before)


def test_neighbours_of_a_slice_stay(backend):
    buffers = [torch.full((300,), 7.0, device=backend.device) for _ in range(4)]
    buffers[1][101:198] = 3.0
    ops.adam_step(*(buffer[101:198] for buffer in buffers), step=1, zero_grad=True, **OPTIONS)
    for buffer in buffers:
        assert (buffer[:101] == 7).all() and (buffer[198:] == 7).all() and (buffer[101:198] != 7).all()


def test_empty(backend):
    ops.adam_step(*sample_inputs(0, backend.device), step=1, **OPTIONS)


def test_same_bits_twice(backend):
    runs = []
    for _ in range(2):
        tensors = sample_inputs(5003, backend.device)
        ops.adam_step(*tensors, step=2, **OPTIONS)
        runs.append(tensors)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_errors_name_what_was_expected(backend):
    param, grad, exp_avg, exp_avg_sq = sample_inputs(8, backend.device)
    with pytest.raises(RuntimeError, match=r"adam_step: grad must have the shape of param, \(8,\), got \(7,\)"):
        ops.adam_step(param, grad[:7], exp_avg, exp_avg_sq, step=1, **OPTIONS)
    with pytest.raises(RuntimeError, match="adam_step: exp_avg must be Float, got Half"):
        ops.adam_step(param, grad, exp_avg.half(), exp_avg_sq, step=1, **OPTIONS)
    with pytest.raises(ValueError, match="step counts from 1, got 0"):
        ops.adam_step(param, grad, exp_avg, exp_avg_sq, step=0, **OPTIONS)


def test_tells_autograd(backend):
    param, grad, exp_avg, exp_avg_sq = sample_inputs(8, backend.device)
    leaf = torch.ones(8, device=backend.device, requires_grad=True)
    saved = (leaf * param).sum()
    ops.adam_step(param, grad, exp_avg, exp_avg_sq, step=1, **OPTIONS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


@needs_library
def test_opcheck():
    tensors = sample_inputs(12, "cpu")
    arguments = (*tensors, torch.tensor(0.5), 1e-3, 0.9, 0.98, 1e-8, 0.01, 1, True)
    torch.library.opcheck(torch.ops.ls.adam_step.default, arguments)
