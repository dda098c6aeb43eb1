"""Timing of the op benchmarks: what a case is, what is measured of it, and the machine's own speed of moving bytes.

One round times every contender once, in turn: eager (what stock fairseq executes), compiled (torch.compile of the same formula, by inductor,
static shapes, whole graph), apex's and Liger-Kernel's op where these are installed and have one, ls, and kernel (the same ops of ours called
below autograd, no graph). A change of the machine's speed so meets all of them alike. What is given are medians over the rounds. Memory that was
freed is kept for the next (keep_freed_memory).

    forward    the call, with grad enabled, until it returns (CPU) or until its last kernel ends (CUDA)
    backward   ``torch.autograd.grad`` from the outputs to the leaves. Both directions of eager, compiled and ls hold what autograd costs by
               itself, some 45 us for both together on an EPYC; the smallest shapes are little else, and kernel shows what is left without
    spread     half the distance between the quartiles over the median, of forward and backward together
    GB/s       the bytes that the fused op must move, over kernel's time, or ls's where a case has no kernel
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import importlib.util
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

PACKAGES = {"apex": "apex", "liger": "liger_kernel"}  # contenders that are there where their package is installed
NO_SUCH_OP = "has no such op"
RIVALS = ("eager", "compiled", *PACKAGES)
CONTENDERS = (*RIVALS, "ls", "kernel")
WARM_UP_ROUNDS = 3
LEAST_ROUNDS = 5
ENOUGH_ROUNDS = 30  # of a case that has used a third of its time
COMPILE_LIMIT_S = 120
COPY_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}  # many times the largest cache
CUDA_ELEMENTS = 64 << 20  # of one tensor: 128 MB in 16 bits, twice the L2 of an H200
FLUSH_BYTES = 256 << 20  # CUDA: written between two measurements, so that nothing is found in the L2 (60 MB on an H200)
HEAD_START_CYCLES = 1_000_000  # CUDA: the GPU idles that long while the host launches ahead of it; about 0.6 ms


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table.

    op, shape: name of the op (the stem of its files) and what is measured of it, dtype left out.
    leaves: tensors on the device in the dtype, made once; those that require grad get a gradient. Also indices and masks.
    eager: leaves -> output or tuple of outputs, by the faithful formula of what stock fairseq executes (a bias inside a product by
        bias_of_product). Gradients of leaves that it does not use are skipped.
    ls: the same by our op.
    grad_outputs: gradients of the first outputs, as many as are given; None: no backward (optimizer steps, norms).
    forward_bytes, backward_bytes: what the fused op must move through memory, reads + writes; None: memory is not its bound.
    prepare: () -> leaves, made anew and untimed before each call, for ops that overwrite their inputs.
    kernels: (forward, backward): our compiled ops called directly, ``torch.ops.ls.…``. forward: leaves -> anything; backward gets that.
        backward is None where grad_outputs is.
    others: the same by a contender of PACKAGES, which is imported when it is called; leaves -> output.
    compilable: formula for torch.compile, where eager's own code (an optimizer) is none that it could trace.
    in_place: the op writes only what it has read (an update). Such stores cost no hidden read, so its share is that of an in-place pass.
    """

    op: str
    shape: str
    leaves: tuple[Tensor, ...]
    eager: Callable
    ls: Callable
    grad_outputs: tuple[Tensor, ...] | None
    forward_bytes: int | None
    backward_bytes: int | None
    prepare: Callable[[], tuple[Tensor, ...]] | None = None
    kernels: tuple[Callable, Callable | None] | None = None
    compilable: Callable | None = None
    in_place: bool = False
    others: dict[str, Callable] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Time:
    """Medians of one contender; the reason where there are none."""

    forward_ms: float | None = None
    backward_ms: float | None = None
    spread: float | None = None
    why_not: str = ""

    @property
    def total_ms(self) -> float | None:
        return None if self.forward_ms is None else self.forward_ms + (self.backward_ms or 0.0)


@dataclasses.dataclass(frozen=True)
class Result:
    """What was measured of a case. GB/s and shares of the bandwidth are (forward, backward), None where not bound by memory."""

    op: str
    shape: str
    dtype: str
    times: dict[str, Time]
    rounds: int
    compile_s: float | None
    gb_per_s: tuple[float | None, float | None]
    share: tuple[float | None, float | None]

    def speedup(self, over: str, part: str = "total") -> float | None:
        """How many times as fast ls is as a rival, or as the fastest of them ("best"), in forward, backward or total."""
        rivals = RIVALS if over == "best" else (over,)
        times = [getattr(self.times[name], f"{part}_ms") for name in rivals]
        ours = getattr(self.times["ls"], f"{part}_ms")
        known = [t for t in times if t is not None]
        return min(known) / ours if known and ours else None

    def to_json(self) -> dict:
        row = dataclasses.asdict(self)
        row["speedup"] = {
            over: {part: self.speedup(over, part) for part in ("forward", "backward", "total")}
            for over in (*RIVALS, "best")
        }
        return row


