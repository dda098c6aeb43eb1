"""Scaled dot-product attention (Vaswani et al., 2017), with dropout on the probabilities."""

import torch
from torch import Tensor

from ls_plugin.reference.attention_softmax import attention_softmax


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
    """out = dropout(softmax(scale * q k^T + bias)) v over the keys that a query sees, which are those of
    :func:`ls_plugin.reference.attention_softmax`; a query that sees none gives zeros.

    Args:
        q: (B, H, T, D), floating. Half types are computed in fp32, products and probabilities too, and rounded once.
        k, v: (B, H, S, D).
        key_padding_mask: bool (B, S), true at padding, or None. A padded key contributes nothing, whatever it and its value hold.
        bias: broadcastable to (B, H, T, S), may hold -inf; or None.
        p: probability of dropping an element of the probabilities, seen as a matrix of B * H * T rows; 0 needs no seed.
        seed: int64 (1,).  offset: tells apart the draws under one seed (see ``kernels/common/philox.h``).
    Returns:
        (B, H, T, D) in q's dtype.
    """
    acc_dtype = torch.promote_types(q.dtype, torch.float32)
    if key_padding_mask is not None:  # 0 times what they hold might be NaN
        k, v = (t.masked_fill(key_padding_mask[:, None, :, None], 0.0) for t in (k, v))
    scores = (q.to(acc_dtype) * scale) @ k.to(acc_dtype).transpose(-1, -2)
    probs = attention_softmax(scores, key_padding_mask, bias, causal, 1.0, p, seed, offset)
    return (probs @ v.to(acc_dtype)).to(q.dtype)
