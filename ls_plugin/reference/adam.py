"""Adam as fairseq computes it (``fairseq.optim.adam.Adam``), on flat buffers; and an fp32 master in two 16-bit halves."""

import math

import torch
from torch import Tensor

_QUIET_NAN = 0x7FC0  # of bf16


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 master -> (weight, low): bf16 and int16 of its shape, from which :func:`join_master` gives the same bits back.

        weight = (bits + 0x8000) >> 16      the master rounded to nearest, ties away from zero
        low    = bits - (weight << 16)      the low 16 bits as a signed number, in [-0x8000, 0x7FFF]

    Ties cannot go to even, as in a cast: the masters from weight - 0x8000 to weight + 0x8000 would all round to an even weight, ends
    included, 65,537 of them for the 65,536 values of ``low``; an odd one would have 65,535. With ties away from zero each has
    65,536. Masters above the largest finite bf16 may round to inf, as in a cast, and still come back exactly. NaN keeps no payload
    (rounding would carry one into inf or zero): it becomes 0x7FC0 and 0.
    """
    bits = master.view(torch.int32)
    weight = ((bits + 0x8000) >> 16).to(torch.int16)
    low = (((bits & 0xFFFF) ^ 0x8000) - 0x8000).to(torch.int16)
    nan = master.isnan()
    return weight.masked_fill(nan, _QUIET_NAN).view(torch.bfloat16), low.masked_fill(nan, 0)


def join_master(weight: Tensor, low: Tensor) -> Tensor:
    """(weight bf16, low int16) -> the fp32 master. After weight has been written from outside, low must be 0."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + low).view(torch.float32)


@torch.no_grad()
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
    """One update in place; arithmetic in fp32 (fp64 for fp64 buffers).

    fairseq's formula: eps is added to the uncorrected sqrt(v), both bias corrections go into the step size, and weight
    decay is decoupled (param -= lr * weight_decay * param, before the step).  ``step`` counts from 1.

    ``param_copy`` receives the updated param as well. With ``param_low``, what is updated is ``join_master(param, param_low)``.
    ``overflow``: where true, only ``zero_grad`` happens.
    """
    if overflow is None or not overflow:
        acc_dtype = torch.promote_types(param.dtype, torch.float32)
        g = grad.to(acc_dtype)
        if grad_scale is not None:
            g = g * grad_scale
        exp_avg.mul_(beta1).add_(g, alpha=1.0 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
        step_size = lr * math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step)
        p = param.to(acc_dtype) if param_low is None else join_master(param, param_low)
        p = p - (lr * weight_decay) * p
        p = p.addcdiv(exp_avg, exp_avg_sq.sqrt().add_(eps), value=-step_size)
        if param_low is not None:
            p, low = split_master(p)
            param_low.copy_(low)
        param.copy_(p)
        if param_copy is not None:
            param_copy.copy_(p)
    if zero_grad:
        grad.zero_()