def shapes_for(device: torch.device, shapes: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of a benchmark: as they are on a CPU; on a GPU each width once, with rows for CUDA_ELEMENTS."""
    if device.type != "cuda":
        return shapes
    return tuple((CUDA_ELEMENTS // n_cols, n_cols) for n_cols in dict.fromkeys(n_cols for _, n_cols in shapes))


class _BiasOfProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, grad.sum(tuple(range(grad.dim() - 1)))


def bias_of_product(x: Tensor, bias: Tensor) -> Tensor:
    """For eager formulas: a bias that the product before has added already. It costs nothing forward, and backward the sum over the rows that
    the product's own backward makes. Let the bias be zero and both sides agree. (On a CPU stock's product pays for it forward too, by copying the bias into every row first.)"""
    return _BiasOfProduct.apply(x, bias)


def check_names(parser: argparse.ArgumentParser, kind: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Ends with a usage error that lists the names of this kind that are not known, and the known ones."""
    unknown = sorted(set(names) - set(known))
    if unknown:
        parser.error(f"unknown {kind} {', '.join(unknown)}; choose from {', '.join(known)}")


def check_out(parser: argparse.ArgumentParser, out: Path | None) -> None:
    """Ends with a usage error, before anything is measured, if ``--out`` names a file in no folder."""
    if out and not out.parent.is_dir():
        parser.error(f"--out {out}: there is no folder {out.parent}")


def keep_freed_memory() -> None:
    """Makes glibc keep what tensors free instead of giving it back to the system. Whether a new output of a few MB costs a page fault for each
    4 KB, which is as much as the op itself, otherwise depends on the order of frees before it, and comes out differently for each contender."""
    m_trim_threshold, m_mmap_max = -1, -4  # malloc.h
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(m_trim_threshold, -1)
        libc.mallopt(m_mmap_max, 0)


def absent(name: str) -> str:
    """Why a contender of PACKAGES is not here, or ""."""
    package = PACKAGES[name]
    # Of an unrelated package called apex the plugin lets every import fail.
    there = sys.modules.get(package, package) is not None and importlib.util.find_spec(package) is not None
    return "" if there else f"{package} is not installed"


# ---- One case ----


def as_tuple(outputs) -> tuple:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def gradients(case: Case, outputs, leaves: tuple[Tensor, ...], allow_unused: bool = False) -> tuple[Tensor | None, ...]:
    """The backward that is timed."""
    differentiated = as_tuple(outputs)[: len(case.grad_outputs)]
    wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.autograd.grad(differentiated, wanted, case.grad_outputs, allow_unused=allow_unused)


def contenders(case: Case, compiled: Callable | None) -> dict[str, tuple[Callable, Callable]]:
    """Name -> (leaves -> outputs, (outputs, leaves) -> gradients)."""
    found = {}
    others = {name: function for name, function in case.others.items() if not absent(name)}
    for name, forward in {"eager": case.eager, "compiled": compiled, **others, "ls": case.ls}.items():
        if forward is not None:
            lenient = name != "ls"
            found[name] = (forward, lambda out, leaves, lenient=lenient: gradients(case, out, leaves, lenient))
    if case.kernels is not None:
        forward, backward = case.kernels
        found["kernel"] = (forward, lambda out, leaves: backward(out))
    return found


