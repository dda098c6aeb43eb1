"""The softmax of attention: from scores to probabilities (Vaswani et al., 2017)."""

import torch
from torch import Tensor

from ls_plugin.reference.dropout import dropout


def attention_softmax(
    scores: Tensor,
    key_padding_mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    scale: float,
    p: float,
    seed: Tensor | None,
    offset: int,
) -> Tensor:
    """probs = dropout(softmax(scale * scores + bias)) over the keys that a query sees.

    Query t sees key s unless ``key_padding_mask[b, s]`` or, when causal, s > t + (S - T): the last query sees all keys, and with T == S
    the mask is the usual triangle. A query that sees no key gives zeros, and zero gradients, where a softmax of -inf gives NaN.

    Args:
        scores: (B, H, T, S), floating. Half types are computed in fp32 and rounded once.
        key_padding_mask: bool (B, S), true at padding, or None.
        bias: broadcastable to scores' shape, may hold -inf; or None.
        p: probability of dropping an element; 0 needs no seed.
        seed: int64 (1,).  offset: tells apart the draws under one seed (see ``kernels/common/philox.h``).
    Returns:
        (B, H, T, S) in scores' dtype.
    """
    z = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if bias is not None:
        z = z + bias
    if key_padding_mask is not None:
        z = z.masked_fill(key_padding_mask[:, None, None, :], -torch.inf)
    if causal:
        n_queries, n_keys = scores.shape[-2:]
        hidden = torch.ones(n_queries, n_keys, dtype=torch.bool, device=scores.device).triu(n_keys - n_queries + 1)
        z = z.masked_fill(hidden, -torch.inf)
    blind = (z == -torch.inf).all(dim=-1, keepdim=True)
    probs = torch.softmax(z.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)
    return dropout(probs, p, seed, offset).to(scores.dtype)
