"""Token embedding on the fused op: scale, positions, layer norm and dropout with it; and an error that names a bad token id."""

import torch
from fairseq.modules import LearnedPositionalEmbedding, SinusoidalPositionalEmbedding
from torch import Tensor, nn

from ls_plugin import ops
from ls_plugin.errors import TokenIdError
from ls_plugin.modules.dropout import Dropout
from ls_plugin.modules.layer_norm import LayerNorm
from ls_plugin.modules.scripting import ScriptedAsStock
from ls_plugin.modules.swap import NO_PARAMETER, WEIGHT, WEIGHT_AND_BIAS, are_as_built, are_classes_as_built


class TokenEmbedding(ScriptedAsStock, nn.Embedding):
    """``nn.Embedding`` whose "index out of range in self" says which id, and what usually causes it.

    The good path pays nothing: on a CPU torch's own error is translated. On a GPU torch stops the kernel with a device-side
    assertion, which no check short of waiting for the GPU at every step can turn into a message.
    """

    @classmethod
    def of(cls, embedding: nn.Embedding) -> "TokenEmbedding":
        """The same embedding, sharing its weight."""
        ours = cls(
            embedding.num_embeddings, embedding.embedding_dim, embedding.padding_idx, _weight=embedding.weight.data
        )
        ours.weight = embedding.weight
        return ours

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: int64 (B, T) -> (B, T, C).  Raises TokenIdError for an id outside [0, V)."""
        try:
            return super().forward(tokens)
        except IndexError:
            self._refuse_bad_ids(tokens)
            raise

    def with_positions(
        self, tokens: Tensor, table: Tensor | None, scale: float, norm: nn.LayerNorm | None, dropout: Dropout
    ) -> Tensor:
        """dropout(norm(scale * weight[tokens] + table[position])), (B, T) -> (B, T, C); positions are counted by fairseq's rule.

        Raises:
            TokenIdError: an id outside [0, V).  RuntimeError: a sentence longer than the table.
        """
        try:
            return ops.embedding(
                tokens,
                self.weight,
                table,
                self.padding_idx,
                scale,
                dropout.p,
                dropout.active,
                None if norm is None else (norm.weight, norm.bias, norm.eps),
            )
        except RuntimeError:
            self._refuse_bad_ids(tokens)
            raise

    def _refuse_bad_ids(self, tokens: Tensor) -> None:
        outside = tokens[(tokens < 0) | (tokens >= self.num_embeddings)]
        if outside.numel() > 0:
            raise TokenIdError(
                f"embedding: tokens must lie in [0, {self.num_embeddings}), the size of the dictionary, got {outside[0].item()} "
                f"({outside.numel()} of {tokens.numel()} ids are outside); was the data preprocessed with another dictionary? "
                "Preprocess it again with this model's --srcdict and --tgtdict"
            ) from None


def is_plain_embedding(module: nn.Module) -> bool:
    """Whether a module is the ``nn.Embedding`` that fairseq builds by default, and not an adaptive or quantised one."""
    return type(module) is nn.Embedding and isinstance(module.weight, torch.nn.Parameter)


_EMBEDDINGS = {
    TokenEmbedding: WEIGHT,
    LearnedPositionalEmbedding: WEIGHT,
    SinusoidalPositionalEmbedding: NO_PARAMETER,
}


def can_be_one_op(
    embedding: nn.Module, positions: nn.Module | None, norm: nn.Module | None, dropout: nn.Module
) -> bool:
    """Whether :meth:`TokenEmbedding.with_positions` does all that calling the four modules would do. Asked in every forward."""
    return (
        type(embedding) is TokenEmbedding
        and not (embedding.max_norm is not None or embedding.scale_grad_by_freq or embedding.sparse)
        and are_classes_as_built()
        and are_as_built((embedding, positions), _EMBEDDINGS)
        and are_as_built((norm,), {LayerNorm: WEIGHT_AND_BIAS})
        and are_as_built((dropout,), {Dropout: NO_PARAMETER})
    )


def position_table(module: nn.Module | None, length: int, like: Tensor) -> Tensor | None:
    """The table (n_positions, C) that fairseq's module of positions looks up; sinusoidal ones grow as sentences do.

    Args:
        length: of the longest sentence.  like: tells dtype and device.
    """
    if module is None:
        return None
    if isinstance(module, LearnedPositionalEmbedding):
        return module.weight
    n_positions = module.padding_idx + 1 + length
    weights = module.weights
    was_on_meta = weights is not None and weights.is_meta and not like.is_meta  # it has no values
    if weights is None or was_on_meta or weights.size(0) < n_positions:
        module.weights = module.get_embedding(n_positions, module.embedding_dim, module.padding_idx)
    if module.weights.dtype != like.dtype or module.weights.device != like.device:
        module.weights = module.weights.to(like)
    return module.weights
