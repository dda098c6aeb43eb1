"""What the SIMT harness shows of embedding: the bytes that it moves, that no order of threads and blocks changes a bit, its refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ..conftest import _load_simt_library, build_simt_library
from .control import Simt, Traffic

PAD = 1
SEED = torch.tensor([5])
TOKEN_BYTES = 8
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(scope="module")
def simt() -> Simt:
    _load_simt_library()
    return Simt(build_simt_library())


def n_bytes(t: Tensor) -> int:
    return t.numel() * t.element_size()


def make_tokens(n_sentences: int, n_tokens: int, n_embeddings: int) -> Tensor:
    """The first sentence is full; the others are padded, to the left or to the right. Ids repeat."""
    tokens = torch.randint(2, n_embeddings, (n_sentences, n_tokens), generator=torch.Generator().manual_seed(1))
    for b in range(1, n_sentences):
        n_pad = b % n_tokens // 2
        tokens[b, slice(0, n_pad) if b % 2 else slice(n_tokens - n_pad, n_tokens)] = PAD
    return tokens


def call(simt: Simt, tokens: Tensor, n_embeddings: int, n_cols: int, dtype: torch.dtype, deterministic: bool):
    """y, grad_weight, grad_positions, and the traffic of the forward and of the backward by argument."""
    torch.manual_seed(0)
    n_positions = tokens.shape[1] + PAD + 2
    weight, positions = (torch.randn(n, n_cols).to(dtype) for n in (n_embeddings, n_positions))
    grad_y = torch.randn(*tokens.shape, n_cols).to(dtype)
    arguments = (PAD, 2.0, 0.1, SEED, 1)
    simt.reset_stats()
    y = torch.ops.ls_simt.embedding_forward(tokens, weight, positions, *arguments)
    forward = simt.stats().regions
    simt.reset_stats()
    grads = torch.ops.ls_simt.embedding_backward(
        grad_y, tokens, *arguments, n_embeddings, n_positions, True, True, deterministic
    )
    return (y, *grads), forward, simt.stats().regions


# (B, T, V, C): teams of a warp to a whole block, several rounds of columns; vectors and single elements; long sentences.
SHAPES = [(3, 9, 12, 40), (2, 70, 30, 264), (2, 9, 12, 1003), (1, 5, 9, 2056), (2, 300, 30, 16)]


@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_no_order_changes_a_bit(simt, shape, dtype):
    n_sentences, n_tokens, n_embeddings, n_cols = shape
    arguments = (make_tokens(n_sentences, n_tokens, n_embeddings), n_embeddings, n_cols, dtype, True)
    expected, _, _ = call(simt, *arguments)
    for seed in (1, 2):
        with simt.schedule(seed):
            shuffled, _, _ = call(simt, *arguments)
        assert all(torch.equal(a, b) for a, b in zip(expected, shuffled, strict=True))


def test_atomics_add_in_any_order(simt):
    """Which is why use_deterministic_algorithms avoids them; what they give is right all the same."""
    tokens = make_tokens(2, 70, 8)
    expected, _, _ = call(simt, tokens, 8, 40, torch.float32, True)
    by_atomics = []
    for seed in (1, 2):
        with simt.schedule(seed):
            (_, grad_weight, _), _, _ = call(simt, tokens, 8, 40, torch.float32, False)
        torch.testing.assert_close(grad_weight, expected[1], rtol=1e-5, atol=1e-4)
        by_atomics.append(grad_weight)
    assert not torch.equal(*by_atomics)


@DTYPES
@pytest.mark.parametrize("n_cols", [512, 1003])
def test_forward_moves_each_row_once(simt, n_cols, dtype):
    """Each token's row is read and its output written once; the tokens before a block's own are counted by the block."""
    tokens, n_embeddings = make_tokens(3, 64, 40), 40
    (y, _, _), forward, _ = call(simt, tokens, n_embeddings, n_cols, dtype, True)
    row_bytes = n_cols * y.element_size()
    assert forward["y"] == Traffic(0, n_bytes(y), 0, n_bytes(y))
    assert forward["weight"].read == forward["positions"].read == n_bytes(y)
    assert forward["weight"].cold_read == tokens.unique().numel() * row_bytes
    assert forward["tokens"].cold_read == n_bytes(tokens)
    floor = 3 * n_bytes(y) + n_bytes(tokens)
    assert sum(region.read + region.written for region in forward.values()) <= 1.05 * floor


@DTYPES
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("n_cols", [512, 1003])
def test_backward_reads_the_gradient_once_per_table(simt, n_cols, dtype, deterministic):
    tokens, n_embeddings = make_tokens(3, 64, 2000), 2000
    (y, _, grad_positions), _, backward = call(simt, tokens, n_embeddings, n_cols, dtype, deterministic)
    n_words, n_types = int((tokens != PAD).sum()), tokens[tokens != PAD].unique().numel()
    row_bytes = n_cols * y.element_size()
    assert backward["grad_y"].read == 2 * n_words * row_bytes
    assert backward["grad_positions"] == Traffic(0, n_bytes(grad_positions), 0, n_bytes(grad_positions))
    # Of the gradient only the rows of tokens that occur, after a cudaMemsetAsync over all of it, which is not counted here.
    assert backward["grad_weight"].cold_written == n_types * row_bytes
    if dtype == torch.float32 and not deterministic:
        assert backward["grad_weight"].read == backward["grad_weight"].written == n_words * row_bytes
        assert "sorted_tokens" not in backward
    else:
        assert backward["grad_weight"] == Traffic(0, n_types * row_bytes, 0, n_types * row_bytes)
        assert backward["sorted_tokens"].cold_read == n_bytes(tokens)
        assert backward["sorted_rows"].cold_read == n_words * TOKEN_BYTES
