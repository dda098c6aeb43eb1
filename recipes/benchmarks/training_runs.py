"""Trainings to be timed: what is trained, by whom, in a process of its own.

A row is a model with its batches; a contender trains it: stock, stock with what PyTorch offers today, ls in fp32 or bf16. Every run is the real command
in a fresh process under the stop-watch (``ls_plugin/report/timed_train.py``), from the same seed, so that all get the same batches in the same order.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "quickstart"))
sys.path.append(str(HERE.parents[1]))  # the clone's ls_plugin, unless one is installed

import prepare  # noqa: E402
import training_floor  # noqa: E402
import trainings  # noqa: E402

from ls_plugin.report import processes, records  # noqa: E402

WARM_UP_UPDATES = 3  # not timed: first touch of memory, start of threads, compilation
LEAST_TIMED_UPDATES = 2
LIMIT_S = 240  # of a run with torch.compile: its compilation and its updates
LM_BLOCK = 256  # tokens of a sample of a language model at most, whole verses
POLL_S = 0.1


@dataclasses.dataclass(frozen=True)
class Row:
    """A model (F is four times C), its vocabulary V and batches of up to so many tokens; timed updates of a run."""

    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    max_tokens: int
    updates: int
    language_model: bool = False

    @property
    def title(self) -> str:
        layers = f"{self.layers}" if self.language_model else f"{self.layers}+{self.layers}"
        return f"{layers} layers, C {self.width}, V {self.vocabulary:,}, {self.max_tokens:,} tokens"

    @property
    def model(self) -> training_floor.Model:
        encoder_layers = 0 if self.language_model else self.layers
        return training_floor.Model(encoder_layers, self.layers, self.width, 4 * self.width, self.vocabulary)

    @property
    def size(self) -> float:
        """FLOPs of an update's products, roughly."""
        length = 32
        shape = [max(1, self.max_tokens // length), length]
        source = {} if self.language_model else {"source": shape}
        return training_floor.product_flops(self.model, {**source, "target": shape, "tokens": self.max_tokens})

    def flags(self) -> list[str]:
        """Of model and batches, the same for every contender but for the names in ``Contender.flags``."""
        sides = ("decoder",) if self.language_model else ("encoder", "decoder")
        options = {f"--{name}": 0.1 for name in ("dropout", "attention-dropout", "activation-dropout")}
        for side in sides:
            options |= {f"--{side}-layers": self.layers, f"--{side}-embed-dim": self.width}
            options |= {f"--{side}-ffn-embed-dim": 4 * self.width, f"--{side}-attention-heads": self.heads}
        training = {**trainings.TRAINING, "--max-tokens": self.max_tokens, "--log-interval": 1000}
        switches = [f"--{side}-normalize-before" for side in sides]
        if self.language_model:
            del training["--label-smoothing"]
            options |= {"--task": "language_modeling", "--tokens-per-sample": LM_BLOCK}
            options |= {"--sample-break-mode": "complete"}
            switches.append("--share-decoder-input-output-embed")
        else:
            options |= {"--task": "translation"}
            switches.append("--share-all-embeddings")
        return [*processes.flags({**options, **training}), *switches]


ROWS = {
    row.name: row
    for row in (
        Row("S", layers=3, width=256, heads=4, vocabulary=8000, max_tokens=1024, updates=17),
        Row("B", layers=6, width=512, heads=8, vocabulary=8000, max_tokens=2048, updates=5),
        Row("B32", layers=6, width=512, heads=8, vocabulary=32_000, max_tokens=2048, updates=4),
        Row("S256", layers=3, width=256, heads=4, vocabulary=8000, max_tokens=256, updates=40),
        Row("LM", layers=6, width=512, heads=8, vocabulary=32_000, max_tokens=2048, updates=5, language_model=True),
        Row("tiny", layers=1, width=32, heads=2, vocabulary=8000, max_tokens=256, updates=3),
        Row("tinyLM", layers=1, width=32, heads=2, vocabulary=8000, max_tokens=256, updates=3, language_model=True),
    )
}


@dataclasses.dataclass(frozen=True)
class Contender:
    """Stock, with what ``timed_train.py --stock-with`` knows, or ls in a precision."""

    kind: str
    stock_with: str = ""
    precision: str = "fp32"

    @property
    def name(self) -> str:
        if self.kind == "ls":
            return f"ls {self.precision}"
        return f"stock+{self.stock_with}" if self.stock_with else "stock"

    @property
    def compiles(self) -> bool:
        return "compile" in self.stock_with

    def flags(self, language_model: bool) -> list[str]:
        names = dict(trainings.KINDS[self.kind])
        if language_model:
            prefix = "ls_" if self.kind == "ls" else ""
            names |= {"--arch": f"{prefix}transformer_lm", "--criterion": f"{prefix}cross_entropy"}
        return processes.flags(names) + ([f"--{self.precision}"] if self.precision != "fp32" else [])


STOCK = Contender("stock")
SOURCE = "ja"  # the figures that are kept were measured with the Japanese text


class RunError(Exception):
    """A training ended with an error, or was too slow to be timed; the message has its reason and the end of its log."""


class Runner:
    """Runs trainings and keeps their records and logs in a folder, which may hold the data of earlier ones.

    threads, seed: of every process. say: called when data are made, which takes a minute.
    """

    def __init__(self, folder: Path, threads: int, seed: int = 1, say: Callable[[str], None] = print) -> None:
        self.folder, self.threads, self.seed, self.say = folder, threads, seed, say
        self.made: dict[tuple[int, bool], Path] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def data(self, row: Row) -> Path:
        """The binary data of a row, made where it is not there; of a language model the English side.

        Raises:
            prepare.DataError
        """
        key = (row.vocabulary, row.language_model)
        if key not in self.made:
            self.made[key] = self.make_data(*key)
        return self.made[key]

    def make_data(self, vocabulary: int, language_model: bool) -> Path:
        folder = self.folder / f"data-{vocabulary}"
        prepare.prepare(folder, self.say, source=SOURCE, vocabulary=vocabulary)
        if not language_model:
            return folder / "bin"
        english = self.folder / f"english-{vocabulary}"
        shutil.rmtree(english, ignore_errors=True)
        english.mkdir()
        shutil.copy(folder / "bin" / "dict.en.txt", english / "dict.txt")
        for split in ("train", "valid"):
            for suffix in ("bin", "idx"):
                shutil.copy(folder / "bin" / f"{split}.{SOURCE}-en.en.{suffix}", english / f"{split}.{suffix}")
        return english

    def command(self, row: Row, contender: Contender, record: Path, updates: int, *options: str) -> list[str]:
        """The stop-watch with the real command."""
        command = [
            sys.executable,
            str(records.STOPWATCH),
            str(record),
            contender.kind,
            "--split-every",
            "1",
        ]
        command += ["--stock-with", contender.stock_with] if contender.stock_with else []
        command += ["--", str(self.data(row)), *row.flags(), *contender.flags(row.language_model)]
        command += ["--cpu", "--no-progress-bar", "--seed", str(self.seed), "--max-update", str(updates)]
        return [*command, *(options or ("--no-save", "--disable-validation"))]

    def run(
        self,
        row: Row,
        contender: Contender,
        name: str,
        show: Callable[[float, str], None] = lambda *_: None,
        updates: int | None = None,
        options: tuple[str, ...] = (),
    ) -> records.Run:
        """One training; ``updates`` timed ones, the row's own number by default, and options in place of --no-save and --disable-validation.
        A run with torch.compile is ended after LIMIT_S.

        Raises:
            RunError: it failed, or the limit came before LEAST_TIMED_UPDATES.
            KeyboardInterrupt: the process is ended with it.
        """
        folder = self.folder / "runs" / row.name / f"{contender.name.replace(' ', '-')}-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        record, log = folder / "record.jsonl", folder / "log.txt"
        total = WARM_UP_UPDATES + (updates or row.updates)
        command = self.command(row, contender, record, total, *options)
        follower = processes.Follower(record)
        began, late = time.monotonic(), False
        with processes.process(command, log, processes.environment(self.threads)) as training:
            while training.poll() is None and not late:
                time.sleep(POLL_S)
                done = len(follower.read())
                show(done / total, f"update {done} of {total}")
                late = contender.compiles and time.monotonic() - began > LIMIT_S
        if training.returncode and not late:
            raise RunError(
                f"{contender.name} ended with status {training.returncode}; the end of {log}:\n{processes.log_tail(log)}"
            )
        run = records.read_run(record, WARM_UP_UPDATES) if record.exists() else records.Run(contender.kind)
        if len(run.updates) < WARM_UP_UPDATES + LEAST_TIMED_UPDATES:
            raise RunError(f"torch.compile: {len(run.updates)} updates in {LIMIT_S} s")
        return run

    def infer(self, kind: str, command: str, checkpoint: Path, name: str, flags: list[str]) -> Inference:
        """fairseq-generate or fairseq-validate, or ls's twin, with the checkpoint.

        Raises:
            RunError: it failed.
        """
        folder = self.folder / "runs" / "inference" / f"{kind}-{command}-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        record, log = folder / "record.json", folder / "log.txt"
        words = [sys.executable, str(HERE / "timed_inference.py"), str(record), kind, command, "--"]
        words += [*flags, "--path", str(checkpoint), "--cpu", "--no-progress-bar", "--seed", str(self.seed)]
        # Without the plugin fairseq cannot load its own checkpoints on torch >= 2.6.
        environment = processes.environment(self.threads) | {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
        with processes.process(words, log, environment) as running:
            running.wait()
        if running.returncode:
            raise RunError(
                f"{kind} {command} ended with status {running.returncode}; the end of {log}:\n{processes.log_tail(log)}"
            )
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        said = sorted(line.split("\t")[0::2] for line in lines if line.startswith("H-"))
        losses = [found[1] for line in lines if (found := re.search(r"\| loss ([\d.]+)", line))]
        return Inference(json.loads(record.read_text(encoding="utf-8")), [*said, *losses])


@dataclasses.dataclass(frozen=True)
class Inference:
    """Of one run of generate or validate: the time of each batch, and what came out of it (hypotheses, or the loss)."""

    batches_ms: list[float]
    results: list
