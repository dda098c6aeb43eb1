"""Fused bias, dropout, residual and layer norm."""

import torch
from torch import Tensor

from ls_plugin import _library, reference
from ls_plugin.ops.autograd import DifferentiableOp
from ls_plugin.ops.checks import (
    check_devices,
    check_matrix,
    check_probability,
    check_row_vector,
    check_same_shape,
    register_fake,
    to_common_dtype,
)
from ls_plugin.ops.rng import draw_seed, rank_offset

_OP = "residual_layer_norm"


def residual_layer_norm(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    p: float,
    eps: float = 1e-5,
    training: bool = True,
) -> tuple[Tensor, Tensor]:
    """sum = residual + dropout(x + bias) and y = layer_norm(sum) in one pass; see :func:`ls_plugin.reference.residual_layer_norm`.

    Pre-norm layers go on with both, post-norm layers with y alone; the sum is what the backward keeps anyway.

    Args:
        x: (..., C), fp32, fp16 or bf16 (others run the reference).
        bias: (C,) or None.  residual: x's shape or None.  weight, norm_bias: the norm's, (C,) or None.  All are promoted to one dtype if
            they differ, as under autocast.
        p: probability of dropping an element, in [0, 1]; taken as 0 unless ``training``.
        eps: added to the variance.
    Returns:
        sum and y, (..., C) in that dtype.  Statistics are fp32, of the sum as it is stored.
    Saves for backward: sum, weight, 8 bytes a row (mean, 1 / deviation) and, for p > 0, an 8-byte seed; the mask is drawn again from it.
    Raises:
        ValueError: p outside [0, 1].  RuntimeError: a shape, dtype or device does not fit.
    """
    check_probability(_OP, p)
    p = p if training else 0.0
    x, bias, residual, weight, norm_bias = to_common_dtype(_OP, "x", x, bias, residual, weight, norm_bias)
    seed = draw_seed(x.device) if p > 0.0 else None
    offset = rank_offset()
    if not _library.has_kernel(x):
        check_devices(_OP, x=x, bias=bias, residual=residual, weight=weight, norm_bias=norm_bias)
        _check(x, bias, residual, weight, norm_bias)
        return reference.residual_layer_norm(x, bias, residual, weight, norm_bias, p, seed, offset, eps)
    residual = residual if residual is None else residual.contiguous()
    total, y, _mean, _rstd = _forward(x.contiguous(), bias, residual, weight, norm_bias, p, seed, offset, eps)
    return total, y


def _check(x, bias, residual, weight, norm_bias):
    check_matrix(_OP, "x", x)
    check_row_vector(_OP, "bias", bias, x)
    check_same_shape(_OP, "residual", residual, "x", x)
    check_row_vector(_OP, "weight", weight, x)
    check_row_vector(_OP, "norm_bias", norm_bias, x)


def _forward_fake(x, bias, residual, weight, norm_bias, p, seed, offset, eps):
    _check(x, bias, residual, weight, norm_bias)
    statistics = x.new_empty((x.shape[:-1].numel(),), dtype=torch.float32)
    return torch.empty_like(x), torch.empty_like(x), statistics, torch.empty_like(statistics)


def _backward_fake(
    grad_sum,
    grad_y,
    total,
    weight,
    mean,
    rstd,
    p,
    seed,
    offset,
    needs_x_grad,
    needs_residual_grad,
    needs_bias_grad,
    needs_weight_grad,
    needs_norm_bias_grad,
):
    def matrix(needed):
        return torch.empty_like(total) if needed else total.new_empty((0,))

    def vector(needed):
        return total.new_empty((total.shape[-1] if needed else 0,))

    needs_dropped = needs_x_grad or needs_bias_grad
    return (
        matrix(needs_dropped and p > 0.0),
        matrix(needs_residual_grad or (needs_dropped and p == 0.0)),
        vector(needs_bias_grad),
        vector(needs_weight_grad),
        vector(needs_norm_bias_grad),
    )


def _setup_context(ctx, inputs, output):
    _x, _bias, _residual, weight, _norm_bias, ctx.p, seed, ctx.offset, _eps = inputs
    total, _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(total, weight, mean, rstd, seed)


def _backward(ctx, grad_sum, grad_y, _grad_mean, _grad_rstd):
    needs_x_grad, needs_bias_grad, needs_residual_grad, needs_weight_grad, needs_norm_bias_grad, *_ = (
        ctx.needs_input_grad
    )
    total, weight, mean, rstd, seed = ctx.saved_tensors
    grad_x = grad_residual = grad_bias = grad_weight = grad_norm_bias = None
    kernels = _library.kernels()
    drops = ctx.p > 0.0
    if grad_y is not None:
        grad_sum = grad_sum if grad_sum is None else grad_sum.contiguous()
        needs = (needs_x_grad, needs_residual_grad, needs_bias_grad, needs_weight_grad, needs_norm_bias_grad)
        grad_x, grad_residual, grad_bias, grad_weight, grad_norm_bias = kernels.residual_layer_norm_backward.default(
            grad_sum, grad_y.contiguous(), total, weight, mean, rstd, ctx.p, seed, ctx.offset, *needs
        )
    elif grad_sum is not None:  # the norm was not used: what is left is bias_dropout_residual
        grad_residual = grad_sum
        needs_weight_grad = needs_norm_bias_grad = False
        if (needs_x_grad and drops) or needs_bias_grad:
            grad_x, grad_bias = kernels.bias_dropout_residual_backward.default(
                grad_sum.contiguous(), ctx.p, seed, ctx.offset, needs_x_grad and drops, needs_bias_grad
            )
    else:
        return (None,) * 9
    return (
        # Without dropout the gradient of x is that of the residual, which is written once.
        (grad_x if drops else grad_residual) if needs_x_grad else None,
        grad_bias if needs_bias_grad else None,
        grad_residual if needs_residual_grad else None,
        grad_weight if needs_weight_grad else None,
        grad_norm_bias if needs_norm_bias_grad else None,
        *(None,) * 4,
    )


_forward = DifferentiableOp(_OP, _setup_context, _backward)


def register(namespace: str) -> None:
    """Fake kernels and autograd for one build of the library."""
    register_fake(f"{namespace}::residual_layer_norm_forward", _forward_fake)
    register_fake(f"{namespace}::residual_layer_norm_backward", _backward_fake)
    _forward.register(namespace)
