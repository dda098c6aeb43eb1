"""What the tests of the CUDA kernels on this harness share: traffic by argument, and tensors at an offset."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

from .control import Simt, Traffic


@contextlib.contextmanager
def traffic(simt: Simt) -> Iterator[dict[str, Traffic]]:
    """Fills the dict with the traffic of each argument, when the with block ends."""
    simt.reset_stats()
    regions: dict[str, Traffic] = {}
    yield regions
    regions.update(simt.stats().regions)


def n_bytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


def at_offset(t: Tensor, n_elem: int) -> Tensor:
    """The same values ``n_elem`` elements past a multiple of 16 bytes."""
    storage = t.new_empty(t.numel() + 16)
    start = -(storage.data_ptr() // t.element_size()) % 16 + n_elem
    return storage[start : start + t.numel()].view(t.shape).copy_(t)
