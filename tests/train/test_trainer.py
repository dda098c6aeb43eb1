"""fairseq's trainer under ``ls_adam``: batches that are added up, missing, empty or too large, and what it cannot go with."""

import copy
import logging

import pytest
import torch

from ls_plugin.errors import UnsupportedError
from ls_plugin.optim import trainer as wrappers

PRECISIONS = ["--log-interval=1", "--bf16", "--fp16"]
NO_DROPOUT = ("--dropout", "0")
ROUNDING = {"--log-interval=1": 1e-5, "--bf16": 2e-2, "--fp16": 5e-3}


def weights(trainer):
    return [p.detach().clone() for p in trainer.get_model().parameters()]


def collated(trainer, indices):
    dataset = trainer.task.dataset("train")
    return dataset.collater([dataset[i] for i in indices])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_batches_that_add_up_equal_a_larger_one(make_trainer, precision):
    runs = []
    for parts in (1, 3):
        trainer = make_trainer("ours", precision, *NO_DROPOUT)
        for update in range(3):
            indices = range(24 * update, 24 * (update + 1))
            size = 24 // parts
            output = trainer.train_step([collated(trainer, indices[i : i + size]) for i in range(0, 24, size)])
        runs.append((trainer.optimizer.optimizer.buffers, output))
    (whole, log), (added, other_log) = runs
    for a, b in zip(whole, added, strict=True):
        # what follows from the gradients in proportion; the update itself is a sign where they are small
        torch.testing.assert_close(
            b.exp_avg, a.exp_avg, rtol=0, atol=ROUNDING[precision] * a.exp_avg.abs().max().item()
        )
    assert other_log["loss"] == pytest.approx(log["loss"], rel=1e-3)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_empty_batch_counts_nothing(make_trainer, precision):
    """fairseq gives ranks that have run out of batches empty ones; a batch that is there stands in, and counts as 0."""
    results = []
    for batches in (lambda b: [b[0]], lambda b: [b[0], []], lambda b: [[], b[0]]):
        trainer = make_trainer("ours", precision, *NO_DROPOUT)
        trainer.reset_dummy_batch(trainer.batches[1])
        log = trainer.train_step(batches(trainer.batches))
        results.append((weights(trainer), log["loss"], log["sample_size"]))
    for other, *logged in results[1:]:
        assert logged == list(results[0][1:])
        assert all(torch.equal(a, b) for a, b in zip(other, results[0][0], strict=True))


@pytest.mark.parametrize("nothing", ["empty batch", "out of memory"])
@pytest.mark.parametrize("kind", [torch.tensor, int], ids=["tensor", "number"])
def test_a_rank_without_a_batch_has_a_sample_size_like_the_others(make_trainer, kind, nothing, monkeypatch):
    """Ranks sum tensors and numbers apart, so they would wait for each other; ``masked_lm``'s is a tensor."""
    trainer = make_trainer("ours")
    monkeypatch.setattr(type(trainer), "data_parallel_world_size", 2)
    step = trainer.task.train_step

    def train_step(*args, **kwargs):
        loss, sample_size, output = step(*args, **kwargs)
        return loss, kind(sample_size), output

    def out_of_memory(*args, **kwargs):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    trainer.task.train_step = train_step
    outputs, size, is_dummy = wrappers._accumulate(trainer, [trainer.batches[0]], raise_oom=False)
    assert (size, is_dummy) == (trainer.batches[0]["ntokens"], False)
    trainer.task.train_step = train_step if nothing == "empty batch" else out_of_memory
    empty_outputs, empty_size, is_dummy = wrappers._accumulate(trainer, [[]], raise_oom=False)
    assert (empty_size, is_dummy, type(empty_size)) == (0, True, type(size))
    assert empty_outputs[0].keys() == outputs[0].keys()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_batch_of_padding_changes_nothing_but_by_momentum(make_trainer, precision):
    trainer = make_trainer("ours", precision, *NO_DROPOUT)
    padding = copy.deepcopy(trainer.batches[0])
    for tokens in (padding["target"], padding["net_input"]["src_tokens"], padding["net_input"]["prev_output_tokens"]):
        tokens.fill_(trainer.task.target_dictionary.pad())
    padding["ntokens"] = 0
    before = weights(trainer)
    trainer.train_step([padding])
    decay = trainer.get_lr() * 0.01 * 2
    for a, b in zip(before, weights(trainer), strict=True):
        assert b.isfinite().all()
        torch.testing.assert_close(a, b, rtol=decay, atol=1e-6)
    trainer.train_step([trainer.batches[1]])
    assert all(p.isfinite().all() for p in weights(trainer)) and trainer.get_num_updates() == 2


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_skips_the_update(make_trainer, where, caplog):
    trainer = make_trainer("ours")
    trainer.train_step([trainer.batches[0]])
    before, step = weights(trainer), trainer.task.train_step

    def out_of_memory(*args, optimizer, **kwargs):
        if where == "backward":
            step(*args, optimizer=optimizer, **kwargs)
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")

    trainer.task.train_step = out_of_memory
    with caplog.at_level(logging.WARNING):
        assert trainer.train_step([trainer.batches[1]]) is None
    assert "attempting to recover from OOM" in caplog.text
    assert all(p.grad is None for p in trainer.get_model().parameters())
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train_step([trainer.batches[1]], raise_oom=True)
    del trainer.task.train_step
    assert all(torch.equal(a, b) for a, b in zip(before, weights(trainer), strict=True))
    assert trainer.get_num_updates() == 1
    assert trainer.train_step([trainer.batches[1]]) is not None


