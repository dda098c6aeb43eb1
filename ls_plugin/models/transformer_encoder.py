"""fairseq's Transformer encoder on the fused layers."""

from fairseq.models.transformer import TransformerEncoderBase

from ls_plugin.models.wrapping import wrap_layer
from ls_plugin.modules import TransformerEncoderLayer, use_fused_modules


class LightSeqTransformerEncoder(TransformerEncoderBase):
    """fairseq's encoder on the fused layers: tokens (B, T) -> {"encoder_out": [(T, B, C)], ...}."""

    def __init__(self, cfg, dictionary, embed_tokens, return_fc: bool = False):
        super().__init__(cfg, dictionary, embed_tokens, return_fc)
        use_fused_modules(self, "TransformerEncoder")

    def build_encoder_layer(self, cfg):
        return wrap_layer(TransformerEncoderLayer(cfg, return_fc=self.return_fc), cfg)
