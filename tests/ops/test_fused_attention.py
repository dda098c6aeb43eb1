import importlib

import pytest
import torch
import torch.nn.functional as F

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
SCALE = 0.3
INF = float("inf")
NAMES = ("out", "grad_q", "grad_k", "grad_v")

# (B, H, T, S, D). T: less and more than a tile and a block of rows; S: part of a vector, a panel and more, long rows; D: odd, part of
# a panel, several; nothing at all.
SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 3, 5, 7, 8),
    (3, 2, 27, 27, 32),
    (2, 2, 32, 32, 64),
    (1, 2, 65, 40, 33),
    (2, 1, 130, 97, 20),
    (1, 1, 3, 300, 128),
    (1, 2, 7, 1031, 5),
    (2, 0, 3, 5, 8),
    (2, 1, 0, 5, 8),
    (2, 1, 3, 0, 8),
]
CAUSAL_SHAPES = [(2, 2, 27, 27, 16), (1, 1, 150, 150, 64), (1, 2, 3, 40, 8), (1, 1, 40, 9, 8)]


def sample_inputs(shape, device, dtype):
    """q, k, v, grad_out as projections (T, B, H * D) give them; bias (T, S) holds a few -inf."""
    n_batch, n_heads, n_queries, n_keys, head_dim = shape
    generator = torch.Generator().manual_seed(3)

    def heads(length):
        t = torch.randn(length, n_batch, n_heads, head_dim, generator=generator)
        return t.to(device, dtype).permute(1, 2, 0, 3)

    bias = torch.randn(n_queries, n_keys, generator=generator)
    bias[:, 1::5] = -INF
    return [heads(n_queries), heads(n_keys), heads(n_keys), heads(n_queries), bias.to(device, dtype)]


