"""``ls_transformer``: fairseq's translation Transformer on the fused layers.

Parameter names and shapes are stock, so checkpoints load strictly in both directions, and so are the initial weights for a given seed.
"""

from fairseq.models.transformer import TransformerConfig, TransformerModel

from ls_plugin.models.transformer_decoder import LightSeqTransformerDecoder
from ls_plugin.models.transformer_encoder import LightSeqTransformerEncoder
from ls_plugin.models.twins import Twin, fused_embedding, register_twins


class EncoderDecoderTwin(Twin):
    """The hooks of fairseq's ``TransformerModel``, for it and its subclasses."""

    @classmethod
    def build_model(cls, args, task):
        model = super().build_model(args, task)
        # The one place where fairseq reads attention weights in training: the loss over given alignments.
        options = getattr(task, "cfg", None) or getattr(task, "args", None)
        model.decoder.attention_in_training = bool(getattr(options, "load_alignments", False))
        return model

    @classmethod
    def build_embedding(cls, args, dictionary, embed_dim, path=None):
        return fused_embedding(super().build_embedding(args, dictionary, embed_dim, path))

    @classmethod
    def build_encoder(cls, args, src_dict, embed_tokens):
        return LightSeqTransformerEncoder(TransformerConfig.from_namespace(args), src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, args, tgt_dict, embed_tokens):
        cfg = TransformerConfig.from_namespace(args)
        return LightSeqTransformerDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)


@register_twins("transformer")
class LightSeqTransformerModel(EncoderDecoderTwin, TransformerModel):
    """``--arch ls_transformer`` and the ``ls_`` twin of every architecture of fairseq's ``transformer``."""
