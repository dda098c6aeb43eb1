import itertools

import pytest
import torch
import torch.nn.functional as F

from ls_plugin import ops, reference
from ls_plugin.ops.rng import draw_seed
from tests.ops.accuracy import (
    DTYPES,
    GRAD_FACTOR,
    SHAPES,
    VALUE_FACTOR,
    assert_as_accurate,
    dtype_name,
    misaligned,
    needs_library,
    noncontiguous,
    shape_name,
)

SEED = 1234
LEAVES = ("x", "bias", "residual", "weight", "norm_bias")
NAMES = ("sum", "y", *(f"grad_{name}" for name in LEAVES))


def sample_inputs(shape, device, dtype):
    """x, bias, residual, weight, norm_bias, grad_sum, grad_y."""
    generator = torch.Generator().manual_seed(3)
    x, residual, grad_sum, grad_y = (torch.randn(shape, generator=generator) for _ in range(4))
    bias, weight, norm_bias = (torch.randn(shape[-1], generator=generator) for _ in range(3))
    return [t.to(device, dtype) for t in (x, bias, residual, weight, norm_bias, grad_sum, grad_y)]


def run(function, inputs, dtype=None):
    """sum, y and the gradients of the leaves."""
    *leaves, grad_sum, grad_y = (t.to(dtype) if dtype else t for t in inputs)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    torch.manual_seed(SEED)
    outputs = function(*leaves)
    return [*outputs, *torch.autograd.grad(outputs, leaves, (grad_sum, grad_y))]


def compare(inputs, p):
    torch.manual_seed(SEED)
    seed = draw_seed()
    x = inputs[0]
    keep = reference.dropout_keep_mask(x.shape, p, int(seed), 0).to(x.device)

    def torch_function(x, bias, residual, weight, norm_bias):
        total = residual + torch.where(keep, (x + bias) * reference.dropout_scale(p), 0.0)
        return total, F.layer_norm(total, x.shape[-1:], weight, norm_bias)

    actual = run(lambda *leaves: ops.residual_layer_norm(*leaves, p), inputs)
    torch_result = run(torch_function, inputs)
    exact = run(
        lambda *leaves: reference.residual_layer_norm(*leaves, p, seed, 0), [t.cpu() for t in inputs], torch.float64
    )
    # What cancels in the gradients of a row is of grad_y's size, times 1 / deviation where that is large (one column: eps alone is left).
    magnitude = 0.0
    if x.numel():
        rstd = (exact[0].var(-1, correction=0) + 1e-5).rsqrt().max().item()
        magnitude = rstd * (inputs[6].abs().max() * inputs[3].abs().max()).item() if x.shape[-1] == 1 else 0.0
    for name, a, t, e in zip(NAMES, actual, torch_result, exact, strict=True):
        factor = VALUE_FACTOR if name in ("sum", "y") else GRAD_FACTOR
        assert_as_accurate(a, t, e, factor, name, magnitude if name.startswith("grad") else 0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_name)
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_as_accurate_as_torch(backend, shape, dtype, p):
    compare(sample_inputs(shape, backend.device, dtype), p)


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_extreme_probabilities(backend, p):
    compare(sample_inputs((9, 100), backend.device, torch.float32), p)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("change", [misaligned, noncontiguous])
def test_layouts(backend, change, dtype):
    x, bias, residual, weight, norm_bias, grad_sum, grad_y = sample_inputs((6, 264), backend.device, dtype)
    compare([change(x), bias, change(residual), weight, norm_bias, change(grad_sum), change(grad_y)], 0.1)


def test_more_than_65536_rows(backend):
    compare(sample_inputs((65_600, 3), backend.device, torch.float32), 0.1)


