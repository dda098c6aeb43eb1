from ls_plugin import ops
from tests.ops.cases import SEED_BYTES, OpCase, n_bytes

STATISTICS_BYTES = 8  # of a row: mean, 1 / deviation
SHAPES = ((4, 24), (24,), (4, 24), (24,), (24,))  # x, bias, residual, weight, norm_bias


def saved_bytes(leaves, outputs):
    return n_bytes(outputs[0], leaves[3]) + 4 * STATISTICS_BYTES


CASES = [
    OpCase(
        "residual_layer_norm",
        lambda *leaves: ops.residual_layer_norm(*leaves, 0.3),
        SHAPES,
        saved_bytes=lambda leaves, outputs: saved_bytes(leaves, outputs) + SEED_BYTES,
    ),
    OpCase(
        "residual_layer_norm, p = 0",
        lambda *leaves: ops.residual_layer_norm(*leaves, 0.0),
        SHAPES,
        saved_bytes=saved_bytes,
    ),
]
