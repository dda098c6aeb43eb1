import math

import torch
import torch.nn.functional as F
from fairseq.modules import SinusoidalPositionalEmbedding
from fairseq.utils import make_positions

from ls_plugin import ops
from ls_plugin.report.op_timing import CUDA_ELEMENTS, Case

P, PAD, MAX_POSITIONS = 0.1, 1, 1024


def _tokens(n_sentences: int, n_tokens: int, n_embeddings: int, generator: torch.Generator) -> torch.Tensor:
    """Ids with the uneven frequencies of words, sentences of falling length, padded to the left as fairseq pads sources."""
    uniform = torch.rand(n_sentences, n_tokens, generator=generator, device=generator.device)
    tokens = (4 * torch.exp(uniform * math.log(n_embeddings / 4))).long().clamp(4, n_embeddings - 1)
    for b in range(n_sentences):
        tokens[b, : b * n_tokens // (4 * n_sentences)] = PAD
    return tokens


def cases(device, dtype):
    generator = torch.Generator(device).manual_seed(0)
    seed = torch.tensor([5])
    # B, T, V, C
    shapes = ((4, 8, 8000, 256), (16, 64, 8000, 512), (16, 64, 32000, 512), (16, 64, 32000, 1024))
    if device.type == "cuda":
        shapes = tuple((CUDA_ELEMENTS // (256 * n_cols), 256, 32000, n_cols) for n_cols in (512, 1024))
    for n_sentences, n_tokens, n_embeddings, n_cols in shapes:
        tokens = _tokens(n_sentences, n_tokens, n_embeddings, generator)
        weight = torch.randn(n_embeddings, n_cols, generator=generator, device=device).to(dtype)
        table = SinusoidalPositionalEmbedding.get_embedding(MAX_POSITIONS + PAD + 1, n_cols, PAD).to(device, dtype)
        grad_y = torch.randn(n_sentences, n_tokens, n_cols, generator=generator, device=device).to(dtype)
        scale = math.sqrt(n_cols)

        def eager(tokens, weight, table, scale=scale):
            positions = table.index_select(0, make_positions(tokens, PAD).view(-1)).view(*tokens.shape, -1)
            return F.dropout(scale * F.embedding(tokens, weight, PAD) + positions, P)

        def ls(tokens, weight, table, scale=scale):
            return ops.embedding(tokens, weight, table, PAD, scale, P)

        def forward(tokens, weight, table, scale=scale):
            return torch.ops.ls.embedding_forward(tokens, weight, table, PAD, scale, P, seed, 0)

        def backward(_y, tokens=tokens, grad_y=grad_y, scale=scale, n_embeddings=n_embeddings):
            return torch.ops.ls.embedding_backward(
                grad_y, tokens, PAD, scale, P, seed, 0, n_embeddings, 0, True, False, False
            )

        yield Case(
            op="embedding",
            shape=f"{n_sentences} x {n_tokens}, V {n_embeddings}, C {n_cols}, sinusoidal, p {P}",
            leaves=(tokens, weight.requires_grad_(), table),
            eager=eager,
            ls=ls,
            grad_outputs=(grad_y,),
            # Reads the rows that occur, once, and the tokens; writes y.
            forward_bytes=(tokens.unique().numel() + make_positions(tokens, PAD).unique().numel())
            * n_cols
            * weight.itemsize
            + grad_y.nbytes
            + tokens.nbytes,
            # Reads grad_y and the tokens, writes every row of the gradient.
            backward_bytes=grad_y.nbytes + weight.nbytes + tokens.nbytes,
            kernels=(forward, backward),
        )
