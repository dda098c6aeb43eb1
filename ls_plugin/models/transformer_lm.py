"""``ls_transformer_lm``: fairseq's Transformer language model on the fused layers."""

from fairseq.models import transformer_lm as stock
from fairseq.models.transformer import TransformerConfig

from ls_plugin.models.transformer_decoder import LightSeqTransformerDecoder
from ls_plugin.models.twins import Twin, fused_embedding, names_mean, register_twins


class LanguageModelDecoder(LightSeqTransformerDecoder):
    """The fused decoder, built from the flat arguments of a language model."""

    def __init__(self, args, dictionary, embed_tokens, no_encoder_attn: bool = True):
        super().__init__(TransformerConfig.from_namespace(args), dictionary, embed_tokens, no_encoder_attn)
        self.args = args


@register_twins("transformer_lm")
class LightSeqTransformerLanguageModel(Twin, stock.TransformerLanguageModel):
    """``--arch ls_transformer_lm`` and the ``ls_`` twin of every architecture of fairseq's ``transformer_lm``, GPT presets included."""

    @classmethod
    def build_model(cls, args, task):
        with names_mean(stock, TransformerDecoder=LanguageModelDecoder):
            return super().build_model(args, task)

    @classmethod
    def build_embedding(cls, args, dictionary, embed_dim, path=None):
        return fused_embedding(super().build_embedding(args, dictionary, embed_dim, path))
