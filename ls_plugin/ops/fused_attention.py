"""Fused attention: both products, the masks, the softmax and the dropout between them."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ls_plugin import _library, reference
from ls_plugin.ops.attention_softmax import attention_softmax
from ls_plugin.ops.autograd import DifferentiableOp
from ls_plugin.ops.checks import (
    check_devices,
    check_probability,
    expand_bias,
    not_a_tensor,
    register_fake,
    to_common_dtype,
)
from ls_plugin.ops.rng import draw_seed, rank_offset

_OP = "fused_attention"

# Costs of a route on a GPU. Bandwidth: NVIDIA's data sheet of the A100 40 GB. Launch: what a small kernel takes from one launch to the next.
_BYTES_PER_SECOND = 1.555e12
_SECONDS_PER_LAUNCH = 5e-6
_SDPA_MAX_HEAD_DIM = 256  # of torch's flash kernels, in multiples of 8
_ROUTES = ("kernel", "three_steps", "sdpa")


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    p: float = 0.0,
    training: bool = True,
    route: str | None = None,
) -> Tensor:
    """out = dropout(softmax(scale * q k^T + bias)) v over the keys that a query sees; see :func:`ls_plugin.reference.fused_attention`.

    On the CPU one kernel, which keeps the scores in the cache. On a GPU two products around ``attention_softmax``, or torch's
    ``scaled_dot_product_attention``, whichever :func:`choose_route` counts as cheaper.

    Args:
        q: (B, H, T, D), fp32, fp16 or bf16 (others run the reference).  k, v: (B, H, S, D). Any strides, without a copy if the last is 1:
            a projection (T, B, H * D) is passed as ``x.view(T, B, H, D).permute(1, 2, 0, 3)``. Promoted to one dtype if they differ.
        key_padding_mask: bool (B, S), true at padding, or None. A padded key contributes nothing, whatever it and its value hold, NaN
            among it, and its gradients are 0. NaN at any other key may reach every query of its sentence, those from which causality or a
            bias of -inf hides it among them.
        bias: floating, broadcastable to (B, H, T, S), may hold -inf; or None. It is rounded to q's dtype; it gets no gradient.
        causal: query t sees the keys s <= t + (S - T) only.
        scale: of the scores; None for D ** -0.5.
        p: probability of dropping an element of the probabilities, in [0, 1]; taken as 0 unless ``training``. The mask is that of
            ``attention_softmax`` on (B, H, T, S) scores.
        route: "kernel", "three_steps" or "sdpa" instead of the choice, for tests.
    Returns:
        (B, H, T, D) in q's dtype; 0 in the rows that see no key. From the CPU kernel its dimensions lie in memory in q's order, so that
        ``out.permute(2, 0, 1, 3).reshape(T, B, H * D)`` is a view for q as above; gradients have the order of their own inputs.
    Saves for backward: q, k, v, key_padding_mask and bias as given (if they had to be neither expanded nor cast), 8 bytes a row (maximum
        and 1 / sum of the exponentials) and, with dropout, an 8-byte seed; no scores, no mask. The three steps save the probabilities as
        well, and with dropout the scores.
    Raises:
        ValueError: p outside [0, 1], a bias that requires a gradient, or an unknown route.
        RuntimeError: a shape, dtype or device does not fit.
    """
    check_probability(_OP, p)
    if route is not None and route not in _ROUTES:
        raise ValueError(f"{_OP}: route must be one of {', '.join(_ROUTES)}, got {route!r}")
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{_OP}: bias must not require a gradient, which is not computed; use attention_softmax for a learned bias"
        )
    p = p if training else 0.0
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise not_a_tensor(_OP, name, t)
    q, k, v = to_common_dtype(_OP, "q", q, k, v)
    _check(q, k, v, key_padding_mask)
    bias = None if bias is None else expand_bias(_OP, bias, (*q.shape[:3], k.shape[2]), q.dtype)
    scale = max(q.shape[-1], 1) ** -0.5 if scale is None else float(scale)
    if not _library.has_kernel(q):
        check_devices(_OP, q=q, k=k, v=v, key_padding_mask=key_padding_mask, bias=bias)
        seed = draw_seed(q.device) if p > 0.0 else None
        return reference.fused_attention(q, k, v, key_padding_mask, bias, causal, scale, p, seed, rank_offset())
    if route is None and not _library.runs_cuda_kernels(q):
        route = "kernel"
    if route in (None, "sdpa"):
        refusals = sdpa_refusals(q, k, key_padding_mask, bias, causal, p)
        if route is None:
            route = choose_route(*q.shape, k.shape[2], q.element_size(), refusals)
        elif refusals:
            raise ValueError(f"{_OP}: scaled_dot_product_attention cannot serve this call: {'; '.join(refusals)}")
    if route == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
    if route == "three_steps":
        if key_padding_mask is not None:
            k, v = (t.masked_fill(key_padding_mask[:, None, :, None], 0.0) for t in (k, v))
        q, options = _scaled_before_product(q, (key_padding_mask, bias, causal, scale, p))
        return attention_softmax(q @ k.transpose(-1, -2), *options) @ v
    seed = draw_seed(q.device) if p > 0.0 else None
    q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
    key_padding_mask = None if key_padding_mask is None else key_padding_mask.contiguous()
    return _forward(q, k, v, key_padding_mask, bias, causal, scale, p, seed, rank_offset())[0]


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    scale: float,
    p: float,
    seed: Tensor | None,
    offset: int,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """:func:`fused_attention` below autograd, for a node that has its own: by the kernel on the CPU, in three steps on a GPU.

    On a GPU keys and values at padding must be finite, as a layer's are unless its input is not: clearing them would be a pass over both.

    Args:
        q, k, v, key_padding_mask, bias: as the kernel takes them: q, k and v in one dtype that it knows, their last stride 1; a
            contiguous mask; a bias of q's dtype expanded to (B, H, T, S), its last stride 1.
        p, seed, offset: of the dropout; seed is an int64 tensor of shape (1,), None where p is 0.
    Returns:
        out (B, H, T, D), its dimensions in memory in q's order, and what :func:`attention_backward` takes as ``saved``: one tensor, or with
        dropout on a GPU three.
    """
    kernels, options = _library.kernels(), (key_padding_mask, bias, causal, scale, p, seed, offset)
    if not _library.runs_cuda_kernels(q):
        out, row_stats = kernels.fused_attention_forward.default(q, k, v, *options)
        return out, (row_stats,)
    q, options = _scaled_before_product(q, options)
    scores = torch.matmul(q, k.transpose(-1, -2))
    probs, row_stats = kernels.attention_softmax_forward.default(scores, *options, p > 0.0)
    out = torch.empty_like(q)
    _multiply_into(out, probs, v)
    return out, (probs,) if p == 0.0 else (probs, scores, row_stats)


def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: Sequence[Tensor],
    key_padding_mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    scale: float,
    p: float,
    seed: Tensor | None,
    offset: int,
    grads: Sequence[Tensor],
) -> None:
    """Writes the gradients of q, k and v for :func:`attention_forward` into ``grads``.

    Args:
        grad_out: (B, H, T, D) in q's dtype, its last stride 1.
        saved: as the forward gave it.
        grads: of the shapes and the dtype of q, k and v, with any strides but a last one of 1: views of one buffer, say. They do not
            overlap, which is not checked.
        The other arguments as the forward took them.
    """
    kernels, options = _library.kernels(), (key_padding_mask, bias, causal, scale, p, seed, offset)
    if not _library.runs_cuda_kernels(q):
        kernels.fused_attention_backward.default(grad_out, q, k, v, *saved, *options, *grads)
        return
    probs, scores, row_stats = saved if len(saved) == 3 else (*saved, None, None)
    grad_q, grad_k, grad_v = grads
    scaled_q, options = _scaled_before_product(q, options)
    _multiply_into(grad_v, probs.transpose(-1, -2), grad_out)
    grad_scores = kernels.attention_softmax_backward.default(
        torch.matmul(grad_out, v.transpose(-1, -2)), probs if scores is None else scores, row_stats, *options
    )
    _multiply_into(grad_q, grad_scores, k)
    if scaled_q is not q:
        grad_q.mul_(scale)
    _multiply_into(grad_k, grad_scores.transpose(-1, -2), scaled_q)


def _scaled_before_product(q: Tensor, options: tuple) -> tuple[Tensor, tuple]:
    """q and the options of the softmax. In fp16 q takes up the scale: q k^T would end at 65,504 otherwise, and stock scales q before it, too."""
    if q.dtype != torch.float16:
        return q, options
    key_padding_mask, bias, causal, scale, *dropout = options
    return q * scale, (key_padding_mask, bias, causal, 1.0, *dropout)


def _multiply_into(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out = a b over (B, H, rows, columns); without a copy where batches and heads of ``out`` are one dimension in memory."""
    n_batch, n_heads = out.shape[:2]
    if n_batch <= 1 or n_heads <= 1 or out.stride(0) == n_heads * out.stride(1):
        torch.matmul(a, b, out=out)
    else:
        out.copy_(torch.matmul(a, b))


