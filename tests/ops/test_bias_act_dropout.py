import importlib

import fairseq.utils
import pytest
import torch
import torch.nn.functional as F

from ls_plugin import ops, reference
from ls_plugin.ops.rng import draw_seed
from ls_plugin.reference.bias_act_dropout import ACTIVATIONS
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

# fairseq says that gelu_fast has a new name.
pytestmark = pytest.mark.filterwarnings("ignore:--activation-fn=gelu_fast")

SEED = 1234
NAMES = [name for name in ACTIVATIONS if name != "gelu_fast"]


def sample_inputs(shape, device, dtype):
    """x, bias, grad_y; x wide enough to saturate every activation."""
    generator = torch.Generator().manual_seed(2)
    x, grad_y = (torch.randn(shape, generator=generator) for _ in range(2))
    bias = torch.randn(shape[-1], generator=generator)
    return [t.to(device, dtype) for t in (2.0 * x, bias, grad_y)]


def run(function, inputs, dtype=None):
    """y and the gradients of x and bias."""
    *leaves, grad_y = (t.to(dtype) if dtype else t for t in inputs)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    torch.manual_seed(SEED)
    y = function(*leaves)
    return [y, *torch.autograd.grad(y, leaves, grad_y)]


def compare(inputs, activation, p):
    torch.manual_seed(SEED)
    seed = draw_seed()
    keep = reference.dropout_keep_mask(inputs[0].shape, p, int(seed), 0).to(inputs[0].device)
    stock = fairseq.utils.get_activation_fn(activation)

    def torch_function(x, bias):
        return torch.where(keep, stock(x + bias) * reference.dropout_scale(p), 0.0)

    def oracle(x, bias):
        return reference.bias_act_dropout(x, bias, activation, p, seed, 0)

    actual = run(lambda *leaves: ops.bias_act_dropout(*leaves, activation, p), inputs)
    torch_result = run(torch_function, inputs)
    exact = run(oracle, [t.cpu() for t in inputs], torch.float64)
    for name, a, t, e in zip(("y", "grad_x", "grad_bias"), actual, torch_result, exact, strict=True):
        assert_as_accurate(a, t, e, VALUE_FACTOR if name == "y" else GRAD_FACTOR, name)
    assert (actual[0][~keep] == 0).all() and (actual[1][~keep] == 0).all(), "backward's mask is not forward's"


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_name)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_as_accurate_as_torch(backend, activation, shape, dtype):
    compare(sample_inputs(shape, backend.device, dtype), activation, 0.1)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(backend, activation, p, dtype):
    compare(sample_inputs((40, 129), backend.device, dtype), activation, p)


@pytest.mark.parametrize("activation", NAMES)
def test_everything_dropped(backend, activation):
    compare(sample_inputs((9, 100), backend.device, torch.float32), activation, 1.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("change", [misaligned, noncontiguous])
@pytest.mark.parametrize("activation", NAMES)
def test_layouts(backend, activation, change, dtype):
    x, bias, grad_y = sample_inputs((6, 264), backend.device, dtype)
    compare([change(x), bias, change(grad_y)], activation, 0.1)
    compare([x, misaligned(bias), grad_y], activation, 0.1)


def test_more_than_65536_rows(backend):
    compare(sample_inputs((65_600, 3), backend.device, torch.float32), "relu", 0.1)


def test_more_dimensions_and_rows_longer_than_a_buffer_of_draws(backend):
    compare(sample_inputs((2, 3, 2600), backend.device, torch.float32), "gelu", 0.1)


@pytest.mark.parametrize("activation", NAMES)
def test_without_bias(backend, activation):
    x, _, grad_y = sample_inputs((11, 40), backend.device, torch.float32)
    x.requires_grad_()
    torch.manual_seed(SEED)
    y = ops.bias_act_dropout(x, None, activation, 0.3)
    torch.manual_seed(SEED)
    expected = reference.bias_act_dropout(x, None, activation, 0.3, draw_seed(), 0)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, grad_y)[0] for out in (y, expected)))


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("needs", ["x", "bias"])
def test_one_gradient_alone(backend, activation, needs):
    x, bias, grad_y = sample_inputs((40, 24), backend.device, torch.float32)
    both = run(lambda x, bias: ops.bias_act_dropout(x, bias, activation, 0.1), (x, bias, grad_y))
    leaf = (x if needs == "x" else bias).requires_grad_()
    torch.manual_seed(SEED)
    (grad,) = torch.autograd.grad(ops.bias_act_dropout(x, bias, activation, 0.1), leaf, grad_y)
    assert torch.equal(grad, both[1 if needs == "x" else 2])


