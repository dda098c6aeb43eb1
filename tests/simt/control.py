"""The SIMT runtime of a library built by :mod:`build`, seen from Python."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Bytes moved to and from global memory. ``cold_*`` counts a byte once per launch: traffic with a perfect cache."""

    read: int
    written: int
    cold_read: int
    cold_written: int


@dataclass(frozen=True)
class Stats:
    """Totals over the launches since the last reset. Cold figures and ``regions`` need registered regions."""

    launches: int
    blocks: int
    barriers: int  # __syncthreads, counted once per block
    warp_collectives: int  # __syncwarp, shuffles and votes, counted once per warp
    all_memory: Traffic
    regions: dict[str, Traffic]


class Simt:
    """Controls the runtime inside one shared library; ``library`` is its path or an open ``ctypes.CDLL``."""

    def __init__(self, library: str | os.PathLike[str] | ctypes.CDLL) -> None:
        self.library = library if isinstance(library, ctypes.CDLL) else ctypes.CDLL(os.fspath(library))
        self._register = self.library.ls_simt_register_region
        self._register.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool, ctypes.c_char_p]
        self._register.restype = None
        self.library.ls_simt_set_schedule.argtypes = [ctypes.c_uint64]
        self.library.ls_simt_stats.restype = ctypes.c_char_p

    def register_region(self, address: int, n_bytes: int, *, writable: bool, name: str) -> None:
        """Allows kernels to touch ``n_bytes`` from ``address`` on; everything unregistered becomes a fault."""
        self._register(address, n_bytes, writable, name.encode())

    def clear_regions(self) -> None:
        self.library.ls_simt_clear_regions()

    @contextmanager
    def regions(self, **regions: tuple[int, int, bool]) -> Iterator[None]:
        """Registers ``name=(address, n_bytes, writable)`` for the length of a with block."""
        for name, (address, n_bytes, writable) in regions.items():
            self.register_region(address, n_bytes, writable=writable, name=name)
        try:
            yield
        finally:
            self.clear_regions()

    @contextmanager
    def schedule(self, seed: int) -> Iterator[None]:
        """Runs blocks and threads in an order shuffled by ``seed``, for the length of a with block; 0 is index order."""
        self.library.ls_simt_set_schedule(seed)
        try:
            yield
        finally:
            self.library.ls_simt_set_schedule(0)

    def reset_stats(self) -> None:
        self.library.ls_simt_reset_stats()

    def stats(self) -> Stats:
        raw = json.loads(self.library.ls_simt_stats())
        return Stats(
            launches=raw["launches"],
            blocks=raw["blocks"],
            barriers=raw["barriers"],
            warp_collectives=raw["warp_collectives"],
            all_memory=Traffic(**raw["global"]),
            regions={name: Traffic(**traffic) for name, traffic in raw["regions"].items()},
        )
