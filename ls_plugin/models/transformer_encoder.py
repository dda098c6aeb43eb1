"""fairseq's Transformer encoder on the fused layers."""

import torch
from fairseq.models.transformer import TransformerEncoderBase
from torch import Tensor

from ls_plugin import host
from ls_plugin.models import module_tree
from ls_plugin.models.wrapping import wrap_layer
from ls_plugin.modules import TransformerEncoderLayer, use_fused_modules
from ls_plugin.modules.embedding import can_be_one_op, position_table
from ls_plugin.modules.scripting import ScriptedAsStock
from ls_plugin.modules.stack import run_stack
from ls_plugin.modules.transformer_layer import Context


class LightSeqTransformerEncoder(ScriptedAsStock, TransformerEncoderBase):
    """fairseq's encoder on the fused layers: tokens (B, T) -> {"encoder_out": [(T, B, C)], ...}.

    ``encoder_embedding``, which no Transformer of fairseq reads, stays empty: embedding, positions and dropout are one op.
    """

    def __init__(self, cfg, dictionary, embed_tokens, return_fc: bool = False):
        super().__init__(cfg, dictionary, embed_tokens, return_fc)
        use_fused_modules(self, "TransformerEncoder")

    def build_encoder_layer(self, cfg):
        return wrap_layer(TransformerEncoderLayer(cfg, return_fc=self.return_fc), cfg)

    def set_num_updates(self, num_updates: int) -> None:
        module_tree.set_num_updates(self, num_updates)

    def forward_scriptable(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
    ) -> dict:
        """src_tokens: int64 (B, T), padded on either side.  token_embeddings: (B, T, C) in place of looked-up ones.

        Returns:
            encoder_out [(T, B, C)]; encoder_padding_mask [(B, T)], true at padding; encoder_states, with ``return_all_hiddens`` the
            embedding and the output of each layer (T, B, C); fc_results of layers built with ``return_fc``; src_lengths [(B, 1)].
        """
        padding_mask = src_tokens.eq(self.padding_idx)
        x = self._embed(src_tokens, token_embeddings)
        mask = padding_mask if host.waits_for(src_tokens.device) or padding_mask.any() else None
        if mask is not None:
            x = x.masked_fill(mask.unsqueeze(-1), 0.0)

        def call(layer, x, _index):
            result = layer(x, encoder_padding_mask=mask)
            return (*result, None) if isinstance(result, tuple) else (result, None, None)

        embedding = x
        x, outputs, _ = run_stack(list(self.layers), x, Context(padding_mask=mask), self.layer_norm, call)
        states = [embedding.transpose(0, 1), *(output for output, _ in outputs)] if return_all_hiddens else []
        return {
            "encoder_out": [x.transpose(0, 1)],
            "encoder_padding_mask": [padding_mask],
            "encoder_embedding": [],
            "encoder_states": states,
            "fc_results": [fc_result for _, fc_result in outputs] if return_all_hiddens else [],
            "src_tokens": [],
            "src_lengths": [(src_tokens.shape[1] - padding_mask.sum(dim=1, keepdim=True)).to(torch.int32)],
        }

    def _embed(self, tokens: Tensor, token_embeddings: Tensor | None) -> Tensor:
        """(B, T) -> (B, T, C)"""
        embed, positions = self.embed_tokens, self.embed_positions
        norm, dropout = self.layernorm_embedding, self.dropout_module
        is_stock = getattr(self.forward_embedding, "__func__", None) is TransformerEncoderBase.forward_embedding
        if token_embeddings is None and is_stock and can_be_one_op(embed, positions, norm, dropout):
            table = position_table(positions, tokens.shape[1], embed.weight)
            return embed.with_positions(tokens, table, self.embed_scale, norm, dropout)
        return self.forward_embedding(tokens, token_embeddings)[0]
