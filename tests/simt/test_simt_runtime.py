"""The SIMT runtime catches kernels that are wrong, and lets right ones through with CUDA's result.

Each function of ``kernels/wrong.cu`` holds one fault on purpose; ``kernels/right.cu`` checks its own results.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .build import build_library
from .control import Simt

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's value; Python names it from 3.13 on
KERNELS = Path(__file__).parent / "kernels"

# Function of wrong.cu: what the report must say (a regular expression). The place is a source line where that is known.
WRONG = {
    # divergent barriers
    "exit_before_barrier": r"^simt: exit_before_barrier_kernel: block \(0,0,0\): divergent barrier: threads 0-39 at __syncthreads \(wrong.cu:\d+\); threads 40-63 exited",
    "barrier_in_each_branch": r"divergent barrier: threads 0-31 at __syncthreads \(wrong.cu:(\d+)\); "
    r"threads 32-63 at __syncthreads \(wrong.cu:(?!\1\))",
    "shuffle_with_exited_lanes": r"divergent barrier: threads 0-15,32-47 at __shfl_xor_sync with mask 0xffffffff "
    r"\(wrong.cu:\d+\); threads 16-31,48-63 exited",
    "shuffle_against_barrier": r"divergent barrier: threads 0-15 at __syncthreads .*; threads 16-31 at __shfl_sync",
    "different_shuffles": r"divergent barrier: threads 0-15 at __shfl_xor_sync .*; threads 16-31 at __shfl_down_sync",
    # misused warp functions
    "mask_without_caller": r"thread \(16,0,0\): __syncwarp: mask 0x0000ffff must name the calling lane 16 \(wrong.cu:",
    "shuffle_from_unnamed_lane": r"thread \(15,0,0\): __shfl_down_sync reads lane 16, which is not among .* 0x0000ffff",
    "shuffle_from_absent_lane": r"thread \(0,0,0\): __shfl_xor_sync reads lane 16, which is not among",
    "shuffle_width": r"__shfl_xor_sync: width must be a power of two up to 32, got 12",
    "activemask": r"__activemask\(\) names whichever lanes",
    # shared memory read before it is written
    "unwritten_static": r"thread \(31,0,0\): read of shared array 'partial', byte 124, which no thread .* \(wrong.cu:\d+",
    "unwritten_dynamic": r"read of shared array 'dynamic shared memory', byte 0, which no thread of the block has written",
    "unwritten_byte": r"^simt: unwritten_byte_kernel<short, 3>: block \(0,0,0\), thread \(0,0,0\): read of shared array 'word', byte 2, which no thread of the block has written",
    "left_by_another_block": r"block \(1,0,0\), thread \(0,0,0\): read of shared array 'total', byte 0, which no thread",
    "atomic_on_unwritten": r"atomic update of shared array 'counter', byte 0, which no thread .* \(wrong.cu:\d+",
    # out of bounds
    "past_shared_array": r"index 64 is outside of 'float \[64\]' \(wrong.cu:\d+\)",
    "past_shared_pointer": r"write of 4 bytes outside of shared memory, 8 bytes past the end of shared array 'tile'",
    "past_dynamic_shared": r"thread \(32,0,0\): write of 4 bytes outside of shared memory, 0 bytes past the end of",
    "past_global_read": r"thread \(32,0,0\): read of 4 bytes outside of global memory, 0 bytes past the end of region 'x'",
    "past_global_write": r"thread \(32,0,0\): write of 4 bytes outside of global memory, 0 bytes past the end of region 'y'",
    "before_global": r"read of 4 bytes outside of global memory, 4 bytes before region 'x' of 160 bytes \(wrong.cu:\d+",
    "write_to_read_only": r"write to read-only region 'x', byte 0 \(wrong.cu:\d+",
    "null_pointer": r"read of 4 bytes through a null pointer \(wrong.cu:\d+",
    "vector_past_end": r"thread \(3,0,0\): write of .* region 'y'",
    "local_of_another_thread": r"thread \(1,0,0\): read of 4 bytes in the local memory of another thread \(wrong.cu:\d+",
    "register_array": r"index 4 is outside of 'float \[4\]' \(wrong.cu:\d+\)",
    "memset_past_end": r"cudaMemsetAsync of 132 bytes outside of the writable regions, in region 'y'",
    # accesses that nothing orders
    "missing_barrier": r"shared array 'tile', byte 252, which no thread of the block has written",
    "missing_barrier_written": r"unsynchronised accesses to shared array 'tile', byte 0: write by thread \(0,0,0\), "
    r"read by this one; put __syncthreads .* \(wrong.cu:\d+",
    "reused_too_early": r"unsynchronised accesses to shared array 'tile', .*(read|write) by thread .* by this one",
    "same_word": r"unsynchronised accesses to shared array 'flag', byte 0: write by thread .*, write by this one",
    "warp_exchange_unsynchronised": r"unsynchronised accesses to shared array 'tile', byte 0: write by thread \(0,0,0\)",
    "warp_exchange_by_shuffle": r"unsynchronised accesses to shared array 'tile', byte 0: write by thread \(0,0,0\)",
    "across_warps_by_syncwarp": r"unsynchronised accesses to shared array 'tile', byte 0: write by thread \(0,0,0\)",
    "half_warp_sync": r"unsynchronised accesses to shared array 'tile', byte 0: write by thread \(0,0,0\)",
    "overlapping_blocks": r"unsynchronised accesses to region 'y', byte 124: write by thread \(31,0,0\) of another block",
    "read_of_other_block": r"region 'y', byte 0: write by thread \(0,0,0\) of another block, read by this one; "
    r"blocks are ordered only by another launch",
    "atomic_and_plain": r"unsynchronised accesses to region 'y', byte 0: atomic update by thread .*, read by this one",
    "last_block_without_fence": r"unsynchronised accesses to region 'partial', .* of another block, read by this one",
    # misaligned
    "misaligned_vector": r"misaligned address: .*float4.* needs a multiple of 16, this one is 4 past one \(wrong.cu:\d+\)",
    "misaligned_row": r"thread \(1,0,0\): misaligned address: .*uint2.* needs a multiple of 8, this one is 6 past one",
    "misaligned_atomic": r"misaligned address|atomic update of 4 bytes at a misaligned address",
    # arithmetic, aborts, configuration
    "int_offset": r"70000 \* 70000 overflows 'int'; offsets must be 64-bit \(wrong.cu:\d+\)",
    "host_overflow": r"host code: 70000 \* 70000 overflows 'int'",
    "trap": r"__trap\(\) was called \(wrong.cu:\d+",
    "failed_assert": r"assertion failed: n < 3 \(wrong.cu:\d+\)",
    "thrown": r"^thrown by a thread$",
    "too_many_threads": r"block must have 1 to 1024 threads, at most 64 along z, got \(32,33,1\)",
    "empty_grid": r"grid must lie within .*, got \(0,1,1\)",
    "grid_too_high": r"grid must lie within .*, got \(1,65536,1\)",
    "too_much_dynamic_shared": r"smem_bytes must be at most 49152 .*cudaFuncSetAttribute\), got 50176",
    "too_much_static_shared": r"LS_SHARED tile: static shared memory must stay within 49152 bytes",
    "forgotten_dynamic_size": r"0 bytes past the end of shared array 'dynamic shared memory' of 0 bytes",
}
# Where the order of threads decides which of the reports comes first, the shuffled runs only ask for some report.
ANY_ORDER_REPORT = r"simt: |^thrown by a thread$"

RIGHT = re.findall(r"^TEST\((\w+)", (KERNELS / "right.cu").read_text(), re.M)


class Kernels:
    """The test kernels by name; a call returns the report, or None."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self.simt = Simt(self.library)

    def __call__(self, name: str, *args: object) -> str | None:
        function = getattr(self.library, name)
        function.restype = ctypes.c_char_p
        message = function(*args)
        return None if message is None else message.decode()


