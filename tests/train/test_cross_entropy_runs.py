"""ls_cross_entropy and the fused projection in whole runs: a language model and a translation model, beside stock's criterions."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils, options
from fairseq_cli import preprocess

USER_DIR = ["--user-dir", Path(__file__).resolve().parents[2] / "ls_plugin"]
PARITY = 1e-3  # relative, per loss
LANGUAGE_MODEL = shlex.split(
    "--task language_modeling --tokens-per-sample 24 --arch transformer_lm --decoder-embed-dim 32 --decoder-input-dim 32 "
    "--decoder-output-dim 32 --decoder-ffn-embed-dim 64 --decoder-layers 2 --decoder-attention-heads 2 --lr 5e-3 "
    "--lr-scheduler inverse_sqrt --warmup-updates 4 --clip-norm 1.0 --max-tokens 120 --update-freq 2 --max-update 20 "
    "--save-interval-updates 10 --log-format json --log-interval 1 --seed 7 --dropout 0 --num-workers 0 --required-batch-size-multiple 1 --cpu"
)
STOCK = shlex.split("--criterion cross_entropy --optimizer adam")
OURS = shlex.split("--criterion ls_cross_entropy --optimizer ls_adam")
BLOCKS = shlex.split("--fused-projection always")


def assert_parity(ours, stock):
    assert len(ours) == len(stock) > 0
    for a, b in zip(ours, stock, strict=True):
        assert abs(a - b) <= PARITY * abs(b)


def validation(log: str) -> tuple[float, float]:
    """Loss and perplexity of the last validation in a log."""
    record = json.loads(re.findall(r"\| valid \| (\{.*\})", log)[-1])
    return float(record["valid_loss"]), float(record["valid_ppl"])


@pytest.fixture(scope="module")
def english(commands) -> Path:
    folder = commands.data.parent / "english_only"
    prefixes = [f"--{split}pref={commands.data.parent / split}.en" for split in ("train", "valid", "test")]
    flags = ["--only-source", *prefixes, "--destdir", str(folder)]
    preprocess.main(options.get_preprocessing_parser().parse_args(flags))
    return folder


@pytest.fixture(scope="module")
def runs(commands, english, tmp_path_factory):
    """Stock without the plugin, ours from the logits and ours by blocks: {name: (save folder, log)}."""
    started = {}
    for name, names in (("stock", STOCK), ("logits", [*OURS, *USER_DIR]), ("blocks", [*OURS, *BLOCKS, *USER_DIR])):
        folder = tmp_path_factory.mktemp(name)
        flags = [*LANGUAGE_MODEL, *names, "--save-dir", folder]
        started[name] = (folder, commands.start("fairseq_cli.train", english, *flags, plugin=name != "stock"))
    return {name: (folder, commands.finish(process)) for name, (folder, process) in started.items()}


def test_language_model_equals_stock(runs, losses):
    """Twenty updates of two batches each, and the validation after them."""
    stock, *others = (losses(log) for _, log in runs.values())
    assert len(stock) == 20
    assert stock[-1] < 0.8 * stock[0]
    for ours in others:
        assert_parity(ours, stock)
    for name in ("logits", "blocks"):
        assert_parity(validation(runs[name][1]), validation(runs["stock"][1]))
    weights = {name: torch.load(folder / "checkpoint_last.pt")["model"] for name, (folder, _) in runs.items()}
    for name, p in weights["stock"].items():
        torch.testing.assert_close(weights["blocks"][name], p, rtol=1e-2, atol=1e-3)


def test_the_checkpoint_keeps_our_flag_beside_what_stock_reads(runs):
    path = runs["blocks"][0] / "checkpoint_last.pt"
    state = torch.load(path)
    assert state["cfg"]["criterion"] == {"_name": "cross_entropy", "sentence_avg": False}
    criterion = checkpoint_utils.load_checkpoint_to_cpu(str(path))["cfg"].criterion
    assert (criterion._name, criterion.fused_projection) == ("ls_cross_entropy", "always")


@pytest.mark.slow
def test_language_models_continue_across_the_criterions(runs, commands, english, losses, tmp_path):
    """Stock's run goes on with ours and ours with stock's, as the uninterrupted one; stock validates ours without the plugin."""
    started = []
    for source, flags, plugin in (("stock", [*OURS, *BLOCKS, *USER_DIR], True), ("blocks", STOCK, False)):
        folder = tmp_path / source
        folder.mkdir()
        shutil.copy(runs[source][0] / "checkpoint_1_10.pt", folder / "checkpoint_last.pt")
        flags = [*LANGUAGE_MODEL, *flags, "--save-dir", folder]
        started.append(commands.start("fairseq_cli.train", english, *flags, plugin=plugin))
    flags = ["--task", "language_modeling", "--path", runs["blocks"][0] / "checkpoint_last.pt", "--max-tokens", 120]
    flags += ["--cpu", "--log-format", "json", "--required-batch-size-multiple", 1]
    started.append(commands.start("fairseq_cli.validate", english, *flags, plugin=False))
    logs = [commands.finish(process) for process in started]
    for log in logs[:2]:
        assert_parity(losses(log), losses(runs["stock"][1])[10:])
    validated = float(re.search(r'"valid_loss": "([0-9.]+)"', logs[2])[1])
    assert_parity([validated], [validation(runs["stock"][1])[0]])


@pytest.mark.slow
def test_translation_by_blocks_equals_stock(commands, training_flags, losses, tmp_path):
    """Tied embeddings, accumulated gradients and an ignored prefix."""
    extra = shlex.split("--update-freq 2 --ignore-prefix-size 1 --share-decoder-input-output-embed --max-update 10")
    flags = {name: [flag for flag in flags if flag != "--report-accuracy"] for name, flags in training_flags.items()}
    started = [
        commands.start("fairseq_cli.train", commands.data, *flags["stock"], *extra, "--save-dir", tmp_path / "stock"),
        commands.start(
            "ls_plugin.cli.train", commands.data, *flags["ours"], *extra, *BLOCKS, "--save-dir", tmp_path / "ls"
        ),
    ]
    stock, ours = (losses(commands.finish(process)) for process in started)
    assert len(stock) == 10
    assert_parity(ours, stock)


def test_always_is_refused_before_training_starts(commands, training_flags, tmp_path):
    """The accuracy needs the logits."""
    log = commands.run(
        "ls_plugin.cli.train", commands.data, *training_flags["ours"], *BLOCKS, "--save-dir", tmp_path, status=2
    )
    assert "--fused-projection always: impossible here: --report-accuracy counts" in log
    assert "Traceback" not in log
    assert not list(tmp_path.iterdir())
