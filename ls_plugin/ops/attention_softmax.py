"""Fused scale, masks, softmax and dropout of attention."""

import torch
from torch import Tensor

from ls_plugin import _library, reference
from ls_plugin.ops.autograd import DifferentiableOp
from ls_plugin.ops.checks import (
    check,
    check_devices,
    check_floating,
    check_probability,
    expand_bias,
    not_a_tensor,
    register_fake,
)
from ls_plugin.ops.rng import draw_seed, rank_offset

_OP = "attention_softmax"


def attention_softmax(
    scores: Tensor,
    key_padding_mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float = 1.0,
    p: float = 0.0,
    training: bool = True,
) -> Tensor:
    """probs = dropout(softmax(scale * scores + bias)) over the keys that a query sees, in one pass; see
    :func:`ls_plugin.reference.attention_softmax`.

    Args:
        scores: (B, H, T, S), fp32, fp16 or bf16 (others run the reference).
        key_padding_mask: bool (B, S), true at padding, or None.
        bias: floating, broadcastable to scores' shape, may hold -inf; or None. It is rounded to scores' dtype, where it is added in
            fp32, and may require a gradient (unless ``scale`` is 0).
        causal: query t sees the keys s <= t + (S - T) only; the others are not read.
        p: probability of dropping an element, in [0, 1]; taken as 0 unless ``training``.
    Returns:
        (B, H, T, S) in scores' dtype; 0 in the rows that see no key, and so are their gradients.
    Saves for backward: without dropout probs; with it scores, bias, key_padding_mask (as given, if they had to be neither expanded
        nor cast), 8 bytes a row (maximum and 1 / sum of the exponentials) and an 8-byte seed, from which probabilities and mask are computed again.
    Raises:
        ValueError: p outside [0, 1], or a bias that requires a gradient with scale 0.
        RuntimeError: a shape, dtype or device does not fit.
    """
    check_probability(_OP, p)
    if not isinstance(scores, Tensor):
        raise not_a_tensor(_OP, "scores", scores)
    if scale == 0.0 and bias is not None and bias.requires_grad:
        raise ValueError(
            f"{_OP}: scale must not be 0 where bias requires a gradient, which is the scores' gradient / scale"
        )
    p = p if training else 0.0
    bias = None if bias is None else expand_bias(_OP, bias, scores.shape, scores.dtype)
    seed = draw_seed(scores.device) if p > 0.0 else None
    offset = rank_offset()
    if not _library.has_kernel(scores):
        check_devices(_OP, scores=scores, key_padding_mask=key_padding_mask, bias=bias)
        _check(_OP, "scores", scores, key_padding_mask, bias)
        return reference.attention_softmax(scores, key_padding_mask, bias, causal, scale, p, seed, offset)
    key_padding_mask = None if key_padding_mask is None else key_padding_mask.contiguous()
    needs_grad = scores.requires_grad or (bias is not None and bias.requires_grad)
    needs_row_stats = p > 0.0 and needs_grad and torch.is_grad_enabled()
    return _forward(scores.contiguous(), key_padding_mask, bias, causal, scale, p, seed, offset, needs_row_stats)[0]


def _check(op, name, scores, key_padding_mask, bias):
    check(scores.dim() == 4, lambda: f"{op}: {name} must have shape (B, H, T, S), got {tuple(scores.shape)}")
    check_floating(op, name, scores)
    mask_shape = (scores.shape[0], scores.shape[3])
    check(
        key_padding_mask is None or key_padding_mask.shape == mask_shape,
        lambda: f"{op}: key_padding_mask must have shape (B, S) = {mask_shape}, got {tuple(key_padding_mask.shape)}",
    )
    check(
        key_padding_mask is None or key_padding_mask.dtype == torch.bool,
        lambda: f"{op}: key_padding_mask must be Bool, got {key_padding_mask.dtype}",
    )
    check(
        bias is None or bias.shape == scores.shape,
        lambda: f"{op}: bias must have the shape of {name}, {tuple(scores.shape)}, got {tuple(bias.shape)}",
    )


def _forward_fake(scores, key_padding_mask, bias, causal, scale, p, seed, offset, needs_row_stats):
    _check(_OP, "scores", scores, key_padding_mask, bias)
    row_stats = scores.new_empty((2, *scores.shape[:3]) if needs_row_stats else (0,), dtype=torch.float32)
    return torch.empty_like(scores), row_stats


def _backward_fake(grad_probs, saved, row_stats, key_padding_mask, bias, causal, scale, p, seed, offset):
    _check(f"{_OP}_backward", "saved", saved, key_padding_mask, bias)
    return torch.empty_like(saved)


def _setup_context(ctx, inputs, output):
    scores, key_padding_mask, bias, ctx.causal, ctx.scale, ctx.p, seed, ctx.offset, _ = inputs
    probs, row_stats = output
    ctx.mark_non_differentiable(row_stats)
    ctx.set_materialize_grads(False)
    if ctx.p == 0.0:  # probabilities that are 0 say which keys were masked
        ctx.save_for_backward(probs, None, None, None, None)
    else:
        ctx.save_for_backward(scores, row_stats, key_padding_mask, bias, seed)


def _backward(ctx, grad_probs, _grad_lse):
    needs_scores_grad, _, needs_bias_grad, *_ = ctx.needs_input_grad
    grad_scores = grad_bias = None
    if grad_probs is not None:
        saved, row_stats, key_padding_mask, bias, seed = ctx.saved_tensors
        grad_scores = _library.kernels().attention_softmax_backward.default(
            grad_probs.contiguous(),
            saved,
            row_stats,
            key_padding_mask,
            bias,
            ctx.causal,
            ctx.scale,
            ctx.p,
            seed,
            ctx.offset,
        )
        if needs_bias_grad:
            grad_bias = grad_scores if ctx.scale == 1.0 else grad_scores / ctx.scale
    return grad_scores if needs_scores_grad else None, None, grad_bias, None, None, None, None, None, None


_forward = DifferentiableOp(_OP, _setup_context, _backward)


def register(namespace: str) -> None:
    """Fake kernels and autograd for one build of the library."""
    register_fake(f"{namespace}::attention_softmax_forward", _forward_fake)
    register_fake(f"{namespace}::attention_softmax_backward", _backward_fake)
    _forward.register(namespace)