def build(config: pytest.Config, name: str, *runtime_flags: str) -> Kernels:
    out_dir = config.cache.mkdir("simt")
    sources = sorted(KERNELS.glob("*.cu"))
    return Kernels(build_library(out_dir, sources, [], [KERNELS], runtime_flags=runtime_flags, name=name))


@pytest.fixture(scope="session")
def kernels(pytestconfig: pytest.Config) -> Kernels:
    return build(pytestconfig, "simt_kernels")


@pytest.fixture(scope="session")
def kernels_ucontext(pytestconfig: pytest.Config) -> Kernels:
    return build(pytestconfig, "simt_kernels_ucontext", "-DLS_SIMT_UCONTEXT")


def test_every_wrong_kernel_has_its_report() -> None:
    defined = set(re.findall(r"^TEST\((\w+)", (KERNELS / "wrong.cu").read_text(), re.M))
    assert defined == {*WRONG, "spin"}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernel_is_caught(kernels: Kernels, name: str) -> None:
    message = kernels(name)
    assert message is not None, "the fault was not caught"
    assert re.search(WRONG[name], message), message
    assert kernels("block_sum") is None, "the runtime must go on after a fault"


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernel_is_caught_in_any_order(kernels: Kernels, name: str, seed: int) -> None:
    with kernels.simt.schedule(seed):
        message = kernels(name)
    assert message is not None, "the fault was not caught"
    assert re.search(ANY_ORDER_REPORT, message), message


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("name", RIGHT)
def test_right_kernel_passes(kernels: Kernels, name: str, seed: int) -> None:
    with kernels.simt.schedule(seed):
        assert kernels(name) is None


