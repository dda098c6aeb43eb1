"""Whole runs through the real command lines: the same losses as stock, checkpoints that move both ways, runs that continue."""

import os
import pickle
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils

from ls_plugin.cli import train

ROOT = Path(__file__).resolve().parents[2]

PARITY = 1e-3  # relative, per loss


def assert_parity(ours, stock):
    assert len(ours) == len(stock) > 0
    for i, (a, b) in enumerate(zip(ours, stock, strict=True)):
        assert abs(a - b) <= PARITY * abs(b), f"loss {i}: {a} against {b}"


def test_twenty_updates_equal_stock(trained, losses):
    stock, ours = (losses(trained[name][1]) for name in ("stock", "ours"))
    assert len(stock) == 20
    assert_parity(ours, stock)


@pytest.mark.slow
def test_two_hundred_updates_equal_stock(commands, losses, training_flags, tmp_path):
    runs = [
        commands.start(
            module,
            commands.data,
            *training_flags[names],
            *shlex.split("--max-update 200 --lr 1e-3 --no-save --save-interval-updates 0 --save-dir"),
            tmp_path / names,
            plugin=names == "ours",
        )
        for names, module in (("stock", "fairseq_cli.train"), ("ours", "ls_plugin.cli.train"))
    ]
    stock, ours = (losses(commands.finish(run)) for run in runs)
    assert len(stock) == 200
    assert_parity(ours, stock)


def test_trained_weights_equal_stock_and_load_strictly_both_ways(trained):
    states = {name: torch.load(folder / "checkpoint_last.pt") for name, (folder, _) in trained.items()}
    stock, ours = states["stock"]["model"], states["ours"]["model"]
    assert {name: p.shape for name, p in stock.items()} == {name: p.shape for name, p in ours.items()}
    for name, p in stock.items():
        torch.testing.assert_close(ours[name], p, rtol=1e-2, atol=1e-3)
    for name in ("stock", "ours"):
        path = str(trained[name][0] / "checkpoint_last.pt")
        overrides = {"arch": "ls_transformer" if name == "stock" else "transformer"}
        (model,), _ = checkpoint_utils.load_model_ensemble([path], arg_overrides=overrides)
        assert torch.equal(model.encoder.layers[0].fc1.weight, states[name]["model"]["encoder.layers.0.fc1.weight"])


def test_checkpoint_stores_no_buffers_and_stock_names(trained):
    """A parameter is a view of a buffer, and must not bring the buffer along."""
    path = trained["ours"][0] / "checkpoint_last.pt"
    assert path.stat().st_size < 1.05 * (trained["stock"][0] / "checkpoint_last.pt").stat().st_size
    state = torch.load(path)
    for tensor in state["model"].values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    assert state["cfg"]["model"].arch == "transformer"
    assert state["ls_plugin"] == {
        "model": "ls_transformer",
        "criterion": "ls_label_smoothed_cross_entropy",
        "optimizer": "ls_adam",
    }
    assert checkpoint_utils.load_checkpoint_to_cpu(str(path))["cfg"].model.arch == "ls_transformer"


def continue_run(commands, module, flags, checkpoint, folder, **options):
    """Updates 11 to 20 from another run's checkpoint."""
    folder.mkdir(exist_ok=True)
    shutil.copy(checkpoint, folder / "checkpoint_last.pt")
    return commands.start(module, commands.data, *flags, "--save-dir", folder, **options)


def test_runs_continue_across_adam_and_ls_adam(trained, commands, losses, training_flags, tmp_path):
    """Stock to ours through fairseq-train --user-dir, ours to stock that knows no plugin; both as the uninterrupted run."""
    from_stock, from_ours = (trained[name][0] / "checkpoint_1_10.pt" for name in ("stock", "ours"))
    with_plugin = [*training_flags["ours"], "--user-dir", ROOT / "ls_plugin"]
    runs = [
        continue_run(
            commands,
            "fairseq_cli.train",
            with_plugin,
            from_stock,
            tmp_path / "a",
            plugin=False,
            env={"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": ""},
        ),
        continue_run(commands, "fairseq_cli.train", training_flags["stock"], from_ours, tmp_path / "b", plugin=False),
    ]
    expected = losses(trained["stock"][1])[10:]
    for run in runs:
        assert_parity(losses(commands.finish(run)), expected)


