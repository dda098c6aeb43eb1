"""Faults of fairseq 0.12 itself, put right while the plugin is loaded; nothing installed is edited.

Each is what fairseq's documentation promises and its code does not do:

- Batches: the last one of an epoch is dropped unless its size is a multiple of 8 (``batching.py``).
- ``--no-repeat-ngram-size``: the last tokens of a hypothesis are looked for at the padded end of its buffer, so nothing is banned.
- Hydra: a component whose configuration extends another's cannot be named by ``_name`` beside that one once it is registered, so the second
  job of a sweep fails. And what a job remembers reaches the next one of the sweep: the best validation, the patience that is left, and the
  writers for tensorboard.
"""

import math
import sys
from dataclasses import is_dataclass

import torch
from fairseq import checkpoint_utils
from fairseq.data import data_utils
from fairseq.dataclass import utils as dataclass_utils
from fairseq.logging import progress_bar
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.trainer import Trainer
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from ls_plugin.batching import batch_by_size
from ls_plugin.rebinding import replace, wrap


def install() -> None:
    """Rebinds the functions at fault.  Calling it again changes nothing."""
    wrap(data_utils, "batch_by_size", batch_by_size)
    wrap(dataclass_utils, "merge_with_parent", _merge_with_parent)
    wrap(Trainer, "__init__", _start_afresh)
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


# --- Hydra


def _merge_with_parent(stock, dc, cfg: DictConfig, *args, **kwargs):
    """Merges a component's configuration over the defaults of its dataclass, also where it has the type of a base of that dataclass.

    ``criterion=cross_entropy criterion._name=ls_cross_entropy`` gives it stock's type. Its values are merged without the type.
    """
    ours, given = (OmegaConf.get_type(config) for config in (dc, cfg))
    if ours is not given and is_dataclass(given) and issubclass(ours, given):
        untyped = OmegaConf.create(OmegaConf.to_container(cfg, resolve=False))
        untyped.__dict__["_parent"] = cfg.__dict__["_parent"]
        cfg = untyped
    return stock(dc, cfg, *args, **kwargs)


def _start_afresh(stock, self, *args, **kwargs) -> None:
    """A trainer begins a run; fairseq keeps these in functions and modules, for the whole process."""
    train = sys.modules.get("fairseq_cli.train")
    for function in (checkpoint_utils.save_checkpoint, *([train.should_stop_early] if train else [])):
        for name in ("best", "num_runs"):
            vars(function).pop(name, None)
    getattr(progress_bar, "_tensorboard_writers", {}).clear()  # there where tensorboard is
    stock(self, *args, **kwargs)
