"""``ls_transformer``: fairseq's translation Transformer on the fused layers.

The classes subclass fairseq's and override the places where a layer, an embedding, a norm or a dropout is made. Parameter
names and shapes are stock, so checkpoints load strictly in both directions.
"""

from fairseq.distributed import fsdp_wrap
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_INV_REGISTRY,
    register_model,
    register_model_architecture,
)
from fairseq.models.transformer import (
    TransformerConfig,
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModel,
    base_architecture,
)
from fairseq.modules.checkpoint_activations import checkpoint_wrapper

from ls_plugin.models.unsupported import refuse_unsupported
from ls_plugin.modules import TokenEmbedding, TransformerDecoderLayer, TransformerEncoderLayer, use_fused_modules
from ls_plugin.modules.embedding import is_plain_embedding

PREFIX = "ls_"


def stock_name(name: str) -> str:
    """fairseq's own architecture, criterion or optimizer that ``name`` is the twin of: ls_transformer -> transformer."""
    return name.removeprefix(PREFIX)


class LightSeqTransformerEncoder(TransformerEncoderBase):
    """fairseq's encoder on the fused layers: tokens (B, T) -> {"encoder_out": [(T, B, C)], ...}."""

    def __init__(self, cfg, dictionary, embed_tokens, return_fc: bool = False):
        super().__init__(cfg, dictionary, embed_tokens, return_fc)
        use_fused_modules(self, "TransformerEncoder")

    def build_encoder_layer(self, cfg):
        return _wrap_layer(TransformerEncoderLayer(cfg, return_fc=self.return_fc), cfg)


class LightSeqTransformerDecoder(TransformerDecoderBase):
    """fairseq's decoder on the fused layers: tokens (B, T) -> logits (B, T, V), and the attention."""

    def __init__(self, cfg, dictionary, embed_tokens, no_encoder_attn: bool = False, output_projection=None):
        super().__init__(cfg, dictionary, embed_tokens, no_encoder_attn, output_projection)
        use_fused_modules(self, "TransformerDecoder")

    def build_decoder_layer(self, cfg, no_encoder_attn: bool = False):
        return _wrap_layer(TransformerDecoderLayer(cfg, no_encoder_attn), cfg)


def _wrap_layer(layer, cfg):
    """Activation checkpointing and FSDP around one layer, by fairseq's rule: a checkpointed layer is always FSDP-wrapped."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)


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
