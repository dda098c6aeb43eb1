"""Matrix product with its usual trimmings.  The oracle of ``ls_plugin/ops/product.py``."""

import torch
from torch import Tensor


def product(
    a: Tensor, b: Tensor, bias: Tensor | None = None, total: Tensor | None = None, alpha: float = 1.0
) -> Tensor:
    """alpha a b + bias + total.  a (N, K), b (K, M), bias (M,), total (N, M) -> (N, M), fp32 (fp64 for fp64 inputs), not rounded."""
    a, b = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (a, b))
    result = alpha * (a @ b)
    result = result if bias is None else result + bias
    return result if total is None else result + total
