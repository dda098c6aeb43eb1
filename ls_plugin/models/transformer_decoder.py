"""fairseq's Transformer decoder on the fused layers."""

import torch
from fairseq.models.transformer import TransformerDecoderBase
from torch import Tensor, nn

from ls_plugin import host, packing
from ls_plugin.models.wrapping import wrap_layer
from ls_plugin.modules import TransformerDecoderLayer, use_fused_modules
from ls_plugin.modules.embedding import can_be_one_op, position_table
from ls_plugin.modules.layer_node import Projection
from ls_plugin.modules.scripting import ScriptedAsStock
from ls_plugin.modules.stack import declare_joint_keys, run_stack
from ls_plugin.modules.swap import WEIGHT, are_as_built, are_classes_as_built
from ls_plugin.modules.transformer_layer import Context, can_be_nodes, knows_causal
from ls_plugin.ops import product


class LightSeqTransformerDecoder(ScriptedAsStock, TransformerDecoderBase):
    """fairseq's decoder on the fused layers: tokens (B, T) -> logits (B, T, V), and the attention.

    Attributes:
        attention_in_training: whether the attention weights are returned in training, too, where stock always computes and hardly ever
            reads them. They are also returned when ``alignment_layer`` or ``alignment_heads`` is given, and in evaluation.
    """

    def __init__(self, cfg, dictionary, embed_tokens, no_encoder_attn: bool = False, output_projection=None):
        super().__init__(cfg, dictionary, embed_tokens, no_encoder_attn, output_projection)
        use_fused_modules(self, "TransformerDecoder")
        declare_joint_keys(
            list(self.layers.children())
        )  # iterating over them would drop layers, by --decoder-layerdrop
        self.attention_in_training = False

    def build_decoder_layer(self, cfg, no_encoder_attn: bool = False):
        return wrap_layer(TransformerDecoderLayer(cfg, no_encoder_attn), cfg)

    def output_layer(self, features: Tensor) -> Tensor:
        """(..., C) -> (..., V)"""
        if type(self.output_projection) is nn.Linear:
            return _project(features, self.output_projection)
        return super().output_layer(features)

    def extract_features_scriptable(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict | None,
        incremental_state: dict | None = None,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
    ) -> tuple[Tensor, dict]:
        """prev_output_tokens: int64 (B, T); with an ``incremental_state`` only the last token is read.

        Returns:
            features (B, T, C), and {"attn": [(B, T, S) or None], "inner_states": the embedding and the output of each layer (T, B, C)}.
        """
        wants_weights = not self.training or self.attention_in_training
        wants_weights = wants_weights or alignment_layer is not None or alignment_heads is not None
        if alignment_layer is None:
            alignment_layer = self.num_layers - 1
        enc = _first(encoder_out, "encoder_out")
        encoder_padding_mask = None if enc is None else _first(encoder_out, "encoder_padding_mask")
        if (
            encoder_padding_mask is not None
            and not host.waits_for(encoder_padding_mask.device)
            and not encoder_padding_mask.any()
        ):
            encoder_padding_mask = None
        x = self._embed(prev_output_tokens, incremental_state)
        tokens = prev_output_tokens if incremental_state is None else prev_output_tokens[:, -1:]
        padding_mask = tokens.eq(self.padding_idx)
        if not self.cross_self_attention and not host.waits_for(tokens.device) and not padding_mask.any():
            padding_mask = None
        context = Context(
            padding_mask=padding_mask,
            encoder_out=enc,
            encoder_padding_mask=encoder_padding_mask,
            causal=incremental_state is None and not full_context_alignment,
            incremental_state=incremental_state,
        )
        if context.causal and not self._has_stock_mask():
            context.causal, context.score_bias = False, self.buffered_future_mask(x.transpose(0, 1)).to(x)

        def call(layer, x, index):
            needs_weights = wants_weights and index == alignment_layer
            causal = {} if context.score_bias is None else {"self_attn_mask": context.score_bias}
            if context.causal:
                causal = {"causal": True} if knows_causal(layer) else {"self_attn_mask": self.buffered_future_mask(x)}
            x, weights, _ = layer(
                x,
                enc,
                encoder_padding_mask,
                incremental_state,
                self_attn_padding_mask=padding_mask,
                need_attn=needs_weights,
                need_head_weights=needs_weights,
                **causal,
            )
            return x, None, weights

        embedding = x
        x, outputs, weights = run_stack(
            list(self.layers), x, context, self.layer_norm, call, alignment_layer if wants_weights else None
        )
        if weights is not None:
            weights = weights.float().to(x)
            weights = (weights if alignment_heads is None else weights[:alignment_heads]).mean(dim=0)
        if self.project_out_dim is not None:
            x = _project(x, self.project_out_dim)
        states = [embedding.transpose(0, 1), *(output for output, _ in outputs)]
        return x, {"attn": [weights], "inner_states": states}

    def _has_stock_mask(self) -> bool:
        return getattr(self.buffered_future_mask, "__func__", None) is TransformerDecoderBase.buffered_future_mask

    def _embed(self, tokens: Tensor, incremental_state: dict | None) -> Tensor:
        """(B, T) -> (B, T, C); (B, 1, C) while decoding."""
        embed, positions = self.embed_tokens, self.embed_positions
        norm, dropout = self.layernorm_embedding, self.dropout_module
        if incremental_state is None and self.project_in_dim is None and can_be_one_op(embed, positions, norm, dropout):
            table = position_table(positions, tokens.shape[1], embed.weight)
            return embed.with_positions(tokens, table, self.embed_scale, norm, dropout)
        position = None if positions is None else positions(tokens, incremental_state=incremental_state)
        if incremental_state is not None:
            tokens = tokens[:, -1:]
            position = None if position is None else position[:, -1:]
        x = self.embed_scale * embed(tokens.contiguous())
        if self.project_in_dim is not None:
            x = _project(x, self.project_in_dim)
        if position is not None:
            x = x + position
        return dropout(x if norm is None else norm(x))


def _project(x: Tensor, projection: nn.Module) -> Tensor:
    if not (are_classes_as_built() and are_as_built((projection,), {nn.Linear: WEIGHT})):
        return projection(x)
    weight = projection.weight
    owned = projection.bias is None and packing.owner_of(weight) is not None and weight.dtype == x.dtype
    if owned and torch.is_grad_enabled() and can_be_nodes(x, training=False):
        return Projection.apply(x, weight)
    return product.linear(x, projection.weight, projection.bias)


def _first(encoder_out: dict | None, name: str) -> Tensor | None:
    """The tensor under a name of the encoder's output, where an empty list stands for none."""
    return encoder_out[name][0] if encoder_out is not None and len(encoder_out[name]) > 0 else None
