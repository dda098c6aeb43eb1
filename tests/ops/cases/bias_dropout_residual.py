from ls_plugin import ops
from tests.ops.cases import SEED_BYTES, OpCase

CASES = [
    OpCase(
        "bias_dropout_residual",
        lambda x, bias, residual: ops.bias_dropout_residual(x, bias, residual, 0.3),
        ((4, 24), (24,), (4, 24)),
        saved_bytes=lambda leaves, outputs: SEED_BYTES,
    ),
    OpCase(
        "bias_dropout_residual without dropout",
        lambda x, bias, residual: ops.bias_dropout_residual(x, bias, residual, 0.0),
        ((4, 24), (24,), (4, 24)),
        saved_bytes=lambda leaves, outputs: 0,
    ),
]
