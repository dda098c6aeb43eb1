"""Matrix products, by the fastest of the ways that this machine has.

On a GPU and under torch.compile they are torch's. On a CPU there are torch's own, the compiled library's (``kernels/cpu/product.cpp``) and
oneDNN's; ``ls_plugin/routes.py`` says which one a shape takes. 16-bit products that the processor lacks are computed in fp32 and rounded:
torch would take scalar loops for them.

:func:`linear` is differentiable. The others are for code below autograd: backward passes and the layers' nodes.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from ls_plugin import _library, routes
from ls_plugin.ops.checks import check, check_devices, check_floating, product_dtype, register_fake

_OP = "product"
# fp32 maps of fewer multiply-adds stay torch's: 10 to 20 us, less than is to be had there by a choice that takes as long. A beam's single steps.
_LEAST_WORTH = 1 << 20


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``.  x (..., K), weight (M, K), bias (M,) -> (..., M)

    Raises:
        RuntimeError: one of them lies on another device, meta among them: torch's product would give what memory holds.
    """
    if weight.is_meta and not x.is_meta:
        check_devices("linear", x=x, weight=weight)
    if x.dim() >= 2 and x.numel() > 0 and _is_ours(x, weight) and _is_worth_a_choice(x, weight) and _is_only_a_value(x):
        y = _by_choice(x.reshape(-1, x.shape[-1]), weight.t(), None, bias, False, 1.0)
        return y.view(*x.shape[:-1], weight.shape[0])
    if not _lacks(x, weight):
        return F.linear(x, weight, bias)
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)


def mm(
    a: Tensor, b: Tensor, out: Tensor | None = None, bias: Tensor | None = None, add: bool = False, alpha: float = 1.0
):
    """alpha a b + bias, and + out with ``add``; sums in fp32.

    Args:
        a: (N, K) and b: (K, M), one dtype, each contiguous or the transpose of a contiguous matrix.
        out: (N, M), a's dtype or, on a CPU, fp32, rows contiguous. It is written and returned; None: a new one.  bias: (M,), a's dtype.
    """
    if b.is_meta and not a.is_meta:
        check_devices(_OP, a=a, b=b)
    return (_by_choice if _is_ours(a, b) else _by_torch)(a, b, out, bias, add, alpha)


def add_mm(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``total.addmm_(a, b)``, computed as in :func:`mm`."""
    return mm(a, b, out=total, add=True)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """``torch.matmul`` of batches of matrices; in fp32 where the processor lacks a's dtype.  (..., N, K), (..., K, M) -> (..., N, M)"""
    return torch.matmul(a.float(), b.float()).to(a.dtype) if _lacks(a, b) else torch.matmul(a, b)


def _by_choice(a, b, out, bias, add, alpha):
    if out is None:
        out = a.new_empty((a.shape[0], b.shape[1]))
    _ROUTES[routes.choose(a, b, _CANDIDATES[a.dtype], _run)](a, b, out, bias, add, alpha)
    return out


def _by_torch(a, b, out, bias, add, alpha):
    if out is None or out.dtype == a.dtype:
        if not _lacks(a, b):
            if add and bias is None:
                return out.addmm_(a, b, alpha=alpha)
            if bias is None and alpha == 1.0:
                return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
        result = torch.mm(a.float(), b.float()).to(a.dtype) if _lacks(a, b) else torch.mm(a, b)
    elif a.dtype == torch.float16 or _lacks(a, b):  # sums of fp16 may leave its range
        result = torch.mm(a.float(), b.float())
    else:
        result = torch.mm(a, b).to(out.dtype)
    return _finish(result, out, bias, add, alpha)


def _finish(product, out, bias, add, alpha):
    """What :func:`mm` makes of a bare product, which is overwritten."""
    if alpha != 1.0:
        product.mul_(alpha)
    if bias is not None:
        product.add_(bias)
    if out is None:
        return product
    return out.add_(product) if add else out.copy_(product)


def _by_onednn(a, b, out, bias, add, alpha):
    joins = bias if alpha == 1.0 else None
    result = torch.ops.mkldnn._linear_pointwise.default(a, b.t(), joins, "none", [], "")
    _finish(result, out, None if joins is bias else bias, add, alpha)


def _by_kernel(a, b, out, bias, add, alpha):
    torch.ops.ls.product.default(a, b, bias, out, alpha, add)


_ROUTES = {"torch": _by_torch, "ls": _by_kernel, "onednn": _by_onednn}
# In the order in which they are preferred, where they are equally fast.
_CANDIDATES = {
    torch.float32: ("ls", "onednn", "torch") if torch.backends.mkldnn.is_available() else ("ls", "torch"),
    torch.bfloat16: ("ls", "torch"),
    torch.float16: ("ls", "torch"),
}


def _run(route: str, a: Tensor, b: Tensor, out: Tensor) -> None:
    _ROUTES[route](a, b, out, None, False, 1.0)


def _is_ours(a: Tensor, b: Tensor) -> bool:
    """Whether there is a choice: CPU matrices that the compiled library takes, and nobody who wants torch's own call."""
    return (
        a.is_cpu
        and a.dtype in _CANDIDATES
        and b.dtype == a.dtype
        and _library.status().loaded
        and F.linear is torch._C._nn.linear  # apex.amp casts in its own
        and _is_exact()
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None  # torch.jit.trace has tensors for sizes
    )


def _is_worth_a_choice(x: Tensor, weight: Tensor) -> bool:
    return x.dtype != torch.float32 or x.numel() * weight.shape[0] >= _LEAST_WORTH


def _is_exact() -> bool:
    """Whether nobody asked for fp32 products that are less exact, which torch's may be."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # asked for by backend, torch.backends.mkldnn.matmul.fp32_precision
        return False


def _is_only_a_value(x: Tensor) -> bool:
    """Whether nothing but numbers is wanted of a product with x: no gradient of any mode, no batching, no cast."""
    return (
        not torch.is_grad_enabled()
        and product_dtype(x) is None
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def _lacks(a: Tensor, b: Tensor) -> bool:
    """Whether these are 16-bit products that the processor has not."""
    dtype = a.dtype
    return (
        dtype in (torch.bfloat16, torch.float16)
        and a.device.type == "cpu"
        and b.dtype == dtype
        and not _has(dtype)
        # apex.amp's would take the fp32 factors to 16 bits again, and `out` with them
        and F.linear is torch._C._nn.linear
    )


@functools.cache
def _has(dtype: torch.dtype) -> bool:
    """Whether oneDNN, which computes torch's 16-bit products on the CPU, has them for this processor."""
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    return torch.backends.mkldnn.is_available() and getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")()


def _fake(a, b, bias, out, alpha, add) -> None:
    check(
        a.dim() == 2 and b.dim() == 2 and a.shape[1] == b.shape[0] and out.shape == (a.shape[0], b.shape[1]),
        lambda: (
            f"{_OP}: a, b and out must have shapes (N, K), (K, M) and (N, M), got "
            f"{tuple(a.shape)}, {tuple(b.shape)} and {tuple(out.shape)}"
        ),
    )
    check_floating(_OP, "a", a)


def register(namespace: str) -> None:
    """The fake kernel; CUDA builds for the tests have no such op."""
    if namespace == "ls":
        register_fake(f"{namespace}::{_OP}", _fake)
