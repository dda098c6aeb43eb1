"""Bias, dropout, residual and the layer norm that follows: the seam between two sublayers of a Transformer."""

from torch import Tensor

from ls_plugin.reference.bias_dropout_residual import bias_dropout_residual
from ls_plugin.reference.layer_norm import layer_norm


def residual_layer_norm(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    p: float,
    seed: Tensor | None,
    offset: int,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """sum = residual + dropout(x + bias), y = (sum - mean) / sqrt(var + eps) * weight + norm_bias.

    The statistics and y are those of the sum as it is stored, rounded to x's dtype: y is then a function of the sum that the caller
    sees, the two ops apart give the same, and the backward, which reads the stored sum, differentiates what was computed.

    Args:
        x: (..., C), floating. Half types are computed in fp32; sum and y are each rounded once.
        bias: (C,) or None.  residual: x's shape or None.
        weight, norm_bias: (C,), or None for ones and zeros.
        p: probability of dropping an element; 0 needs no seed.
        seed: int64 (1,).  offset: tells apart the draws under one seed (see ``kernels/common/philox.h``).
    Returns:
        sum and y, both (..., C) in x's dtype.
    """
    total = bias_dropout_residual(x, bias, residual, p, seed, offset)
    return total, layer_norm(total, weight, norm_bias, eps)
