"""Tiny stock and ls_ Transformers with the same weights."""

import copy
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models.transformer import TransformerModel

from ls_plugin.models import LightSeqTransformerModel


def _dictionary(n_words: int) -> Dictionary:
    dictionary = Dictionary()
    for i in range(n_words):
        dictionary.add_symbol(f"word{i}")
    return dictionary


def _tiny_args(**options) -> Namespace:
    """Two layers of width 32, dropout off, vocabularies of 27 and 23 words."""
    args = Namespace(
        arch="ls_transformer",
        encoder_embed_dim=32,
        encoder_ffn_embed_dim=48,
        encoder_layers=2,
        encoder_attention_heads=4,
        decoder_layers=2,
        decoder_attention_heads=4,
        dropout=0.0,
        max_source_positions=64,
        max_target_positions=64,
    )
    vars(args).update(options)
    return args


@pytest.fixture
def task():
    def make(joined: bool = False):
        source = _dictionary(23)
        return SimpleNamespace(source_dictionary=source, target_dictionary=source if joined else _dictionary(19))

    return make


@pytest.fixture
def tiny_args():
    return _tiny_args


@pytest.fixture
def build_twins(task):
    """A function of model options that returns (stock, ls_), equal in weights, in train mode."""

    def build(seed: int = 1, **options):
        joined = any(options.get(name) for name in ("share_all_embeddings", "merge_src_tgt_embed"))
        models = []
        for cls in (TransformerModel, LightSeqTransformerModel):
            torch.manual_seed(seed)
            models.append(cls.build_model(_tiny_args(**copy.deepcopy(options)), task(joined)))
        return tuple(models)

    return build


@pytest.fixture
def batch():
    """Source left-padded, target right-padded, as fairseq's collater makes them; ids valid for both vocabularies."""
    generator = torch.Generator().manual_seed(5)
    source = torch.randint(4, 23, (3, 9), generator=generator)
    previous = torch.randint(4, 23, (3, 7), generator=generator)
    source[0, :4] = 1
    source[2, :1] = 1
    source[:, -1] = 2
    previous[:, 0] = 2
    previous[1, 5:] = 1
    return {"src_tokens": source, "src_lengths": torch.tensor([5, 9, 8]), "prev_output_tokens": previous}
