"""Shape checks of the fake kernels, in the words of the bindings (``kernels/ops/binding.h``)."""

import torch
from torch import Tensor


def check_row_vector(op: str, name: str, parameter: Tensor | None, x: Tensor) -> None:
    """Raises RuntimeError unless ``parameter`` is None or (C,), with C the last size of ``x``."""
    columns = x.shape[-1]
    torch._check(
        parameter is None or (parameter.dim() == 1 and parameter.shape[0] == columns),
        lambda: f"{op}: {name} must have shape (C,) = ({columns},), got {tuple(parameter.shape)}",
    )
