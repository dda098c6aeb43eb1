"""Bias, dropout and residual: what stands after every output projection of a Transformer layer."""

import torch
from torch import Tensor

from ls_plugin.reference.dropout import dropout


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
    acc = dropout(acc, p, seed, offset)
    if residual is not None:
        acc = residual + acc
    return acc.to(x.dtype)
