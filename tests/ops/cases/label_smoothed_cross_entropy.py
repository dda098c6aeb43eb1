import torch

from ls_plugin import ops
from tests.ops.cases import OpCase, n_bytes

PAD = 1


def _loss(logits, inplace):
    # The view is no leaf, as a projection's output.
    return ops.label_smoothed_cross_entropy(
        logits.view_as(logits), torch.tensor([3, PAD, 0, 7], device=logits.device), 0.1, PAD, inplace=inplace
    )[0]


CASES = [
    OpCase(
        "label_smoothed_cross_entropy",
        lambda logits: _loss(logits, inplace=False),
        ((4, 24),),
        saved_bytes=lambda leaves, outputs: n_bytes(leaves[0]),
    ),
]
