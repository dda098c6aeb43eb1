"""Fused Adam over contiguous buffers."""

import torch
from torch import Tensor

from ls_plugin import _library, reference
from ls_plugin.ops.checks import check, check_same_shape

_OP = "adam_step"


def adam_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: Tensor | None = None,
    zero_grad: bool = False,
) -> None:
    """One Adam update in place, one launch; fairseq's formula, see :func:`ls_plugin.reference.adam_step`.

    Args:
        param, grad: contiguous (n,), each fp32, fp16 or bf16.  exp_avg, exp_avg_sq: fp32 (n,).  Arithmetic is fp32.
        step: number of this update, from 1.
        grad_scale: fp32 scalar on param's device that multiplies the gradient inside the kernel (loss scale, sample size and
            clip coefficient in one), or None.
        zero_grad: clear the gradient in the same pass.
    Raises:
        ValueError: step below 1.  RuntimeError: a shape, dtype, layout or device does not fit.
    """
    if step < 1:
        raise ValueError(f"{_OP}: step counts from 1, got {step}")
    for changed in (param, exp_avg, exp_avg_sq, *((grad,) if zero_grad else ())):
        # A node that saved one of them must refuse to run backward with the new values.
        torch.autograd.graph.increment_version(changed)
    if _library.has_kernel(param) and grad.dtype in _library.KERNEL_DTYPES:
        _library.kernels().adam_step(
            param, grad, exp_avg, exp_avg_sq, grad_scale, lr, beta1, beta2, eps, weight_decay, step, zero_grad
        )
        return
    _check(param, grad, exp_avg, exp_avg_sq, grad_scale, beta1, beta2)
    reference.adam_step(
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        step=step,
        grad_scale=grad_scale,
        zero_grad=zero_grad,
    )


def _step_fake(param, grad, exp_avg, exp_avg_sq, grad_scale, lr, beta1, beta2, eps, weight_decay, step, zero_grad):
    _check(param, grad, exp_avg, exp_avg_sq, grad_scale, beta1, beta2)


def _check(param, grad, exp_avg, exp_avg_sq, grad_scale, beta1, beta2):
    for name, buffer in (("grad", grad), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        check_same_shape(_OP, name, buffer, "param", param)
    for name, buffer in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        check(
            buffer.dtype in (torch.float32, torch.float64),
            lambda name=name, buffer=buffer: f"{_OP}: {name} must be torch.float32, got {buffer.dtype}",
        )
    check(grad_scale is None or grad_scale.numel() == 1, lambda: f"{_OP}: grad_scale must have one element")
    check(
        0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0, lambda: f"{_OP}: betas must lie in [0, 1), got {beta1} and {beta2}"
    )


def register(namespace: str) -> None:
    """The fake kernel for one build of the library."""
    torch.library.register_fake(f"{namespace}::adam_step", _step_fake)
