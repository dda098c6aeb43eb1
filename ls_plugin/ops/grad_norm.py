"""Norm of the gradients, clip coefficient and overflow flag in one reduction, all left on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ls_plugin import _library, reference
from ls_plugin.ops.checks import check, check_devices, check_floating, not_a_tensor, register_fake

_OP = "grad_norm"


def grad_norm(
    grads: Sequence[Tensor], scale: Tensor | None = None, max_norm: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(norm, coefficient, overflow) of the gradients ``scale * grads``; formula in :func:`ls_plugin.reference.grad_norm`.

    Each gradient is read once, squares are added up in fp32 within chunks of 16,384 elements and in fp64 across them, in an order
    that depends on positions alone: the same gradients give the same bits. Nothing waits for the device. One launch per tensor
    and one to finish. No autograd: nothing is saved.

    Args:
        grads: at least one tensor, contiguous, any shapes, each fp32, fp16 or bf16, on one device.
        scale: fp32 scalar there, the factor still to be applied to grads (1 / loss scale, 1 / sample size), or None for 1.
        max_norm: the norm to clip to; 0 for no clipping.
    Returns:
        norm: fp32 (), of the scaled gradients before clipping.  coefficient: fp32 (), scale times the clip coefficient, the
        ``grad_scale`` of :func:`ls_plugin.ops.adam_step`.  overflow: bool (), norm is inf or NaN, its ``overflow``.
        The squares being fp32, elements beyond 1.8e19 overflow as well, and those below 1e-23 count as 0.
    Raises:
        ValueError: no gradients.  RuntimeError: a dtype, layout or device does not fit.
    """
    if grads is None:
        raise not_a_tensor(_OP, "each of grads", grads)
    grads = list(grads)
    if not grads:
        raise ValueError(f"{_OP}: grads must hold at least one tensor, got none")
    for grad in grads:
        if not isinstance(grad, Tensor):
            raise not_a_tensor(_OP, "each of grads", grad)
    if all(_library.has_kernel(grad) for grad in grads):
        return _library.kernels().grad_norm.default(grads, scale, max_norm)
    check_devices(_OP, grads=grads, scale=scale)
    _check(grads, scale)
    return reference.grad_norm(grads, scale, max_norm)


def _fake(grads, scale, max_norm):
    _check(grads, scale)
    norm, coefficient = (grads[0].new_empty((), dtype=torch.float32) for _ in range(2))
    return norm, coefficient, grads[0].new_empty((), dtype=torch.bool)


def _check(grads, scale):
    for grad in grads:
        check_floating(_OP, "each of grads", grad)
    check(scale is None or scale.numel() == 1, lambda: f"{_OP}: scale must have one element, got {tuple(scale.shape)}")


def register(namespace: str) -> None:
    """The fake kernel for one build of the library."""
    register_fake(f"{namespace}::grad_norm", _fake)
