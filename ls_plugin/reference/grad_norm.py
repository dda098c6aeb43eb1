"""Norm of the gradients, clip coefficient and overflow flag, as ``fairseq.utils.clip_grad_norm_`` defines them."""

from collections.abc import Sequence

import torch
from torch import Tensor

_PIECE = 1 << 20  # elements: bounds the fp64 copy that vector_norm makes


@torch.no_grad()
def grad_norm(
    grads: Sequence[Tensor], scale: Tensor | None = None, max_norm: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(norm, coefficient, overflow) of the gradients ``scale * grads``, which lie unscaled in memory; sums in fp64.

    norm        = abs(scale) * sqrt(sum of g^2 over all grads)
    coefficient = scale * min(1, max_norm / (norm + 1e-6)), or scale where max_norm <= 0: what an update multiplies grads by
    overflow    = norm is not finite
    """
    pieces = [piece for grad in grads for piece in grad.detach().reshape(-1).split(_PIECE)]
    norms = torch.stack([torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces])
    norm = torch.linalg.vector_norm(norms)
    coefficient = norm.new_ones((), dtype=torch.float32) if scale is None else scale.reshape(()).float()
    norm = (norm * coefficient.double().abs()).float()
    if max_norm > 0:
        coefficient = coefficient * (float(max_norm) / (norm + 1e-6)).clamp(max=1.0)
    return norm, coefficient.clone(), ~norm.isfinite()
