"""adam_step on the SIMT harness: bytes moved, and slices of every alignment."""

import pytest
import torch

from ls_plugin.reference import split_master

from .helpers import at_offset, n_bytes, traffic

OPTIONS = (1e-3, 0.9, 0.98, 1e-8, 0.01, 3)
HALF = [torch.float16, torch.bfloat16]


def buffers(kind: str, n_elem: int) -> dict[str, torch.Tensor | None]:
    """The first six arguments, with 16-bit gradients but for fp32."""
    torch.manual_seed(0)
    param, grad, exp_avg, exp_avg_sq = torch.randn(n_elem), torch.randn(n_elem), torch.randn(n_elem), torch.rand(n_elem)
    copy = low = None
    if kind == "bf16":
        param, grad = param.bfloat16(), grad.bfloat16()
    elif kind.startswith("copy"):
        grad = grad.to(HALF[kind == "copy bf16"])
        copy = torch.zeros_like(grad)
    elif kind == "split":
        grad = grad.bfloat16()
        param, low = split_master(param)
    return dict(param=param, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, param_copy=copy, param_low=low)


KINDS = {"fp32": 28, "bf16": 22, "copy fp16": 28, "copy bf16": 28, "split": 26}  # bytes per element, without zeroing


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_elem", [1, 4096, 5003])
def test_moves_each_element_once(simt, n_elem, kind):
    arguments = buffers(kind, n_elem)
    with traffic(simt) as moved:
        torch.ops.ls_simt.adam_step(*arguments.values(), None, None, *OPTIONS, False)
    for name in ("param", "exp_avg", "exp_avg_sq", "param_low"):
        if arguments[name] is not None:
            assert moved[name].read == moved[name].written == n_bytes(arguments[name]), name
    assert moved["grad"].read == n_bytes(arguments["grad"]) and moved["grad"].written == 0
    if arguments["param_copy"] is not None:
        assert moved["param_copy"].written == 2 * n_elem and moved["param_copy"].read == 0
    assert sum(t.read + t.written for t in moved.values()) == KINDS[kind] * n_elem


def test_with_norm_copy_and_zeroing_moves_the_floor(simt):
    """fp32 master, 16-bit gradient and copy, the norm, the zeros: 32 bytes per element, and three scalars per thread from a cache."""
    n_elem = 65_536
    arguments = buffers("copy fp16", n_elem)
    scale = torch.tensor(0.5)
    simt.reset_stats()
    _, coefficient, overflow = torch.ops.ls_simt.grad_norm([arguments["grad"]], scale, 1.0)
    torch.ops.ls_simt.adam_step(*arguments.values(), coefficient, overflow, *OPTIONS, True)
    stats = simt.stats()
    assert stats.launches == 3
    cold = stats.all_memory.cold_read + stats.all_memory.cold_written
    assert 32 * n_elem <= cold <= 32.1 * n_elem


@pytest.mark.parametrize("kind", ["fp32", *KINDS])
@pytest.mark.parametrize("offset", range(1, 8))
def test_slices_get_the_bits_of_aligned_buffers(simt, kind, offset):
    """Equally misplaced slices go by vectors from the first multiple of four elements on, others element by element."""
    results = []
    for offsets in ([0] * 6, [offset] * 6, [offset, *[0] * 5], [*[0] * 4, offset, offset]):
        arguments = buffers(kind, 1003)
        placed = [None if t is None else at_offset(t, o) for t, o in zip(arguments.values(), offsets, strict=True)]
        torch.ops.ls_simt.adam_step(*placed, None, None, *OPTIONS, True)
        results.append([t for t in placed if t is not None])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_no_order_changes_a_bit(simt, kind):
    results = []
    for seed in (0, 1, 2):
        arguments = buffers(kind, 1027)
        with simt.schedule(seed):
            torch.ops.ls_simt.adam_step(*arguments.values(), torch.tensor(0.5), torch.tensor(False), *OPTIONS, True)
        results.append([t for t in arguments.values() if t is not None])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_overflow_writes_nothing_but_zeros(simt):
    arguments = buffers("copy bf16", 5003)
    with traffic(simt) as moved:
        torch.ops.ls_simt.adam_step(*arguments.values(), None, torch.tensor(True), *OPTIONS, True)
    assert moved["grad"].written == n_bytes(arguments["grad"])
    assert all(moved[name].written == 0 for name in ("param", "exp_avg", "exp_avg_sq") if name in moved)
    assert "param_copy" not in moved or moved["param_copy"].written == 0
