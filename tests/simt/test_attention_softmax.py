"""What the SIMT harness shows of attention_softmax: the bytes that it moves, and that no order of threads and blocks changes a bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ..conftest import _load_simt_library, build_simt_library
from .control import Simt, Traffic

SEED = torch.tensor([5])
VEC_BYTES = 16


@pytest.fixture(scope="module")
def simt() -> Simt:
    _load_simt_library()
    return Simt(build_simt_library())


def n_bytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


def call(simt: Simt, shape, dtype, *, causal=False, padding=None, bias=None, p=0.1):
    """probs, row_stats, grad_scores, and the traffic of the forward and of the backward by argument."""
    torch.manual_seed(0)
    scores, grad_probs = (torch.randn(shape).to(dtype) for _ in range(2))
    arguments = (padding, bias, causal, 0.5, p, SEED if p > 0 else None, 1)
    simt.reset_stats()
    probs, row_stats = torch.ops.ls_simt.attention_softmax_forward(scores, *arguments, p > 0)
    forward = simt.stats().regions
    simt.reset_stats()
    saved = (scores, row_stats) if p > 0 else (probs, None)
    grad_scores = torch.ops.ls_simt.attention_softmax_backward(grad_probs, *saved, *arguments)
    return (probs, row_stats, grad_scores), forward, simt.stats().regions


# One per kind of instance: teams of four and of 32 lanes, of several groups a lane, a block, a long row; vectors and single keys.
N_KEYS = [27, 32, 200, 333, 512, 1000, 1001, 2056, 8200]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("n_keys", N_KEYS)
def test_no_order_changes_a_bit(simt, n_keys, dtype):
    shape = (2, 2, 5, n_keys)
    masks = {
        "causal": True,
        "padding": torch.rand(2, n_keys) < 0.2,
        "bias": torch.zeros(n_keys, dtype=dtype).expand(shape),
    }
    expected, _, _ = call(simt, shape, dtype, **masks)
    for seed in (1, 2):
        with simt.schedule(seed):
            shuffled, _, _ = call(simt, shape, dtype, **masks)
        assert all(torch.equal(a, b) for a, b in zip(expected, shuffled, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("n_keys", N_KEYS)
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_moves_each_element_once(simt, n_keys, dtype, p):
    """Rows beyond the registers are read twice by the block that owns them, the second time from a cache."""
    shape = (1, 2, 3, n_keys)
    n_rows, reads = 6, 2 if n_keys > 8192 else 1
    (probs, _, _), forward, backward = call(simt, shape, dtype, p=p)
    matrix = n_bytes(probs)
    assert forward["scores"] == Traffic(reads * matrix, 0, matrix, 0)
    assert forward["probs"] == Traffic(0, matrix, 0, matrix)
    for name in ("grad_probs", "saved"):
        assert backward[name] == Traffic(reads * matrix, 0, matrix, 0)
    assert backward["grad_scores"] == Traffic(0, matrix, 0, matrix)
    # Beyond the floor: four bytes a row, 6 % of the 64 bytes of the shortest row in 16 bits, 1 % from 200 keys on.
    assert ("row_stats" in forward) == (p > 0)
    if p > 0:
        assert forward["row_stats"].written == backward["row_stats"].cold_read == n_rows * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("n_keys", [27, 64, 512, 1001])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_does_not_read_what_causality_hides(simt, n_keys, dtype, p):
    """But for the rest of the vector that the diagonal cuts."""
    n_queries = min(n_keys, 64)
    width = VEC_BYTES // dtype.itemsize if n_keys % (VEC_BYTES // dtype.itemsize) == 0 else 1
    seen = [n_keys - n_queries + t + 1 for t in range(n_queries)]
    read = sum(-(-n // width) * width for n in seen) * dtype.itemsize
    (probs, _, _), forward, backward = call(simt, (1, 1, n_queries, n_keys), dtype, causal=True, p=p)
    assert forward["scores"].read == read
    assert backward["grad_probs"].read == backward["saved"].read == read
    assert forward["probs"].written == backward["grad_scores"].written == n_bytes(probs)


def test_masks_are_read_as_bytes_of_their_own(simt):
    """A bias that is broadcast is read from a cache but for once; padding is one byte a key."""
    shape = (2, 4, 16, 64)
    bias = torch.randn(16, 64, dtype=torch.bfloat16)
    padding = torch.zeros(2, 64, dtype=torch.bool)
    padding[0, 50:] = True
    _, forward, backward = call(simt, shape, torch.bfloat16, padding=padding, bias=bias.expand(shape))
    for traffic in (forward, backward):
        assert traffic["bias"].cold_read == n_bytes(bias)
        assert traffic["key_padding_mask"].cold_read == n_bytes(padding)


@pytest.mark.parametrize("offsets", [(1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=["scores", "padding", "bias"])
def test_any_misaligned_argument_gives_the_same_bits(simt, offsets):
    """Key by key instead of by vectors."""
    shape = (2, 3, 9, 64)
    torch.manual_seed(0)
    tensors = [torch.randn(shape), torch.rand(2, 64) < 0.2, torch.randn(shape)]
    moved = []
    for t, offset in zip(tensors, offsets, strict=True):
        storage = t.new_empty(t.numel() + offset)
        moved.append(storage[offset:].view(t.shape).copy_(t))
    results = [
        torch.ops.ls_simt.attention_softmax_forward(*arguments, False, 1.0, 0.1, SEED, 0, True)
        for arguments in (tensors, moved)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
