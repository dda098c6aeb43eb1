"""The dropout mask as a function of (seed, offset, position): Philox4x32-10 in PyTorch integers.

The kernels draw the same masks (``kernels/common/philox.h`` gives the layout), so a run gives the same losses with and
without them.  Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC'11).
"""

import torch
from torch import Tensor

_LEVELS = 65536  # a draw gives each element a 16-bit integer
_GROUP = 8  # elements served by one draw
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def dropout_threshold(p: float) -> int:
    """The integer below which an element's draw drops it: p in units of 1 / 65536, rounded.

    A positive p drops at least one level in 65536 and p < 1 keeps at least one, so neither ever means "none" or "all".
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout: p must lie in [0, 1], got {p}")
    if p in (0.0, 1.0):
        return int(p) * _LEVELS
    return min(max(round(p * _LEVELS), 1), _LEVELS - 1)


def dropout_scale(p: float) -> float:
    """What kept elements are multiplied by: one over the probability of being kept that the threshold really gives."""
    threshold = dropout_threshold(p)
    return 0.0 if threshold == _LEVELS else _LEVELS / (_LEVELS - threshold)


def philox4x32_10(seed: int, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten Philox rounds on int64 tensors that hold 32-bit words. Returns the four output words."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(10):
        # 32 x 32 bits fit in 64; the sign is harmless because the halves are taken with masks.
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = ((p1 >> 32) & _LOW) ^ c1 ^ k0, p1 & _LOW, ((p0 >> 32) & _LOW) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def dropout_keep_mask(
    shape: torch.Size, p: float, seed: int, offset: int, device: torch.device | None = None
) -> Tensor:
    """Boolean mask of ``shape`` (..., C): True where an element is kept."""
    n_cols = shape[-1]
    n_rows = shape.numel() // n_cols if n_cols else 0
    groups_per_row = -(-n_cols // _GROUP)
    group = torch.arange(n_rows * groups_per_row, dtype=torch.int64, device=device)
    zeros = torch.zeros_like(group)
    counter = (group & _LOW, group >> 32, zeros + (offset & _LOW), zeros + ((offset >> 32) & _LOW))
    words = philox4x32_10(seed, counter)
    lanes = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], dim=-1)
    keep = lanes >= dropout_threshold(p)
    return keep.view(n_rows, groups_per_row * _GROUP)[:, :n_cols].reshape(shape)


def dropout(x: Tensor, p: float, seed: Tensor | None, offset: int) -> Tensor:
    """x (..., C) where it is kept, times :func:`dropout_scale`, and 0 elsewhere; x itself for p = 0, which needs no seed."""
    if p == 0.0:
        return x
    keep = dropout_keep_mask(x.shape, p, int(seed), offset, x.device)
    # where, not a product: an infinite value that is dropped must give 0, not NaN.
    return torch.where(keep, x * dropout_scale(p), 0.0)
