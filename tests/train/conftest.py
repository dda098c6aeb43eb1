"""A tiny corpus, and fairseq's real command lines on it, in processes of their own."""

import json
import os
import random
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from fairseq_cli import preprocess

from tests.limits import LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
GERMAN = [
    "der",
    "die",
    "das",
    "hund",
    "katze",
    "haus",
    "baum",
    "sieht",
    "liebt",
    "geht",
    "steht",
    "klein",
    "gross",
    "rot",
    "blau",
    "und",
    "nicht",
    "heute",
    "morgen",
    "wald",
]
ENGLISH = [
    "the",
    "a",
    "that",
    "dog",
    "cat",
    "house",
    "tree",
    "sees",
    "loves",
    "goes",
    "stands",
    "small",
    "big",
    "red",
    "blue",
    "and",
    "not",
    "today",
    "tomorrow",
    "forest",
]
# Everything but the names of architecture, criterion and optimizer; dropout 0 for parity, and batches of any size, of which stock drops none.
TRAINING = shlex.split(
    "--encoder-embed-dim 32 --encoder-ffn-embed-dim 64 --encoder-layers 2 --decoder-layers 2 --encoder-attention-heads 2 "
    "--decoder-attention-heads 2 --lr 5e-3 --lr-scheduler inverse_sqrt --warmup-updates 4 --clip-norm 1.0 --weight-decay 0.01 "
    "--label-smoothing 0.1 --report-accuracy --max-tokens 300 --max-update 20 --save-interval-updates 10 --disable-validation "
    "--log-format json --log-interval 1 --seed 7 --dropout 0 --num-workers 0 "
    "--required-batch-size-multiple 1 --cpu"
)
STOCK = shlex.split("--arch transformer --criterion label_smoothed_cross_entropy --optimizer adam")
OURS = shlex.split("--arch ls_transformer --criterion ls_label_smoothed_cross_entropy --optimizer ls_adam")


def write_corpus(folder: Path) -> None:
    """Sentences of 2 to 12 words, and their translation in reverse order: something that can be learned."""
    rng = random.Random(3)
    for split, n_sentences in (("train", 600), ("valid", 40), ("test", 20)):
        pairs = []
        for _ in range(n_sentences):
            words = [min(int(rng.expovariate(0.15)), 19) for _ in range(rng.randint(2, 12))]
            pairs.append((" ".join(GERMAN[i] for i in words), " ".join(ENGLISH[i] for i in reversed(words))))
        for language, sentences in zip(("de", "en"), zip(*pairs, strict=True), strict=False):
            (folder / f"{split}.{language}").write_text("\n".join(sentences) + "\n")


class Commands:
    """Runs fairseq's commands and ours. ``plugin=False`` is stock fairseq that cannot import the plugin."""

    def __init__(self, data: Path):
        self.data = data

    def start(
        self, module: str, *arguments, plugin: bool = True, env: dict | None = None, **options
    ) -> subprocess.Popen:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **(env or {})}
        if plugin:
            environment["PYTHONPATH"] = str(ROOT)
        else:
            environment.pop("PYTHONPATH", None)
        return subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            env=environment,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.data.parent,
            **{"stdout": subprocess.PIPE, **options},
        )

    def finish(self, process: subprocess.Popen, status: int | None = 0) -> str:
        output, _ = process.communicate(timeout=LIMIT_S)
        assert status is None or process.returncode == status, output[-4000:]
        return output

    def run(self, module: str, *arguments, status: int | None = 0, **options) -> str:
        return self.finish(self.start(module, *arguments, **options), status)


@pytest.fixture(autouse=True)
def forget_what_was_logged():
    """fairseq keeps meters for the whole process; a criterion that logs under the same names would add to them."""
    yield
    metrics.reset()


@pytest.fixture(autouse=True)
def put_back_what_commands_rebind():
    """A ``lightseq-`` command that is called in this process puts its worker function in fairseq's module."""
    names = ("train", "validate", "generate", "interactive", "eval_lm")
    mains = {name: getattr(sys.modules.get(f"fairseq_cli.{name}"), "main", None) for name in names}
    yield
    for name, main in mains.items():
        if main is not None:
            sys.modules[f"fairseq_cli.{name}"].main = main


@pytest.fixture(scope="session")
def commands(tmp_path_factory) -> Commands:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    runner = Commands(folder / "bin")
    prefixes = [f"--{split}pref={folder / split}" for split in ("train", "valid", "test")]
    flags = ["--source-lang", "de", "--target-lang", "en", *prefixes, "--destdir", str(runner.data)]
    preprocess.main(options.get_preprocessing_parser().parse_args(flags))
    return runner


@pytest.fixture(scope="session")
def losses():
    """The training losses in a log, in order."""

    def parse(log: str) -> list[float]:
        records = (line.split("| train_inner | ")[1] for line in log.splitlines() if "| train_inner | " in line)
        return [float(json.loads(record)["loss"]) for record in records]

    return parse


@pytest.fixture(scope="session")
def trained(commands, tmp_path_factory):
    """Stock and ours, 20 updates each with a checkpoint after 10: {"stock" or "ours": (save folder, log)}."""
    runs = {}
    for name, module, names in (("stock", "fairseq_cli.train", STOCK), ("ours", "ls_plugin.cli.train", OURS)):
        folder = tmp_path_factory.mktemp(name)
        process = commands.start(module, commands.data, *TRAINING, *names, "--save-dir", folder, plugin=name == "ours")
        runs[name] = (folder, process)
    return {name: (folder, commands.finish(process)) for name, (folder, process) in runs.items()}


@pytest.fixture(scope="session")
def training_flags():
    return {"stock": [*TRAINING, *STOCK], "ours": [*TRAINING, *OURS]}


@pytest.fixture
def make_trainer(commands, training_flags, tmp_path):
    """Builds a trainer in this process; its batches are in ``batches``."""

    def make(names: str, *flags, log_interval: int = 1) -> Trainer:
        arguments = [
            commands.data,
            *training_flags[names],
            "--save-dir",
            tmp_path,
            "--dropout",
            "0.1",
            "--log-interval",
            log_interval,
        ]
        args = options.parse_args_and_arch(options.get_training_parser(), [str(a) for a in (*arguments, *flags)])
        cfg = convert_namespace_to_omegaconf(args)
        torch.manual_seed(7)
        task = tasks.setup_task(cfg.task)
        trainer = Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
        task.load_dataset("train")
        trainer.batches = list(trainer.get_train_iterator(1).next_epoch_itr(shuffle=False))
        return trainer

    return make
