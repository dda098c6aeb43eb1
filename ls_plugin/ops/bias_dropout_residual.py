"""Fused bias, dropout and residual."""

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
    not_a_tensor,
    register_fake,
    to_common_dtype,
)
from ls_plugin.ops.rng import draw_seed, rank_offset

_OP = "bias_dropout_residual"


def bias_dropout_residual(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, training: bool = True
) -> Tensor:
    """y = residual + dropout(x + bias) in one pass; see :func:`ls_plugin.reference.bias_dropout_residual`.

    Args:
        x: (..., C), fp32, fp16 or bf16 (others run the reference).
        bias: (C,) or None.  residual: x's shape or None.  All are promoted to one dtype if they differ, as under autocast.
        p: probability of dropping an element, in [0, 1]; taken as 0 unless ``training``.
    Returns:
        (..., C) in that dtype; ``x`` itself when there is nothing to do.
    Saves for backward: an 8-byte seed; the mask is drawn again from it.
    Raises:
        ValueError: p outside [0, 1].  RuntimeError: a shape, dtype or device does not fit.
    """
    check_probability(_OP, p)
    p = p if training else 0.0
    if not isinstance(x, Tensor):
        raise not_a_tensor(_OP, "x", x)
    if p == 0.0 and bias is None and residual is None:
        return x
    x, bias, residual = to_common_dtype(_OP, "x", x, bias, residual)
    seed = draw_seed(x.device) if p > 0.0 else None
    offset = rank_offset()
    if not _library.has_kernel(x):
        check_devices(_OP, x=x, bias=bias, residual=residual)
        _check(x, bias, residual)
        return reference.bias_dropout_residual(x, bias, residual, p, seed, offset)
    residual = residual if residual is None else residual.contiguous()
    return _forward(x.contiguous(), bias, residual, p, seed, offset)


def _check(x, bias, residual):
    check_matrix(_OP, "x", x)
    check_row_vector(_OP, "bias", bias, x)
    check_same_shape(_OP, "residual", residual, "x", x)


def _forward_fake(x, bias, residual, p, seed, offset):
    _check(x, bias, residual)
    return torch.empty_like(x)


def _backward_fake(grad_y, p, seed, offset, needs_x_grad, needs_bias_grad):
    return (
        torch.empty_like(grad_y) if needs_x_grad else grad_y.new_empty((0,)),
        grad_y.new_empty((grad_y.shape[-1] if needs_bias_grad else 0,)),
    )


def _setup_context(ctx, inputs, output):
    _, _, _, ctx.p, seed, ctx.offset = inputs
    ctx.save_for_backward(seed)


def _backward(ctx, grad_y):
    needs_x_grad, needs_bias_grad, needs_residual_grad, *_ = ctx.needs_input_grad
    grad_x = grad_y if needs_x_grad else None
    grad_bias = None
    # Without dropout the gradient of x is grad_y as it stands, and only the bias needs a kernel.
    drops = needs_x_grad and ctx.p > 0.0
    if drops or needs_bias_grad:
        (seed,) = ctx.saved_tensors
        kernel_grad_x, kernel_grad_bias = _library.kernels().bias_dropout_residual_backward.default(
            grad_y.contiguous(), ctx.p, seed, ctx.offset, drops, needs_bias_grad
        )
        grad_x = kernel_grad_x if drops else grad_x
        grad_bias = kernel_grad_bias if needs_bias_grad else None
    return grad_x, grad_bias, grad_y if needs_residual_grad else None, None, None, None


_forward = DifferentiableOp(_OP, _setup_context, _backward)


def register(namespace: str) -> None:
    """Fake kernels and autograd for one build of the library."""
    register_fake(f"{namespace}::bias_dropout_residual_forward", _forward_fake)
    register_fake(f"{namespace}::bias_dropout_residual_backward", _backward_fake)
    _forward.register(namespace)
