import pytest
import torch

from ls_plugin import ops, reference
from ls_plugin.ops.rng import draw_seed
from tests.ops.accuracy import (
    DTYPES,
    GRAD_FACTOR,
    VALUE_FACTOR,
    assert_as_accurate,
    dtype_name,
    misaligned,
    needs_library,
    noncontiguous,
    shape_name,
)

SEED = 1234
SCALE = 0.7
INF = float("inf")

# (B, H, T, S). S: one, odd, a team of each size, a team of several groups a lane, a block, longer than any registers, none.
SHAPES = [
    (1, 1, 1, 1),
    (2, 3, 5, 3),
    (3, 2, 9, 7),
    (2, 2, 8, 8),
    (2, 3, 27, 27),
    (3, 1, 4, 64),
    (1, 2, 33, 100),
    (2, 1, 3, 256),
    (1, 2, 5, 257),
    (1, 1, 2, 1000),
    (1, 1, 3, 1024),
    (1, 1, 2, 2050),
    (1, 1, 2, 8200),
    (2, 0, 3, 5),
    (2, 1, 3, 0),
]


def sample_inputs(shape, device, dtype):
    """scores, bias, grad_probs; bias (T, S) holds a few -inf, never a whole row of them."""
    generator = torch.Generator().manual_seed(3)
    scores, grad_probs = (torch.randn(shape, generator=generator) * 2 for _ in range(2))
    bias = torch.randn(shape[2:], generator=generator)
    bias[:, 1::5] = -INF
    return [t.to(device, dtype) for t in (scores, bias, grad_probs)]


