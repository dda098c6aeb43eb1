"""``ls_roberta``: fairseq's RoBERTa on the fused layers; classification heads are stock."""

from fairseq.models.roberta import model as stock
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from torch import Tensor, nn

from ls_plugin import ops
from ls_plugin.models.transformer_encoder import LightSeqTransformerEncoder
from ls_plugin.models.twins import Twin, fused_embedding, names_mean, register_twins
from ls_plugin.modules import use_fused_modules
from ls_plugin.modules.scripting import ScriptedAsStock
from ls_plugin.modules.swap import WEIGHT_AND_BIAS, are_as_built, are_classes_as_built
from ls_plugin.ops import product


class RobertaLMHead(ScriptedAsStock, stock.RobertaLMHead):
    """Head for masked language modelling: dense, activation, layer norm, product with the embedding."""

    def __init__(self, embed_dim: int, output_dim: int, activation_fn: str, weight=None):
        super().__init__(embed_dim, output_dim, activation_fn, weight)
        use_fused_modules(self, "RobertaLMHead")
        self.activation_name, self._stock_activation_fn = activation_fn, self.activation_fn

    def forward(self, features: Tensor, masked_tokens: Tensor | None = None, **unused) -> Tensor:
        """features (B, T, C), masked_tokens bool (B, T) -> logits (B, T, V), or of the n masked tokens alone (n, V)."""
        is_fusable = self.activation_fn is self._stock_activation_fn and are_classes_as_built()
        if not (is_fusable and are_as_built((self.dense,), {nn.Linear: WEIGHT_AND_BIAS})):
            return super().forward(features, masked_tokens, **unused)
        if masked_tokens is not None:
            features = features[masked_tokens]
        x = product.linear(features, self.dense.weight)
        x = self.layer_norm(ops.bias_act_dropout(x, self.dense.bias, self.activation_name, p=0.0))
        # The bias goes into the product: a pass of its own over the logits is the dearest of all.
        return product.linear(x, self.weight, self.bias)


class RobertaEncoder(ScriptedAsStock, stock.RobertaEncoder):
    """RoBERTa's encoder with its head: the embedding, the layers and the head are ours."""

    def build_embedding(self, vocab_size: int, embedding_dim: int, padding_idx: int):
        return fused_embedding(super().build_embedding(vocab_size, embedding_dim, padding_idx))

    def build_encoder(self, args, dictionary, embed_tokens):
        encoder = LightSeqTransformerEncoder(TransformerConfig.from_namespace(args), dictionary, embed_tokens)
        encoder.apply(init_bert_params)
        return encoder

    def build_lm_head(self, embed_dim: int, output_dim: int, activation_fn: str, weight):
        return RobertaLMHead(embed_dim, output_dim, activation_fn, weight)


@register_twins("roberta")
class LightSeqRobertaModel(Twin, stock.RobertaModel):
    """``--arch ls_roberta`` and the ``ls_`` twin of every architecture of fairseq's ``roberta``, ``xlm`` included."""

    @classmethod
    def build_model(cls, args, task):
        with names_mean(stock, RobertaEncoder=RobertaEncoder):
            return super().build_model(args, task)
