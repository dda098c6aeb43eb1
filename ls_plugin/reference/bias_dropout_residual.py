"""Bias, dropout and residual: what stands after every output projection of a Transformer layer."""

import torch
from torch import Tensor

from ls_plugin.reference.dropout import dropout_keep_mask, dropout_scale


def bias_dropout_residual(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, seed: Tensor | None, offset: int
) -> Tensor:
    """y = residual + dropout(x + bias).

    Args:
        x: (..., C), floating. Half types are computed in fp32 and rounded once.
        bias: (C,) or None.  residual: x's shape or None.
        p: probability of dropping an element; 0 needs no seed.
        seed: int64 (1,).  offset: tells apart the draws under one seed (see ``kernels/common/philox.h``).
    Returns:
        (..., C) in x's dtype.
    """
    acc = x.to(torch.promote_types(x.dtype, torch.float32))
    if bias is not None:
        acc = acc + bias
    if p > 0.0:
        keep = dropout_keep_mask(x.shape, p, int(seed), offset, x.device)
        # where, not a product: an infinite value that is dropped must give 0, not NaN.
        acc = torch.where(keep, acc * dropout_scale(p), 0.0)
    if residual is not None:
        acc = residual + acc
    return acc.to(x.dtype)