@pytest.mark.parametrize("columns", [40, 1100])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_optional_arguments(backend, columns, p):
    """Each argument and each gradient may be absent; so may either output's gradient."""
    *leaves, grad_sum, grad_y = sample_inputs((11, columns), backend.device, torch.float32)
    torch.manual_seed(SEED)
    seed = draw_seed()
    for present in itertools.product([False, True], repeat=4):
        given = [leaves[0], *(leaf if here else None for leaf, here in zip(leaves[1:], present, strict=True))]
        for grads in ((grad_sum, grad_y), (None, grad_y), (grad_sum, None)):
            results = []
            for function in (
                lambda *inputs: ops.residual_layer_norm(*inputs, p),
                lambda *inputs: reference.residual_layer_norm(*inputs, p, seed, 0),
            ):
                inputs = [None if t is None else t.detach().requires_grad_() for t in given]
                torch.manual_seed(SEED)
                outputs = function(*inputs)
                used = [(out, grad) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
                wanted = [t for t in inputs if t is not None]
                results.append(
                    [
                        *outputs,
                        *torch.autograd.grad(
                            [out for out, _ in used], wanted, [grad for _, grad in used], allow_unused=True
                        ),
                    ]
                )
            for a, e in zip(*results, strict=True):
                assert (a is None) == (e is None)
                if a is not None:
                    torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("wanted", ["x", "bias", "residual", "weight", "norm_bias"])
def test_one_gradient_alone(backend, wanted, p):
    *leaves, grad_sum, grad_y = sample_inputs((5, 77), backend.device, torch.float32)
    expected = run(lambda *leaves: ops.residual_layer_norm(*leaves, p), [*leaves, grad_sum, grad_y])
    i = LEAVES.index(wanted)
    leaves[i] = leaves[i].clone().requires_grad_()
    torch.manual_seed(SEED)
    outputs = ops.residual_layer_norm(*leaves, p)
    (grad,) = torch.autograd.grad(outputs, leaves[i], (grad_sum, grad_y))
    assert torch.equal(grad, expected[2 + i])


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_equals_the_two_ops_apart(backend, dtype):
    """y is the layer norm of the sum as it is stored."""
    x, bias, residual, weight, norm_bias, *_ = sample_inputs((7, 520), backend.device, dtype)
    torch.manual_seed(SEED)
    total, y = ops.residual_layer_norm(x, bias, residual, weight, norm_bias, 0.1)
    torch.manual_seed(SEED)
    assert torch.equal(total, ops.bias_dropout_residual(x, bias, residual, 0.1))
    torch.testing.assert_close(y, ops.layer_norm(total, weight, norm_bias))


def test_without_dropout_one_gradient_serves_x_and_residual(backend):
    *leaves, grad_sum, grad_y = sample_inputs((5, 77), backend.device, torch.float32)
    x, residual = leaves[0].requires_grad_(), leaves[2].requires_grad_()
    outputs = ops.residual_layer_norm(*leaves, 0.5, training=False)
    grad_x, grad_residual = torch.autograd.grad(outputs, (x, residual), (grad_sum, grad_y))
    assert grad_x.data_ptr() == grad_residual.data_ptr()


@pytest.mark.parametrize("columns", [64, 1024, 5000])
def test_large_mean_keeps_two_pass_accuracy(backend, columns):
    x, *_ = sample_inputs((8, columns), backend.device, torch.float32)
    residual = torch.full_like(x, 1e4)
    total, y = ops.residual_layer_norm(x, None, residual, None, None, 0.0)
    exact = reference.layer_norm(total.double().cpu(), None, None)
    assert (y.double().cpu() - exact).abs().max() < 1e-3  # as in test_layer_norm.py


def test_dropped_infinity_gives_the_residual(backend):
    x = torch.full((4, 64), float("inf"), device=backend.device)
    residual = torch.randn(4, 64).to(backend.device)
    total, y = ops.residual_layer_norm(x, None, residual, None, None, 1.0)
    assert torch.equal(total, residual)
    torch.testing.assert_close(y, F.layer_norm(residual, (64,)))


def test_not_finite_rows_stay_by_themselves(backend):
    x, bias, residual, weight, norm_bias, *_ = sample_inputs((5, 77), backend.device, torch.float32)
    expected = ops.residual_layer_norm(x, bias, residual, weight, norm_bias, 0.0)
    x[1, 3], x[2, 5] = float("inf"), float("nan")
    actual = ops.residual_layer_norm(x, bias, residual, weight, norm_bias, 0.0)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a[[0, 3, 4]], e[[0, 3, 4]])
    assert torch.isnan(actual[1][1:3]).all()


