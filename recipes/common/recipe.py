"""What the recipes share: their flags, a comparison of stock and ls, training, evaluation, a sweep over batch sizes, a dry run.

A recipe is a subclass with its data and its flags of fairseq-train, in stock's names. For ls an ``ls_`` is put before the names
of architecture, criterion and optimizer, and nothing else is changed.
"""

import argparse
import contextlib
import importlib
import itertools
import json
import logging
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

from common import corpus
from common.download import check_disk, digest
from common.errors import RecipeError

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("stock", "ls")
TRAIN_MODULES = {"stock": "fairseq_cli.train", "ls": "ls_plugin.cli.train"}
# Without it stock fairseq cannot read its own checkpoints with torch >= 2.6; the plugin reads them under torch's protection.
ENVIRONMENTS = {"stock": {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}, "ls": {}}
RENAMED = ("--arch", "--criterion", "--optimizer")
STOP_GRACE_S = 60.0
POLL_S = 0.1
DRY_UPDATES = 6
INTERRUPTED = 130

Flags = dict[str, object]

# Model S of our benchmarks, for machines without a GPU.
SMALL_LAYERS: Flags = {
    f"--{side}-{name}": value
    for side in ("encoder", "decoder")
    for name, value in {"layers": 3, "embed-dim": 256, "ffn-embed-dim": 1024, "attention-heads": 4}.items()
}
TINY_LAYERS: Flags = {
    f"--{side}-{name}": value
    for side in ("encoder", "decoder")
    for name, value in {"layers": 1, "embed-dim": 32, "ffn-embed-dim": 64, "attention-heads": 2}.items()
}


def words(flags: Flags) -> list[str]:
    """A command line: True stands for a flag without a value, None for no flag."""
    chosen = {name: value for name, value in flags.items() if value is not None}
    return [word for name, value in chosen.items() for word in ((name,) if value is True else (name, str(value)))]


def value(arguments: list[str], flag: str) -> str:
    """What a command line gives to a flag last."""
    return [value for name, value in itertools.pairwise(arguments) if name == flag][-1]