class Stopwatch:
    """Seconds that a call takes: wall time on a CPU; on a GPU time between two events, caches flushed and launches queued before."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        if self.cuda:
            self.flush = torch.empty(FLUSH_BYTES // 4, device=device)

    def __call__(self, function: Callable, *arguments) -> tuple[float, object]:
        if not self.cuda:
            begin = time.perf_counter()
            result = function(*arguments)
            return time.perf_counter() - begin, result
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self.flush.zero_()
        torch.cuda._sleep(HEAD_START_CYCLES)
        start.record()
        result = function(*arguments)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3, result


@contextmanager
def below_autograd(wanted: bool) -> Iterator[None]:
    if not wanted:
        yield
        return
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        yield


def _round(case: Case, name: str, calls: tuple[Callable, Callable], stopwatch: Stopwatch) -> tuple[float, float]:
    leaves = case.leaves if case.prepare is None else case.prepare()
    forward, backward = calls
    with below_autograd(name == "kernel"):
        forward_s, outputs = stopwatch(forward, *leaves)
        backward_s = 0.0
        if case.grad_outputs is not None:
            backward_s, _ = stopwatch(backward, outputs, leaves)
    return forward_s, backward_s


class CompileTimeout(BaseException):
    """Raised through inductor, which catches every Exception."""


def compile_formula(case: Case) -> tuple[Callable | None, float | None, str]:
    """The compiled formula, both directions compiled by a first call; how long that took; why not."""

    def stop(_signal, _frame):
        raise CompileTimeout

    torch._dynamo.reset()  # cases share their lambdas' code, of which dynamo keeps only so many versions
    function = torch.compile(case.compilable or case.eager, fullgraph=True, dynamic=False)
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(COMPILE_LIMIT_S)
    begin = time.perf_counter()
    try:
        leaves = case.leaves if case.prepare is None else case.prepare()
        outputs = function(*leaves)
        if case.grad_outputs is not None:
            gradients(case, outputs, leaves, allow_unused=True)
    except CompileTimeout:
        return None, None, f"torch.compile took longer than {COMPILE_LIMIT_S} s"
    except Exception as error:
        return None, None, f"torch.compile: {first_line(error)}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return function, time.perf_counter() - begin, ""


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


def measure(
    case: Case, dtype: str, bandwidth: Bandwidth, device: torch.device, seconds: float, with_compile: bool
) -> Result:
    """Times the contenders of a case in turn for about so many seconds, compilation excepted."""
    compiled, compile_s, why_not = (
        compile_formula(case) if with_compile else (None, None, "not asked for (--no-compile)")
    )
    calls = contenders(case, compiled)
    reasons = {"compiled": why_not, "kernel": "the case gives no kernels"}
    reasons |= {name: absent(name) or f"{package} {NO_SUCH_OP}" for name, package in PACKAGES.items()}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    stopwatch = Stopwatch(device)
    rounds, begin = -WARM_UP_ROUNDS, time.perf_counter()
    gc.collect()
    gc.disable()
    torch._dynamo.config.error_on_recompile = True  # a formula compiled again for each call is no contender
    try:
        while True:
            for name in tuple(calls):
                try:
                    sample = _round(case, name, calls[name], stopwatch)
                except Exception as error:
                    reasons[name] = first_line(error)
                    del calls[name]
                    continue
                if rounds >= 0:
                    samples[name].append(sample)
            rounds += 1
            if rounds == 0:
                begin = time.perf_counter()
            used = time.perf_counter() - begin
            if rounds >= LEAST_ROUNDS and (used >= seconds or (rounds >= ENOUGH_ROUNDS and used >= seconds / 3)):
                break
    finally:
        gc.enable()
        torch._dynamo.config.error_on_recompile = False
    times = {name: _time(case, samples[name]) if name in calls else Time(why_not=reasons[name]) for name in CONTENDERS}
    judged = times["kernel"] if times["kernel"].forward_ms is not None else times["ls"]
    gb_per_s = tuple(
        n_bytes / ms / 1e6 if n_bytes and ms else None
        for n_bytes, ms in ((case.forward_bytes, judged.forward_ms), (case.backward_bytes, judged.backward_ms))
    )
    yardstick = bandwidth.in_place if case.in_place else bandwidth.copy
    share = tuple(None if rate is None else rate / yardstick for rate in gb_per_s)
    return Result(case.op, case.shape, dtype, times, rounds, compile_s, gb_per_s, share)


def _time(case: Case, samples: list[tuple[float, float]]) -> Time:
    forward, backward = zip(*samples, strict=True)
    totals = [f + b for f, b in samples]
    first, middle, third = statistics.quantiles(totals, n=4)
    return Time(
        statistics.median(forward) * 1e3,
        None if case.grad_outputs is None else statistics.median(backward) * 1e3,
        (third - first) / 2 / middle,
    )


# ---- The machine ----


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """GB/s of large buffers, reads plus writes. A plain store of a CPU reads the line that it overwrites; in place that read is the op's own.

    copy_ (torch) and memmove (one call for each thread) are both copies; the faster one is the yardstick of ops that write elsewhere.
    """

    copy_: float
    memmove: float | None
    in_place: float

    @property
    def copy(self) -> float:
        return max(self.copy_, self.memmove or 0.0)


def measure_bandwidth(device: torch.device) -> Bandwidth:
    """Medians of 12 after 3, on memory that was touched before."""
    n_bytes = COPY_BYTES[device.type]
    source = torch.ones(n_bytes // 4, device=device)
    target = torch.zeros_like(source)
    stopwatch = Stopwatch(device)

    def rate(function: Callable) -> float:
        times = [stopwatch(function)[0] for _ in range(15)][3:]
        return 2 * n_bytes / statistics.median(times) / 1e9

    memmove = None
    if device.type == "cpu":
        n_threads = torch.get_num_threads()
        part = n_bytes // n_threads
        with ThreadPoolExecutor(n_threads) as pool:

            def move(i: int) -> None:
                ctypes.memmove(target.data_ptr() + i * part, source.data_ptr() + i * part, part)

            memmove = rate(lambda: list(pool.map(move, range(n_threads))))
    return Bandwidth(rate(lambda: target.copy_(source)), memmove, rate(target.neg_))
