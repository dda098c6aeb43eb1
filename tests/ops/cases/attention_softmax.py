import torch

from ls_plugin import ops
from tests.ops.cases import SEED_BYTES, OpCase, n_bytes

PADDING = torch.zeros(2, 11, dtype=torch.bool)
PADDING[1, 8:] = True
STATS_BYTES = 2 * 3 * 7 * 8

CASES = [
    OpCase(
        "attention_softmax",
        lambda scores, bias: ops.attention_softmax(
            scores, PADDING.to(scores.device), bias, causal=True, scale=0.5, p=0.3
        ),
        ((2, 3, 7, 11), (7, 11)),
        saved_bytes=lambda leaves, outputs: n_bytes(*leaves, PADDING) + STATS_BYTES + SEED_BYTES,
        autocast_dtype=torch.bfloat16,
        masks=(PADDING,),
    ),
    OpCase(
        "attention_softmax without dropout",
        lambda scores, bias: ops.attention_softmax(scores, PADDING.to(scores.device), bias, causal=True, scale=0.5),
        ((2, 3, 7, 11), (7, 11)),
        saved_bytes=lambda leaves, outputs: n_bytes(*outputs),
        autocast_dtype=torch.bfloat16,
        masks=(PADDING,),
    ),
]
