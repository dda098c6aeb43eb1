"""Every op in plain PyTorch: the oracle of the tests, the fallback where no kernel runs, and the maths in readable form.

Each module has the stem of its op. The functions are ordinary differentiable PyTorch, work on any device and any
floating dtype, and know nothing of the compiled kernels.
"""

from ls_plugin.reference.adam import adam_step, join_master, split_master
from ls_plugin.reference.attention_softmax import attention_softmax
from ls_plugin.reference.bias_act_dropout import bias_act_dropout
from ls_plugin.reference.bias_dropout_residual import bias_dropout_residual
from ls_plugin.reference.dropout import dropout_keep_mask, dropout_scale, dropout_threshold
from ls_plugin.reference.embedding import embedding, position_ids
from ls_plugin.reference.fused_attention import fused_attention
from ls_plugin.reference.grad_norm import grad_norm
from ls_plugin.reference.label_smoothed_cross_entropy import label_smoothed_cross_entropy
from ls_plugin.reference.layer_norm import layer_norm
from ls_plugin.reference.linear_cross_entropy import linear_cross_entropy
from ls_plugin.reference.product import product
from ls_plugin.reference.residual_layer_norm import residual_layer_norm

__all__ = [
    "adam_step",
    "attention_softmax",
    "bias_act_dropout",
    "bias_dropout_residual",
    "dropout_keep_mask",
    "dropout_scale",
    "dropout_threshold",
    "embedding",
    "fused_attention",
    "grad_norm",
    "join_master",
    "label_smoothed_cross_entropy",
    "layer_norm",
    "linear_cross_entropy",
    "position_ids",
    "product",
    "residual_layer_norm",
    "split_master",
]
