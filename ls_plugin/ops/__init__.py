"""The fused ops. Each has its kernels under ``kernels/cpu`` and ``kernels/cuda``, its maths under ``ls_plugin/reference``
and its tests under ``tests/ops``, all by the same stem.

They take CPU and CUDA tensors in fp32, fp16 and bf16, under autograd, ``torch.compile`` and fake tensors; anything else (fp64, a
device without kernels, no compiled library) runs the reference.
"""

from ls_plugin import _library
from ls_plugin.ops import adam as _adam
from ls_plugin.ops import attention_softmax as _attention_softmax
from ls_plugin.ops import bias_act_dropout as _bias_act_dropout
from ls_plugin.ops import bias_dropout_residual as _bias_dropout_residual
from ls_plugin.ops import embedding as _embedding
from ls_plugin.ops import fused_attention as _fused_attention
from ls_plugin.ops import grad_norm as _grad_norm
from ls_plugin.ops import label_smoothed_cross_entropy as _label_smoothed_cross_entropy
from ls_plugin.ops import layer_norm as _layer_norm
from ls_plugin.ops import linear_cross_entropy as _linear_cross_entropy
from ls_plugin.ops import product as _product
from ls_plugin.ops import residual_layer_norm as _residual_layer_norm
from ls_plugin.ops.adam import adam_step
from ls_plugin.ops.attention_softmax import attention_softmax
from ls_plugin.ops.bias_act_dropout import bias_act_dropout
from ls_plugin.ops.bias_dropout_residual import bias_dropout_residual
from ls_plugin.ops.embedding import embedding
from ls_plugin.ops.fused_attention import fused_attention
from ls_plugin.ops.grad_norm import grad_norm
from ls_plugin.ops.label_smoothed_cross_entropy import label_smoothed_cross_entropy
from ls_plugin.ops.layer_norm import layer_norm
from ls_plugin.ops.linear_cross_entropy import linear_cross_entropy
from ls_plugin.ops.residual_layer_norm import residual_layer_norm

__all__ = [
    "adam_step",
    "attention_softmax",
    "bias_act_dropout",
    "bias_dropout_residual",
    "embedding",
    "fused_attention",
    "grad_norm",
    "label_smoothed_cross_entropy",
    "layer_norm",
    "linear_cross_entropy",
    "residual_layer_norm",
]


def register(namespace: str) -> None:
    """Registers fake kernels and autograd for the ops of one compiled library (``ls``, or a test build of it)."""
    for module in (
        _adam,
        _attention_softmax,
        _bias_act_dropout,
        _bias_dropout_residual,
        _embedding,
        _fused_attention,
        _grad_norm,
        _label_smoothed_cross_entropy,
        _layer_norm,
        _linear_cross_entropy,
        _product,
        _residual_layer_norm,
    ):
        module.register(namespace)


if _library.status().loaded:
    register("ls")
