from ls_plugin import ops
from tests.ops.cases import OpCase, n_bytes

STATISTICS_BYTES = 8  # of a row: mean, 1 / deviation

CASES = [
    OpCase(
        "layer_norm",
        ops.layer_norm,
        ((4, 24), (24,), (24,)),
        saved_bytes=lambda leaves, outputs: n_bytes(leaves[0], leaves[1]) + 4 * STATISTICS_BYTES,
    ),
]