@pytest.mark.parametrize("width", [32, 16, 8, 1])
@pytest.mark.parametrize("param", [0, 1, 3, 7, 9, 31])
def test_shuffles_follow_cuda(kernels: Kernels, param: int, width: int) -> None:
    """Against the definitions in the CUDA C++ Programming Guide, "Warp Shuffle Functions"."""
    out = (ctypes.c_int * 128)()
    assert kernels("shuffles", out, param, width) is None
    for lane in range(32):
        first = lane - lane % width  # of the lane's segment
        up, down, xor = lane - param, lane + param, lane ^ param
        assert out[lane] == first + param % width
        assert out[32 + lane] == (up if up >= first else lane)
        assert out[64 + lane] == (down if down < first + width else lane)
        assert out[96 + lane] == (xor if xor < first + width else lane)


def test_schedule_changes_the_order_and_repeats(kernels: Kernels) -> None:
    def last_writer(seed: int) -> int:
        out = ctypes.c_int(-1)
        with kernels.simt.schedule(seed):
            assert kernels("last_writer", ctypes.byref(out)) is None
        return out.value

    assert last_writer(0) == 3 * 64 - 1
    winners = [last_writer(seed) for seed in range(1, 9)]
    assert winners == [last_writer(seed) for seed in range(1, 9)]
    assert len({w // 64 for w in winners}) > 1, "blocks run in one order"
    assert len({w % 64 for w in winners}) > 1, "threads run in one order"


def test_traffic_is_counted(kernels: Kernels) -> None:
    kernels.simt.reset_stats()
    n_rows, n_cols = 5, 96
    assert kernels("scale", n_rows, n_cols) is None
    stats = kernels.simt.stats()
    n_bytes = 4 * n_rows * n_cols
    assert (stats.launches, stats.blocks, stats.barriers, stats.warp_collectives) == (1, n_rows, 0, 0)
    assert stats.regions["x"].read == stats.regions["x"].cold_read == n_bytes
    assert stats.regions["y"].written == stats.regions["y"].cold_written == n_bytes
    assert (stats.regions["y"].read, stats.regions["x"].written) == (0, 0)
    assert stats.regions["weight"].read == n_bytes
    assert stats.regions["weight"].cold_read == 4 * n_cols
    assert (stats.all_memory.read, stats.all_memory.cold_read) == (2 * n_bytes, n_bytes + 4 * n_cols)

    kernels.simt.reset_stats()
    assert kernels("block_sum") is None
    stats = kernels.simt.stats()
    assert (stats.barriers, stats.warp_collectives) == (5, 5 * 4 * 5)


def test_offset_beyond_two_gigaelements(kernels: Kernels) -> None:
    """A mapping of 12 GB of which one page is touched, and as little of its shadow."""
    offset = 3 * 2**30
    with mmap.mmap(-1, 4 * (offset + 32), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE) as sparse:
        buffer = (ctypes.c_float * 1).from_buffer(sparse)
        kernels.simt.reset_stats()
        assert kernels("far_offset", ctypes.c_void_p(ctypes.addressof(buffer)), ctypes.c_int64(offset)) is None
        assert sparse[4 * (offset + 31) : 4 * (offset + 32)] == b"\x00\x00\x80\x3f"
        assert kernels.simt.stats().all_memory.cold_written == 32 * 4
        del buffer


def test_spinning_kernel_is_stopped(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LS_SIMT_TIMEOUT", "1")
    message = kernels("spin")
    assert message is not None and "a thread may be spinning" in message, message


def test_faults_leave_nothing_behind(kernels: Kernels) -> None:
    """A thousand abandoned launches cost no stacks and no shadow memory."""

    def resident_pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    for _ in range(50):
        kernels("missing_barrier")
    before = resident_pages()
    for _ in range(1000):
        kernels("shuffle_width")
    assert resident_pages() - before < 512  # 2 MB


def test_launches_from_several_threads(kernels: Kernels) -> None:
    """PyTorch runs backward passes on threads of its own."""
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(kernels, ["nothing"] * 30)) == [None] * 30


def test_speed(kernels: Kernels) -> None:
    """Hundreds of launches must fit into a test run: 256 rows of 1,024 take well under a second, instrumented."""
    start = time.process_time()  # not disturbed by what else the machine does
    assert kernels("scale", 256, 1024) is None
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize(
    "name", [*(n for n in RIGHT if n != "many_blocks"), "exit_before_barrier", "missing_barrier_written", "thrown"]
)
def test_ucontext_fallback(kernels_ucontext: Kernels, name: str) -> None:
    """The switch for machines other than x86-64 does the same."""
    message = kernels_ucontext(name)
    if name in RIGHT:
        assert message is None
    else:
        assert message is not None and re.search(WRONG[name], message), message


def test_no_sanitizer_symbol_leaks(kernels: Kernels) -> None:
    """The hooks stay inside the library: a process may hold another one, or a real sanitizer."""
    symbols = subprocess.run(["nm", "-D", kernels.path], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"__(tsan|ubsan)_|__assert_fail", symbols)
