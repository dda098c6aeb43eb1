"""The bytes that an op moves, counted by the harness, beside those that it must move: the cases of ls_plugin/report/op_cases in bf16.

A byte counts once for each launch that touches it, which is what memory behind a perfect cache sees. Partial sums of a deterministic
two-stage reduction (regions named "partials") are told apart: they are small, written by one launch and read by the next, out of the L2.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ls_plugin import _library
from ls_plugin.report import op_timing

from ..conftest import _load_simt_library, build_simt_library
from .control import Simt

# The harness moves some 30 MB a second, so it gets the largest case below this, or the smallest of all.
LARGEST_CASE_BYTES = 16 << 20


@dataclass(frozen=True)
class Count:
    """Of one direction of one op."""

    op: str
    shape: str
    direction: str
    floor: int
    moved: int  # partial sums included
    partials: int

    @property
    def of_floor(self) -> float:
        """Without the partial sums."""
        return (self.moved - self.partials) / self.floor


def _choose(cases: Iterable):
    def size(case) -> int:
        return case.forward_bytes + (case.backward_bytes or 0)

    smallest = chosen = None
    for case in cases:
        if case.forward_bytes is None:
            continue
        if smallest is None or size(case) < size(smallest):
            smallest = case
        if size(case) <= LARGEST_CASE_BYTES and (chosen is None or size(case) > size(chosen)):
            chosen = case
    return chosen or smallest


def count(op: str) -> list[Count]:
    """Counts one case of an op, forward and backward; nothing for an op that memory does not bound."""
    _load_simt_library()
    simt = Simt(build_simt_library())

    def since_reset() -> tuple[int, int]:
        stats = simt.stats()
        partials = [t for name, t in stats.regions.items() if name == "partials"]
        return tuple(sum(t.cold_read + t.cold_written for t in some) for some in ([stats.all_memory], partials))

    counts = []
    case = _choose(
        importlib.import_module(f"ls_plugin.report.op_cases.{op}").cases(torch.device("cpu"), torch.bfloat16)
    )
    if case is None:
        return []
    leaves = case.leaves if case.prepare is None else case.prepare()
    _library.use_namespace("ls_simt")
    try:
        simt.reset_stats()
        outputs = case.ls(*leaves)
        counts.append(Count(op, case.shape, "forward", case.forward_bytes, *since_reset()))
        if case.backward_bytes is not None:
            simt.reset_stats()
            op_timing.gradients(case, outputs, leaves)
            counts.append(Count(op, case.shape, "backward", case.backward_bytes, *since_reset()))
    finally:
        _library.use_namespace("ls")
    return counts
