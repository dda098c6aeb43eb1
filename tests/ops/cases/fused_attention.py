import torch

from ls_plugin import ops
from tests.ops.cases import SEED_BYTES, OpCase, n_bytes

PADDING = torch.zeros(2, 11, dtype=torch.bool)
PADDING[1, 8:] = True
BIAS = torch.linspace(-1, 1, 77).view(7, 11)
STATS_BYTES = 2 * 3 * 7 * 8
SHAPES = ((2, 3, 7, 8), (2, 3, 11, 8), (2, 3, 11, 8))

CASES = [
    OpCase(
        "fused_attention",
        lambda q, k, v: ops.fused_attention(q, k, v, PADDING.to(q.device), BIAS.to(q.device), causal=True, p=0.3),
        SHAPES,
        saved_bytes=lambda leaves, outputs: n_bytes(*leaves, PADDING, BIAS) + STATS_BYTES + SEED_BYTES,
        masks=(PADDING, BIAS),
    ),
    OpCase(
        "fused_attention without dropout",
        lambda q, k, v: ops.fused_attention(q, k, v, causal=True),
        SHAPES,
        saved_bytes=lambda leaves, outputs: n_bytes(*leaves) + STATS_BYTES,
    ),
]