def padding_of(shape, device):
    """Right padding, left padding, a hole; never a whole row, nor all that a causal row sees, but for left padding."""
    padding = torch.zeros(shape[0], shape[3], dtype=torch.bool)
    n = shape[3]
    if shape[0] > 0 and n > 3:
        padding[0, n - n // 3 :] = True
        padding[-1, n // 2] = True
    return padding.to(device)


def run(function, inputs, dtype=None):
    """probs and the gradients of scores and bias."""
    scores, bias, grad_probs = (t.to(dtype) if dtype else t for t in inputs)
    leaves = [leaf.detach().requires_grad_() for leaf in (scores, bias)]
    torch.manual_seed(SEED)
    probs = function(*leaves)
    return [probs, *torch.autograd.grad(probs, leaves, grad_probs)]


def compare(inputs, padding, causal, p):
    torch.manual_seed(SEED)
    seed = draw_seed() if p > 0 else None
    shape = inputs[0].shape
    device = inputs[0].device
    hidden = torch.zeros(shape, dtype=torch.bool, device=device)
    if padding is not None:
        hidden = hidden | padding[:, None, None, :]
    if causal:
        hidden = hidden | torch.ones(shape[2:], dtype=torch.bool, device=device).triu(shape[3] - shape[2] + 1)
    keep = torch.ones_like(hidden)
    if p > 0:
        keep = reference.dropout_keep_mask(shape, p, int(seed), 0).to(device)

    def torch_function(scores, bias):  # as fairseq has it
        z = (scores * SCALE + bias).masked_fill(hidden, -INF)
        probs = torch.softmax(z, dim=-1, dtype=torch.float32).type_as(scores)
        return torch.where(keep, probs * reference.dropout_scale(p), 0.0)

    def oracle(scores, bias):
        return reference.attention_softmax(
            scores, None if padding is None else padding.cpu(), bias, causal, SCALE, p, seed, 0
        )

    def fused(scores, bias):
        return ops.attention_softmax(scores, padding, bias, causal, SCALE, p)

    actual = run(fused, inputs)
    torch_result = run(torch_function, inputs)
    exact = run(oracle, [t.cpu() for t in inputs], torch.float64)
    for name, a, t, e in zip(("probs", "grad_scores", "grad_bias"), actual, torch_result, exact, strict=True):
        # One visible key: the gradient is 0 exactly, as the difference of numbers of grad_probs' size.
        magnitude = inputs[2].abs().max().item() if name != "probs" and inputs[2].numel() else 0.0
        assert_as_accurate(a, t, e, VALUE_FACTOR if name == "probs" else GRAD_FACTOR, name, magnitude)
    assert (actual[0][hidden | ~keep] == 0).all() and (actual[1][hidden] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_name)
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_as_accurate_as_torch(backend, shape, dtype, p):
    compare(sample_inputs(shape, backend.device, dtype), padding_of(shape, backend.device), False, p)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shape", [(2, 2, 27, 27), (1, 2, 3, 40), (1, 1, 30, 300), (1, 1, 2, 1500)], ids=shape_name)
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_causal(backend, shape, dtype, p):
    """With T == S the triangle; with T < S the last query sees all keys, as in incremental decoding."""
    compare(sample_inputs(shape, backend.device, dtype), None, True, p)


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_extreme_probabilities(backend, p):
    shape = (2, 2, 5, 40)
    compare(sample_inputs(shape, backend.device, torch.float32), padding_of(shape, backend.device), False, p)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("change", [misaligned, noncontiguous])
def test_layouts(backend, change, dtype):
    shape = (2, 2, 6, 264)
    inputs = [change(t) for t in sample_inputs(shape, backend.device, dtype)]
    compare(inputs, change(padding_of(shape, backend.device)), False, 0.1)


def test_more_than_65536_rows(backend):
    shape = (2, 1, 33_000, 3)
    compare(sample_inputs(shape, backend.device, torch.float32), padding_of(shape, backend.device), False, 0.1)


BIAS_SHAPES = [(), (40,), (6, 1), (6, 40), (3, 1, 40), (3, 6, 1), (2, 1, 1, 40), (2, 3, 6, 40), (1, 3, 1, 1)]


@pytest.mark.parametrize("bias_shape", BIAS_SHAPES, ids=shape_name)
def test_bias_broadcasts(backend, bias_shape):
    generator = torch.Generator().manual_seed(4)
    scores, grad_probs = (torch.randn(2, 3, 6, 40, generator=generator).to(backend.device) for _ in range(2))
    bias = torch.randn(bias_shape, generator=generator).to(backend.device)
    results = []
    for function, arguments in ((ops.attention_softmax, ()), (reference.attention_softmax, (None, 0))):
        leaves = [scores.clone().requires_grad_(), bias.clone().requires_grad_()]
        probs = function(leaves[0], None, leaves[1], True, 2.0, 0.0, *arguments)
        results.append([probs, *torch.autograd.grad(probs, leaves, grad_probs)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_bias_of_another_dtype_is_rounded(backend):
    """fairseq's future mask is fp32 under autocast, where the scores are bf16."""
    scores, bias, _ = sample_inputs((2, 2, 6, 40), backend.device, torch.bfloat16)
    probs = ops.attention_softmax(scores, None, bias.float())
    assert probs.dtype == torch.bfloat16 and torch.equal(probs, ops.attention_softmax(scores, None, bias))


@pytest.mark.parametrize("n_keys", [5, 40, 300, 1500, 8200])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_rows_that_see_nothing_are_zero(backend, n_keys, p):
    """By padding (batch 0), by a bias of -inf (row 1) and by causality (rows 0 and 1 of T = S + 2); nothing that is hidden is looked at."""
    n_queries = 3
    scores, _, grad_probs = sample_inputs((2, 1, n_queries, n_keys), backend.device, torch.float32)
    padding = torch.zeros(2, n_keys, dtype=torch.bool, device=backend.device)
    padding[0] = True
    scores[0], grad_probs[0] = float("nan"), INF
    bias = torch.zeros(n_queries, 1, device=backend.device)
    bias[1] = -INF
    scores.requires_grad_()
    probs = ops.attention_softmax(scores, padding, bias, p=p)
    (grad,) = torch.autograd.grad(probs, scores, grad_probs)
    for result in (probs, grad):
        assert (result[0] == 0).all() and (result[1, 0, 1] == 0).all()
        assert torch.isfinite(result).all()
    assert (probs[1, 0, 0] != 0).any() and (probs[1, 0, 2] != 0).any()

    scores = torch.randn(1, 1, 7, 5, device=backend.device)
    scores[0, 0, :2] = float("nan")
    scores.requires_grad_()
    probs = ops.attention_softmax(scores, causal=True, p=p)
    (grad,) = torch.autograd.grad(probs, scores, torch.ones_like(probs))
    assert (probs[0, 0, :2] == 0).all() and (grad[0, 0, :2] == 0).all()
    assert torch.isfinite(probs).all() and torch.isfinite(grad).all()


@pytest.mark.parametrize("n_keys", [7, 27, 64, 300, 1500])
def test_what_causality_hides_is_not_looked_at(backend, n_keys):
    scores, _, grad_probs = sample_inputs((1, 2, n_keys, n_keys), backend.device, torch.float32)
    hidden = torch.ones(n_keys, n_keys, dtype=torch.bool, device=backend.device).triu(1)
    results = []
    for fill in (0.0, float("nan")):
        leaf = scores.masked_fill(hidden, fill).requires_grad_()
        torch.manual_seed(SEED)
        probs = ops.attention_softmax(leaf, causal=True, p=0.1)
        results.append([probs, *torch.autograd.grad(probs, leaf, grad_probs.masked_fill(hidden, fill))])
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)


@pytest.mark.parametrize("n_keys", [3, 27, 300, 1500, 8200])
def test_nan_and_infinity_spoil_their_row_only(backend, n_keys):
    scores, _, _ = sample_inputs((1, 1, 4, n_keys), backend.device, torch.float32)
    scores[0, 0, 0, n_keys // 2] = float("nan")
    scores[0, 0, 1, n_keys - 1] = INF
    scores[0, 0, 2, 0] = -INF
    probs = ops.attention_softmax(scores)
    assert torch.isnan(probs[0, 0, 0]).all() and torch.isnan(probs[0, 0, 1]).any()
    torch.testing.assert_close(probs[0, 0, 2:], torch.softmax(scores[0, 0, 2:], dim=-1))


@pytest.mark.parametrize("level", [32.0, 96.0, 320.0])
def test_gradients_at_large_scores(backend, level):
    """With dropout the backward computes the probabilities again, from scores that fp32 holds exactly: as well as the forward did."""
    scores, _, grad_probs = sample_inputs((2, 3, 8, 100), backend.device, torch.float32)
    inputs = [(4 * scores).round() / 4 * (level / 32) + level, torch.zeros(8, 100, device=backend.device), grad_probs]
    torch.manual_seed(SEED)
    seed = draw_seed()
    keep = reference.dropout_keep_mask(scores.shape, 0.1, int(seed), 0)

    def by_torch(scores, bias):
        probs = torch.softmax(scores + bias, dim=-1)
        return torch.where(keep.to(probs.device), probs * reference.dropout_scale(0.1), 0.0)

    actual = run(lambda scores, bias: ops.attention_softmax(scores, None, bias, p=0.1), inputs)
    exact = run(by_torch, [t.cpu() for t in inputs], torch.float64)
    for name, a, t, e in zip(("probs", "grad_scores", "grad_bias"), actual, run(by_torch, inputs), exact, strict=True):
        assert_as_accurate(a, t, e, VALUE_FACTOR if name == "probs" else GRAD_FACTOR, name)


def test_large_scores(backend):
    """exp would overflow without the maximum taken off, and underflows for most of a row with it."""
    scores = torch.linspace(-2e4, 3e4, 333, device=backend.device).repeat(2, 1, 3, 1)
    probs = ops.attention_softmax(scores, scale=0.5)
    torch.testing.assert_close(probs, torch.softmax(scores * 0.5, dim=-1))
    huge = torch.full((1, 1, 2, 9), -3e38, device=backend.device)
    torch.testing.assert_close(ops.attention_softmax(huge), torch.full_like(huge, 1 / 9))


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_same_bits_twice(backend, p):
    inputs = sample_inputs((2, 3, 50, 50), backend.device, torch.float32)
    first, second = (run(lambda s, b: ops.attention_softmax(s, None, b, True, SCALE, p), inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("n_keys", [27, 300, 2100])
def test_same_bits_at_any_thread_count(n_keys):
    inputs = sample_inputs((3, 5, 37, n_keys), "cpu", torch.float32)
    padding = padding_of(inputs[0].shape, "cpu")
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(run(lambda s, b: ops.attention_softmax(s, padding, b, True, SCALE, 0.1), inputs))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_frozen_bias_gets_no_gradient(backend):
    scores, bias, grad_probs = sample_inputs((2, 2, 5, 30), backend.device, torch.float32)
    scores.requires_grad_()
    ops.attention_softmax(scores, None, bias, p=0.1).backward(grad_probs)
    assert scores.grad is not None and bias.grad is None


def test_evaluation_does_not_drop(backend):
    scores, _, _ = sample_inputs((2, 2, 5, 30), backend.device, torch.float32)
    torch.testing.assert_close(ops.attention_softmax(scores, p=0.5, training=False), torch.softmax(scores, dim=-1))


def test_double_backward_is_refused(backend):
    scores, _, grad_probs = sample_inputs((2, 2, 5, 30), backend.device, torch.float32)
    scores.requires_grad_()
    (grad,) = torch.autograd.grad(ops.attention_softmax(scores, p=0.1), scores, grad_probs, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.square().sum().backward()


def test_errors_name_what_was_expected(backend):
    scores = torch.randn(2, 3, 4, 8, device=backend.device)
    padding = torch.zeros(2, 8, dtype=torch.bool, device=backend.device)
    with pytest.raises(RuntimeError, match=r"attention_softmax: scores must be floating, got torch.int64"):
        ops.attention_softmax(scores.long())
    with pytest.raises(RuntimeError, match=r"attention_softmax: scores must have shape \(B, H, T, S\), got \(4, 8\)"):
        ops.attention_softmax(scores[0, 0])
    with pytest.raises(RuntimeError, match=r"key_padding_mask must have shape \(B, S\) = \(2, 8\), got \(2, 7\)"):
        ops.attention_softmax(scores, padding[:, :7])
    with pytest.raises(RuntimeError, match=r"key_padding_mask must be Bool, got"):
        ops.attention_softmax(scores, padding.to(torch.uint8))
    with pytest.raises(
        RuntimeError, match=r"bias must be floating and broadcastable to \(2, 3, 4, 8\), got \(6, 4, 8\)"
    ):
        ops.attention_softmax(scores, None, scores.new_zeros(6, 4, 8))
    with pytest.raises(RuntimeError, match=r"bias must be floating and broadcastable .* of torch.bool"):
        ops.attention_softmax(scores, None, padding[0])
    with pytest.raises(ValueError, match=r"p must lie in \[0, 1\], got -0.5"):
        ops.attention_softmax(scores, p=-0.5)
    with pytest.raises(ValueError, match=r"scale must not be 0 where bias requires a gradient"):
        ops.attention_softmax(scores, None, scores.new_zeros(8).requires_grad_(), scale=0.0)


@needs_library
def test_bindings_refuse_what_the_wrapper_would_not_pass():
    scores = torch.randn(2, 3, 4, 8)
    op = torch.ops.ls
    with pytest.raises(RuntimeError, match=r"bias must have the shape of scores, \(2, 3, 4, 8\), got \(4, 8\)"):
        op.attention_softmax_forward(scores, None, scores[0, 0], False, 1.0, 0.0, None, 0, False)
    with pytest.raises(RuntimeError, match=r"bias must have stride 1 over its last dimension, got 4"):
        op.attention_softmax_forward(
            scores, None, scores.transpose(2, 3).contiguous().transpose(2, 3), False, 1.0, 0.0, None, 0, False
        )
    with pytest.raises(RuntimeError, match=r"attention_softmax: p = 0.5 needs a seed"):
        op.attention_softmax_forward(scores, None, None, False, 1.0, 0.5, None, 0, False)
    with pytest.raises(
        RuntimeError, match=r"attention_softmax_backward: p = 0.5 needs row_stats and, in saved, the scores"
    ):
        op.attention_softmax_backward(scores, scores, None, None, None, False, 1.0, 0.5, torch.tensor([1]), 0)
    with pytest.raises(RuntimeError, match=r"row_stats must have two elements per row, 48, got shape \(0,\)"):
        op.attention_softmax_backward(scores, scores, scores.new_empty(0), None, None, False, 1.0, 0.0, None, 0)


@pytest.mark.parametrize("causal", [False, True])
def test_oracle_gradcheck(causal):
    shape = (2, 2, 4, 5)
    scores, bias, _ = sample_inputs(shape, "cpu", torch.float64)
    padding = padding_of(shape, "cpu")
    padding[1] = True  # and rows that see nothing
    bias = bias.clamp(min=-3).requires_grad_()
    seed = torch.tensor([7])
    assert torch.autograd.gradcheck(
        lambda s, b: reference.attention_softmax(s, padding, b, causal, 0.5, 0.3, seed, 0),
        (scores.requires_grad_(), bias),
    )


@needs_library
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_opcheck(p):
    shape = (2, 2, 4, 12)
    scores, bias, grad_probs = sample_inputs(shape, "cpu", torch.float32)
    bias, padding = bias.expand(shape), padding_of(shape, "cpu")
    seed = torch.tensor([7])
    arguments = (padding, bias, True, 0.5, p, seed, 0)
    forward, backward = torch.ops.ls.attention_softmax_forward.default, torch.ops.ls.attention_softmax_backward.default
    torch.library.opcheck(forward, (scores.clone().requires_grad_(), *arguments, p > 0))
    probs, row_stats = forward(scores, *arguments, p > 0)
    saved = (scores, row_stats) if p > 0 else (probs, None)
    torch.library.opcheck(backward, (grad_probs, *saved, *arguments))


def test_matches_fairseq_attention(backend):
    """The formula of fairseq's MultiheadAttention.forward: mask added, padding filled, softmax in fp32."""
    from fairseq import utils

    scores, _, _ = sample_inputs((3, 2, 9, 9), backend.device, torch.float32)
    padding = padding_of(scores.shape, backend.device)
    future = torch.triu(torch.full((9, 9), -INF, device=backend.device), 1)
    expected = utils.softmax((scores + future).masked_fill(padding[:, None, None, :], -INF), dim=-1)
    for arguments in ({"causal": True}, {"bias": future}):
        torch.testing.assert_close(ops.attention_softmax(scores, padding, **arguments), expected)