@pytest.mark.parametrize(
    "flags",
    [("--amp",), ("--use-bmuf",), ("--zero-sharding", "os"), ("--ddp-backend", "slowmo")],
    ids=lambda flags: flags[0],
)
def test_what_cannot_go_with_the_buffers_is_refused_by_name(make_trainer, flags):
    trainer = make_trainer("ours", *flags)
    with pytest.raises(UnsupportedError, match=f"ls_adam: {flags[0]}.*is unsupported"):
        _ = trainer.optimizer


def test_overflows_name_their_parameters(make_trainer, caplog):
    flags = ("--fp16", "--fp16-no-flatten-grads", "--debug-param-names", "--fp16-init-scale", 2**22)
    trainer = make_trainer("ours", *flags)
    with caplog.at_level(logging.INFO):
        assert trainer.train_step([trainer.batches[0]]) is None
    assert "gradient overflow detected, ignoring gradient, setting loss scale to: 2097152.0" in caplog.text
    assert "overflow in param encoder.embed_tokens.weight" in caplog.text
    assert trainer.get_num_updates() == 0


def test_ranks_that_agree_on_nan_are_not_called_inconsistent(make_trainer, monkeypatch):
    trainer = make_trainer("ours")
    trainer._grad_norm_buf = torch.zeros(2)  # as on two GPUs
    monkeypatch.setattr("fairseq.distributed.utils.all_reduce", lambda buffer, group: buffer.fill_(buffer[0]))
    assert trainer.train_step([trainer.batches[0]]) is not None
    monkeypatch.setattr(trainer, "clip_grad_norm", lambda clip_norm: torch.tensor(float("nan")))
    with pytest.raises(FloatingPointError, match="Nan/Inf at update 2"):
        trainer.train_step([trainer.batches[1]])
    trainer._norms = [torch.tensor(float("nan"))]
    monkeypatch.setattr(
        "fairseq.distributed.utils.all_reduce", lambda buffer, group: buffer.copy_(torch.tensor([0, 1]))
    )
    with pytest.raises(FloatingPointError, match="inconsistent"):
        wrappers._check_norms(trainer, 2)


def test_what_is_frozen_stays_of_16_bits_when_a_checkpoint_is_loaded(make_trainer, tmp_path):
    def trainer_with_frozen_encoder():
        trainer = make_trainer("ours", "--bf16", "--store-ema")
        trainer.get_model().encoder.requires_grad_(False)
        return trainer

    trainer = trainer_with_frozen_encoder()
    trainer.train_step([trainer.batches[0]])
    place = {"epoch": 1, "iterations_in_epoch": 1, "version": 2}
    trainer.consolidate_optimizer()
    trainer.save_checkpoint(str(tmp_path / "saved.pt"), {"train_iterator": place})
    resumed = trainer_with_frozen_encoder()
    resumed.load_checkpoint(str(tmp_path / "saved.pt"))
    assert all(torch.equal(a, b) for a, b in zip(weights(trainer), weights(resumed), strict=True))
    for model in (resumed.get_model(), resumed.ema.get_model()):
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("names", ["stock", "ours"])
def test_each_update_seeds_torch_by_its_number(make_trainer, names):
    trainer = make_trainer(names)
    for n_updates in (0, 3):
        trainer.set_num_updates(n_updates)
        trainer._set_seed()
        drawn = torch.rand(4)
        torch.manual_seed(trainer.cfg.common.seed + n_updates)
        assert torch.equal(drawn, torch.rand(4))