def test_a_resumed_run_continues_the_uninterrupted_one(commands, losses, training_flags, tmp_path):
    """With dropout, gradient accumulation and EMA; the same losses to every printed digit and the same weights to the bit."""
    flags = [
        *training_flags["ours"],
        *shlex.split("--dropout 0.2 --update-freq 2 --store-ema --ema-decay 0.9 --save-interval-updates 4"),
    ]
    flags += ["--max-update", "12"]
    whole = commands.run("ls_plugin.cli.train", commands.data, *flags, "--save-dir", tmp_path / "whole")
    checkpoint = tmp_path / "whole" / "checkpoint_1_4.pt"
    rest = commands.finish(continue_run(commands, "ls_plugin.cli.train", flags, checkpoint, tmp_path / "rest"))
    assert len(losses(rest)) == 8
    assert losses(rest) == losses(whole)[4:]
    states = [torch.load(tmp_path / name / "checkpoint_last.pt") for name in ("whole", "rest")]
    for name, p in states[0]["model"].items():
        assert torch.equal(states[1]["model"][name], p)
        assert torch.equal(states[1]["extra_state"]["ema"][name], states[0]["extra_state"]["ema"][name])


def test_accumulated_half_batches_equal_one_batch(commands, losses, training_flags, tmp_path):
    """The twenty sentences of the test split are one epoch and one update, as two batches of ten and as one of twenty."""
    flags = [
        *training_flags["ours"],
        *shlex.split("--train-subset test --required-batch-size-multiple 1 --max-update 6"),
    ]
    halves = ["--batch-size", "10", "--update-freq", "2"]
    runs = [
        commands.start("ls_plugin.cli.train", commands.data, *flags, *batches, "--save-dir", tmp_path / batches[1])
        for batches in (halves, ["--batch-size", "20"])
    ]
    accumulated, whole = (losses(commands.finish(run)) for run in runs)
    assert len(whole) == 6
    assert_parity(accumulated, whole)
    models = [torch.load(tmp_path / name / "checkpoint_last.pt")["model"] for name in ("10", "20")]
    for name, p in models[1].items():
        torch.testing.assert_close(models[0][name], p, rtol=1e-3, atol=1e-4)


# A --user-dir that prints, after each update, digests of the parameters and of the mask that dropout would draw next.
SPY = """
import hashlib
import torch
from fairseq.trainer import Trainer
from ls_plugin import ops

def digest(x):
    return hashlib.sha256(x.detach().numpy().tobytes()).hexdigest()

stock_step = Trainer.train_step

def train_step(self, *args, **kwargs):
    result = stock_step(self, *args, **kwargs)
    print("spy parameters", digest(torch.cat([p.flatten() for p in self.model.parameters()])), flush=True)
    with torch.random.fork_rng():
        print("spy mask", digest(ops.bias_dropout_residual(torch.ones(100), None, None, 0.5)), flush=True)
    return result

Trainer.train_step = train_step
"""


@pytest.mark.slow
def test_two_ranks_train_and_resume(commands, losses, training_flags, tmp_path):
    """Two processes with gloo; masks differ between ranks, parameters do not."""
    (tmp_path / "spy").mkdir()
    (tmp_path / "spy" / "__init__.py").write_text(SPY)

    def both(max_update):
        with socket.socket() as s:
            s.bind(("localhost", 0))
            port = s.getsockname()[1]
        flags = [*training_flags["ours"], "--dropout", "0.2", "--max-update", max_update, "--save-dir", tmp_path]
        flags += ["--user-dir", tmp_path / "spy"]
        flags += shlex.split(
            f"--distributed-init-method tcp://localhost:{port} --distributed-world-size 2 --distributed-no-spawn"
        )
        flags += shlex.split("--distributed-backend gloo --ddp-backend legacy_ddp")
        runs = [
            commands.start("ls_plugin.cli.train", commands.data, *flags, "--distributed-rank", rank) for rank in (0, 1)
        ]
        return [commands.finish(run) for run in runs]

    def digests(log, what):
        return re.findall(rf"spy {what} (\w+)", log)

    for i, logs in enumerate((both(3), both(6))):
        assert len(losses(logs[0])) == 3
        assert ("Loaded checkpoint" in logs[0]) == (i == 1)
        parameters, masks = ([digests(log, what) for log in logs] for what in ("parameters", "mask"))
        assert parameters[0] == parameters[1]
        assert len(set(parameters[0])) == 3  # every update changed them
        assert len(set(masks[0] + masks[1])) == 6


