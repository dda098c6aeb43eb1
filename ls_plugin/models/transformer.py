"""``ls_transformer``: fairseq's translation Transformer on the fused layers.

The classes subclass fairseq's and override the places where a layer, an embedding, a norm or a dropout is made. Parameter
names and shapes are stock, so checkpoints load strictly in both directions.
"""

from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_INV_REGISTRY,
    register_model,
    register_model_architecture,
)
from fairseq.models.transformer import (
    TransformerConfig,
    TransformerModel,
    base_architecture,
)

from ls_plugin.models.transformer_decoder import LightSeqTransformerDecoder
from ls_plugin.models.transformer_encoder import LightSeqTransformerEncoder
from ls_plugin.models.unsupported import refuse_unsupported
from ls_plugin.modules import TokenEmbedding
from ls_plugin.modules.embedding import is_plain_embedding

PREFIX = "ls_"


def stock_name(name: str) -> str:
    """fairseq's own architecture, criterion or optimizer that ``name`` is the twin of: ls_transformer -> transformer."""
    return name.removeprefix(PREFIX)


@register_model("ls_transformer")
class LightSeqTransformerModel(TransformerModel):
    """``--arch ls_transformer`` and the ``ls_`` twin of every architecture of fairseq's ``transformer``.

    Raises, when built: UnsupportedError, with every flag that the fused layers do not honour.
    """

    @classmethod
    def hub_models(cls):
        return {}

    @classmethod
    def build_model(cls, args, task):
        refuse_unsupported(args, stock_name(getattr(args, "arch", None) or "ls_transformer"))
        base_architecture(args)  # older checkpoints lack some arguments
        return super().build_model(args, task)

    @classmethod
    def build_embedding(cls, args, dictionary, embed_dim, path=None):
        embedding = super().build_embedding(args, dictionary, embed_dim, path)
        return TokenEmbedding.of(embedding) if is_plain_embedding(embedding) else embedding

    @classmethod
    def build_encoder(cls, args, src_dict, embed_tokens):
        return LightSeqTransformerEncoder(TransformerConfig.from_namespace(args), src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, args, tgt_dict, embed_tokens):
        cfg = TransformerConfig.from_namespace(args)
        return LightSeqTransformerDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)


def _register_architectures() -> None:
    """Every architecture of fairseq's ``transformer``, under its name with the prefix and with its own defaults."""
    for arch in ARCH_MODEL_INV_REGISTRY["transformer"]:
        register_model_architecture("ls_transformer", PREFIX + arch)(ARCH_CONFIG_REGISTRY[arch])


_register_architectures()
