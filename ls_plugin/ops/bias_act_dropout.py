"""Fused bias, activation and dropout."""

import torch
from torch import Tensor

from ls_plugin import _library, reference
from ls_plugin.ops.autograd import DifferentiableOp
from ls_plugin.ops.bias_dropout_residual import bias_dropout_residual
from ls_plugin.ops.checks import (
    check_devices,
    check_floating,
    check_matrix,
    check_probability,
    check_row_vector,
    check_same_shape,
    not_a_tensor,
    register_fake,
)
from ls_plugin.ops.rng import draw_seed, rank_offset
from ls_plugin.reference.bias_act_dropout import ACTIVATIONS

_OP = "bias_act_dropout"
# Activation, kernels/common/params.h
ACTIVATION_CODES = {"relu": 0, "gelu": 1, "gelu_accurate": 2, "gelu_fast": 2, "tanh": 3, "relu_squared": 4}
SAVES_OUTPUT = (ACTIVATION_CODES["relu"], ACTIVATION_CODES["tanh"])


def bias_act_dropout(x: Tensor, bias: Tensor | None, activation: str, p: float, training: bool = True) -> Tensor:
    """y = dropout(act(x + bias)) in one pass; see :func:`ls_plugin.reference.bias_act_dropout`.

    Args:
        x: (..., F), fp32, fp16 or bf16 (others run the reference).
        bias: (F,) or None; taken in x's dtype, as a product takes it under autocast.
        activation: relu, gelu, gelu_accurate, gelu_fast (its deprecated name), tanh, relu_squared or linear, each as
            ``fairseq.utils.get_activation_fn`` defines it, computed in fp32.
        p: probability of dropping an element, in [0, 1]; taken as 0 unless ``training``.
    Returns:
        (..., F) in x's dtype; ``x`` itself when there is nothing to do.
    Saves for backward: relu and tanh y, which the product that follows saves as well, the others x and bias, linear neither; and
        an 8-byte seed, from which the mask is drawn again (for relu y tells it).
    Raises:
        ValueError: p outside [0, 1], an activation unknown.  RuntimeError: a shape, dtype or device does not fit.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"{_OP}: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    check_probability(_OP, p)
    if not isinstance(x, Tensor):
        raise not_a_tensor(_OP, "x", x)
    if bias is not None:
        if not bias.is_floating_point():
            check_floating(_OP, "bias", bias)
        bias = bias.to(x.dtype)
    if activation == "linear":
        return bias_dropout_residual(x, bias, None, p, training)
    p = p if training else 0.0
    seed = draw_seed(x.device) if p > 0.0 else None
    offset = rank_offset()
    if not _library.has_kernel(x):
        check_devices(_OP, x=x, bias=bias)
        _check(x, bias)
        return reference.bias_act_dropout(x, bias, activation, p, seed, offset)
    return _forward(x.contiguous(), bias, ACTIVATION_CODES[activation], p, seed, offset)


def _check(x, bias):
    check_matrix(_OP, "x", x)
    check_row_vector(_OP, "bias", bias, x)


def _forward_fake(x, bias, activation, p, seed, offset):
    _check(x, bias)
    return torch.empty_like(x)


def _backward_fake(grad_y, saved, bias, activation, p, seed, offset, needs_bias_grad):
    check_same_shape(f"{_OP}_backward", "saved", saved, "grad_y", grad_y)
    return torch.empty_like(grad_y), grad_y.new_empty((grad_y.shape[-1] if needs_bias_grad else 0,))


def _setup_context(ctx, inputs, output):
    x, bias, ctx.activation, ctx.p, seed, ctx.offset = inputs
    if ctx.activation in SAVES_OUTPUT:
        ctx.save_for_backward(output, None, seed)
    else:
        ctx.save_for_backward(x, bias, seed)


def _backward(ctx, grad_y):
    saved, bias, seed = ctx.saved_tensors
    needs_x_grad, needs_bias_grad, *_ = ctx.needs_input_grad
    grad_x, grad_bias = _library.kernels().bias_act_dropout_backward.default(
        grad_y.contiguous(), saved, bias, ctx.activation, ctx.p, seed, ctx.offset, needs_bias_grad
    )
    return grad_x if needs_x_grad else None, grad_bias if needs_bias_grad else None, None, None, None, None


_forward = DifferentiableOp(_OP, _setup_context, _backward)


def register(namespace: str) -> None:
    """Fake kernels and autograd for one build of the library."""
    register_fake(f"{namespace}::bias_act_dropout_forward", _forward_fake)
    register_fake(f"{namespace}::bias_act_dropout_backward", _backward_fake)
    _forward.register(namespace)