class Recipe:
    """One recipe in one output folder."""

    name: str  # of its folder
    title: str
    description: str
    needs_gpu = True  # whether the flags ask for fp16 and for a model beyond what a CPU trains
    data_mib, train_mib = 100, 1000  # of disk, beyond what is there
    names: ClassVar[Flags]  # --arch, --criterion, --optimizer
    flags: ClassVar[Flags]  # everything else that decides how fast it trains and what it learns
    schedule: ClassVar[Flags]  # of a whole training: its end, and what it saves
    small: ClassVar[Flags] = {}  # takes the place of flags with --cpu
    tiny: ClassVar[Flags] = {}  # and these with --dry-run
    tiny_schedule: ClassVar[Flags] = {"--max-update": DRY_UPDATES, "--save-interval-updates": DRY_UPDATES // 2}

    published: ClassVar[dict[int, float]] = {}  # LightSeq's own speed-up by tokens a batch

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.out: Path = args.out / "dry_run" if args.dry_run else args.out
        self.data = self.out / "data"

    # ---- for subclasses

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Flags of this recipe alone."""

    def inputs(self) -> dict:
        """What the data depends on beside ``corpus.py``: it is made again where this changes."""
        raise NotImplementedError

    def make_data(self, folder: Path) -> dict:
        """Writes ``folder/bin``, and ``folder/text`` where evaluation needs it; returns what the manifest tells of it."""
        raise NotImplementedError

    def score(self, checkpoint: Path, folder: Path) -> dict:
        """Evaluates on the test split: "summary", a line for people, and whatever else is worth keeping."""
        raise NotImplementedError

    # ---- flags

    @property
    def on_cpu(self) -> bool:
        return self.args.cpu or self.args.dry_run

    def device(self) -> Flags:
        """Flags of every command of fairseq that computes. ``--bf16`` is training's alone: generation would ignore it."""
        if self.on_cpu:
            return {"--cpu": True, "--num-workers": 0}
        return {"--fp16": self.args.precision in (None, "fp16") or None}

    def training(self, kind: str = "stock", schedule: Flags | None = None) -> list[str]:
        """The arguments of fairseq-train or lightseq-train; the user's own come last, so that they are the ones that count."""
        names = {flag: f"ls_{name}" if kind == "ls" else name for flag, name in self.names.items()}
        flags = self.flags | {"--seed": self.args.seed}
        flags |= (self.small if self.on_cpu else {}) | (self.tiny if self.args.dry_run else {}) | self.device()
        flags |= {"--bf16": self.args.precision == "bf16" or None}
        if self.args.max_tokens:
            flags |= {"--max-tokens": self.args.max_tokens}
        return [str(self.data / "bin"), *words(flags | names | (schedule or {})), *self.args.further]

    # ---- parts

    def prepare(self) -> dict:
        """Makes the data, or finds it made from the same inputs; returns its manifest.

        It is built beside its place and moved there when whole, so that an interrupted run leaves nothing that looks whole.
        """
        key = {"corpus.py": digest(Path(corpus.__file__)), **self.inputs()}
        with contextlib.suppress(OSError, ValueError, KeyError):
            manifest = json.loads((self.data / "manifest.json").read_text(encoding="utf-8"))
            if manifest["key"] == key and manifest["bytes"] == sizes(self.data):
                self.say(f"data: unchanged in {self.data}")
                return manifest
        check_disk(self.out, 100 if self.args.dry_run else self.data_mib, "the data")
        building = self.data.with_name("data.building")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        told = self.make_data(building)
        manifest = {"key": key, "bytes": sizes(building), "told": told}
        (building / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        self.check_dictionary(building)
        if self.data.exists():
            shutil.rmtree(self.data)
        building.rename(self.data)
        counts = (f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}" for name, value in told.items())
        self.say(f"data: {', '.join(counts)}")
        return manifest

    def check_dictionary(self, building: Path) -> None:
        """Raises RecipeError where what was trained in this folder would silently go on with words that have other numbers."""
        made = [name for name in ("train", "pretrain", "report", "sweep") if (self.out / name).exists()]
        before, now = (
            {path.name: path.read_bytes() for path in (data / "bin").glob("dict.*txt")}
            for data in (self.data, building)
        )
        if before and made and now != before:
            raise RecipeError(
                f"the data have another dictionary than before, so that {', '.join(made)} in {self.out} cannot go on with them; give another --out, or "
                f"move these away"
            )

    def compare(self, folder: Path, name: str) -> int:
        """Stock and ls in turn, by ``lightseq-report run``; returns its exit status."""
        from ls_plugin.report import run

        parser = argparse.ArgumentParser(prog="lightseq-report run")
        run.add_arguments(parser)
        args = self.args
        options: Flags = {
            "--out": folder,
            "--name": name,
            "--contenders": ",".join(args.contenders or ("stock", "ls")),
            "--rounds": args.rounds,
            "--updates": args.updates,
        }
        options |= {"--threads": args.threads, **self.report_options()}
        options["--resume"] = (args.resume and (folder / "settings.json").exists()) or None
        options |= {"--warm-up": 1, "--updates": 4} if args.dry_run else {}
        arguments = [*words(options), "--", *self.training()]
        self.say(f"\n$ lightseq-report run {shlex.join(arguments)}\n")
        return run.run(parser.parse_args(arguments))

    def report_options(self) -> Flags:
        """Of lightseq-report run, for this recipe alone."""
        return {}

    def sweep(self) -> int:
        """The comparison at each number of tokens a batch, and one table of them."""
        status, rows = 0, []
        for max_tokens in self.args.sweep:
            self.args.max_tokens = max_tokens
            folder = self.out / "sweep" / str(max_tokens)
            status = max(status, self.compare(folder, f"{self.title}, {max_tokens:,} tokens a batch"))
            rows.append((max_tokens, json.loads((folder / "report.json").read_text(encoding="utf-8"))))
            if status == INTERRUPTED:
                break
        from ls_plugin.report import tables

        title, (header, cells) = f"{self.title}: by tokens a batch", sweep_table(rows, self.published)
        path = self.out / "sweep" / "sweep.md"
        path.write_text(f"# {title}\n\n{tables.markdown(header, cells)}\n", encoding="utf-8")
        self.say(f"{tables.Table(title, header, cells)}\n{path}")
        return status

    def save_dir(self, kind: str) -> Path:
        return self.out / "train" / kind

    def train(self, kind: str) -> None:
        """Trains to the end of the schedule, from the last checkpoint on where there is one."""
        folder = self.save_dir(kind)
        check_disk(self.out, 200 if self.on_cpu else self.train_mib, "checkpoints")
        schedule = self.schedule | (self.tiny_schedule if self.args.dry_run else {})
        schedule |= {"--save-dir": folder, "--log-format": "json", "--log-interval": 1 if self.args.dry_run else 20}
        resumed = " from its last checkpoint on" if (folder / "checkpoint_last.pt").exists() else ""
        self.say(f"training {kind}{resumed} in {folder}")
        launch, environment = self.command(kind)
        arguments = [*self.training(kind, schedule), *self.further()]
        updates = int(value(arguments, "--max-update"))
        self.follow(f"training {kind}", [*launch, *arguments], folder.with_suffix(".log"), updates, environment)

    def further(self) -> list[str]:
        """Arguments of --train alone."""
        return []

    def command(self, kind: str) -> tuple[list[str], dict[str, str]]:
        """What starts a training, and what it needs in its environment."""
        return [sys.executable, "-m", TRAIN_MODULES[kind]], ENVIRONMENTS[kind]

    def evaluate(self, kind: str) -> dict:
        """Averages the last checkpoints of a training, and scores that on the test split."""
        folder = self.save_dir(kind)
        scored = self.out / f"evaluation_{folder.name}"
        saved = sorted(folder.glob("checkpoint_*_*.pt"), key=lambda path: int(path.stem.rpartition("_")[2]))
        chosen = saved[-self.args.average :] or [path for path in (folder / "checkpoint_last.pt",) if path.exists()]
        if not chosen:
            raise RecipeError(
                f"--evaluate {kind} needs a training, found no checkpoint in {folder}; first: bash recipes/{self.name}/run.sh --train {kind}"
            )
        scored.mkdir(parents=True, exist_ok=True)
        averaged = scored / "averaged.pt"
        self.tool(
            "averaging",
            "ls_plugin.cli.average",
            ["--inputs", *map(str, chosen), "--output", str(averaged)],
            scored / "average.log",
        )
        result = {"kind": kind, "checkpoints": [path.name for path in chosen], **self.score(averaged, scored)}
        (scored / "result.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        self.say(f"{kind}, mean of {len(chosen)} checkpoints: {result['summary']}  ({scored / 'result.json'})")
        return result

    def dry_run(self) -> int:
        """Everything at a tiny size on the CPU."""
        shutil.rmtree(self.out, ignore_errors=True)
        self.prepare()
        self.train("ls")
        self.evaluate("ls")
        self.args.rounds = 1
        # Last: it computes in this process, too, whose threads would not survive a fork.
        status = self.compare(self.out / "report", f"{self.title}, dry run")
        self.say(f"dry run of {self.name}: every part ran; its figures mean nothing. {self.out}")
        return status

    def run(self) -> int:
        if self.args.dry_run:
            return self.dry_run()
        self.prepare()
        if self.args.data_only:
            return 0
        if self.args.train:
            self.train(self.args.train)
            self.say(f"next: bash recipes/{self.name}/run.sh --evaluate {self.args.train}")
            return 0
        if self.args.evaluate:
            self.evaluate(self.args.evaluate)
            return 0
        if self.args.sweep:
            return self.sweep()
        return self.compare(self.out / "report", self.title)

    # ---- processes

    def say(self, text: str) -> None:
        self.display.say(text)

    @property
    def display(self):
        from ls_plugin.report.processes import Display

        if not hasattr(self, "_display"):
            self._display = Display()
        return self._display

    def tool(self, label: str, module: str, arguments: list[str], log: Path, done=lambda: (0.0, "")) -> None:
        """Runs a command's ``main`` (or ``cli_main``) in a process of its own; ``done`` tells the progress.

        The process is a fork of this one where that is safe: torch and fairseq are loaded here, which takes longer than many of
        these commands. Nothing here touches CUDA, which would not survive a fork.
        """
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        process = context.Process(target=call_command, args=(module, arguments, log))
        process.start()
        try:
            with self.display.task(label) as show:
                while process.exitcode is None:
                    process.join(POLL_S)
                    show(*done())
        finally:
            if process.exitcode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its workers, too
                process.kill()
                process.join()
        check_status(label, process.exitcode, log)

    def follow(self, label: str, command: list[str], log: Path, updates: int, environment: dict | None = None) -> None:
        """Runs a training in a fresh process and shows what it logs, one JSON a line after ``train_inner`` or ``valid``."""
        from ls_plugin.report import processes

        log.parent.mkdir(parents=True, exist_ok=True)
        start = log.stat().st_size if log.exists() else 0
        environment = processes.environment(self.args.threads) | (environment or {})
        with processes.process(command, log, environment) as training, self.display.task(label) as show:
            try:
                with log.open(encoding="utf-8", errors="replace") as lines:
                    lines.seek(start)
                    while True:
                        ended = training.poll() is not None
                        for line in lines.readlines():
                            self.tell(label, line, updates, show)
                        if ended:
                            break
                        time.sleep(POLL_S)
            except KeyboardInterrupt:
                os.killpg(training.pid, signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    training.wait(STOP_GRACE_S)
                raise
        check_status(label, training.returncode, log)

    def tell(self, label: str, line: str, updates: int, show) -> None:
        found = re.search(r"\| (train_inner|valid) \| (\{.*\})$", line)
        if not found:
            return
        stats = json.loads(found[2])
        if found[1] == "valid":
            self.say(
                f"{label}: validation after update {int(stats['valid_num_updates']):,}: loss {float(stats['valid_loss']):.3f}"
            )
        else:
            done = int(stats["num_updates"])
            show(
                done / updates,
                f"update {done:,} of {updates:,}, loss {float(stats['loss']):.3f}, {float(stats['wps']):,.0f} tokens/s",
            )


def call_command(module: str, arguments: list[str], log: Path) -> None:
    """The child's side of ``Recipe.tool``."""
    os.setsid()  # Ctrl-C is the parent's
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(output, stream)
    logging.disable(logging.NOTSET)
    sys.argv = [module, *arguments]
    command = importlib.import_module(module)
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, force=True)
    getattr(command, "cli_main", getattr(command, "main", None))()


def check_status(label: str, status: int, log: Path) -> None:
    if status != 0:
        from ls_plugin.report.processes import log_tail

        raise RecipeError(f"{label} ended with status {status}; the end of {log}:\n{log_tail(log)}")


def python_path() -> str:
    """So that the trainings run this clone's plugin, whatever is installed."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of all files of the data but the manifest, by relative name."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "manifest.json")
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def sweep_table(rows: list[tuple[int, dict]], published: dict[int, float]) -> tuple[list[str], list[list[str]]]:
    """Header and rows, of (tokens a batch, report.json)."""
    contenders = list(dict.fromkeys(name for _, report in rows for name in report["contenders"]))
    columns = [
        "tokens a batch",
        *(f"{name}, tokens/s" for name in contenders),
        "ls over stock",
        "loss of ls against stock's",
    ]
    columns += ["LightSeq over fairseq, as published for 8 A100"] if published else []
    lines = []
    for max_tokens, report in rows:
        rates = (report["contenders"].get(name, {}).get("tokens_per_s") for name in contenders)
        gain = report["over_stock"].get("ls", {})
        cells = [f"{max_tokens:,}", *("-" if rate is None else f"{rate:,.0f}" for rate in rates)]
        cells += [f"{gain['ratio']:.2f}x" if gain.get("ratio") else "no claim"]
        cells += [f"{gain['loss_difference']:+.2%}" if gain.get("loss_difference") is not None else "-"]
        cells += [f"{published[max_tokens]:.2f}x" if max_tokens in published else "-"] if published else []
        lines.append(cells)
    return columns, lines


# ---- Command ----


def tokens(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"must be whole numbers of at least 1, e.g. 512,1024,2048,4096,8192,15000, got {text!r}"
        )
    return int(text)


def parse_args(recipe: type[Recipe], arguments: list[str] | None = None) -> argparse.Namespace:
    from ls_plugin.arguments import Listed

    arguments = sys.argv[1:] if arguments is None else arguments
    split = arguments.index("--") if "--" in arguments else len(arguments)
    folder = Path(sys.modules[recipe.__module__].__file__).resolve().parent
    parser = argparse.ArgumentParser(
        prog=f"bash recipes/{recipe.name}/run.sh",
        description=f"{recipe.description} Without a mode: the data, then stock and ls in turn, and a report of both.",
        epilog="Flags after -- go to both trainings, e.g. -- --update-freq 8. README.md beside run.sh has the data, the figures to expect and times.",
    )
    modes = parser.add_argument_group("modes").add_mutually_exclusive_group()
    modes.add_argument("--data-only", action="store_true", help="make the data and end")
    modes.add_argument(
        "--train", choices=KINDS, help="train to the end; the same command again goes on from the last checkpoint"
    )
    modes.add_argument(
        "--evaluate", choices=KINDS, help="average the last checkpoints of --train, score the test split"
    )
    modes.add_argument(
        "--sweep",
        action=Listed,
        type=tokens,
        metavar="N",
        help="compare at each --max-tokens, e.g. 512,1024,2048,4096,8192,15000, LightSeq's",
    )
    modes.add_argument(
        "--dry-run",
        action="store_true",
        help="every part at a tiny size, on the CPU, without a download: about a minute",
    )
    parser.add_argument(
        "--updates",
        type=int,
        metavar="N",
        help="timed updates of each run of the comparison (default: 200 on a GPU, 50 on a CPU)",
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="how often the contenders take turns (default: lightseq-report's, 2)"
    )
    parser.add_argument(
        "--contenders", action=Listed, metavar="NAME", help="as of lightseq-report run (default stock,ls)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep what an earlier comparison measured, go on from there"
    )
    parser.add_argument("--max-tokens", type=int, metavar="N", help="tokens a batch (default: the recipe's)")
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="a small model in fp32 on the CPU" if recipe.needs_gpu else "on the CPU, though there is a GPU",
    )
    parser.add_argument(
        "--precision",
        choices=("fp16", "bf16", "fp32"),
        help="default fp16 on a GPU, fp32 on a CPU, where fp16 cannot be had",
    )
    parser.add_argument(
        "--average",
        type=int,
        default=10,
        metavar="N",
        help="checkpoints that --evaluate averages, at most (default %(default)s)",
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: all cores that this process may use)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--out",
        type=Path,
        default=folder / "out",
        help="output folder (default: out/ beside run.sh, which git ignores)",
    )
    recipe.add_arguments(parser)
    args = parser.parse_args(arguments[:split])
    args.further = arguments[split + 1 :]
    for name, least in (("updates", 4), ("rounds", 1), ("threads", 1), ("max_tokens", 1), ("average", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    without_meaning = ("max_tokens",) if args.sweep else ("updates", "rounds", "resume") if args.dry_run else ()
    if args.train or args.evaluate or args.data_only:
        without_meaning = ("updates", "rounds", "resume", "contenders")
    for name in without_meaning:
        if getattr(args, name):
            mode = next(m for m in ("data_only", "train", "evaluate", "sweep", "dry_run") if getattr(args, m))
            remedy = "; -- --max-update N ends a training" if (mode, name) == ("train", "updates") else ""
            parser.error(
                f"--{name.replace('_', '-')} has no meaning beside --{mode.replace('_', '-')}, drop it{remedy}"
            )
    if args.precision == "fp16" and (args.cpu or args.dry_run):
        parser.error("--precision fp16: stock fairseq has it on GPUs only; take bf16 or fp32")
    if args.precision == "bf16" and args.train == "stock":
        parser.error(
            "--precision bf16: by itself stock fairseq takes --bf16 for a TPU; take fp16 or fp32, or compare without --train"
        )
    taken = [flag for flag in args.further if flag.partition("=")[0] in RENAMED]
    if taken:
        parser.error(f"-- {taken[0]}: the recipe names it, since ls has its own; drop it")
    args.threads = args.threads or len(
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else [0] * (os.cpu_count() or 1)
    )
    args.out = args.out.resolve()
    return args


def check_device(recipe: type[Recipe], args: argparse.Namespace) -> None:
    """Raises RecipeError where a GPU is needed and not there. Where none is needed and none is there, the CPU trains."""
    if args.dry_run or args.cpu or args.data_only:
        return
    import torch

    if torch.cuda.is_available():
        return
    if recipe.needs_gpu:
        raise RecipeError(
            f"{recipe.name} trains in fp16 and needs an NVIDIA GPU that torch can use, found none (lightseq-doctor says why); without one: "
            f"--cpu trains a small model in fp32, --dry-run proves the script, --data-only makes the data, and recipes/quickstart is made for CPUs"
        )
    if args.precision == "fp16":
        raise RecipeError("--precision fp16: stock fairseq has it on GPUs only, and none is here; take bf16 or fp32")
    args.cpu = True


def main(recipe: type[Recipe]) -> int:
    # Whether there is a GPU is asked without CUDA, so that this process can still be forked (Recipe.tool).
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ["PYTHONPATH"] = python_path()  # of what is started here; sys.path is this process's own
    sys.path.insert(0, str(ROOT))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's stop is a Ctrl-C
    args = parse_args(recipe)
    logging.disable(logging.INFO)  # fairseq's remarks about optional packages, as it is imported
    again = f"the same command again goes on: bash recipes/{recipe.name}/run.sh {shlex.join(sys.argv[1:])}".rstrip()
    try:
        check_device(recipe, args)
        return recipe(args).run()
    except RecipeError as error:
        print(f"\n{recipe.name}: {error}", file=sys.stderr)
    except ValueError as error:
        from ls_plugin.errors import UsageError

        if not isinstance(error, UsageError):
            raise
        print(f"\n{recipe.name}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"\n{recipe.name}: {error}; fix it, then {again}", file=sys.stderr)
    except KeyboardInterrupt:
        print(
            f"\n{recipe.name}: interrupted; what was downloaded, measured and saved is kept, {again}", file=sys.stderr
        )
        return INTERRUPTED
    return 1
