"""Bias, activation and dropout: what stands between the two products of a Transformer's feed-forward network."""

import math

import torch
from torch import Tensor

from ls_plugin.reference.dropout import dropout

# Beyond it both gelus are x or 0 in fp64 as well. Their formulas are taken no further out, where infinity times 0 would be NaN.
_TAIL = 40.0


def _gelu(x: Tensor) -> Tensor:
    """x Phi(x), Phi the distribution function of the standard normal (Hendrycks & Gimpel, 2016)."""
    z = x.clamp(-_TAIL, _TAIL)
    return torch.where(x > _TAIL, x, z * 0.5 * (1.0 + torch.erf(z * math.sqrt(0.5))))


def _gelu_accurate(x: Tensor) -> Tensor:
    """Their approximation by tanh; fairseq's name notwithstanding."""
    z = x.clamp(-_TAIL, _TAIL)
    return torch.where(x > _TAIL, x, 0.5 * z * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (z + 0.044715 * z**3))))


ACTIVATIONS = {
    "relu": torch.relu,
    "gelu": _gelu,
    "gelu_accurate": _gelu_accurate,
    "gelu_fast": _gelu_accurate,  # its deprecated name
    "tanh": torch.tanh,
    "relu_squared": lambda x: torch.relu(x).square(),
    "linear": lambda x: x,
}
"""The activations, by the names of ``fairseq.utils.get_activation_fn``. Its ``swish`` is left out: fairseq gives a class, not a function."""


def bias_act_dropout(
    x: Tensor, bias: Tensor | None, activation: str, p: float, seed: Tensor | None, offset: int
) -> Tensor:
    """y = dropout(act(x + bias)).

    Args:
        x: (..., F), floating. Half types are computed in fp32 and rounded once.
        bias: (F,) or None.  activation: one of ``ACTIVATIONS``.
        p: probability of dropping an element; 0 needs no seed.
        seed: int64 (1,).  offset: tells apart the draws under one seed (see ``kernels/common/philox.h``).
    Returns:
        (..., F) in x's dtype.
    """
    acc = x.to(torch.promote_types(x.dtype, torch.float32))
    if bias is not None:
        acc = acc + bias
    return dropout(ACTIVATIONS[activation](acc), p, seed, offset).to(x.dtype)
