"""Tiny models of the four families, stock and ls_, and batches for them."""

import copy
from argparse import Namespace
from types import SimpleNamespace

import torch
from fairseq import models
from fairseq.data import Dictionary
from torch import Tensor

PAD, EOS = 1, 2
N_SOURCE_WORDS, N_TARGET_WORDS = 23, 19  # and four symbols of fairseq's
N_VALID_IDS = 4 + N_TARGET_WORDS  # ids that both dictionaries know

_SIZES = {"embed_dim": 32, "ffn_embed_dim": 48, "layers": 2, "attention_heads": 4}
_ENCODER = {f"encoder_{name}": size for name, size in _SIZES.items()}
_DECODER = {f"decoder_{name}": size for name, size in _SIZES.items()}
_SEQ2SEQ = {**_ENCODER, **_DECODER, "max_source_positions": 64, "max_target_positions": 64}
_LM = {
    **_DECODER,
    "decoder_input_dim": 32,
    "decoder_output_dim": 32,
    "max_target_positions": 64,
    "tokens_per_sample": 64,
}
# For each family: a stock architecture, and the arguments that make it tiny. BART reads the task's name when it loads weights.
FAMILIES = {
    "transformer": ("transformer", _SEQ2SEQ),
    "transformer_lm": ("transformer_lm", {**_LM, "add_bos_token": False, "tpu": False}),
    "bart": ("bart_base", {**_SEQ2SEQ, "task": "denoising"}),
    "roberta": ("roberta", {**_ENCODER, "max_positions": 64}),
}


def dictionary(n_words: int) -> Dictionary:
    words = Dictionary()
    for i in range(n_words):
        words.add_symbol(f"word{i}")
    return words


def tiny_args(family: str = "transformer", ls: bool = True, **options) -> Namespace:
    """Two layers of width 32, dropout off."""
    arch, sizes = FAMILIES[family]
    no_dropout = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    return Namespace(**{"arch": f"ls_{arch}" if ls else arch, **sizes, **no_dropout, **copy.deepcopy(options)})


def task(joined: bool = False):
    source = dictionary(N_SOURCE_WORDS)
    target = source if joined else dictionary(N_TARGET_WORDS)
    return SimpleNamespace(source_dictionary=source, target_dictionary=target, max_positions=lambda: 64)


def build(family: str, ls: bool, seed: int = 1, **options):
    """A model by the way of fairseq's registry, in train mode."""
    joined = family in ("transformer_lm", "roberta", "bart")
    joined |= any(options.get(name) for name in ("share_all_embeddings", "merge_src_tgt_embed"))
    torch.manual_seed(seed)
    return models.build_model(tiny_args(family, ls, **options), task(joined))


def build_twins(family: str = "transformer", seed: int = 1, **options):
    """(stock, ls_), built from the same seed."""
    return build(family, False, seed, **options), build(family, True, seed, **options)


def tokens(n_sentences: int, length: int, seed: int) -> Tensor:
    """int64 (n_sentences, length) without padding; each sentence ends with EOS."""
    ids = torch.randint(4, N_VALID_IDS, (n_sentences, length), generator=torch.Generator().manual_seed(seed))
    ids[:, -1] = EOS
    return ids


def pad(ids: Tensor, lengths: list[int], left: bool) -> Tensor:
    """Keeps the last ``lengths[i]`` tokens of sentence i, EOS among them, and pads to the left or right of them."""
    padded = torch.full_like(ids, PAD)
    for row, sentence, n in zip(padded, ids, lengths, strict=True):
        kept = sentence[len(sentence) - n :]
        row[len(row) - n if left else 0 :][:n] = kept
    return padded


# How long the sentences of a batch are, and on which side of them the padding is.
PADDINGS = {
    "unpadded": ([9, 9, 9], [7, 7, 7], False),
    "left": ([5, 9, 8], [7, 5, 6], True),
    "right": ([5, 9, 8], [7, 5, 6], False),
    "empty sentence": ([0, 9, 8], [0, 5, 7], False),
    "one token": ([1], [1], False),
}


def batch(family: str = "transformer", padding: str = "left") -> dict[str, Tensor]:
    """What fairseq's collater hands to the model. Targets, and the tokens of a language model, are padded on the right."""
    source_lengths, target_lengths, left = PADDINGS[padding]
    decoder_only = family == "transformer_lm"
    source = tokens(len(source_lengths), max(source_lengths), 5)
    inputs = {"src_tokens": pad(source, source_lengths, left and not decoder_only)}
    inputs["src_lengths"] = torch.tensor(source_lengths)
    if family in ("transformer", "bart"):
        target = tokens(len(target_lengths), max(target_lengths), 6)
        inputs["prev_output_tokens"] = pad(target, target_lengths, False)
    return inputs
