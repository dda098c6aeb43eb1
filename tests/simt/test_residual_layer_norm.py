"""residual_layer_norm on the SIMT harness: bytes moved, and that no order of blocks and threads changes a bit."""

import pytest
import torch

from .helpers import n_bytes, traffic


def run(n_rows, n_cols, dtype, p=0.3):
    generator = torch.Generator().manual_seed(0)
    x, residual, grad_sum, grad_y = (torch.randn(n_rows, n_cols, generator=generator).to(dtype) for _ in range(4))
    bias, weight, norm_bias = (torch.randn(n_cols, generator=generator).to(dtype) for _ in range(3))
    seed = torch.tensor(5)
    op = torch.ops.ls_simt
    total, y, mean, rstd = op.residual_layer_norm_forward(x, bias, residual, weight, norm_bias, p, seed, 2, 1e-5)
    grads = op.residual_layer_norm_backward(grad_sum, grad_y, total, weight, mean, rstd, p, seed, 2, *(True,) * 5)
    return total, y, mean, rstd, *grads


# One per kind of instance: rows in a warp with 8, 16 and 32 elements per lane, in a block; vectors and single elements.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("n_rows, n_cols", [(70, 40), (37, 512), (37, 999), (35, 1032), (33, 1101)])
def test_no_order_changes_a_bit(simt, n_rows, n_cols, dtype):
    expected = run(n_rows, n_cols, dtype)
    for seed in (1, 2):
        with simt.schedule(seed):
            shuffled = run(n_rows, n_cols, dtype)
        assert all(torch.equal(a, b) for a, b in zip(expected, shuffled, strict=True))


@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize(
    "n_cols, reads, reads_backward", [(256, 1, 1), (512, 1, 1), (1003, 1, 1), (1024, 1, 1), (2048, 2, 3)]
)
def test_rows_in_registers_move_each_element_once(simt, n_cols, reads, reads_backward, p):
    """Longer rows: the sum is read back by the block that wrote it, and in the backward twice and once more for the column sums; those of
    the bias read the gradient that was stored."""
    x, residual, grad_sum, grad_y = (torch.randn(64, n_cols, dtype=torch.bfloat16) for _ in range(4))
    bias, weight, norm_bias = (torch.randn(n_cols, dtype=torch.bfloat16) for _ in range(3))
    seed = torch.tensor(5)
    op, size = torch.ops.ls_simt, n_bytes(x)
    with traffic(simt) as moved:
        total, _y, mean, rstd = op.residual_layer_norm_forward(x, bias, residual, weight, norm_bias, p, seed, 0, 1e-5)
    assert moved["x"].read == moved["residual"].read == moved["sum"].written == moved["y"].written == size
    assert moved["y"].read == 0 and moved["sum"].read == (reads - 1) * size
    with traffic(simt) as moved:
        op.residual_layer_norm_backward(grad_sum, grad_y, total, weight, mean, rstd, p, seed, 0, *(True,) * 5)
    assert moved["sum"].read == moved["grad_y"].read == reads_backward * size
    assert moved["grad_sum"].read == moved["grad_residual"].written == size
    if p > 0.0:
        assert moved["grad_x"].written == size
    else:
        assert "grad_x" not in moved  # the same tensor as grad_residual
    # Three partial rows per chunk of 32 rows, written and read once: for a bf16 matrix 3/16 of its traffic in either direction.
    assert moved["partials"].read == moved["partials"].written == 3 * 2 * n_cols * 4
    stored = "grad_x" if p > 0.0 else "grad_residual"
    assert moved[stored].read == (0 if reads == 1 else size)