def sdpa_refusals(
    q: Tensor, k: Tensor, key_padding_mask: Tensor | None, bias: Tensor | None, causal: bool, p: float
) -> list[str]:
    """All reasons why torch's ``scaled_dot_product_attention`` would not give this op's result, or not in one kernel."""
    n_queries, n_keys, head_dim = q.shape[2], k.shape[2], q.shape[3]
    reasons = [
        (key_padding_mask is not None, "a key_padding_mask may leave a row without keys, which must give 0"),
        (bias is not None, "a bias may leave a row without keys, which must give 0"),
        (
            causal and n_queries != n_keys,
            f"its causal mask starts at the first key, so T = {n_queries} must be S = {n_keys}",
        ),
        (p > 0.0, "its dropout draws from torch's generator, which fairseq seeds alike on all ranks"),
        (torch.are_deterministic_algorithms_enabled(), "its backward is not deterministic"),
        (q.dtype == torch.float32, "its fast kernels take fp16 and bf16"),
        (
            head_dim % 8 != 0 or head_dim > _SDPA_MAX_HEAD_DIM,
            f"its fast kernels take D in multiples of 8 up to {_SDPA_MAX_HEAD_DIM}, not {head_dim}",
        ),
    ]
    return [reason for holds, reason in reasons if holds]


