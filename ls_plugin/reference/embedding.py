"""Token embedding with positions: what stands before the first layer of a Transformer."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ls_plugin.reference.dropout import dropout


def embedding(
    tokens: Tensor,
    weight: Tensor,
    positions: Tensor | None,
    padding_idx: int | None,
    scale: float,
    p: float,
    seed: Tensor | None,
    offset: int,
) -> Tensor:
    """y = dropout(scale * weight[tokens] + positions[position_ids(tokens)]).

    Args:
        tokens: int64 (B, T).  weight: (V, C), floating. Half types are computed in fp32 and rounded once.
        positions: (n_positions, C) or None.
        padding_idx: the token that is padding, whose rows in both tables get no gradient, as in ``nn.Embedding``; or None.
        p: probability of dropping an element; 0 needs no seed.
        seed: int64 (1,).  offset: tells apart the draws under one seed (see ``kernels/common/philox.h``).
    Returns:
        (B, T, C) in weight's dtype.
    """
    acc_dtype = torch.promote_types(weight.dtype, torch.float32)
    acc = scale * F.embedding(tokens, weight, padding_idx).to(acc_dtype)
    if positions is not None:
        acc = acc + F.embedding(position_ids(tokens, padding_idx), positions, padding_idx).to(acc_dtype)
    return dropout(acc, p, seed, offset).to(weight.dtype)


def position_ids(tokens: Tensor, padding_idx: int | None) -> Tensor:
    """Row of each token in the table of positions, int64 (B, T): fairseq's ``utils.make_positions``.

    Tokens that are not padding count from padding_idx + 1 on, so padding on either side changes no row; padding stands at padding_idx.
    Without a padding_idx: 0, 1, ….
    """
    if padding_idx is None:
        return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    is_token = tokens != padding_idx
    return is_token.cumsum(dim=1) * is_token + padding_idx
