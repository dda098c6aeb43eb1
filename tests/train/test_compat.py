"""What fairseq needs old releases for: through the real commands where it can matter, with the plugin as console script and as --user-dir."""

import argparse
import copy
import importlib.util
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils, options
from fairseq.data import data_utils, language_pair_dataset
from fairseq.modules import DynamicCRF
from fairseq_cli import preprocess
from omegaconf import OmegaConf

from ls_plugin import compat
from ls_plugin.errors import UnsupportedError
from tests.limits import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
USER_DIR = ["--user-dir", ROOT / "ls_plugin"]
PARITY = 1e-3
BF16_NOISE = 5e-3  # relative, of a loss against fp32's; eps is 8e-3


def assert_close(losses, expected, tolerance):
    assert len(losses) == len(expected) > 0
    np.testing.assert_allclose(losses, expected, rtol=tolerance)


def test_installing_again_changes_nothing():
    before = (options.parse_args_and_arch, checkpoint_utils.prune_state_dict)
    compat.install()
    assert (options.parse_args_and_arch, checkpoint_utils.prune_state_dict) == before


# --- reading ahead

ENDS_WHILE_READING_AHEAD = """
import sys
import ls_plugin
import torch
from fairseq.data.iterators import BufferedIterator

class Batches:
    def __len__(self):
        return 1_000_000
    def __iter__(self):
        while True:
            for _ in range(300):
                batch = torch.ones(1000).fill_(2)
            yield batch

batches = BufferedIterator(int(sys.argv[1]), Batches())
next(batches)
"""


