"""Token embedding that names a bad token id."""

import torch
from torch import Tensor, nn

from ls_plugin.errors import TokenIdError


class TokenEmbedding(nn.Embedding):
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
            outside = tokens[(tokens < 0) | (tokens >= self.num_embeddings)]
            if outside.numel() == 0:
                raise
            raise TokenIdError(
                f"embedding: tokens must lie in [0, {self.num_embeddings}), the size of the dictionary, got {outside[0].item()} "
                f"({outside.numel()} of {tokens.numel()} ids are outside); was the data preprocessed with another dictionary? "
                "Preprocess it again with this model's --srcdict and --tgtdict"
            ) from None


def is_plain_embedding(module: nn.Module) -> bool:
    """Whether a module is the ``nn.Embedding`` that fairseq builds by default, and not an adaptive or quantised one."""
    return type(module) is nn.Embedding and isinstance(module.weight, torch.nn.Parameter)
