"""The tolerances of the op tests, in one place.

An op is as accurate as PyTorch when its error against an fp64 result is at most ``VALUE_FACTOR`` times (gradients
``GRAD_FACTOR`` times) the error that PyTorch makes in the same dtype, plus a floor of a few units in the last place of the
largest value, for inputs where PyTorch happens to be exact.
"""

import pytest
import torch
from torch import Tensor

from ls_plugin import _library

VALUE_FACTOR = 2.0
GRAD_FACTOR = 3.0
FLOOR_ULPS = 4.0

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
dtype_name = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}.get

needs_library = pytest.mark.skipif(
    not _library.status().loaded, reason=f"no compiled library: {_library.status().reason}"
)

# Matrices (rows, columns): one element, odd, prime, not a multiple of any vector, wider than a block, many rows, none.
SHAPES = [(1, 1), (3, 5), (7, 31), (5, 64), (2, 257), (33, 256), (4, 1000), (3, 1024), (2, 1031), (2, 5003), (0, 16)]


def shape_name(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def assert_as_accurate(
    actual: Tensor, torch_result: Tensor, exact: Tensor, factor: float, what: str, magnitude: float = 0.0
) -> None:
    """``actual`` and ``torch_result`` in the tested dtype, ``exact`` in fp64, all of one shape.

    ``magnitude``: size of the terms that cancel in the result, where the result is much smaller than they are.
    """
    assert actual.shape == exact.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    assert actual.dtype == torch_result.dtype, f"{what}: dtype {actual.dtype}, expected {torch_result.dtype}"
    if actual.numel() == 0:
        return
    eps = torch.finfo(actual.dtype).eps
    actual, torch_result, exact = (t.detach().double().cpu() for t in (actual, torch_result, exact))
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    error = (actual - exact).abs().max().item()
    allowed = factor * (torch_result - exact).abs().max().item() + FLOOR_ULPS * eps * max(
        magnitude, exact.abs().max().item()
    )
    assert error <= allowed, f"{what}: error {error:.3e}, allowed {allowed:.3e}"


def misaligned(t: Tensor) -> Tensor:
    """The same values one element off any 16-byte boundary, contiguous."""
    storage = t.new_empty(t.numel() + 1)
    view = storage[1:].view(t.shape)
    return view.copy_(t)


def noncontiguous(t: Tensor) -> Tensor:
    """The same values with the last two dimensions' strides swapped."""
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)
