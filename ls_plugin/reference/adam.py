"""Adam as fairseq computes it (``fairseq.optim.adam.Adam``), on flat buffers."""

import math

import torch
from torch import Tensor


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
    grad_scale: Tensor | None = None,
    zero_grad: bool = False,
) -> None:
    """One update in place; arithmetic in fp32 (fp64 for fp64 buffers).

    fairseq's formula: eps is added to the uncorrected sqrt(v), both bias corrections go into the step size, and weight
    decay is decoupled (param -= lr * weight_decay * param, before the step).  ``step`` counts from 1.
    """
    acc_dtype = torch.promote_types(param.dtype, torch.float32)
    g = grad.to(acc_dtype)
    if grad_scale is not None:
        g = g * grad_scale
    exp_avg.mul_(beta1).add_(g, alpha=1.0 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
    step_size = lr * math.sqrt(1.0 - beta2**step) / (1.0 - beta1**step)
    p = param.to(acc_dtype)
    p = p - (lr * weight_decay) * p
    p = p.addcdiv(exp_avg, exp_avg_sq.sqrt().add_(eps), value=-step_size)
    param.copy_(p)
    if zero_grad:
        grad.zero_()
