import torch

from ls_plugin import ops
from tests.ops.cases import SEED_BYTES, OpCase, n_bytes


def case(activation, saved_bytes, p=0.3):
    return OpCase(
        f"bias_act_dropout {activation}{'' if p else ' without dropout'}",
        lambda x, bias: ops.bias_act_dropout(x, bias, activation, p),
        ((4, 24), (24,)),
        saved_bytes=saved_bytes,
        autocast_dtype=torch.bfloat16,
    )


def output_and_seed(leaves, outputs):
    return n_bytes(*outputs) + SEED_BYTES


def inputs_and_seed(leaves, outputs):
    return n_bytes(*leaves) + SEED_BYTES


CASES = [
    case("relu", output_and_seed),
    case("tanh", output_and_seed),
    case("gelu", inputs_and_seed),
    case("gelu_accurate", inputs_and_seed),
    case("relu_squared", inputs_and_seed),
    case("linear", lambda leaves, outputs: SEED_BYTES),
    case("relu", lambda leaves, outputs: n_bytes(*outputs), p=0.0),
]
