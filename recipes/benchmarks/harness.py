"""Timing of the op benchmarks: two functions in turn, medians, and bytes against the measured copy bandwidth."""

import dataclasses
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
MIN_SECONDS = 0.6  # spent on each function of a case, at least MIN_ROUNDS rounds
MIN_ROUNDS = 15
WARM_UP_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table.

    stock, ls: what is timed; each takes what ``prepare`` returns, which is made anew, untimed, before every call.
    n_bytes: the bytes that the fused op must move through memory, reads and writes.
    """

    op: str
    shape: str
    stock: Callable
    ls: Callable
    n_bytes: int
    prepare: Callable = lambda: ()


@dataclasses.dataclass(frozen=True)
class Result:
    """Medians in ms; spread = half the distance between the quartiles over the median; gb_per_s of the fused op."""

    op: str
    shape: str
    stock_ms: float
    ls_ms: float
    speedup: float
    stock_spread: float
    ls_spread: float
    gb_per_s: float
    copy_share: float


def _once(function: Callable, arguments: tuple, device: torch.device) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        function(*arguments)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - begin


def _spread(times: list[float]) -> float:
    first, _, third = statistics.quantiles(times, n=4)
    return (third - first) / 2 / statistics.median(times)


def measure(case: Case, copy_gb_per_s: float, device: torch.device) -> Result:
    """Times stock and ls alternately, so that a change of the machine's speed meets both."""
    times: dict[str, list[float]] = {"stock": [], "ls": []}
    for round_ in range(10_000):
        for name in times:
            seconds = _once(getattr(case, name), case.prepare(), device)
            if round_ >= WARM_UP_ROUNDS:
                times[name].append(seconds)
        if len(times["ls"]) >= MIN_ROUNDS and min(sum(t) for t in times.values()) >= MIN_SECONDS:
            break
        if len(times["ls"]) >= MIN_ROUNDS and sum(times["stock"]) >= 10 * MIN_SECONDS:
            break
    stock, ls = (statistics.median(times[name]) for name in ("stock", "ls"))
    gb_per_s = case.n_bytes / ls / 1e9
    return Result(
        case.op,
        case.shape,
        stock * 1e3,
        ls * 1e3,
        stock / ls,
        _spread(times["stock"]),
        _spread(times["ls"]),
        gb_per_s,
        gb_per_s / copy_gb_per_s,
    )


def copy_bandwidth(device: torch.device, n_bytes: int = 256 << 20) -> float:
    """GB/s of a large copy, reads plus writes: the yardstick of every memory-bound op. Median of 15."""
    source = torch.ones(n_bytes // 4, device=device)
    target = torch.empty_like(source).fill_(0)
    times = [_once(target.copy_, (source,), device) for _ in range(18)][3:]
    return 2 * n_bytes / statistics.median(times) / 1e9


def machine(device: torch.device) -> dict[str, str | int]:
    """What the figures depend on."""
    from ls_plugin import _library

    def commit() -> str:
        try:
            return subprocess.run(
                ["git", "describe", "--always", "--dirty"], cwd=ROOT, check=True, capture_output=True, text=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    def processor() -> str:
        if device.type == "cuda":
            return torch.cuda.get_device_name(device)
        try:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
            return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
        except (OSError, StopIteration):
            return platform.processor() or platform.machine()

    return {
        "processor": processor(),
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "instruction_set": _library.status().isa,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
    }