def test_same_bits_at_any_thread_count():
    inputs = sample_inputs((701, 96), "cpu", torch.float32)
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run(lambda *leaves: ops.residual_layer_norm(*leaves, 0.1), inputs))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_mixed_dtypes_are_promoted(backend):
    """Under autocast a bf16 product meets an fp32 residual stream, which must stay fp32."""
    x, bias, residual, weight, norm_bias, *_ = sample_inputs((3, 40), backend.device, torch.bfloat16)
    total, y = ops.residual_layer_norm(x, bias, residual.float(), weight.float(), norm_bias.float(), 0.0)
    assert total.dtype == y.dtype == torch.float32
    assert torch.equal(total, residual.float() + (x.float() + bias.float()))


def test_double_backward_is_refused(backend):
    x, bias, residual, weight, norm_bias, _, grad_y = sample_inputs((3, 40), backend.device, torch.float32)
    x.requires_grad_()
    _, y = ops.residual_layer_norm(x, bias, residual, weight, norm_bias, 0.5)
    (grad,) = torch.autograd.grad(y, x, grad_y, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.square().sum().backward()


def test_errors_name_what_was_expected(backend):
    x = torch.randn(2, 8, device=backend.device)
    with pytest.raises(RuntimeError, match=r"residual_layer_norm: bias must have shape \(C,\) = \(8,\), got \(7,\)"):
        ops.residual_layer_norm(x, x.new_ones(7), None, None, None, 0.1)
    with pytest.raises(RuntimeError, match=r"residual must have the shape of x, \(2, 8\), got \(8,\)"):
        ops.residual_layer_norm(x, None, x.new_ones(8), None, None, 0.1)
    with pytest.raises(
        RuntimeError, match=r"residual_layer_norm: norm_bias must have shape \(C,\) = \(8,\), got \(9,\)"
    ):
        ops.residual_layer_norm(x, None, None, None, x.new_ones(9), 0.1)
    with pytest.raises(RuntimeError, match="residual_layer_norm: x must have at least one dimension"):
        ops.residual_layer_norm(x.new_ones(()), None, None, None, None, 0.0)
    with pytest.raises(ValueError, match=r"residual_layer_norm: p must lie in \[0, 1\], got 1.5"):
        ops.residual_layer_norm(x, None, x, None, None, 1.5)


def test_oracle_gradcheck():
    leaves = [t.requires_grad_() for t in sample_inputs((4, 6), "cpu", torch.float64)[:5]]
    seed = torch.tensor([7])
    assert torch.autograd.gradcheck(lambda *args: reference.residual_layer_norm(*args, 0.3, seed, 0), leaves)


@needs_library
def test_opcheck():
    *leaves, grad_sum, grad_y = sample_inputs((4, 12), "cpu", torch.float32)
    seed = torch.tensor([7])
    forward = torch.ops.ls.residual_layer_norm_forward.default
    torch.library.opcheck(forward, (*(t.requires_grad_() for t in leaves), 0.3, seed, 0, 1e-5))
    total, _y, mean, rstd = forward(*(t.detach() for t in leaves), 0.3, seed, 0, 1e-5)
    for p in (0.0, 0.3):
        arguments = (grad_sum, grad_y, total, leaves[3].detach(), mean, rstd, p, seed, 0, *(True,) * 5)
        torch.library.opcheck(torch.ops.ls.residual_layer_norm_backward.default, arguments)
