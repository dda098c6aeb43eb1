"""Several parameters as one operand of a matrix product."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ls_plugin import packing


def joint(params: Sequence[nn.Parameter]) -> Tensor:
    """The parameters one below the other, (sum of shape[0], *shape[1:]), detached: their own memory where it is one block, else a copy."""
    block = packing.packed(params)
    return torch.cat([p.detach() for p in params]) if block is None else block
