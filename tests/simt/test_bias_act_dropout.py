"""bias_act_dropout on the SIMT harness: bytes moved, and that no order of blocks and threads changes a bit."""

import pytest
import torch

from .helpers import n_bytes, traffic

SEED = torch.tensor([5])
RELU, GELU, GELU_ACCURATE, TANH, RELU_SQUARED = range(5)
SAVES_OUTPUT = (RELU, TANH)


def inputs(n_rows: int, n_cols: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """x, bias, grad_y."""
    torch.manual_seed(0)
    x, grad_y = (torch.randn(n_rows, n_cols).to(dtype) for _ in range(2))
    return x, torch.randn(n_cols).to(dtype), grad_y


def saved_of(activation: int, x: torch.Tensor, bias: torch.Tensor, y: torch.Tensor) -> tuple:
    return (y, None) if activation in SAVES_OUTPUT else (x, bias)


@pytest.mark.parametrize("activation", range(5))
@pytest.mark.parametrize("n_cols", [512, 1003])
def test_moves_each_element_once(simt, n_cols, activation):
    x, bias, grad_y = inputs(64, n_cols, torch.bfloat16)
    op = torch.ops.ls_simt
    with traffic(simt) as moved:
        y = op.bias_act_dropout_forward(x, bias, activation, 0.1, SEED, 0)
    assert moved["x"].read == moved["y"].written == n_bytes(x)
    assert moved["y"].read == 0
    assert moved["bias"].cold_read == n_bytes(bias)
    with traffic(simt) as moved:
        op.bias_act_dropout_backward(grad_y, *saved_of(activation, x, bias, y), activation, 0.1, SEED, 0, True)
    assert moved["grad_y"].read == moved["saved"].read == moved["grad_x"].written == n_bytes(x)
    # One partial row per chunk of 32 rows, written and read once: 1/8 of a bf16 gradient's traffic in either direction.
    assert moved["partials"].read == moved["partials"].written == 2 * n_cols * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("n_rows, n_cols", [(70, 264), (3, 1003)])
@pytest.mark.parametrize("activation", [RELU, GELU])
def test_no_order_changes_a_bit(simt, activation, n_rows, n_cols, dtype):
    x, bias, grad_y = inputs(n_rows, n_cols, dtype)

    def call():
        op = torch.ops.ls_simt
        y = op.bias_act_dropout_forward(x, bias, activation, 0.3, SEED, 2)
        saved = saved_of(activation, x, bias, y)
        return y, *op.bias_act_dropout_backward(grad_y, *saved, activation, 0.3, SEED, 2, True)

    expected = call()
    for seed in (1, 2):
        with simt.schedule(seed):
            assert all(torch.equal(a, b) for a, b in zip(expected, call(), strict=True))