def test_linear_without_bias_and_dropout_returns_x():
    x = torch.randn(3, 4)
    assert ops.bias_act_dropout(x, None, "linear", 0.5, training=False) is x


@pytest.mark.parametrize("activation", ["gelu", "gelu_accurate", "tanh"])
def test_over_the_range_of_floats(backend, activation):
    """A few units in the last place of 1, which is where the derivatives and tanh live, and of the value beyond."""
    magnitude = torch.cat([torch.logspace(-30, 2, 3001), torch.linspace(0, 16, 6001), torch.tensor([1e4, 1e9])])
    x = torch.cat([magnitude, -magnitude]).to(backend.device).requires_grad_()
    y = ops.bias_act_dropout(x, None, activation, 0.0)
    (grad,) = torch.autograd.grad(y.sum(), x)
    exact_x = x.detach().cpu().double().requires_grad_()
    exact = reference.bias_act_dropout(exact_x, None, activation, 0.0, None, 0)
    (exact_grad,) = torch.autograd.grad(exact.sum(), exact_x)
    eps = torch.finfo(torch.float32).eps
    small = exact_x.abs() < 1e-3
    error = (y.detach().cpu() - exact).abs()
    assert (error <= 4 * eps * exact_x.abs().clamp(max=16)).all() if activation != "tanh" else (error <= 3 * eps).all()
    assert (error[small] <= 4 * eps * exact_x[small].abs()).all()
    assert ((grad.cpu() - exact_grad).abs() <= 8 * eps).all()
    # Saturated: exactly 0, x, 1 or -1.
    for value in (16.0, 1e4, 1e9):
        ends = ops.bias_act_dropout(torch.tensor([value, -value], device=backend.device), None, activation, 0.0)
        assert ends.tolist() == ([1.0, -1.0] if activation == "tanh" else [value, 0.0])


# What each activation and its derivative tend to, which is what they are at 0, at infinity and at 1e30.
ASYMPTOTES = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": lambda x: x.clamp(min=0),
    "gelu_accurate": lambda x: x.clamp(min=0),
    "tanh": lambda x: x.clamp(-1, 1),
    "relu_squared": lambda x: x.clamp(min=0).square(),
    "linear": lambda x: x,
}
NAN = float("nan")
SLOPES = {  # at inf, -inf, NaN, 0, -0, 1e30 and -1e30
    "relu": [1, 0, 1, 0, 0, 1, 0],  # NaN passes the gradient on, as torch's relu does
    "gelu": [1, 0, NAN, 0.5, 0.5, 1, 0],
    "gelu_accurate": [1, 0, NAN, 0.5, 0.5, 1, 0],
    "tanh": [0, 0, NAN, 1, 1, 0, 0],
    "relu_squared": [float("inf"), 0, NAN, 0, 0, 2e30, 0],
    "linear": [1, 1, 1, 1, 1, 1, 1],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("activation", NAMES)
def test_limits_at_infinity_and_nan(backend, activation, dtype):
    """The limits of the maths. Stock's gelu has NaN at -inf, and on some processors at inf as well."""
    inf = float("inf")
    # In tails as well as in whole vectors.
    x = torch.tensor([inf, -inf, NAN, 0.0, -0.0, 1e30, -1e30] * 5, device=backend.device).to(dtype).requires_grad_()
    y = ops.bias_act_dropout(x, None, activation, 0.0)
    torch.testing.assert_close(y.detach(), ASYMPTOTES[activation](x.detach().double()).to(dtype), equal_nan=True)
    (grad,) = torch.autograd.grad(y.sum(), x, allow_unused=True)
    slopes = torch.tensor(SLOPES[activation] * 5, dtype=torch.float64, device=backend.device)
    torch.testing.assert_close(grad, slopes.to(dtype), equal_nan=True)


@pytest.mark.parametrize("activation", NAMES)
def test_dropped_infinity_gives_zero(backend, activation):
    x = torch.full((4, 64), float("inf"), device=backend.device, requires_grad=True)
    y = ops.bias_act_dropout(x, None, activation, 0.5)
    assert (y == 0).any() and not torch.isnan(y).any()
    (grad,) = torch.autograd.grad(y, x, torch.full_like(x, float("inf")))
    assert (grad[y == 0] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_relu_gradient_at_the_smallest_sums(backend, dtype):
    """Backward takes y != 0 for "kept and positive": no positive sum may round to 0."""
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x = torch.full((8, 33), 3 * tiny, dtype=dtype, device=backend.device, requires_grad=True)
    bias = torch.full((33,), -2 * tiny, dtype=dtype, device=backend.device)
    y = ops.bias_act_dropout(x, bias, "relu", 0.0)
    assert (y == tiny).all()
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert (grad == 1).all()


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_keep_rate(backend, p):
    shape = (64, 1000) if backend.name == "simt" else (1000, 1000)
    y = ops.bias_act_dropout(torch.ones(shape, device=backend.device), None, "relu", p)
    expected = 1 - reference.dropout_threshold(p) / 65536
    deviation = (expected * (1 - expected) / y.numel()) ** 0.5
    assert abs((y != 0).double().mean().item() - expected) < 4 * deviation
    assert y[y != 0].unique().tolist() == pytest.approx([1 / expected], rel=1e-6)


def test_masks_depend_on_seed_and_rank(monkeypatch):
    module = importlib.import_module("ls_plugin.ops.bias_act_dropout")
    x = torch.ones(16, 256)

    def draw(seed, rank=0):
        torch.manual_seed(seed)
        monkeypatch.setattr(module, "rank_offset", lambda: rank << 32)
        return ops.bias_act_dropout(x, None, "relu", 0.5)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2)) and not torch.equal(draw(1), draw(1, rank=3))


