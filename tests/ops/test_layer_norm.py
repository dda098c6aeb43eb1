import pytest
import torch
import torch.nn.functional as F

from ls_plugin import ops, reference
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


def sample_inputs(shape, device, dtype, mean=0.3, deviation=1.7):
    """x, weight, bias, grad_y."""
    generator = torch.Generator().manual_seed(1)
    x, grad_y = (torch.randn(shape, generator=generator) for _ in range(2))
    weight, bias = (torch.randn(shape[-1], generator=generator) for _ in range(2))
    return [t.to(device, dtype) for t in (x * deviation + mean, weight, bias, grad_y)]


def run(function, inputs, dtype=None):
    """y and the gradients of x, weight, bias."""
    *leaves, grad_y = (t.to(dtype) if dtype else t for t in inputs)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    y = function(*leaves)
    return [y, *torch.autograd.grad(y, leaves, grad_y)]


def compare(inputs):
    columns = inputs[0].shape[-1:]
    actual = run(ops.layer_norm, inputs)
    torch_result = run(lambda x, w, b: F.layer_norm(x, columns, w, b), inputs)
    exact = run(reference.layer_norm, [t.cpu() for t in inputs], torch.float64)
    for name, a, t, e in zip(("y", "grad_x", "grad_weight", "grad_bias"), actual, torch_result, exact, strict=True):
        # One column: grad_x is 0 exactly, as the difference of numbers of grad_y's size.
        magnitude = inputs[3].abs().max().item() if name == "grad_x" and a.numel() else 0.0
        assert_as_accurate(a, t, e, VALUE_FACTOR if name == "y" else GRAD_FACTOR, name, magnitude)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_name)
def test_as_accurate_as_torch(backend, shape, dtype):
    compare(sample_inputs(shape, backend.device, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("change", [misaligned, noncontiguous])
def test_layouts(backend, change, dtype):
    x, weight, bias, grad_y = sample_inputs((6, 264), backend.device, dtype)
    compare([change(x), weight, bias, change(grad_y)])


def test_more_than_65536_rows(backend):
    compare(sample_inputs((65_600, 3), backend.device, torch.float32))


@pytest.mark.parametrize("columns", [64, 1024, 5000])
@pytest.mark.parametrize("mean", [1e4, 1e6])
def test_large_mean_keeps_two_pass_accuracy(backend, columns, mean):
    """Rows of mean 10,000, and 1,000,000, and deviation 1, where E[x^2] - E[x]^2 in fp32 is nonsense: 0, below 0, or far from 1."""
    x, _, _, _ = sample_inputs((8, columns), backend.device, torch.float32, mean=mean, deviation=1.0)
    naive = x.cpu().square().mean(-1) - x.cpu().mean(-1).square()
    assert (naive <= 0).any() and (naive - 1).abs().max() > 0.5, "the inputs no longer show the cancellation"
    y = ops.layer_norm(x, None, None).double().cpu()
    exact = reference.layer_norm(x.double().cpu(), None, None)
    two_pass = reference.layer_norm(x, None, None).double().cpu()
    # The mean itself is rounded to fp32, in steps of 2^-10 at 10,000 and 1/16 at a million: half a step moves y by as much over the
    # deviation, whatever the algorithm.
    step = torch.finfo(torch.float32).eps * 2 ** torch.tensor(mean).log2().floor().item()
    assert (y - exact).abs().max() < 0.75 * step
    assert (y - exact).abs().max() < 2 * (two_pass - exact).abs().max() + 0.05 * step
    # Apart from that shift of the whole row nothing is lost.
    assert ((y - y.mean(-1, keepdim=True)) - exact).abs().max() < 2e-6


@pytest.mark.parametrize("columns", [64, 300, 1024, 5000, 20000])
@pytest.mark.parametrize("first", [1, 8, 40])
def test_rows_that_begin_far_from_their_mean(backend, columns, first):
    """The statistics start from a pivot out of the row's beginning; where that is an outlier, they must not stay there."""
    x, _, _, _ = sample_inputs((6, columns), backend.device, torch.float32, mean=0.0, deviation=1.0)
    x[::2, :first] += 1e4
    y = ops.layer_norm(x, None, None).double().cpu()
    exact = reference.layer_norm(x.double().cpu(), None, None)
    torch.testing.assert_close(y, exact, rtol=1e-6, atol=1e-6)


def test_without_weight_and_bias(backend):
    x, _, _, grad_y = sample_inputs((5, 77), backend.device, torch.float32)
    x.requires_grad_()
    y = ops.layer_norm(x, None, None)
    expected = F.layer_norm(x, (77,))
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, grad_y)[0] for out in (y, expected)))


def test_frozen_parameters_get_no_gradient(backend):
    x, weight, bias, grad_y = sample_inputs((5, 77), backend.device, torch.float32)
    x.requires_grad_()
    weight.requires_grad_()
    y = ops.layer_norm(x, weight, bias)
    y.backward(grad_y)
    assert bias.grad is None and weight.grad is not None and x.grad is not None


def test_same_bits_twice(backend):
    inputs = sample_inputs((700, 96), backend.device, torch.float32)
    first, second = run(ops.layer_norm, inputs), run(ops.layer_norm, inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_mixed_dtypes_are_promoted(backend):
    """As torch's layer norm under autocast: fp32 parameters make an fp32 result."""
    x, weight, bias, _ = sample_inputs((3, 40), backend.device, torch.bfloat16)
    y = ops.layer_norm(x, weight.float(), bias.float())
    assert y.dtype == torch.float32 and torch.equal(y, ops.layer_norm(x.float(), weight.float(), bias.float()))


def test_double_backward_is_refused(backend):
    x, weight, bias, grad_y = sample_inputs((3, 40), backend.device, torch.float32)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(ops.layer_norm(x, weight, bias), x, grad_y, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.square().sum().backward()


def test_errors_name_what_was_expected(backend):
    x = torch.randn(2, 8, device=backend.device)
    with pytest.raises(RuntimeError, match=r"layer_norm: x must be floating, got torch.int64"):
        ops.layer_norm(x.long(), None, None)
    with pytest.raises(RuntimeError, match=r"layer_norm: weight must have shape \(C,\) = \(8,\), got \(7,\)"):
        ops.layer_norm(x, x.new_ones(7), x.new_zeros(8))
    with pytest.raises(RuntimeError, match="layer_norm: x must have at least one dimension"):
        ops.layer_norm(x.new_ones(()), None, None)


def test_oracle_gradcheck():
    inputs = [t.requires_grad_() for t in sample_inputs((4, 6), "cpu", torch.float64)[:3]]
    assert torch.autograd.gradcheck(reference.layer_norm, inputs)


@needs_library
def test_opcheck():
    x, weight, bias, grad_y = sample_inputs((4, 12), "cpu", torch.float32)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    torch.library.opcheck(torch.ops.ls.layer_norm_forward.default, (*leaves, 1e-5))
    _y, mean, rstd = torch.ops.ls.layer_norm_forward(x.detach(), weight.detach(), bias.detach(), 1e-5)
    arguments = (grad_y, x.detach(), weight.detach(), mean, rstd, True, True)
    torch.library.opcheck(torch.ops.ls.layer_norm_backward.default, arguments)
