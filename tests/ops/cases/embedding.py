import torch

from ls_plugin import ops
from tests.ops.cases import SEED_BYTES, OpCase, n_bytes

PAD = 1
TOKENS = torch.tensor([[PAD, 3, 0, 3], [2, 5, PAD, PAD]])

CASES = [
    OpCase(
        "embedding",
        lambda weight, positions: ops.embedding(TOKENS.to(weight.device), weight, positions, PAD, 4.0, 0.3),
        ((7, 24), (8, 24)),
        saved_bytes=lambda leaves, outputs: n_bytes(TOKENS) + SEED_BYTES,
    ),
    OpCase(
        "embedding without positions, padding or dropout",
        lambda weight: ops.embedding(TOKENS.to(weight.device), weight),
        ((7, 24),),
        saved_bytes=lambda leaves, outputs: n_bytes(TOKENS),
        autocast_dtype=torch.bfloat16,
    ),
    OpCase(
        "embedding with layer norm",
        lambda weight, positions, gamma, beta: ops.embedding(
            TOKENS.to(weight.device), weight, positions, PAD, 4.0, 0.3, layer_norm=(gamma, beta, 1e-5)
        ),
        ((7, 24), (8, 24), (24,), (24,)),
        # Layer norm keeps its input, gamma and two numbers a row.
        saved_bytes=lambda leaves, outputs: n_bytes(TOKENS, outputs[0], leaves[2]) + 8 * TOKENS.numel() + SEED_BYTES,
    ),
]
