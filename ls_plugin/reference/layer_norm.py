"""Layer normalisation over the last dimension (Ba et al., 2016)."""

import torch
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """y = (x - mean) / sqrt(var + eps) * weight + bias.

    Args:
        x: (..., C), floating. Half types are computed in fp32 and rounded once.
        weight, bias: (C,), or None for ones and zeros.
    Returns:
        (..., C) in x's dtype.
    """
    acc = x.to(torch.promote_types(x.dtype, torch.float32))
    mean = acc.mean(dim=-1, keepdim=True)
    centred = acc - mean
    # Two passes: E[x^2] - E[x]^2 cancels catastrophically when |mean| is large against the deviation.
    variance = centred.square().mean(dim=-1, keepdim=True)
    y = centred * torch.rsqrt(variance + eps)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype)
