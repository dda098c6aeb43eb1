"""Fused Adam over contiguous buffers."""

import torch
from torch import Tensor

from ls_plugin import _library, reference
from ls_plugin.ops.checks import check, check_devices, check_floating, check_same_shape, not_a_tensor, register_fake

_OP = "adam_step"
_HALF = (torch.float16, torch.bfloat16)


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
    param_copy: Tensor | None = None,
    param_low: Tensor | None = None,
    grad_scale: Tensor | None = None,
    overflow: Tensor | None = None,
    zero_grad: bool = False,
) -> None:
    """One Adam update in place, one launch; fairseq's formula, see :func:`ls_plugin.reference.adam_step`.

    Moves 28 bytes per element in fp32, 2 more each for a 16-bit copy and for zeroing a 16-bit gradient; 26 with a bf16 weight, its
    low half and a bf16 gradient. No autograd: nothing is saved.

    Args:
        param, grad: contiguous (n,), each fp32, fp16 or bf16, but not the one fp16 and the other bf16.  exp_avg, exp_avg_sq: fp32
            (n,).  Arithmetic is fp32.
        step: number of this update, from 1.
        param_copy: fp16 or bf16 (n,), overwritten with the updated fp32 param; or None.
        param_low: int16 (n,), the low half of an fp32 master whose high half is the bf16 param
            (:func:`ls_plugin.reference.split_master`), to the bits the same as a run with the master in fp32; or None.
        grad_scale: fp32 scalar on param's device that multiplies the gradient inside the kernel (loss scale, sample size and
            clip coefficient in one), or None.
        overflow: bool scalar on param's device; where true, nothing is updated. None: false.
        zero_grad: clear the gradient in the same pass, also on overflow.
    Raises:
        ValueError: step below 1.  RuntimeError: a shape, dtype, layout or device does not fit.
    """
    if step < 1:
        raise ValueError(f"{_OP}: step counts from 1, got {step}")
    for name, t in (("param", param), ("grad", grad), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        if not isinstance(t, Tensor):
            raise not_a_tensor(_OP, name, t)
    for changed in (param, exp_avg, exp_avg_sq, param_copy, param_low, grad if zero_grad else None):
        # A node that saved one of them must refuse to run backward with the new values.
        if changed is not None:
            torch.autograd.graph.increment_version(changed)
    buffers = (param, grad, exp_avg, exp_avg_sq, param_copy, param_low)
    if _library.has_kernel(param) and grad.dtype in _library.KERNEL_DTYPES:
        _library.kernels().adam_step.default(
            *buffers, grad_scale, overflow, lr, beta1, beta2, eps, weight_decay, step, zero_grad
        )
        return
    check_devices(
        _OP,
        param=param,
        grad=grad,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        param_copy=param_copy,
        param_low=param_low,
        grad_scale=grad_scale,
        overflow=overflow,
    )
    _check(*buffers, grad_scale, overflow, beta1, beta2)
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
        param_copy=param_copy,
        param_low=param_low,
        grad_scale=grad_scale,
        overflow=overflow,
        zero_grad=zero_grad,
    )


def _step_fake(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    param_copy,
    param_low,
    grad_scale,
    overflow,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    step,
    zero_grad,
):
    _check(param, grad, exp_avg, exp_avg_sq, param_copy, param_low, grad_scale, overflow, beta1, beta2)


def _check(param, grad, exp_avg, exp_avg_sq, param_copy, param_low, grad_scale, overflow, beta1, beta2):
    check_floating(_OP, "param", param)
    check_floating(_OP, "grad", grad)
    buffers = {"grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    buffers |= {"param_copy": param_copy, "param_low": param_low}
    for name, buffer in buffers.items():
        check_same_shape(_OP, name, buffer, "param", param)
    for name in ("exp_avg", "exp_avg_sq"):
        dtype = buffers[name].dtype
        check(
            dtype in (torch.float32, torch.float64),
            lambda name=name, dtype=dtype: f"{_OP}: {name} must be torch.float32, got {dtype}",
        )
    if param_copy is not None:
        check(
            param.dtype == torch.float32 and param_copy.dtype in _HALF,
            lambda: (
                f"{_OP}: param_copy must be 16 bits wide beside a param of torch.float32, got {param_copy.dtype} beside {param.dtype}"
            ),
        )
    if param_low is not None:
        check(
            param.dtype == torch.bfloat16 and param_low.dtype == torch.int16,
            lambda: (
                f"{_OP}: param_low must be torch.int16 beside a param of torch.bfloat16, got {param_low.dtype} beside {param.dtype}"
            ),
        )
    half = {t.dtype for t in (param, grad, param_copy) if t is not None and t.dtype in _HALF}
    check(len(half) <= 1, lambda: f"{_OP}: param, grad and param_copy must share their 16-bit type, got {half}")
    for name, scalar in (("grad_scale", grad_scale), ("overflow", overflow)):
        check(scalar is None or scalar.numel() == 1, lambda name=name: f"{_OP}: {name} must have one element")
    check(
        0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0, lambda: f"{_OP}: betas must lie in [0, 1), got {beta1} and {beta2}"
    )


def register(namespace: str) -> None:
    """The fake kernel for one build of the library."""
    register_fake(f"{namespace}::adam_step", _step_fake)