def choose_route(
    n_batch: int, n_heads: int, n_queries: int, head_dim: int, n_keys: int, element_size: int, refusals: list[str]
) -> str:
    """The cheaper way on a GPU, "three_steps" or "sdpa", by :func:`route_seconds`; SDPA only where nothing speaks against it."""
    if refusals:
        return "three_steps"
    sizes = n_batch, n_heads, n_queries, head_dim, n_keys, element_size
    return min(("sdpa", "three_steps"), key=lambda route: route_seconds(route, *sizes))


def route_seconds(
    route: str, n_batch: int, n_heads: int, n_queries: int, head_dim: int, n_keys: int, element_size: int
) -> float:
    """Counted, not measured: time of forward and backward from the bytes that cross memory and the number of launches.

    Three steps: scores written and read, probabilities written and read; backward dP written, probabilities and dP read by the softmax,
    dS written and read by two products, probabilities read by one: 11 times T S elements, in 3 + 5 launches. Each of the 6 products
    moves two operands of T D and S D.
    SDPA (flash): q, k, v and out; backward reads q, k, v, grad_out, and out and grad_out once more for the row sums, adds grad_q in fp32
    (zeroed, written, read) and writes three gradients: 1 + 4 launches.
    """
    queries, keys = n_queries * head_dim, n_keys * head_dim
    if route == "three_steps":
        elements, launches = 11 * n_queries * n_keys + 6 * (queries + keys), 8
    else:
        elements, launches = 4 * (queries + keys) + 3 * queries + 2 * keys + 3 * queries * 4 // element_size, 5
    return n_batch * n_heads * elements * element_size / _BYTES_PER_SECOND + launches * _SECONDS_PER_LAUNCH


