"""Modules built on the fused ops. Each subclasses the stock module it stands for and keeps its parameter names and shapes."""

from ls_plugin.modules.dropout import Dropout
from ls_plugin.modules.embedding import TokenEmbedding
from ls_plugin.modules.layer_norm import LayerNorm
from ls_plugin.modules.swap import use_fused_modules
from ls_plugin.modules.transformer_layer import TransformerDecoderLayer, TransformerEncoderLayer

__all__ = [
    "Dropout",
    "LayerNorm",
    "TokenEmbedding",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
    "use_fused_modules",
]