def hypotheses(output: str) -> list[str]:
    """Lines "H-<id> <score> <tokens>" without the score, by id."""
    lines = (line.split("\t") for line in output.splitlines() if line.startswith("H-"))
    return sorted(f"{fields[0]} {fields[2]}" for fields in lines)


def test_stock_generates_the_same_from_our_checkpoint_without_the_plugin(trained, commands):
    flags = ["--path", trained["ours"][0] / "checkpoint_last.pt", "--beam", 5, "--max-len-b", 20, "--cpu"]
    flags += ["--no-progress-bar"]
    # fairseq drops the last batch unless its size is a multiple of this, 8 by default; with the plugin it does not.
    whole = ["--required-batch-size-multiple", 1]
    runs = [
        commands.start("fairseq_cli.generate", commands.data, *flags, *whole, plugin=False),
        commands.start("ls_plugin.cli.generate", commands.data, *flags),
    ]
    stock, ours = (hypotheses(commands.finish(run)) for run in runs)
    assert len(stock) == 20
    assert ours == stock


def test_validation_scores_every_token(trained, commands, tmp_path):
    """fairseq alone leaves out the last batch, unless its size is a multiple of 8."""
    (tmp_path / "counting").mkdir()
    (tmp_path / "counting" / "__init__.py").write_text(
        "from fairseq.tasks.fairseq_task import FairseqTask\n"
        "stock_step = FairseqTask.valid_step\n"
        "def valid_step(self, sample, model, criterion):\n"
        "    print('scored', sample['ntokens'], flush=True)\n"
        "    return stock_step(self, sample, model, criterion)\n"
        "FairseqTask.valid_step = valid_step\n"
    )
    flags = ["--task", "translation", "--path", trained["ours"][0] / "checkpoint_last.pt", "--max-tokens", 150, "--cpu"]
    flags += ["--user-dir", tmp_path / "counting"]
    log = commands.run("ls_plugin.cli.validate", commands.data, *flags)
    counts = [int(n) for n in re.findall(r"scored (\d+)", log)]
    sentences = (commands.data.parent / "valid.en").read_text().splitlines()
    assert sum(counts) == sum(len(sentence.split()) + 1 for sentence in sentences)


@pytest.mark.slow
def test_validate_and_interactive(trained, commands, tmp_path):
    checkpoint = trained["ours"][0] / "checkpoint_last.pt"
    sentences = tmp_path / "input.de"
    sentences.write_text("der hund sieht die katze\n")
    validation = [
        commands.data,
        "--task",
        "translation",
        "--path",
        checkpoint,
        "--max-tokens",
        500,
        "--cpu",
        "--log-format",
        "json",
    ]
    whole = ["--required-batch-size-multiple", 1]
    runs = [
        commands.start("ls_plugin.cli.validate", *validation),
        commands.start("fairseq_cli.validate", *validation, *whole, plugin=False),
        commands.start(
            "ls_plugin.cli.interactive", commands.data, "--path", checkpoint, "--input", sentences, "--beam", 2, "--cpu"
        ),
    ]
    validated, stock_validated, translated = (commands.finish(run) for run in runs)
    ours, stock = (
        re.search(r'"valid_loss": "([0-9.]+)".*"valid_accuracy": "([0-9.]+)"', log)
        for log in (validated, stock_validated)
    )
    assert abs(float(ours[1]) - float(stock[1])) <= PARITY * float(stock[1])
    assert ours[2] == stock[2]
    assert len(hypotheses(translated)) == 1


def test_a_spawned_worker_imports_the_plugin():
    """What torch.multiprocessing.spawn does on GPUs: the worker function arrives pickled, in a fresh process."""
    code = (
        "import pickle, sys; pickle.loads(bytes.fromhex(sys.argv[1])); import fairseq.models as m; "
        "assert 'ls_transformer' in m.ARCH_MODEL_REGISTRY"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, "-c", code, pickle.dumps(train.worker_main).hex()], env=environment, check=True)
