"""Matrix products of 16-bit tensors on processors that have none: torch would compute them in scalar loops there."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``; computed in fp32 and rounded where the processor has no products in ``x``'s dtype."""
    if not _is_slow(x, weight):
        return F.linear(x, weight, bias)
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """``torch.mm``, computed as in :func:`linear`.  (N, K), (K, M) -> (N, M)"""
    if not _is_slow(a, b):
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
    product = torch.mm(*widened(a, b))
    return product.to(a.dtype) if out is None else out.copy_(product)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``torch.matmul`` of batches of matrices, computed as in :func:`linear`.  (..., N, K), (..., K, M) -> (..., N, M)"""
    return torch.matmul(*widened(a, b)).to(a.dtype) if _is_slow(a, b) else torch.matmul(a, b)


def add_mm(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``total.addmm_(a, b)``, computed as in :func:`linear`."""
    return total.add_(mm(a, b)) if _is_slow(a, b) else total.addmm_(a, b)


def widened(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The factors of a product in the dtype in which it should be computed."""
    return (a.float(), b.float()) if _is_slow(a, b) else (a, b)


def _is_slow(a: Tensor, b: Tensor) -> bool:
    dtype = a.dtype
    return (
        dtype in (torch.bfloat16, torch.float16)
        and a.device.type == "cpu"
        and b.dtype == dtype
        and not _has(dtype)
        and F.linear
        is torch._C._nn.linear  # apex.amp's would take the fp32 factors to 16 bits again, and `out` with them
    )


@functools.cache
def _has(dtype: torch.dtype) -> bool:
    """Whether oneDNN, which computes torch's 16-bit products on the CPU, has them for this processor."""
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    return torch.backends.mkldnn.is_available() and getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")()