@pytest.mark.parametrize("activation", NAMES)
def test_same_bits_at_any_thread_count(activation):
    inputs = sample_inputs((700, 96), "cpu", torch.float32)
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(run(lambda *leaves: ops.bias_act_dropout(*leaves, activation, 0.1), inputs))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_bias_is_taken_in_the_dtype_of_x(backend):
    """Under autocast the product is bf16 and the bias an fp32 parameter; stock's activation then stays bf16."""
    x, bias, grad_y = sample_inputs((3, 40), backend.device, torch.bfloat16)
    wide = bias.float().requires_grad_()
    y = ops.bias_act_dropout(x, wide, "relu", 0.0)
    assert y.dtype == torch.bfloat16 and torch.equal(y, F.relu(x.float() + bias.float()).bfloat16())
    assert torch.autograd.grad(y, wide, grad_y)[0].dtype == torch.float32


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_output_modified_before_backward_is_noticed(backend, activation):
    x = torch.randn(3, 40, device=backend.device, requires_grad=True)
    y = ops.bias_act_dropout(x, None, activation, 0.5)
    y.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_double_backward_is_refused(backend, activation):
    x, _, grad_y = sample_inputs((3, 40), backend.device, torch.float32)
    grad_y.requires_grad_()
    y = ops.bias_act_dropout(x.requires_grad_(), None, activation, 0.5)
    (grad,) = torch.autograd.grad(y, x, grad_y, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.square().sum().backward()


def test_errors_name_what_was_expected(backend):
    x = torch.randn(2, 8, device=backend.device)
    with pytest.raises(RuntimeError, match=r"bias_act_dropout: bias must have shape \(C,\) = \(8,\), got \(7,\)"):
        ops.bias_act_dropout(x, x.new_ones(7), "relu", 0.1)
    with pytest.raises(ValueError, match=r"bias_act_dropout: p must lie in \[0, 1\], got 1.5"):
        ops.bias_act_dropout(x, None, "relu", 1.5)
    with pytest.raises(ValueError, match=r"activation must be one of relu, gelu, .*, linear, got 'swish'"):
        ops.bias_act_dropout(x, None, "swish", 0.1)
    forward = getattr(torch.ops, backend.namespace).bias_act_dropout_forward
    with pytest.raises(RuntimeError, match=r"bias_act_dropout: activation must be a code from 0 to 4, got 5"):
        forward(x, None, 5, 0.0, None, 0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_oracle_gradcheck_and_stock(activation):
    x, bias, _ = sample_inputs((4, 6), "cpu", torch.float64)
    seed = torch.tensor([7])
    leaves = [t.requires_grad_() for t in (x, bias)]
    assert torch.autograd.gradcheck(lambda *args: reference.bias_act_dropout(*args, activation, 0.3, seed, 0), leaves)
    stock = fairseq.utils.get_activation_fn(activation)((x + bias).float())
    torch.testing.assert_close(reference.bias_act_dropout(x, bias, activation, 0.0, None, 0).float(), stock)


@needs_library
@pytest.mark.parametrize("activation", [0, 1])
def test_opcheck(activation):
    x, bias, grad_y = sample_inputs((4, 12), "cpu", torch.float32)
    leaves = [t.requires_grad_() for t in (x, bias)]
    seed = torch.tensor([7])
    torch.library.opcheck(torch.ops.ls.bias_act_dropout_forward.default, (*leaves, activation, 0.3, seed, 0))
    saved = [t.detach() for t in (x, bias)]
    torch.library.opcheck(
        torch.ops.ls.bias_act_dropout_backward.default, (grad_y, *saved, activation, 0.3, seed, 0, True)
    )