@pytest.mark.parametrize("room", [1, 10], ids=["waiting for room", "making a batch"])
def test_a_process_may_end_while_it_reads_ahead(room):
    """Without the plugin this aborts nearly every time: "terminate called without an active exception"."""
    process = subprocess.run(
        [sys.executable, "-c", ENDS_WHILE_READING_AHEAD, str(room)], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert process.returncode == 0, process.stderr


# --- bf16


@pytest.mark.slow
def test_bf16_trains_as_fp32_does(trained, commands, losses, training_flags, tmp_path):
    """Ours and stock, with fp32 masters and without; a scale that compounds from step to step would show."""
    stock = (["fairseq_cli.train", *USER_DIR], training_flags["stock"])
    ours = (["ls_plugin.cli.train"], training_flags["ours"])
    runs = []
    for flag in ("--bf16", "--memory-efficient-bf16"):
        for (module, *user_dir), flags in (stock, ours):
            folder = ["--save-dir", tmp_path / str(len(runs))]
            runs.append(commands.start(module, commands.data, *flags, *user_dir, flag, *folder))
    results = [losses(commands.finish(run)) for run in runs]
    fp32 = losses(trained["stock"][1])
    assert fp32[-1] < fp32[0] - 0.5
    for result in results:
        assert_close(result, fp32, BF16_NOISE)
    assert_close(results[1], results[0], 2 * PARITY)  # each rounds its own way
    assert_close(results[3], results[2], 2 * PARITY)
    assert fp32 not in results  # it was bf16 indeed


TRAINING = ["data", "--arch", "ls_transformer", "--optimizer", "ls_adam", "--max-tokens", "100"]


def parse(*flags):
    parser = options.get_training_parser()
    return options.parse_args_and_arch(parser, [*TRAINING, *flags])


@pytest.fixture(autouse=True)
def no_arguments_of_pytest(monkeypatch):
    monkeypatch.setattr("sys.argv", ["lightseq-train"])


@pytest.mark.parametrize("flags", [[], ["--bf16"], ["--memory-efficient-bf16"]])
def test_bf16_is_no_tpu_run(flags):
    assert not parse(*flags).tpu


def test_tpu_without_torch_xla_is_refused():
    with pytest.raises(UnsupportedError, match=r"--tpu: .*torch_xla"):
        parse("--tpu", "--bf16")


def test_with_torch_xla_nothing_changes(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert parse("--bf16").tpu
    assert parse("--tpu").tpu
    assert not parse().tpu


# --- saving


@pytest.mark.parametrize("flag", ["--write-checkpoints-asynchronously", "--save-async"])
def test_saving_in_the_background_is_refused(flag):
    with pytest.raises(
        UnsupportedError, match=r"--write-checkpoints-asynchronously, --save-async: unsupported.*drop the flag"
    ):
        parse(flag)


# --- numpy


def test_batch_buckets(commands, losses, training_flags, tmp_path):
    flags = ["--num-batch-buckets", "3", "--max-update", "4"]
    runs = [
        commands.start(
            "ls_plugin.cli.train", commands.data, *training_flags["ours"], *flags, "--save-dir", tmp_path / "a"
        ),
        commands.start(
            "fairseq_cli.train",
            commands.data,
            *training_flags["stock"],
            *flags,
            *USER_DIR,
            "--save-dir",
            tmp_path / "b",
        ),
    ]
    logs = [commands.finish(run) for run in runs]
    assert all("bucketing target lengths: [" in log for log in logs)
    assert_close(losses(logs[0]), losses(logs[1]), PARITY)


def test_sample_break_mode_eos(commands, losses, tmp_path):
    """A language model on single sentences."""
    corpus = commands.data.parent
    flags = ["--only-source", "--trainpref", str(corpus / "train.en"), "--destdir", str(tmp_path / "bin")]
    preprocess.main(options.get_preprocessing_parser().parse_args(flags))
    flags = shlex.split(
        "--task language_modeling --sample-break-mode eos --arch transformer_lm --decoder-embed-dim 32 --decoder-ffn-embed-dim 64 "
        "--decoder-layers 1 --decoder-attention-heads 2 --optimizer adam --lr 5e-3 --max-tokens 300 --max-update 6 --cpu "
        "--disable-validation --no-save --log-format json --log-interval 1 --dropout 0 --num-workers 0"
    )
    log = commands.run("fairseq_cli.train", tmp_path / "bin", *flags, *USER_DIR)
    assert len(losses(log)) == 6
    assert losses(log)[-1] < losses(log)[0]


def test_other_names_that_numpy_removed():
    sizes = np.array([3, 5, 5, 8, 13, 21])
    assert data_utils.get_buckets(sizes, 2).tolist() == [5, 21]
    assert language_pair_dataset.np.compat.long(3) == 3
    crf = DynamicCRF(num_embedding=6, low_rank=2, beam_size=3)
    emissions, targets = torch.randn(2, 4, 6), torch.randint(6, (2, 4))
    assert torch.isfinite(crf(emissions, targets, torch.ones(2, 4, dtype=torch.bool))).all()


def test_old_numpy_is_numpy_otherwise():
    old = compat.Overlay(np, {"float": float})
    assert old.array is np.array and old.float is float
    assert old.random is np.random
    with pytest.raises(AttributeError):
        old.no_such_name  # noqa: B018
    np.testing.assert_array_equal(compat._percentile([1, 2, 4], [50], interpolation="higher"), [2])
    assert compat._percentile([1, 2], 50) == 1.5


# --- mBART


@pytest.mark.slow
@pytest.mark.longest
def test_mbart_trains_and_translates(commands, losses, tmp_path):
    """A stock checkpoint is finetuned by ours as by stock."""
    prefixes = [f"--{split}pref={commands.data.parent / split}" for split in ("train", "test")]
    flags = [
        "--source-lang",
        "de",
        "--target-lang",
        "en",
        *prefixes,
        "--joined-dictionary",
        "--destdir",
        str(tmp_path / "bin"),
    ]
    preprocess.main(options.get_preprocessing_parser().parse_args(flags))
    task = shlex.split("--task translation_from_pretrained_bart --langs de,en --source-lang de --target-lang en")
    sizes = shlex.split(
        "--encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 16 --decoder-embed-dim 16 --encoder-ffn-embed-dim 32 "
        "--decoder-ffn-embed-dim 32 --encoder-attention-heads 2 --decoder-attention-heads 2 --dropout 0 --attention-dropout 0 "
        "--lr 1e-3 --max-tokens 300 --max-update 4 --disable-validation --log-format json --log-interval 1 --seed 7 --num-workers 0 --cpu"
    )
    stock = shlex.split("--arch mbart_base --criterion cross_entropy --optimizer adam")
    ours = shlex.split("--arch ls_mbart_base --criterion ls_cross_entropy --optimizer ls_adam")

    def train(module, folder, *flags):
        folder = ["--save-dir", tmp_path / folder]
        return losses(commands.run(module, tmp_path / "bin", *task, *sizes, *flags, *folder))

    from_stock = ["--finetune-from-model", tmp_path / "pretrained" / "checkpoint_last.pt"]
    train("fairseq_cli.train", "pretrained", *USER_DIR, *stock)
    expected = train("fairseq_cli.train", "stock", *USER_DIR, *stock, *from_stock)
    assert_close(train("ls_plugin.cli.train", "ours", *ours, *from_stock), expected, PARITY)
    path = ["--path", tmp_path / "ours" / "checkpoint_last.pt", "--beam", 2, "--max-len-b", 5, "--cpu"]
    assert commands.run("ls_plugin.cli.generate", tmp_path / "bin", *task, *path).count("\nH-") == 20


# --- layers to keep


@pytest.mark.slow
@pytest.mark.longest
def test_layers_to_keep_train_resume_generate(commands, losses, training_flags, tmp_path):
    """Four encoder layers of which two are kept: ours and stock resume as the uninterrupted run, and the checkpoint translates."""
    kept = [
        "--encoder-layers",
        "4",
        "--encoder-layers-to-keep",
        "0,3",
        "--save-interval-updates",
        "3",
        "--max-update",
        "6",
    ]
    ours = ["ls_plugin.cli.train", commands.data, *training_flags["ours"], *kept, "--save-dir"]
    stock = ["fairseq_cli.train", commands.data, *training_flags["stock"], *kept, *USER_DIR, "--save-dir"]
    whole = losses(commands.run(*ours, tmp_path / "whole"))
    for name in ("ours", "stock"):
        (tmp_path / name).mkdir()
        shutil.copy(tmp_path / "whole" / "checkpoint_1_3.pt", tmp_path / name / "checkpoint_last.pt")
    runs = [commands.start(*ours, tmp_path / "ours"), commands.start(*stock, tmp_path / "stock")]
    resumed, stock_resumed = (losses(commands.finish(run)) for run in runs)
    assert len(whole) == 6
    assert resumed == whole[3:]
    assert_close(stock_resumed, whole[3:], PARITY)
    model = torch.load(tmp_path / "ours" / "checkpoint_last.pt")["model"]
    assert {name.split(".")[2] for name in model if name.startswith("encoder.layers.")} == {"0", "1"}

    flags = ["--beam", "2", "--max-len-b", "20", "--cpu", "--no-progress-bar", "--required-batch-size-multiple", "1"]
    flags = ["--path", tmp_path / "ours" / "checkpoint_last.pt", *flags]
    runs = [
        commands.start("ls_plugin.cli.generate", commands.data, *flags),
        commands.start("fairseq_cli.generate", commands.data, *flags, *USER_DIR),
    ]
    ours, stock = ([line for line in commands.finish(run).splitlines() if line.startswith("H-")] for run in runs)
    assert len(ours) == 20
    assert ours == stock


def layers(encoder, decoder):
    names = [f"encoder.layers.{i}.fc1.weight" for i in range(encoder)] + [
        f"decoder.layers.{i}.fc1.weight" for i in range(decoder)
    ]
    return {name: name for name in [*names, "encoder.embed_tokens.weight"]}


@pytest.mark.parametrize("as_omegaconf", [False, True])
@pytest.mark.parametrize(
    "encoder, decoder, kept_encoder, kept_decoder",
    [
        ([0, 1, 2, 3], [0, 1], None, None),
        ([1, 3], [0, 1], "1,3", None),  # fairseq alone drops the decoder
        ([0, 1, 2, 3], [1], None, "1"),
        ([3], [0], "3", "0"),
    ],
)
def test_each_side_is_pruned_once(as_omegaconf, encoder, decoder, kept_encoder, kept_decoder):
    values = {"encoder_layers_to_keep": kept_encoder, "decoder_layers_to_keep": kept_decoder, "arch": "x", "_name": "x"}
    cfg = OmegaConf.create(values) if as_omegaconf else argparse.Namespace(**values)
    if as_omegaconf:
        OmegaConf.set_struct(cfg, True)
    again = copy.deepcopy(cfg)
    pruned = checkpoint_utils.prune_state_dict(layers(4, 2), cfg)
    assert list(pruned.values()) == [
        *(f"encoder.layers.{i}.fc1.weight" for i in encoder),
        *(f"decoder.layers.{i}.fc1.weight" for i in decoder),
        "encoder.embed_tokens.weight",
    ]
    assert pruned.keys() == layers(len(encoder), len(decoder)).keys()
    assert checkpoint_utils.prune_state_dict(dict(pruned), again) == pruned
    assert cfg.encoder_layers_to_keep is None