def _require(condition, message):
    """Not torch._check: the wrapper itself checks, and torch.compile takes no tensors in that one's messages."""
    if not condition:
        raise RuntimeError(message())


def _check(q, k, v, key_padding_mask):
    _require(q.dim() == 4, lambda: f"{_OP}: q must have shape (B, H, T, D), got {tuple(q.shape)}")
    _require(k.dim() == 4, lambda: f"{_OP}: k must have shape (B, H, S, D), got {tuple(k.shape)}")
    _require(q.is_floating_point(), lambda: f"{_OP}: q must be floating, got {q.dtype}")
    expected = (*q.shape[:2], k.shape[2], q.shape[3])
    for name, t in (("k", k), ("v", v)):
        _require(
            t.shape == expected,
            lambda name=name, t=t: f"{_OP}: {name} must have shape {expected}, got {tuple(t.shape)}",
        )
    if key_padding_mask is not None:
        mask_shape = (q.shape[0], k.shape[2])
        _require(
            key_padding_mask.shape == mask_shape,
            lambda: (
                f"{_OP}: key_padding_mask must have shape (B, S) = {mask_shape}, got {tuple(key_padding_mask.shape)}"
            ),
        )
        _require(
            key_padding_mask.dtype == torch.bool,
            lambda: f"{_OP}: key_padding_mask must be Bool, got {key_padding_mask.dtype}",
        )


def _new_in_order_of(t):
    """Empty, of t's shape, without gaps, its first three dimensions one inside the other as t's are (``kernels/ops/fused_attention.cpp``)."""
    strides, stride = [1] * 4, max(t.shape[3], 1)
    for i in reversed(sorted(range(3), key=lambda i: -t.stride(i))):
        strides[i] = stride
        stride = stride * max(t.shape[i], 1)
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device)


def _forward_fake(q, k, v, key_padding_mask, bias, causal, scale, p, seed, offset):
    _check(q, k, v, key_padding_mask)
    return _new_in_order_of(q), q.new_empty((2, *q.shape[:3]), dtype=torch.float32)


def _backward_fake(
    grad_out, q, k, v, row_stats, key_padding_mask, bias, causal, scale, p, seed, offset, grad_q, grad_k, grad_v
):
    _check(q, k, v, key_padding_mask)
    for name, grad, t in (("grad_q", grad_q, q), ("grad_k", grad_k, k), ("grad_v", grad_v, v)):
        _require(
            grad.shape == t.shape,
            lambda name=name, grad=grad, t=t: (
                f"{_OP}: {name} must have shape {tuple(t.shape)}, got {tuple(grad.shape)}"
            ),
        )


def _setup_context(ctx, inputs, output):
    q, k, v, key_padding_mask, bias, ctx.causal, ctx.scale, ctx.p, seed, ctx.offset = inputs
    _, row_stats = output
    ctx.mark_non_differentiable(row_stats)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, row_stats, key_padding_mask, bias, seed)


def _backward(ctx, grad_out, _grad_lse):
    grads = (None, None, None)
    if grad_out is not None:
        q, k, v, row_stats, key_padding_mask, bias, seed = ctx.saved_tensors
        if grad_out.stride(-1) != 1:  # as that of out.sum(): one element, repeated
            grad_out = grad_out.contiguous()
        grads = tuple(map(torch.empty_like, (q, k, v)))  # their dimensions in the order of q, k and v, without gaps
        _library.kernels().fused_attention_backward.default(
            grad_out, q, k, v, row_stats, key_padding_mask, bias, ctx.causal, ctx.scale, ctx.p, seed, ctx.offset, *grads
        )
    grads = (grad if needed else None for grad, needed in zip(grads, ctx.needs_input_grad[:3], strict=True))
    return *grads, None, None, None, None, None, None, None


_forward = DifferentiableOp(_OP, _setup_context, _backward)


def register(namespace: str) -> None:
    """Fake kernels and autograd for one build of the library."""
    register_fake(f"{namespace}::fused_attention_forward", _forward_fake)
    register_fake(f"{namespace}::fused_attention_backward", _backward_fake)
    _forward.register(namespace)
