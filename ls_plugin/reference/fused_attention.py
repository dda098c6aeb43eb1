"""Scaled dot-product attention (Vaswani et al., 2017), with dropout on the probabilities."""

import torch
from torch import Tensor

from ls_plugin.reference.dropout import dropout_keep_mask, dropout_scale


def fused_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    scale: float,
    p: float,
    seed: Tensor | None,
    offset: int,
) -> Tensor:
    """out = dropout(softmax(scale * q k^T + bias)) v over the keys that a query sees.

    Query t sees key s unless ``key_padding_mask[b, s]`` or, when causal, s > t + (S - T): the last query sees all keys, and with T == S
    the mask is the usual triangle. A query that sees no key gives zeros, and zero gradients, where a softmax of -inf gives NaN.

    Args:
        q: (B, H, T, D), floating. Half types are computed in fp32, products and probabilities too, and rounded once.
        k, v: (B, H, S, D).
        key_padding_mask: bool (B, S), true at padding, or None.
        bias: broadcastable to (B, H, T, S), may hold -inf; or None.
        p: probability of dropping an element of the probabilities, seen as a matrix of B * H * T rows; 0 needs no seed.
        seed: int64 (1,).  offset: tells apart the draws under one seed (see ``kernels/common/philox.h``).
    Returns:
        (B, H, T, D) in q's dtype.
    """
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(acc_dtype) * scale) @ k.to(acc_dtype).transpose(-1, -2)
    if bias is not None:
        scores = scores + bias
    if key_padding_mask is not None:
        scores = scores.masked_fill(key_padding_mask[:, None, None, :], -torch.inf)
    if causal:
        n_queries, n_keys = scores.shape[-2:]
        hidden = torch.ones(n_queries, n_keys, dtype=torch.bool, device=scores.device).triu(n_keys - n_queries + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    blind = (scores == -torch.inf).all(dim=-1, keepdim=True)
    probs = torch.softmax(scores.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)
    if p > 0.0:
        keep = dropout_keep_mask(probs.shape, p, int(seed), offset, probs.device)
        probs = torch.where(keep, probs * dropout_scale(p), 0.0)
    return (probs @ v.to(acc_dtype)).to(q.dtype)