def padding_of(shape, device):
    """Left padding, right padding, a hole, and, where there are three sentences, one of padding only."""
    n_batch, _, _, n_keys, _ = shape
    padding = torch.zeros(n_batch, n_keys, dtype=torch.bool)
    if n_keys > 3:
        padding[0, n_keys - n_keys // 3 :] = True
        padding[-1, n_keys // 2] = True
        padding[-1, : n_keys // 4] = True
        if n_batch > 2:
            padding[1] = True
    return padding.to(device)


def run(function, inputs, dtype=None):
    """out and the gradients of q, k and v."""
    q, k, v, grad_out, bias = (t.to(dtype) if dtype else t for t in inputs)
    leaves = [leaf.detach().requires_grad_() for leaf in (q, k, v)]
    torch.manual_seed(SEED)
    out = function(*leaves, bias)
    return [out, *torch.autograd.grad(out, leaves, grad_out)]


def compare(inputs, padding, causal, p, with_bias=True, **options):
    torch.manual_seed(SEED)
    seed = draw_seed() if p > 0 else None
    q, k = inputs[:2]
    device, shape = q.device, torch.Size((*q.shape[:3], k.shape[2]))
    hidden = torch.zeros(shape, dtype=torch.bool, device=device)
    if padding is not None:
        hidden = hidden | padding[:, None, None, :]
    if causal:
        hidden = hidden | torch.ones(shape[2:], dtype=torch.bool, device=device).triu(shape[3] - shape[2] + 1)
    keep = torch.ones_like(hidden)
    if p > 0:
        keep = reference.dropout_keep_mask(shape, p, int(seed), 0).to(device)

    def torch_function(q, k, v, bias):  # as fairseq has it, but for rows that see nothing
        z = (q * SCALE) @ k.transpose(-1, -2)
        z = (z + bias if with_bias else z).masked_fill(hidden, -INF)
        blind = (z == -INF).all(-1, keepdim=True)
        probs = torch.softmax(z.masked_fill(blind, 0.0), dim=-1, dtype=torch.float32).masked_fill(blind, 0.0)
        return torch.where(keep, probs.type_as(q) * reference.dropout_scale(p), 0.0) @ v

    def oracle(q, k, v, bias):
        mask = None if padding is None else padding.cpu()
        return reference.fused_attention(q, k, v, mask, bias if with_bias else None, causal, SCALE, p, seed, 0)

    def fused(q, k, v, bias):
        return ops.fused_attention(q, k, v, padding, bias if with_bias else None, causal, SCALE, p, **options)

    actual = run(fused, inputs)
    torch_result = run(torch_function, inputs)
    exact = run(oracle, [t.cpu() for t in inputs], torch.float64)
    magnitude = max((t.abs().max().item() for t in inputs[:4] if t.numel()), default=0.0)
    for name, a, t, e in zip(NAMES, actual, torch_result, exact, strict=True):
        # One visible key: the gradients of q and k are 0 exactly, as the difference of numbers of grad_out's and v's size.
        assert_as_accurate(
            a, t, e, VALUE_FACTOR if name == "out" else GRAD_FACTOR, name, magnitude if name in NAMES[1:3] else 0.0
        )
    blind = hidden.all(-1)
    assert (actual[0][blind] == 0).all() and (actual[1][blind] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_name)
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_as_accurate_as_torch(backend, shape, dtype, p):
    compare(sample_inputs(shape, backend.device, dtype), padding_of(shape, backend.device), False, p)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shape", CAUSAL_SHAPES, ids=shape_name)
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("padded", [False, True])
def test_causal(backend, shape, dtype, p, padded):
    """T == S: the triangle; T < S: the last query sees all keys, as in incremental decoding; T > S: the first see none."""
    inputs = sample_inputs(shape, backend.device, dtype)
    compare(inputs, padding_of(shape, backend.device) if padded else None, True, p, with_bias=padded)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("n_queries", range(1, 10))
def test_few_queries(backend, dtype, n_queries):
    """As in decoding, where the CPU kernel reads the keys where they lie; up to 8 queries, in whole vectors of each instruction set."""
    for n_keys, head_dim, causal, change in ((37, 80, False, torch.Tensor.contiguous), (16, 48, True, misaligned)):
        shape = (3, 2, n_queries, n_keys, head_dim)
        *inputs, bias = sample_inputs(shape, backend.device, dtype)
        compare([*inputs, bias], padding_of(shape, backend.device), causal, 0.0)
        compare([*map(change, inputs), bias], None, causal, 0.0, with_bias=False)


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_extreme_probabilities(backend, p):
    shape = (2, 2, 5, 40, 8)
    compare(sample_inputs(shape, backend.device, torch.float32), padding_of(shape, backend.device), False, p)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("change", [misaligned, noncontiguous, torch.Tensor.contiguous])
def test_layouts(backend, change, dtype):
    shape = (2, 2, 6, 70, 24)
    *inputs, bias = sample_inputs(shape, backend.device, dtype)
    compare([*map(change, inputs), change(bias)], change(padding_of(shape, backend.device)), False, 0.1)


def test_more_than_65536_rows(backend):
    shape = (2, 1, 33_000, 3, 2)
    compare(sample_inputs(shape, backend.device, torch.float32), padding_of(shape, backend.device), False, 0.1)


@pytest.mark.parametrize("packed", [False, True])
def test_memory_order_follows_the_inputs(packed):
    """No copy on the way in or out: q, k and v are views of products, and what leaves is a product's (T, B, H * D) again."""
    n_batch, n_heads, length, head_dim = 3, 2, 10, 8
    if packed:
        qkv = torch.randn(length, n_batch, 3, n_heads, head_dim, requires_grad=True)
        q, k, v = (t.permute(1, 2, 0, 3) for t in qkv.unbind(2))
    else:
        rows = [torch.randn(length, n_batch, n_heads * head_dim, requires_grad=True) for _ in range(3)]
        q, k, v = (t.view(length, n_batch, n_heads, head_dim).permute(1, 2, 0, 3) for t in rows)
    out = ops.fused_attention(q, k, v, p=0.1)
    joined = out.permute(2, 0, 1, 3)
    assert joined.is_contiguous()
    grads = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    if needs_library.args[0]:
        return  # the reference leaves the order of gradients to torch
    assert all(grad.permute(2, 0, 1, 3).is_contiguous() for grad in grads)


def test_mask_is_that_of_attention_softmax(backend):
    """With v the unit matrix, out is the dropped probabilities themselves."""
    q, k, _, _, _ = sample_inputs((2, 3, 21, 32, 32), backend.device, torch.float32)
    unit = torch.eye(32, device=backend.device).expand(2, 3, 32, 32)
    torch.manual_seed(SEED)
    out = ops.fused_attention(q, k, unit, scale=SCALE, p=0.4)
    torch.manual_seed(SEED)
    probs = ops.attention_softmax(q @ k.transpose(-1, -2), scale=SCALE, p=0.4)
    torch.testing.assert_close(out, probs)
    assert torch.equal(out == 0, probs == 0) and (out == 0).any()


@pytest.mark.parametrize(
    "bias_shape", [(), (40,), (6, 1), (3, 1, 40), (2, 1, 1, 40), (2, 3, 6, 40), (1, 3, 1, 1)], ids=shape_name
)
def test_bias_broadcasts(backend, bias_shape):
    q, k, v, grad_out, _ = sample_inputs((2, 3, 6, 40, 8), backend.device, torch.float32)
    bias = torch.randn(bias_shape, generator=torch.Generator().manual_seed(4)).to(backend.device)
    results = [
        run(lambda q, k, v, b: ops.fused_attention(q, k, v, None, b, True, 2.0), [q, k, v, grad_out, bias]),
        run(
            lambda q, k, v, b: reference.fused_attention(q, k, v, None, b, True, 2.0, 0.0, None, 0),
            [q, k, v, grad_out, bias],
        ),
    ]
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_rows_that_see_nothing_are_zero(backend, p):
    """By padding (batch 0), by a bias of -inf (row 1), by causality (T > S)."""
    q, k, v, grad_out, _ = sample_inputs((2, 1, 3, 40, 8), backend.device, torch.float32)
    padding = torch.zeros(2, 40, dtype=torch.bool, device=backend.device)
    padding[0] = True
    bias = torch.zeros(3, 1, device=backend.device)
    bias[1] = -INF
    out, grad_q, grad_k, grad_v = run(
        lambda q, k, v, b: ops.fused_attention(q, k, v, padding, b, p=p), [q, k, v, grad_out, bias]
    )
    for result in (out, grad_q, grad_k, grad_v):
        assert torch.isfinite(result).all() and (result[0] == 0).all() and (result[1] != 0).any()
    assert (out[1, 0, 1] == 0).all() and (grad_q[1, 0, 1] == 0).all()
    q, k, v, _, _ = sample_inputs((1, 1, 7, 5, 8), backend.device, torch.float32)
    out = ops.fused_attention(q, k, v, causal=True)
    assert (out[0, 0, :2] == 0).all() and (out[0, 0, 2:] != 0).all()


@pytest.mark.parametrize("n_queries", [3, 9], ids=["read where they lie", "packed"])
@pytest.mark.parametrize("fill", [float("nan"), INF], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_padding_contributes_nothing_whatever_it_holds(backend, n_queries, fill, causal):
    """At both ends, in the middle, everywhere: NaN at padding changes no bit of the output and of the gradients."""
    q, k, v, grad_out, bias = sample_inputs((4, 2, n_queries, 80, 16), backend.device, torch.float32)
    padding = torch.zeros(4, 80, dtype=torch.bool)
    padding[0, :33] = padding[1, 48:] = padding[2, 5:7] = padding[2, 31:48] = padding[2, 79] = padding[3] = True
    padding, mask = padding.to(backend.device), padding
    torch.manual_seed(SEED)
    seed = draw_seed()
    results = []
    for value in (0.0, fill):
        dirty = [t.masked_fill(padding[:, None, :, None], value) for t in (k, v)]
        results.append(
            run(
                lambda q, k, v, b: ops.fused_attention(q, k, v, padding, None, causal, p=0.1),
                [q, *dirty, grad_out, bias],
            )
        )
        exact = [t.cpu() for t in (q, *dirty, grad_out, bias)]
        exact = run(
            lambda q, k, v, b: reference.fused_attention(q, k, v, mask, None, causal, 0.25, 0.1, seed, 0), exact
        )
        for actual, expected in zip(results[-1], exact, strict=True):
            torch.testing.assert_close(actual.cpu(), expected)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    hidden = padding[:, None, :, None].expand_as(k)
    assert (results[1][2][hidden] == 0).all() and (results[1][3][hidden] == 0).all()


@pytest.mark.parametrize("level", [32.0, 96.0, 320.0])
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("n_queries", [5, 21])
def test_gradients_at_large_scores(backend, n_queries, p, level):
    """Scores about ``level`` that fp32 holds exactly: the probabilities of the backward have the digits of the forward's."""
    q, k, v, grad_out, _ = sample_inputs((2, 2, n_queries, 64, 32), backend.device, torch.float32)
    scale = level / 8
    q, k = ((4 * t).round() / 4 for t in (q, k))
    q[..., 0], k[..., 0] = level / scale, 1.0
    torch.manual_seed(SEED)
    seed = draw_seed()
    shape = torch.Size((2, 2, n_queries, 64))
    keep = reference.dropout_keep_mask(shape, p, int(seed), 0) if p else torch.ones(1, dtype=torch.bool)
    dropout_scale = reference.dropout_scale(p) if p else 1.0

    def by_torch(q, k, v, _):
        probs = torch.softmax(scale * q @ k.transpose(-1, -2), dim=-1)
        return torch.where(keep.to(probs.device), probs * dropout_scale, 0.0) @ v

    inputs = [q, k, v, grad_out, q]
    actual = run(lambda q, k, v, _: ops.fused_attention(q, k, v, scale=scale, p=p), inputs)
    exact = run(by_torch, [t.cpu() for t in inputs], torch.float64)
    for name, a, t, e in zip(NAMES, actual, run(by_torch, inputs), exact, strict=True):
        assert_as_accurate(a, t, e, VALUE_FACTOR if name == "out" else GRAD_FACTOR, name)


def test_nan_and_infinity_spoil_their_row_only(backend):
    q, k, v, _, _ = sample_inputs((1, 1, 9, 40, 8), backend.device, torch.float32)
    q[0, 0, 3, 1] = float("nan")
    q[0, 0, 5, 1] = INF
    out = ops.fused_attention(q, k, v)
    good = [0, 1, 2, 4, 6, 7, 8]
    assert torch.isnan(out[0, 0, [3, 5]]).all()
    torch.testing.assert_close(out[:, :, good], F.scaled_dot_product_attention(q[:, :, good], k, v))


def test_large_scores(backend):
    """exp would overflow without the maximum taken off, and underflows for most of a row with it."""
    q = torch.linspace(-200, 300, 33, device=backend.device).view(1, 1, 33, 1)
    k, v = (
        torch.linspace(-50, 50, 40, device=backend.device).view(1, 1, 40, 1),
        torch.randn(1, 1, 40, 1, device=backend.device),
    )
    torch.testing.assert_close(ops.fused_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("route", [None, "three_steps"])
def test_fp16_scores_that_overflow_before_they_are_scaled(backend, route):
    """q k^T goes up to 102,400, times D ** -0.5 up to 12,800."""
    sign = torch.tensor([1.0, -1.0, 0.5]).view(1, 1, 3, 1)
    q = (40 * sign).expand(1, 2, 3, 64).to(backend.device, torch.float16).requires_grad_()
    v = torch.randn(1, 2, 3, 64, generator=torch.Generator().manual_seed(5)).to(q)
    out = ops.fused_attention(q, q.detach(), v, route=route)
    torch.testing.assert_close(out, v[:, :, [0, 1, 0]])  # the softmax is one-hot
    (grad,) = torch.autograd.grad(out, q, torch.ones_like(out))
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_same_bits_twice(backend, p):
    inputs = sample_inputs((2, 3, 50, 50, 16), backend.device, torch.float32)
    first, second = (run(lambda q, k, v, b: ops.fused_attention(q, k, v, None, b, True, p=p), inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("n_keys", [27, 300])
def test_same_bits_at_any_thread_count(n_keys):
    shape = (3, 5, 170, n_keys, 24)
    inputs = sample_inputs(shape, "cpu", torch.float32)
    padding = padding_of(shape, "cpu")
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(run(lambda q, k, v, b: ops.fused_attention(q, k, v, padding, b, True, p=0.1), inputs))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_frozen_inputs_get_no_gradient(backend):
    q, k, v, grad_out, bias = sample_inputs((2, 2, 5, 30, 8), backend.device, torch.float32)
    ops.fused_attention(q, k.requires_grad_(), v, None, bias, p=0.1).backward(grad_out)
    assert k.grad is not None and q.grad is None and v.grad is None and bias.grad is None


def test_gradient_of_a_sum(backend):
    """Its grad_out is one element, repeated."""
    q, k, v, _, _ = sample_inputs((2, 2, 5, 30, 8), backend.device, torch.float32)
    q.requires_grad_()
    (grad,) = torch.autograd.grad(ops.fused_attention(q, k, v).sum(), q)
    (expected,) = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), q)
    torch.testing.assert_close(grad, expected)


def test_evaluation_does_not_drop(backend):
    q, k, v, _, _ = sample_inputs((2, 2, 5, 30, 8), backend.device, torch.float32)
    out = ops.fused_attention(q, k, v, p=0.5, training=False)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("shape", [(2, 2, 0, 30, 8), (2, 2, 5, 0, 8)])
def test_bias_of_one_column_without_queries_or_keys(backend, shape):
    q, k, v, _, _ = sample_inputs(shape, backend.device, torch.float32)
    bias = torch.ones(shape[2], 1, device=backend.device)
    out = ops.fused_attention(q, k, v, bias=bias)
    assert out.shape == q.shape and (out == 0).all()
    scores = q @ k.transpose(-1, -2)
    assert ops.attention_softmax(scores, bias=bias).shape == scores.shape


def test_double_backward_is_refused(backend):
    q, k, v, grad_out, _ = sample_inputs((2, 2, 5, 30, 8), backend.device, torch.float32)
    (grad,) = torch.autograd.grad(ops.fused_attention(q.requires_grad_(), k, v, p=0.1), q, grad_out, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.square().sum().backward()


def test_errors_name_what_was_expected(backend):
    q, k, v, _, _ = sample_inputs((2, 3, 4, 8, 16), backend.device, torch.float32)
    padding = torch.zeros(2, 8, dtype=torch.bool, device=backend.device)
    for arguments, error, message in (
        ((q[0], k, v), RuntimeError, r"fused_attention: q must have shape \(B, H, T, D\), got \(3, 4, 16\)"),
        ((q[0], k, v, None, q.new_zeros(8)), RuntimeError, r"q must have shape \(B, H, T, D\), got \(3, 4, 16\)"),
        ((q.long(), k.long(), v.long()), RuntimeError, "fused_attention: q must be floating, got torch.int64"),
        ((q, k[..., :8], v), RuntimeError, r"k must have shape \(2, 3, 8, 16\), got \(2, 3, 8, 8\)"),
        ((q, k, v[:, :, :7]), RuntimeError, r"v must have shape \(2, 3, 8, 16\), got \(2, 3, 7, 16\)"),
        (
            (q, k, v, padding[:, :7]),
            RuntimeError,
            r"key_padding_mask must have shape \(B, S\) = \(2, 8\), got \(2, 7\)",
        ),
        ((q, k, v, padding.to(torch.uint8)), RuntimeError, r"key_padding_mask must be Bool, got"),
        (
            (q, k, v, None, q.new_zeros(6, 4, 8)),
            RuntimeError,
            r"bias must be floating and broadcastable to .*\(2, 3, 4, 8\), got",
        ),
        ((q, k, v, None, q.new_zeros(8).requires_grad_()), ValueError, r"bias must not require a gradient"),
        ((q, k, v, None, None, False, None, -0.5), ValueError, r"p must lie in \[0, 1\], got -0.5"),
    ):
        with pytest.raises(error, match=message):
            ops.fused_attention(*arguments)
    with pytest.raises(ValueError, match=r"route must be one of kernel, three_steps, sdpa, got 'flash'"):
        ops.fused_attention(q, k, v, route="flash")


@needs_library
def test_bindings_refuse_what_the_wrapper_would_not_pass():
    q, k, v, _, _ = sample_inputs((2, 3, 4, 8, 16), "cpu", torch.float32)
    forward, backward = torch.ops.ls.fused_attention_forward, torch.ops.ls.fused_attention_backward
    rest = (False, 1.0, 0.0, None, 0)
    with pytest.raises(RuntimeError, match=r"k must have shape \(2, 3, 8, 16\), got \(2, 3, 8, 15\)"):
        forward(q, k[..., 1:], v, None, None, *rest)
    with pytest.raises(RuntimeError, match=r"v must have stride 1 in its last dimension, got 8"):
        forward(q, k, noncontiguous(v), None, None, *rest)
    with pytest.raises(RuntimeError, match=r"v must be Float, got Half"):
        forward(q, k, v.half(), None, None, *rest)
    with pytest.raises(RuntimeError, match=r"bias must have shape \(B, H, T, S\) = \(2, 3, 4, 8\), got \(4, 8\)"):
        forward(q, k, v, None, torch.zeros(4, 8), *rest)
    with pytest.raises(RuntimeError, match=r"fused_attention: p = 0.5 needs a seed"):
        forward(q, k, v, None, None, False, 1.0, 0.5, None, 0)
    grads = [torch.empty_like(t) for t in (q, k, v)]
    with pytest.raises(RuntimeError, match=r"row_stats must have shape \(2, B, H, T\) = \(2, 2, 3, 4\), got \(5,\)"):
        backward(q, q, k, v, torch.zeros(5), None, None, *rest, *grads)
    row_stats = torch.zeros(2, 2, 3, 4)
    for i, name in enumerate(("grad_q", "grad_k", "grad_v")):
        for wrong, message in (
            (grads[i][:, :, 1:], r"must have shape \(2, 3, \d, 16\), got \(2, 3, \d, 16\)"),
            (noncontiguous(grads[i]), r"must have stride 1 in its last dimension, got \d"),
            (grads[i].half(), "must be Float, got Half"),
        ):
            with pytest.raises(RuntimeError, match=f"fused_attention: {name} {message}"):
                backward(q, q, k, v, row_stats, None, None, *rest, *grads[:i], wrong, *grads[i + 1 :])


# For nodes that have their own autograd.


def heads_of(rows, n_batch, n_heads, n_parts=1):
    """The parts (B, H, T, D) of a product (B * T, parts * H * D)."""
    return [t.view(n_batch, -1, n_heads, t.shape[-1] // n_heads).transpose(1, 2) for t in rows.chunk(n_parts, dim=-1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("shape", [(2, 3, 21, 21, 8), (1, 2, 5, 40, 16), (2, 1, 9, 9, 24)], ids=shape_name)
def test_below_autograd_gives_what_the_op_gives(backend, shape, p, dtype):
    """Gradients into views of one buffer, as a product for q, k and v together takes them; the rest of the buffer stays as it was."""
    q, k, v, grad_out, bias = sample_inputs(shape, backend.device, dtype)
    padding, bias = padding_of(shape, backend.device), bias.expand(*shape[:4])
    module = importlib.import_module("ls_plugin.ops.fused_attention")
    n_batch, n_heads, n_queries, n_keys, head_dim = shape
    route = "kernel" if backend.name == "cpu" else "three_steps"
    expected = run(
        lambda q, k, v, b: ops.fused_attention(q, k, v, padding, b, True, SCALE, p, route=route),
        [q, k, v, grad_out, bias],
    )

    torch.manual_seed(SEED)
    seed = draw_seed(backend.device) if p > 0 else None
    out, saved = module.attention_forward(q, k, v, padding, bias, True, SCALE, p, seed, 0)
    assert out.permute(2, 0, 1, 3).is_contiguous()
    width = n_heads * head_dim
    buffer = torch.full((n_batch * max(n_queries, n_keys), 4 * width), 7.0, device=backend.device, dtype=dtype)
    *grads, rest = heads_of(buffer, n_batch, n_heads, 4)
    grads = [grad[:, :, : t.shape[2]] for grad, t in zip(grads, (q, k, v), strict=True)]
    assert not grads[0].is_contiguous()
    module.attention_backward(grad_out, q, k, v, saved, padding, bias, True, SCALE, p, seed, 0, grads)
    fresh = [torch.full(t.shape, float("nan"), device=backend.device, dtype=dtype) for t in (q, k, v)]
    module.attention_backward(grad_out, q, k, v, saved, padding, bias, True, SCALE, p, seed, 0, fresh)
    for name, in_view, in_fresh, e in zip(NAMES, [out, *grads], [out, *fresh], expected, strict=True):
        assert torch.equal(in_view, in_fresh), name
        if backend.name == "cpu":
            assert torch.equal(in_view, e), name
        else:  # products of other layouts, and fp16's scale in another place
            torch.testing.assert_close(in_view, e, rtol=4 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)
    assert (rest == 7.0).all()


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_below_autograd_nothing_else_is_saved(backend, p):
    """The kernel saves two numbers a row. The three steps save probabilities, and scores where dropout hides some of them."""
    shape = (2, 3, 21, 30, 8)
    q, k, v, _, _ = sample_inputs(shape, backend.device, torch.float32)
    module = importlib.import_module("ls_plugin.ops.fused_attention")
    seed = draw_seed(backend.device) if p > 0 else None
    _, saved = module.attention_forward(q, k, v, None, None, False, SCALE, p, seed, 0)
    rows, scores = (2, 2, 3, 21), (2, 3, 21, 30)
    expected = [rows] if backend.name == "cpu" else [scores] if p == 0 else [scores, scores, rows]
    assert [tuple(t.shape) for t in saved] == expected


@pytest.mark.parametrize("causal", [False, True])
def test_oracle_gradcheck(causal):
    shape = (3, 2, 4, 5, 3)
    q, k, v, _, bias = sample_inputs(shape, "cpu", torch.float64)
    seed = torch.tensor([7])
    assert torch.autograd.gradcheck(
        lambda q, k, v: reference.fused_attention(q, k, v, padding_of(shape, "cpu"), bias, causal, 0.5, 0.3, seed, 0),
        [t.requires_grad_() for t in (q, k, v)],
    )


@needs_library
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_opcheck(p):
    shape = (2, 2, 4, 12, 8)
    q, k, v, grad_out, bias = sample_inputs(shape, "cpu", torch.float32)
    arguments = (padding_of(shape, "cpu"), bias.expand(2, 2, 4, 12), True, 0.5, p, torch.tensor([7]), 0)
    forward, backward = torch.ops.ls.fused_attention_forward.default, torch.ops.ls.fused_attention_backward.default
    torch.library.opcheck(forward, (*(t.detach().requires_grad_() for t in (q, k, v)), *arguments))
    _, row_stats = forward(q, k, v, *arguments)
    qkv = torch.empty(4, 2, 3, 2, 8)
    together = [t.permute(1, 2, 0, 3) for t in qkv.unbind(2)]
    fresh = [torch.empty_like(t) for t in (q, k, v)]
    for grads in (fresh, [together[0], fresh[1], torch.empty(2, 2, 12, 16)[..., :8]]):
        torch.library.opcheck(backward, (grad_out, q, k, v, row_stats, *arguments, *grads))


@needs_library
def test_second_derivatives_are_refused_to_direct_callers_too():
    q, k, v, grad_out, _ = sample_inputs((2, 2, 5, 30, 8), "cpu", torch.float32)
    out, _ = torch.ops.ls.fused_attention_forward(q.requires_grad_(), k, v, None, None, False, 1.0, 0.0, None, 0)
    (grad,) = torch.autograd.grad(out, q, grad_out, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.square().sum().backward()


# Routes of a GPU. The three steps run in every test above on the backends "simt" and "cuda".


@pytest.mark.parametrize("causal", [False, True])
def test_three_steps_give_what_the_kernel_gives(causal):
    shape = (3, 2, 21, 21, 16)
    compare(sample_inputs(shape, "cpu", torch.float32), padding_of(shape, "cpu"), causal, 0.1, route="three_steps")


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=dtype_name)
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_gives_what_the_kernel_gives(dtype, causal):
    inputs = sample_inputs((3, 2, 21, 21, 16), "cpu", dtype)
    compare(inputs, None, causal, 0.0, with_bias=False, route="sdpa")


def test_sdpa_is_refused_with_all_reasons():
    q, k, v, _, bias = sample_inputs((3, 2, 5, 7, 12), "cpu", torch.float32)
    padding = padding_of((3, 2, 5, 7, 12), "cpu")
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ValueError, match="cannot serve this call") as refusal:
            ops.fused_attention(q, k, v, padding, bias, True, p=0.1, route="sdpa")
    finally:
        torch.use_deterministic_algorithms(False)
    for reason in ("key_padding_mask", "a bias", "T = 5 must be S = 7", "all ranks", "deterministic", "bf16", "not 12"):
        assert reason in str(refusal.value)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8, 8, 16, 64, 16), "sdpa"),  # a small batch: launches decide
        ((4, 16, 512, 64, 512), "sdpa"),  # long rows: the scores' bytes
        ((2, 8, 4096, 128, 4096), "sdpa"),
        (
            (1024, 16, 16, 64, 16),
            "three_steps",
        ),  # many short rows: grad_q in fp32 costs SDPA more than the scores cost the products
    ],
)
def test_route_by_shape(shape, expected):
    choose_route = importlib.import_module("ls_plugin.ops.fused_attention").choose_route

    assert choose_route(*shape, 2, refusals=[]) == expected
    assert choose_route(*shape, 2, refusals=["any"]) == "three_steps"
