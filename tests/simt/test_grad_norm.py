"""grad_norm on the SIMT harness: bytes moved, launches, alignment, order of blocks and threads."""

import pytest
import torch

from .helpers import at_offset, n_bytes, traffic

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CHUNK = 16384


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_elem", [1, CHUNK, 2 * CHUNK + 1003])
def test_reads_each_element_once_in_two_launches(simt, n_elem, dtype):
    grad = torch.randn(n_elem).to(dtype)
    with traffic(simt) as moved:
        torch.ops.ls_simt.grad_norm([grad], None, 1.0)
    n_chunks = -(-n_elem // CHUNK)
    assert moved["grad"].read == n_bytes(grad) and moved["grad"].written == 0
    assert moved["partials"].read == moved["partials"].written == 4 * n_chunks
    assert (moved["norm"].written, moved["coefficient"].written, moved["overflow"].written) == (4, 4, 1)
    assert simt.stats().launches == 2
    assert simt.stats().barriers == n_chunks + 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_alignment_nor_order_changes_a_bit(simt, dtype):
    torch.manual_seed(0)
    grad = torch.randn(CHUNK + 1003).to(dtype)
    expected = torch.ops.ls_simt.grad_norm([grad], None, 1.0)
    for offset in range(8):
        with simt.schedule(offset):
            actual = torch.ops.ls_simt.grad_norm([at_offset(grad, offset)], None, 1.0)
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_more_chunks_than_finishing_threads(simt):
    """1,024 threads add up 2,100 chunks; empty and one-element buffers have theirs too."""
    grads = [torch.full((1,), 2.0)] * 2100 + [torch.empty(0)]
    norm, _, _ = torch.ops.ls_simt.grad_norm(grads, None, 0.0)
    assert norm.item() == pytest.approx(8400**0.5, rel=1e-7)
