"""fairseq's Transformer decoder on the fused layers."""

from fairseq.models.transformer import TransformerDecoderBase

from ls_plugin.models.wrapping import wrap_layer
from ls_plugin.modules import TransformerDecoderLayer, use_fused_modules


class LightSeqTransformerDecoder(TransformerDecoderBase):
    """fairseq's decoder on the fused layers: tokens (B, T) -> logits (B, T, V), and the attention."""

    def __init__(self, cfg, dictionary, embed_tokens, no_encoder_attn: bool = False, output_projection=None):
        super().__init__(cfg, dictionary, embed_tokens, no_encoder_attn, output_projection)
        use_fused_modules(self, "TransformerDecoder")

    def build_decoder_layer(self, cfg, no_encoder_attn: bool = False):
        return wrap_layer(TransformerDecoderLayer(cfg, no_encoder_attn), cfg)
