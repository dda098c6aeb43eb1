"""What the SIMT harness shows of the CUDA kernels beyond their results, which tests/ops checks on the backend ``simt``.

The bytes that they move, that no order of threads and blocks changes a bit, offsets beyond 2^31 elements, pointers of every
alignment, and the launchers' own refusals.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ..conftest import ROOT
from .build import build_library
from .helpers import at_offset, n_bytes, traffic

MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux's value; Python names it from 3.13 on
PAD = 1
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


# ---- Calls, each giving its outputs ----


def bias_dropout_residual(n_rows: int, n_cols: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x, residual, grad_y = (torch.randn(n_rows, n_cols).to(dtype) for _ in range(3))
    bias, seed = torch.randn(n_cols).to(dtype), torch.tensor(5)
    op = torch.ops.ls_simt
    y = op.bias_dropout_residual_forward(x, bias, residual, 0.3, seed, 2)
    return y, *op.bias_dropout_residual_backward(grad_y, 0.3, seed, 2, True, True)


def layer_norm(n_rows: int, n_cols: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    x, grad_y = (torch.randn(n_rows, n_cols).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(n_cols).to(dtype) for _ in range(2))
    op = torch.ops.ls_simt
    y, mean, rstd = op.layer_norm_forward(x, weight, bias, 1e-5)
    return y, mean, rstd, *op.layer_norm_backward(grad_y, x, weight, mean, rstd, True, True)


def cross_entropy(n_rows: int, n_cols: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    logits = torch.randn(n_rows, n_cols).to(dtype)
    target = torch.randint(2, n_cols, (n_rows,))
    target[0] = PAD
    op = torch.ops.ls_simt
    loss, nll = op.label_smoothed_cross_entropy_forward(logits, target, logits, 0.1, PAD, 1.0)
    op.label_smoothed_cross_entropy_backward(logits, torch.linspace(0.5, 1.5, n_rows), 1.0)
    return loss, nll, logits


def adam(n_elem: int, _: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    param, grad = (torch.randn(n_elem).to(dtype) for _ in range(2))
    exp_avg, exp_avg_sq = torch.randn(n_elem), torch.rand(n_elem)
    torch.ops.ls_simt.adam_step(param, grad, exp_avg, exp_avg_sq, *[None] * 4, 1e-3, 0.9, 0.98, 1e-8, 0.01, 3, True)
    return param, grad, exp_avg, exp_avg_sq


# One call per kind of instance: rows in part of a warp, in a warp, in a block; vectors and single elements.
CALLS: list[tuple[Callable[..., tuple[Tensor, ...]], int, int]] = [
    (bias_dropout_residual, 70, 264),
    (bias_dropout_residual, 3, 1003),
    (layer_norm, 70, 40),
    (layer_norm, 70, 512),
    (layer_norm, 37, 999),
    (layer_norm, 35, 2056),
    (cross_entropy, 5, 1000),
    (cross_entropy, 3, 4099),
    (cross_entropy, 2, 25_001),
    (adam, 1027, 0),
]
call_name = [f"{call.__name__}-{n_rows}x{n_cols}" for call, n_rows, n_cols in CALLS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("call, n_rows, n_cols", CALLS, ids=call_name)
def test_no_order_changes_a_bit(simt, call, n_rows, n_cols, dtype):
    expected = call(n_rows, n_cols, dtype)
    for seed in (1, 2):
        with simt.schedule(seed):
            shuffled = call(n_rows, n_cols, dtype)
        assert all(torch.equal(a, b) for a, b in zip(expected, shuffled, strict=True))


# ---- Bytes moved ----


@pytest.mark.parametrize("n_cols", [512, 1003])
def test_bias_dropout_residual_moves_each_element_once(simt, n_cols):
    x, residual, grad_y = (torch.randn(64, n_cols, dtype=torch.bfloat16) for _ in range(3))
    bias, seed = torch.randn(n_cols, dtype=torch.bfloat16), torch.tensor(5)
    with traffic(simt) as moved:
        torch.ops.ls_simt.bias_dropout_residual_forward(x, bias, residual, 0.1, seed, 0)
    assert moved["x"].read == moved["residual"].read == moved["y"].written == n_bytes(x)
    assert moved["y"].read == 0
    with traffic(simt) as moved:
        torch.ops.ls_simt.bias_dropout_residual_backward(grad_y, 0.1, seed, 0, True, True)
    assert moved["grad_y"].read == moved["grad_x"].written == n_bytes(grad_y)
    # One partial row per chunk of 32 rows, written and read once: 1/8 of a bf16 gradient's traffic in either direction.
    assert moved["partials"].read == moved["partials"].written == 2 * n_cols * 4


@pytest.mark.parametrize("n_cols, reads, reads_backward", [(64, 1, 1), (512, 1, 1), (1003, 1, 1), (2048, 2, 3)])
def test_layer_norm_reads_rows_in_registers_once(simt, n_cols, reads, reads_backward):
    """Longer rows are read twice by the block that owns them, the second time from a cache, and once for the column sums."""
    x, grad_y = (torch.randn(64, n_cols) for _ in range(2))
    weight, bias = torch.ones(n_cols), torch.zeros(n_cols)
    op = torch.ops.ls_simt
    with traffic(simt) as moved:
        _y, mean, rstd = op.layer_norm_forward(x, weight, bias, 1e-5)
    assert moved["x"].read == reads * n_bytes(x)
    assert moved["x"].cold_read == moved["y"].written == n_bytes(x)
    with traffic(simt) as moved:
        op.layer_norm_backward(grad_y, x, weight, mean, rstd, True, True)
    assert moved["x"].read == moved["grad_y"].read == reads_backward * n_bytes(x)
    assert moved["grad_x"].written == n_bytes(x)
    assert moved["partials"].read == moved["partials"].written == 2 * 2 * n_cols * 4


@pytest.mark.parametrize(
    "n_cols, dtype, reads",
    [(8000, torch.float32, 1), (24_064, torch.bfloat16, 1), (24_072, torch.bfloat16, 2), (12_040, torch.float32, 2)],
)
def test_cross_entropy_reads_cached_rows_once(simt, n_cols, dtype, reads):
    logits = at_offset(torch.randn(2, n_cols).to(dtype), 0)
    grad = at_offset(torch.empty_like(logits), 0)
    target = torch.tensor([3, PAD])
    with traffic(simt) as moved:
        torch.ops.ls_simt.label_smoothed_cross_entropy_forward(logits, target, grad, 0.1, PAD, 1.0)
    row_bytes = n_cols * logits.element_size()
    n_threads = 512
    assert (
        moved["logits"].read == reads * row_bytes + n_threads * logits.element_size()
    )  # the target's, by every thread
    assert moved["logits"].cold_read == row_bytes  # the ignored row is not read
    assert moved["grad"].written == 2 * row_bytes
    grad_loss = torch.tensor([0.5, 1.0])
    with traffic(simt) as moved:
        torch.ops.ls_simt.label_smoothed_cross_entropy_backward(grad, grad_loss, 1.0)
    assert moved["grad"].read == moved["grad"].written == row_bytes  # the row with factor 1 is left alone


# ---- Alignment ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_cols", [1, 2, 7, 9, 40, 67])
@pytest.mark.parametrize("logits_offset, grad_offset", [(0, 0), (3, 3), (7, 7), (0, 1), (5, 2)])
def test_cross_entropy_rows_may_start_anywhere(simt, dtype, n_cols, logits_offset, grad_offset):
    logits = at_offset(torch.randn(9, n_cols).to(dtype), logits_offset)
    grad = at_offset(torch.full_like(logits, torch.nan), grad_offset)
    target = torch.arange(9) % n_cols
    loss, nll = torch.ops.ls_simt.label_smoothed_cross_entropy_forward(logits, target, grad, 0.1, -100, 1.0)
    log_q = torch.log_softmax(logits.double(), dim=-1)
    p = torch.full((9, n_cols), 0.1 / max(n_cols - 1, 1), dtype=torch.float64)
    p[torch.arange(9), target] = 0.9 if n_cols > 1 else 1.0
    torch.testing.assert_close(nll.double(), -log_q[torch.arange(9), target], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss.double(), -(p * log_q).sum(-1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad.double(), log_q.exp() - p, rtol=torch.finfo(dtype).eps, atol=1e-6)


# ---- Sizes ----


def test_cross_entropy_beyond_two_to_the_31_elements(simt):
    """The last of 2,049 rows of 2^20 logits starts at element 2^31. The other rows are ignored, or scaled by one, and so not
    touched: the 4 GB are address space without memory."""
    n_rows, n_cols = 2049, 1 << 20
    mapping = mmap.mmap(-1, n_rows * n_cols * 2, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    logits = torch.frombuffer(mapping, dtype=torch.bfloat16).view(n_rows, n_cols)
    logits[-1, 5] = 20.0
    target = torch.full((n_rows,), PAD)
    target[-1] = 5
    loss, _ = torch.ops.ls_simt.label_smoothed_cross_entropy_forward(logits, target, None, 0.0, PAD, 1.0)
    exact = torch.nn.functional.cross_entropy(logits[-1:].double(), target[-1:])
    torch.testing.assert_close(loss[-1].double(), exact, rtol=0, atol=1e-5)
    assert loss[:-1].abs().sum() == 0
    grad_loss = torch.ones(n_rows)
    grad_loss[-1] = 0.5
    torch.ops.ls_simt.label_smoothed_cross_entropy_backward(logits, grad_loss, 1.0)
    assert logits[-1, 5] == 10.0


# ---- Refusals ----


@pytest.mark.parametrize(
    "name, message",
    {
        "target_outside_the_vocabulary": r"__trap\(\) was called \(label_smoothed_cross_entropy.cu:\d+",
        "token_outside_the_vocabulary": r"embedding_forward_kernel<float, 4>: block .*: __trap\(\) was called",
        "sentence_beyond_the_table_of_positions": r"embedding_forward_kernel<float, 4>: block .*: __trap\(\) was called",
        "more_blocks_than_a_grid_has": r"^layer_norm_forward: input needs 2147483648 thread blocks, expected at most 2147483647; "
        r"split the input along its first dimension$",
        "unknown_dtype": r"^adam_step: dtype code 7 is none of float32, float16, bfloat16$",
    }.items(),
)
def test_launchers_refuse(name, message, capfd):
    kernels = ROOT / "kernels"
    path = build_library(
        ROOT / "build" / "simt",
        cu_sources=sorted((kernels / "cuda").glob("*.cu")),
        cpp_sources=[ROOT / "tests" / "simt" / "cuda_launchers.cpp"],
        include_dirs=[kernels, ROOT / "tests" / "simt", Path(torch.__file__).parent / "include"],
        extra_flags=["-DTORCH_TARGET_VERSION=0x020a000000000000"],  # as conftest.py has it: the objects are shared
        name="ls_simt_launchers",
    )
    function = getattr(ctypes.CDLL(str(path)), name)
    function.restype = ctypes.c_char_p
    assert re.search(message, function().decode())
    printed = {
        "target_outside_the_vocabulary": "target[1] is 8, expected 0 <= target < V = 8 or ignore_index = 1",
        "token_outside_the_vocabulary": "token 8 at position 5 of the batch is outside the vocabulary of 8 entries",
        "sentence_beyond_the_table_of_positions": "sentence 0 needs position 4 of a table of 4",
    }
    assert printed.get(name, "") in capfd.readouterr().out
