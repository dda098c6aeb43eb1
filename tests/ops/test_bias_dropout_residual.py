import importlib

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

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


def sample_inputs(shape, device, dtype):
    """x, bias, residual, grad_y."""
    generator = torch.Generator().manual_seed(2)
    x, residual, grad_y = (torch.randn(shape, generator=generator) for _ in range(3))
    bias = torch.randn(shape[-1], generator=generator)
    return [t.to(device, dtype) for t in (x, bias, residual, grad_y)]


def run(function, inputs, dtype=None):
    """y and the gradients of x, bias, residual."""
    *leaves, grad_y = (t.to(dtype) if dtype else t for t in inputs)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    torch.manual_seed(SEED)
    y = function(*leaves)
    return [y, *torch.autograd.grad(y, leaves, grad_y)]


def compare(inputs, p):
    torch.manual_seed(SEED)
    seed = draw_seed()
    keep = reference.dropout_keep_mask(inputs[0].shape, p, int(seed), 0).to(inputs[0].device)

    def torch_function(x, bias, residual):
        return residual + torch.where(keep, (x + bias) * reference.dropout_scale(p), 0.0)

    def oracle(x, bias, residual):
        return reference.bias_dropout_residual(x, bias, residual, p, seed, 0)

    actual = run(lambda *leaves: ops.bias_dropout_residual(*leaves, p), inputs)
    torch_result = run(torch_function, inputs)
    exact = run(oracle, [t.cpu() for t in inputs], torch.float64)
    for name, a, t, e in zip(("y", "grad_x", "grad_bias", "grad_residual"), actual, torch_result, exact, strict=True):
        assert_as_accurate(a, t, e, VALUE_FACTOR if name == "y" else GRAD_FACTOR, name)
    if actual[0].numel():
        assert torch.equal(actual[1] == 0, ~keep | (inputs[3] == 0)), "backward's mask is not forward's"


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
    x, bias, residual, grad_y = sample_inputs((6, 264), backend.device, dtype)
    compare([change(x), bias, change(residual), change(grad_y)], 0.1)


def test_more_than_65536_rows(backend):
    compare(sample_inputs((65_600, 3), backend.device, torch.float32), 0.1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_optional_arguments(backend, bias, residual):
    x, b, r, grad_y = sample_inputs((11, 40), backend.device, torch.float32)
    b, r = (b if bias else None), (r if residual else None)
    x.requires_grad_()
    torch.manual_seed(SEED)
    y = ops.bias_dropout_residual(x, b, r, 0.3)
    torch.manual_seed(SEED)
    expected = reference.bias_dropout_residual(x, b, r, 0.3, draw_seed(), 0)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, grad_y)[0] for out in (y, expected)))


def test_nothing_to_do_returns_x():
    x = torch.randn(3, 4)
    assert ops.bias_dropout_residual(x, None, None, 0.5, training=False) is x


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_keep_rate(backend, p):
    shape = (64, 1000) if backend.name == "simt" else (1000, 1000)
    y = ops.bias_dropout_residual(torch.ones(shape, device=backend.device), None, None, p)
    kept = (y != 0).double()
    expected = 1 - reference.dropout_threshold(p) / 65536
    deviation = (expected * (1 - expected) / kept.numel()) ** 0.5
    assert abs(kept.mean().item() - expected) < 4 * deviation
    # Neighbours in a row and in a column are uncorrelated: both kept as often as independence says.
    for pairs in (kept[:, 1:] * kept[:, :-1], kept[1:] * kept[:-1]):
        assert abs(pairs.mean().item() - expected**2) < 6 * deviation
    assert y[y != 0].unique().tolist() == pytest.approx([1 / expected], rel=1e-6)


def test_tiny_and_almost_one_probabilities_still_drop_and_keep():
    assert reference.dropout_threshold(1e-9) == 1
    assert reference.dropout_threshold(1 - 1e-9) == 65535
    assert reference.dropout_threshold(0.0) == 0 and reference.dropout_threshold(1.0) == 65536


