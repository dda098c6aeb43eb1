"""Faults of fairseq 0.12 itself, put right while the plugin is loaded; nothing installed is edited.

Each is what fairseq's documentation promises and its code does not do:

- Batches: the last one of an epoch is dropped unless its size is a multiple of 8 (``batching.py``).
- ``--no-repeat-ngram-size``: the last tokens of a hypothesis are looked for at the padded end of its buffer, so nothing is banned.
"""

import math

import torch
from fairseq.data import data_utils
from fairseq.ngram_repeat_block import NGramRepeatBlock
from torch import Tensor

from ls_plugin.batching import batch_by_size
from ls_plugin.rebinding import replace, wrap


def install() -> None:
    """Rebinds the functions at fault.  Calling it again changes nothing."""
    wrap(data_utils, "batch_by_size", batch_by_size)
    replace(NGramRepeatBlock, "_no_repeat_ngram", _no_repeat_ngram)


# --- n-grams


def _no_repeat_ngram(self, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int):
    """Sets to -inf, in place, each token that would end an n-gram which its hypothesis already has. TorchScript compiles it.

    fairseq's CUDA extension, where it was built, does the same.

    Args:
        tokens: (rows, length of the buffer); written are ``step + 1``, of which the first is no output but what decoding begins with.
        lprobs: (rows, V).
    """
    n = self.no_repeat_ngram_size
    first = (
        1 if n == 1 else 0
    )  # the first token ends no n-gram; as an n-gram of one it would ban the end of the sentence
    written = tokens[:, first : step + 1]
    if written.size(1) < n:
        return lprobs
    ngrams = written.unfold(1, n, 1)  # (rows, n-grams, n)
    last = written[:, written.size(1) - (n - 1) :]
    repeated = (ngrams[:, :, : n - 1] == last.unsqueeze(1)).all(dim=2)
    rows = torch.arange(tokens.size(0), device=tokens.device).unsqueeze(1).expand_as(repeated)
    lprobs[rows[repeated], ngrams[:, :, n - 1][repeated]] = torch.tensor(-math.inf).to(lprobs)
    return lprobs
