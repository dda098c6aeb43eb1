"""Fused layer normalisation."""

import torch
from torch import Tensor

from ls_plugin import _library, reference
from ls_plugin.ops.autograd import DifferentiableOp
from ls_plugin.ops.checks import check_devices, check_matrix, check_row_vector, register_fake, to_common_dtype

_OP = "layer_norm"


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """Layer norm over the last dimension in one pass over memory; see :func:`ls_plugin.reference.layer_norm`.

    Args:
        x: (..., C), fp32, fp16 or bf16 (others run the reference).
        weight, bias: (C,) or None.  All are promoted to one dtype if they differ, as under autocast.
    Returns:
        (..., C) in that dtype.  Statistics are fp32.
    Saves for backward: x, weight, and 8 bytes a row (mean, 1 / deviation).
    Raises:
        RuntimeError: a shape, dtype or device does not fit.
    """
    x, weight, bias = to_common_dtype(_OP, "x", x, weight, bias)
    if not _library.has_kernel(x):
        check_devices(_OP, x=x, weight=weight, bias=bias)
        _check(x, weight, bias)
        return reference.layer_norm(x, weight, bias, eps)
    return _forward(x.contiguous(), weight, bias, eps)[0]


def _check(x, weight, bias):
    check_matrix(_OP, "x", x)
    check_row_vector(_OP, "weight", weight, x)
    check_row_vector(_OP, "bias", bias, x)


def _forward_fake(x, weight, bias, eps):
    _check(x, weight, bias)
    rows = x.shape[:-1].numel()
    statistics = x.new_empty((rows,), dtype=torch.float32)
    return torch.empty_like(x), statistics, torch.empty_like(statistics)


def _backward_fake(grad_y, x, weight, mean, rstd, needs_weight_grad, needs_bias_grad):
    columns = x.shape[-1]
    return (
        torch.empty_like(x),
        x.new_empty((columns if needs_weight_grad else 0,)),
        x.new_empty((columns if needs_bias_grad else 0,)),
    )


def _setup_context(ctx, inputs, output):
    x, weight, _bias, _ = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, mean, rstd)


def _backward(ctx, grad_y, _grad_mean, _grad_rstd):
    if grad_y is None:
        return None, None, None, None
    x, weight, mean, rstd = ctx.saved_tensors
    _, needs_weight_grad, needs_bias_grad, _ = ctx.needs_input_grad
    grad_x, grad_weight, grad_bias = _library.kernels().layer_norm_backward.default(
        grad_y.contiguous(), x, weight, mean, rstd, needs_weight_grad, needs_bias_grad
    )
    return grad_x, grad_weight if needs_weight_grad else None, grad_bias if needs_bias_grad else None, None


_forward = DifferentiableOp(_OP, _setup_context, _backward)


def register(namespace: str) -> None:
    """Fake kernels and autograd for one build of the library."""
    register_fake(f"{namespace}::layer_norm_forward", _forward_fake)
    register_fake(f"{namespace}::layer_norm_backward", _backward_fake)
    _forward.register(namespace)
