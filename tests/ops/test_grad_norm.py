import math

import pytest
import torch
from fairseq.utils import clip_grad_norm_

from ls_plugin import ops, reference
from tests.ops.accuracy import DTYPES, dtype_name, misaligned, needs_library

CHUNK = 16384  # kNormChunk
SIZES = [*range(1, 10), 31, 257, 4095, 4097, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]


def sample_input(n_elem, device, dtype=torch.float32, seed=3):
    return torch.randn(n_elem, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def scalar(value, device):
    return torch.tensor(value, dtype=torch.float32, device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("size", SIZES)
def test_norm_to_fp32s_last_digits(backend, size, dtype):
    grad = sample_input(size, backend.device, dtype)
    norm, coefficient, overflow = ops.grad_norm([grad])
    assert norm.shape == coefficient.shape == overflow.shape == () and norm.dtype == coefficient.dtype == torch.float32
    assert norm.device == coefficient.device == overflow.device == grad.device
    assert norm.item() == pytest.approx(grad.double().norm().item(), rel=5e-7)
    assert coefficient == 1.0 and overflow.dtype == torch.bool and not overflow


def test_large_buffer_keeps_its_digits(backend):
    """Squares that are all of one size, whose plain fp32 sum would stop growing at 2^24 terms."""
    if backend.name == "simt":
        pytest.skip("40 million elements are a minute of the harness; test_norm_to_fp32s_last_digits runs there")
    grad = torch.full((40_000_003,), 1.0, device=backend.device)
    assert ops.grad_norm([grad])[0].item() == pytest.approx(math.sqrt(40_000_003), rel=2e-7)


@pytest.mark.parametrize("scale", [None, 0.25, -3.0])
@pytest.mark.parametrize("max_norm", [0.0, 1e-3, 0.7, 1e6])
def test_equals_fairseq(backend, scale, max_norm):
    """The coefficient is that by which multiply_grads(scale) and clip_grad_norm_ change the gradients together."""
    values = [sample_input(n, backend.device, seed=n) for n in (1003, 20, 1)]
    params = [torch.nn.Parameter(torch.zeros_like(value)) for value in values]
    for p, value in zip(params, values, strict=True):
        p.grad = value * (1.0 if scale is None else scale)
    expected = clip_grad_norm_(params, max_norm)
    device_scale = None if scale is None else scalar(scale, backend.device)
    norm, coefficient, overflow = ops.grad_norm(values, device_scale, max_norm)
    torch.testing.assert_close(norm, expected)
    for p, value in zip(params, values, strict=True):
        torch.testing.assert_close(value * coefficient, p.grad)
    assert not overflow


@pytest.mark.parametrize("scale", [None, -0.125])
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_equals_the_oracle_on_mixed_buffers(backend, scale, max_norm):
    grads = [sample_input(n, backend.device, dtype) for n, dtype in zip((7, 0, 20_000), DTYPES, strict=True)]
    grads.append(sample_input(30, backend.device).view(5, 6))
    scale = None if scale is None else scalar(scale, backend.device)
    for actual, expected in zip(
        ops.grad_norm(grads, scale, max_norm), reference.grad_norm(grads, scale, max_norm), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("max_norm", [0.0, 1.0])
@pytest.mark.parametrize("at", [0, 12_345, 40_001])
def test_overflow(backend, bad, max_norm, at):
    grad = sample_input(40_002, backend.device, torch.float16)
    grad[at] = bad
    scale = scalar(0.5, backend.device)
    norm, coefficient, overflow = ops.grad_norm([sample_input(9, backend.device), grad], scale, max_norm)
    assert overflow and (norm.isnan() if math.isnan(bad) else norm == math.inf)
    expected = reference.grad_norm([grad], scale, max_norm)[1]
    torch.testing.assert_close(coefficient, expected, equal_nan=True)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_scale_that_is_not_finite_is_an_overflow(backend, value):
    assert ops.grad_norm([sample_input(9, backend.device)], scalar(value, backend.device), 1.0)[2]


def test_fp16_squares_do_not_overflow(backend):
    grad = torch.full((2 * CHUNK,), 65504.0, device=backend.device, dtype=torch.float16)
    norm, _, overflow = ops.grad_norm([grad])
    assert not overflow and norm.item() == pytest.approx(65504.0 * math.sqrt(2 * CHUNK), rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_same_bits_wherever_the_buffer_starts(backend, dtype):
    grad = sample_input(2 * CHUNK + 77, backend.device, dtype)
    assert torch.equal(ops.grad_norm([grad])[0], ops.grad_norm([misaligned(grad)])[0])


def test_same_bits_at_any_number_of_threads(backend):
    grad = sample_input(11 * CHUNK + 77, backend.device)
    threads, norms = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 1):
            torch.set_num_threads(count)
            norms.append(ops.grad_norm([grad])[0])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(norm, norms[0]) for norm in norms)


def test_gradients_of_zero_and_of_no_elements(backend):
    for grad in (torch.zeros(5, device=backend.device), torch.zeros(0, device=backend.device)):
        norm, coefficient, overflow = ops.grad_norm([grad], None, 1.0)
        assert norm == 0 and coefficient == 1 and not overflow


def test_drives_adam_step(backend):
    """norm -> coefficient and flag -> update, nothing read on the host."""
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.1, "step": 1}
    for bad in (False, True):
        param, grad = (sample_input(100, backend.device, seed=seed) for seed in (1, 2))
        exp_avg, exp_avg_sq = torch.zeros_like(param), torch.zeros_like(param)
        if bad:
            grad[50] = torch.inf
        before = param.clone()
        norm, coefficient, overflow = ops.grad_norm([grad], scalar(0.5, backend.device), 1.0)
        expected_grad = grad * 0.5 / (norm + 1e-6)
        ops.adam_step(param, grad, exp_avg, exp_avg_sq, grad_scale=coefficient, overflow=overflow, **options)
        if bad:
            assert torch.equal(param, before) and exp_avg.abs().sum() == 0
        else:
            torch.testing.assert_close(exp_avg, 0.1 * expected_grad)


def test_fp64_runs_the_reference():
    grads = [torch.tensor([3.0], dtype=torch.float64), torch.tensor([4.0])]
    norm, coefficient, overflow = ops.grad_norm(grads, torch.tensor(2.0), 5.0)
    assert norm == 10 and coefficient.item() == pytest.approx(1.0) and not overflow


def test_errors_name_what_was_expected(backend):
    grad = sample_input(8, backend.device)
    with pytest.raises(ValueError, match="grad_norm: grads must hold at least one tensor, got none"):
        ops.grad_norm([])
    with pytest.raises(RuntimeError, match="grad_norm: grads must be contiguous"):
        ops.grad_norm([grad[::2]])
    with pytest.raises(RuntimeError, match=r"grad_norm: scale must have one element, got shape \(8,\)"):
        ops.grad_norm([grad], grad)
    with pytest.raises(RuntimeError, match="grad_norm: scale must be Float, got Half"):
        ops.grad_norm([grad], grad[0].half())


@needs_library
def test_opcheck():
    torch.library.opcheck(
        torch.ops.ls.grad_norm.default, ([torch.ones(5), torch.ones(3).half()], torch.tensor(2.0), 1.0)
    )
    torch.library.opcheck(torch.ops.ls.grad_norm.default, ([torch.ones(5)], None, 0.0))


@pytest.mark.parametrize(("size", "expected"), [(1e19, 1e19 * 3**0.5), (1e20, float("inf")), (1e-24, 0.0)])
def test_range_of_the_squares(backend, size, expected):
    norm, _, overflow = ops.grad_norm([torch.full((3,), size, device=backend.device)])
    assert norm.item() == pytest.approx(expected) and overflow.item() == (expected == float("inf"))
