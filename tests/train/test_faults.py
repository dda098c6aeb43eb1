"""Faults of fairseq itself: each through fairseq's own functions or the real command, with the right value beside it."""

import itertools

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import data_utils
from fairseq.dataclass import utils as dataclass_utils
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.sequence_generator import SequenceGenerator
from fairseq_cli.train import should_stop_early
from omegaconf import OmegaConf

from ls_plugin import criterions, faults

stock_batch_by_size = data_utils.batch_by_size.__wrapped__


def test_installing_again_changes_nothing():
    before = (data_utils.batch_by_size, NGramRepeatBlock._no_repeat_ngram)
    faults.install()
    assert (data_utils.batch_by_size, NGramRepeatBlock._no_repeat_ngram) == before


# --- batches

LENGTHS = np.sort(np.random.default_rng(5).integers(1, 40, 1003))
LIMITS = {
    "sentences and tokens": {"max_sentences": 24, "max_tokens": 400},
    "sentences": {"max_sentences": 5},
    "tokens": {"max_tokens": 300},
    "no limit": {},
}


def batches(n, batch_by_size=data_utils.batch_by_size, vector=True, **flags):
    lengths = LENGTHS[:n]
    return batch_by_size(
        np.arange(n), lambda index: LENGTHS[index], num_tokens_vec=lengths if vector else None, **flags
    )


@pytest.mark.parametrize("vector", [True, False])
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("multiple", [1, 2, 8])
def test_every_sentence_is_in_a_batch(limits, multiple, vector):
    for n in [*range(1, 60), 104, 105, 1000, 1003]:
        ours = batches(n, vector=vector, required_batch_size_multiple=multiple, **limits)
        stock = batches(n, stock_batch_by_size, vector, required_batch_size_multiple=multiple, **limits)
        assert np.array_equal(np.concatenate(ours), np.arange(n))
        assert len(ours) - len(stock) in (0, 1)
        assert all(np.array_equal(a, b) for a, b in zip(ours, stock, strict=False))  # the others are stock's
        for batch in ours:
            assert len(batch) < multiple or len(batch) % multiple == 0
            assert len(batch) <= limits.get("max_sentences", n)
            assert len(batch) * LENGTHS[batch].max() <= limits.get("max_tokens", n * LENGTHS.max())


def test_the_sizes_of_the_last_batches():
    def sizes(n, **flags):
        return list(map(len, batches(n, required_batch_size_multiple=8, **flags)))

    assert sizes(21) == [16, 5]
    assert sizes(105) == [104, 1]
    assert sizes(5) == [5]
    assert sizes(16) == [16]
    assert sizes(0) == []
    assert list(map(len, data_utils.batch_by_size(iter(range(21)), lambda i: 3, required_batch_size_multiple=8))) == [
        16,
        5,
    ]


def test_batches_of_fixed_shapes_are_those_of_stock():
    flags = {"fixed_shapes": [[8, 10], [4, 20], [2, 40]], "required_batch_size_multiple": 8}
    ours, stock = batches(203, **flags), batches(203, stock_batch_by_size, **flags)
    assert ours == stock
    assert sum(map(len, ours)) == 203


@pytest.mark.parametrize("flags", [[], ["--num-batch-buckets", "3"]], ids=["", "buckets"])
def test_an_epoch_and_a_validation_have_every_sentence(make_trainer, flags):
    """fairseq's default: any number below 8, or a multiple of it."""
    trainer = make_trainer("ours", "--required-batch-size-multiple", "8", *flags)
    trainer.task.load_dataset("valid")
    validation = trainer.get_valid_iterator("valid").next_epoch_itr(shuffle=False)
    for batches, n_sentences in ((trainer.batches, 600), (validation, 40)):
        ids = torch.cat([batch["id"] for batch in batches])
        assert ids.sort()[0].tolist() == list(range(n_sentences))


# --- n-grams


def banned(tokens, size, padding=3):
    """Tokens that may not come next, for each row."""
    tokens = torch.tensor(tokens)
    written = tokens.size(1)
    buffer = torch.cat([tokens, torch.full((len(tokens), padding), 1)], dim=1)
    lprobs = torch.zeros(len(tokens), 12)
    result = NGramRepeatBlock(size)(buffer, lprobs, 1, len(tokens), written - 1)
    assert result is lprobs  # fairseq writes in place
    return [row.isinf().nonzero().flatten().tolist() for row in result]


def test_the_token_that_would_repeat_an_n_gram_is_banned():
    assert banned([[2, 5, 6, 5, 6]], 3) == [[5]]  # stock bans 6
    assert banned([[2, 5, 6, 5, 6]], 2) == [[5]]
    assert banned([[2, 5, 6, 7, 5], [2, 5, 5, 5, 5]], 2) == [[6], [5]]
    assert banned([[2, 5, 6, 5, 7, 5]], 2) == [[6, 7]]
    assert banned([[2, 5, 6, 5, 6]], 1) == [[5, 6]]  # and not 2, by which the sentence could not end
    assert banned([[2, 5, 6]], 4) == [[]]
    assert banned([[2]], 1) == [[]]
    assert banned([[2]], 2) == [[]]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("scripted", [False, True])
def test_no_output_repeats_an_n_gram(make_trainer, size, scripted):
    """Stock's generator over a model that has learned nothing, and so repeats itself."""
    trainer = make_trainer("stock")
    model, dictionary = trainer.model.eval(), trainer.task.target_dictionary

    def repeats(n):
        generator = SequenceGenerator([model], dictionary, beam_size=3, max_len_b=15, min_len=9, no_repeat_ngram_size=n)
        generator = torch.jit.script(generator) if scripted else generator
        found = 0
        for hypothesis in itertools.chain.from_iterable(
            generator.forward({"net_input": trainer.batches[0]["net_input"]})
        ):
            tokens = hypothesis["tokens"].tolist()[:-1]
            ngrams = list(zip(*(tokens[i:] for i in range(size)), strict=False))
            found += len(ngrams) - len(set(ngrams))
        return found

    if not scripted:
        assert repeats(0) > 0
    assert repeats(size) == 0


# --- Hydra


def test_a_configuration_takes_the_place_of_the_one_that_it_extends():
    """As in the second job of a sweep with criterion=cross_entropy criterion._name=ls_cross_entropy, when Hydra knows stock's alone."""
    ours = criterions.cross_entropy.CrossEntropyCriterionConfig
    stock = ours.__mro__[2]
    parent = OmegaConf.create(
        {"optimization": {"sentence_avg": True}, "criterion": stock(), "other": OmegaConf.structured(stock)}
    )
    parent.criterion._name = "ls_cross_entropy"
    merged = dataclass_utils.merge_with_parent(ours, parent.criterion)
    assert OmegaConf.get_type(merged) is ours
    assert (merged._name, merged.sentence_avg, str(merged.fused_projection)) == ("ls_cross_entropy", True, "auto")
    assert OmegaConf.get_type(dataclass_utils.merge_with_parent(stock, parent.other)) is stock


def test_a_trainer_remembers_nothing_of_the_run_before(make_trainer):
    checkpoint_utils.save_checkpoint.best = 1.5
    should_stop_early.best, should_stop_early.num_runs = 1.5, 3
    make_trainer("ours")
    for function in (checkpoint_utils.save_checkpoint, should_stop_early):
        assert not hasattr(function, "best") and not hasattr(function, "num_runs")