def test_philox_known_answers():
    """Test vectors of the Philox authors' Random123 library (kat_vectors, philox4x32, 10 rounds)."""
    from ls_plugin.reference.dropout import philox4x32_10

    def draw(seed, counter):
        return [int(word) for word in philox4x32_10(seed, tuple(torch.tensor([c]) for c in counter))]

    assert draw(0, (0, 0, 0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert draw(-1, (ones, ones, ones, ones)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_masks_depend_on_seed_call_and_rank(monkeypatch):
    # By name, because the package exports the function under the module's name.
    module = importlib.import_module("ls_plugin.ops.bias_dropout_residual")
    x = torch.ones(16, 256)

    def draw(seed, rank=0):
        torch.manual_seed(seed)
        monkeypatch.setattr(module, "rank_offset", lambda: rank << 32)
        return [ops.bias_dropout_residual(x, None, None, 0.5) for _ in range(2)]

    first, again, other_seed, other_rank = draw(1), draw(1), draw(2), draw(1, rank=3)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), "the same seed gives the same masks"
    assert not torch.equal(first[0], first[1]), "two calls draw two masks"
    assert not torch.equal(first[0], other_seed[0])
    assert not torch.equal(first[0], other_rank[0]), "ranks seeded alike draw different masks"


def test_same_bits_at_any_thread_count():
    inputs = sample_inputs((700, 96), "cpu", torch.float32)
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(run(lambda *leaves: ops.bias_dropout_residual(*leaves, 0.1), inputs))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_dropped_infinity_gives_zero(backend):
    x = torch.full((4, 64), float("inf"), device=backend.device)
    y = ops.bias_dropout_residual(x, None, None, 0.5)
    assert torch.isinf(y).any() and (y == 0).any() and not torch.isnan(y).any()


def test_activation_checkpointing_draws_the_same_mask():
    x = torch.randn(8, 32, requires_grad=True)
    mask = []

    def function(t):
        y = ops.bias_dropout_residual(t, None, None, 0.5)
        mask.append(y.detach() != 0)
        return y

    torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad != 0, mask[0])


def test_mixed_dtypes_are_promoted(backend):
    """Under autocast a bf16 product meets an fp32 residual stream, which must stay fp32."""
    x, bias, residual, _ = sample_inputs((3, 40), backend.device, torch.bfloat16)
    y = ops.bias_dropout_residual(x, bias, residual.float(), 0.0)
    assert y.dtype == torch.float32 and torch.equal(y, residual.float() + (x.float() + bias.float()))


def test_double_backward_is_refused(backend):
    x, _, _, grad_y = sample_inputs((3, 40), backend.device, torch.float32)
    grad_y.requires_grad_()
    y = ops.bias_dropout_residual(x.requires_grad_(), None, None, 0.5)
    (grad,) = torch.autograd.grad(y, x, grad_y, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.square().sum().backward()


def test_errors_name_what_was_expected(backend):
    x = torch.randn(2, 8, device=backend.device)
    with pytest.raises(RuntimeError, match=r"bias_dropout_residual: bias must have shape \(C,\) = \(8,\), got \(7,\)"):
        ops.bias_dropout_residual(x, x.new_ones(7), None, 0.1)
    with pytest.raises(RuntimeError, match=r"residual must have the shape of x, \(2, 8\), got \(8,\)"):
        ops.bias_dropout_residual(x, None, x.new_ones(8), 0.1)
    with pytest.raises(ValueError, match=r"p must lie in \[0, 1\], got 1.5"):
        ops.bias_dropout_residual(x, None, x, 1.5)


def test_oracle_gradcheck():
    x, bias, residual, _ = sample_inputs((4, 6), "cpu", torch.float64)
    leaves = [t.requires_grad_() for t in (x, bias, residual)]
    seed = torch.tensor([7])
    assert torch.autograd.gradcheck(lambda *args: reference.bias_dropout_residual(*args, 0.3, seed, 0), leaves)


@needs_library
def test_opcheck():
    x, bias, residual, grad_y = sample_inputs((4, 12), "cpu", torch.float32)
    leaves = [t.requires_grad_() for t in (x, bias, residual)]
    seed = torch.tensor([7])
    torch.library.opcheck(torch.ops.ls.bias_dropout_residual_forward.default, (*leaves, 0.3, seed, 0))
    torch.library.opcheck(torch.ops.ls.bias_dropout_residual_backward.default, (grad_y, 0.3, seed, 0, True, True))


def test_matches_torch_without_dropout(backend):
    x, bias, residual, _ = sample_inputs((5, 24), backend.device, torch.float32)
    y = ops.bias_dropout_residual(x, bias, residual, 0.4, training=False)
    torch.testing.assert_close(y, residual + F.dropout(x + bias, 0.4, training=False))
