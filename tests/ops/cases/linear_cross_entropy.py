import torch

from ls_plugin import ops
from tests.ops.cases import OpCase, n_bytes

PAD = 1


def _loss(x, weight, reduction):
    target = torch.tensor([3, PAD, 0, 7], device=x.device)
    return ops.linear_cross_entropy(x, weight, target, 0.1, PAD, reduction)[0]


CASES = [
    OpCase(
        "linear_cross_entropy",
        lambda x, weight: _loss(x, weight, "sum"),
        ((4, 24), (9, 24)),
        saved_bytes=lambda leaves, outputs: n_bytes(*leaves),  # their gradients
    ),
    OpCase(
        "linear_cross_entropy per token",
        lambda x, weight: _loss(x, weight, "none"),
        ((4, 24), (9, 24)),
        saved_bytes=lambda leaves, outputs: n_bytes(*leaves) + 4 * 8,
    ),
]
