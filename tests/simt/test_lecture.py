"""The counting examples of lecture 10 (kernel fusion), measured: what fusion saves, and what it does not.

The harness counts launches, bytes and barriers; time is the lecture's estimate for an A100 on paper (ls_plugin/report/roofline.py). The
kernels are in kernels/lecture.cu; beside them, where it has the same job, an op of ours.
"""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from torch import Tensor

from ls_plugin.report.roofline import GPUS

from ..conftest import _load_simt_library, build_simt_library
from .control import Simt, Stats
from .test_simt_runtime import Kernels, build

A100 = GPUS["A100"]


@pytest.fixture(scope="module")
def kernels(pytestconfig: pytest.Config) -> Kernels:
    return build(pytestconfig, "simt_kernels")


def run(kernels: Kernels, name: str, *args: Tensor | int | float | bool) -> Stats:
    kinds = {
        Tensor: lambda t: ctypes.c_void_p(t.data_ptr()),
        int: ctypes.c_int,
        bool: ctypes.c_bool,
        float: ctypes.c_float,
    }
    kernels.simt.reset_stats()
    assert kernels(name, *(kinds[type(arg)](arg) for arg in args)) is None
    return kernels.simt.stats()


def moved(stats: Stats) -> int:
    """Every access, as the lecture counts: no cache."""
    return stats.all_memory.read + stats.all_memory.written


def paper_us(n_launches: int, n_bytes: float) -> float:
    return (n_launches * A100.launch_s + n_bytes / A100.bytes_per_s) * 1e6


def test_tri_mat_add_moves_four_arrays_for_six(kernels):
    """Section 2.2: one launch for two, 4 arrays for 6, and the same bits."""
    n = 10_000
    a, b, d, apart, fused = (torch.randn(n) for _ in range(5))
    two = run(kernels, "tri_mat_add", a, b, d, apart, n, False)
    one = run(kernels, "tri_mat_add", a, b, d, fused, n, True)
    assert torch.equal(apart, fused) and torch.equal(fused, a + b + d)
    assert (two.launches, moved(two) / (4 * n)) == (2, 6.0)
    assert (one.launches, moved(one) / (4 * n)) == (1, 4.0)
    # Exercise 1, a million elements: 24 and 16 MB, 23.4 and 14.3 us.
    scale = 1_000_000 / n
    assert (moved(two) * scale, moved(one) * scale) == (24e6, 16e6)
    assert paper_us(two.launches, moved(two) * scale) == pytest.approx(23.4, abs=0.05)
    assert paper_us(one.launches, moved(one) * scale) == pytest.approx(14.3, abs=0.05)


def test_a_launch_costs_as_much_as_half_a_million_additions(kernels):
    """Section 2.1: below that many elements, what fusion saves is the launch; above, the bytes."""
    n = 4096
    a, b, d, e = (torch.randn(n) for _ in range(4))
    bytes_per_addition = moved(run(kernels, "tri_mat_add", a, b, d, e, n, False)) / (2 * n)
    assert int(A100.launch_s * A100.bytes_per_s / bytes_per_addition) == 518_333


@pytest.mark.parametrize(
    "tokens, n_cols, speedup", [(8 * 512, 1024, 1.9), (1, 4096, 3.0)], ids=["training", "decoding"]
)
def test_bias_dropout_residual_moves_five_arrays_for_nine(kernels, tokens, n_cols, speedup):
    """Section 2.3: 1.8 times the traffic in three kernels. A long input gains its bytes, a short one its launches."""
    rows, columns = 16, 256
    x, mask, residual, apart, fused = (torch.randn(rows, columns) for _ in range(5))
    bias = torch.randn(columns)
    three = run(kernels, "bias_dropout_residual", x, bias, mask, residual, apart, rows, columns, False)
    one = run(kernels, "bias_dropout_residual", x, bias, mask, residual, fused, rows, columns, True)
    torch.testing.assert_close(fused, apart)
    assert (three.launches, one.launches) == (3, 1)
    assert moved(three) / moved(one) == pytest.approx(9 / 5)
    scale = tokens * n_cols / x.numel()
    gain = paper_us(3, moved(three) * scale) / paper_us(1, moved(one) * scale)
    assert gain == pytest.approx(speedup, abs=0.05)

    # Ours draws the mask instead of reading it, and neither writes nor keeps one: 4 arrays, the bias among them.
    _load_simt_library()
    simt = Simt(build_simt_library())
    simt.reset_stats()
    torch.ops.ls_simt.bias_dropout_residual_forward(x, bias, residual, 0.1, torch.tensor([5]), 0)
    ours = simt.stats()
    arrays = [ours.regions[name].read for name in ("x", "bias", "residual")] + [ours.regions["y"].written]
    assert ours.launches == 1 and sum(arrays) == 4 * x.nbytes


def test_fused_softmax_moves_two_arrays_for_eight(kernels):
    """Section 4.1, exercise 3: 8 arrays of scores, and what the rows' maxima and sums cost, come down to 2."""
    rows = columns = 64
    x, apart, fused = (torch.randn(rows, columns) for _ in range(3))
    five = run(kernels, "softmax", x, apart, 0.125, rows, columns, 32, False)
    one = run(kernels, "softmax", x, fused, 0.125, rows, columns, 32, True)
    for y in (apart, fused):
        torch.testing.assert_close(y, torch.softmax(0.125 * x, dim=-1))
    assert (five.launches, one.launches) == (5, 1)
    scores = sum(t.read + t.written for name, t in five.regions.items() if not name.startswith("row_"))
    assert scores == 8 * x.nbytes
    assert moved(one) == 2 * x.nbytes


@pytest.mark.parametrize("n_threads", [16, 32, 64, 128, 256])
def test_fusion_saves_no_barrier(kernels, n_threads):
    """Section 4.1, exercise 12: for each row two reductions of log2(threads) rounds, and three barriers more (two unfused). The
    larger the block, the more. Rows that a warp reduces by shuffles need none: our layer norm up to 1,024 columns."""
    rows, columns = 4, 256
    x, y = torch.randn(rows, columns), torch.empty(rows, columns)
    five = run(kernels, "softmax", x, y, 1.0, rows, columns, n_threads, False)
    one = run(kernels, "softmax", x, y, 1.0, rows, columns, n_threads, True)
    assert one.barriers == rows * (2 * int(math.log2(n_threads)) + 3)
    assert one.barriers == five.barriers + rows

    _load_simt_library()
    simt = Simt(build_simt_library())
    simt.reset_stats()
    torch.ops.ls_simt.layer_norm_forward(x, torch.ones(columns), torch.zeros(columns), 1e-5)
    assert simt.stats().barriers == 0
