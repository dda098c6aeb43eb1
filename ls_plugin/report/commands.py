"""Contenders of a speed-up report, made of one command in stock's names: they differ by ``ls_`` before architecture, criterion and optimizer alone."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from ls_plugin.arguments import is_plugin, values
from ls_plugin.errors import UnsupportedError, UsageError
from ls_plugin.names import PREFIX
from ls_plugin.report.records import STOPWATCH

BASELINES = {
    "medium": "torch.set_float32_matmul_precision('medium')",
    "fused_adam": "torch.optim.AdamW(fused=True) instead of fairseq's Adam",
    "compile": "torch.compile of each layer and of the loss",
    "apex": "NVIDIA apex's fused Adam and layer norm, which fairseq takes by itself where they are installed",
}
_NAMES = {"--arch": "--arch", "-a": "--arch", "--criterion": "--criterion", "--optimizer": "--optimizer"}
_OWN = "leave it out: the report gives each contender its own"
_REFUSED = {
    "--save-dir": _OWN,
    "--max-update": "leave it out: --updates and --warm-up of the report decide",
    "--max-epoch": "leave it out: --updates and --warm-up of the report decide",
    "--stop-time-hours": "leave it out: --updates and --warm-up of the report decide",
    "--deepspeed": "leave it out: stock has no such flag",
    "--log-file": "leave it out: each contender's log is kept in the report's folder",
    "--tensorboard-logdir": "leave it out: the contenders would write over each other's",
    "--wandb-project": "leave it out: the contenders would write over each other's",
    "--azureml-logging": "leave it out: the contenders would write over each other's",
    "--restore-file": "use --finetune-from-model, which begins to count at update 1",
    "--device-id": "use --nproc of the report",
    "--local_rank": "use --nproc of the report",
    "--nprocs-per-node": "use --nproc of the report",
}


@dataclasses.dataclass(frozen=True)
class Contender:
    """stock, stock with names of ``BASELINES`` joined by +, or ls."""

    kind: str
    stock_with: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind}+{self.stock_with}" if self.stock_with else self.kind

    @property
    def is_baseline(self) -> bool:
        return bool(self.stock_with)


def parse(name: str) -> Contender:
    """Raises UsageError for a name that is none."""
    kind, _, stock_with = name.partition("+")
    known = set(stock_with.split("+")) <= set(BASELINES) if stock_with else name == kind
    if kind not in ("stock", "ls") or not known or (kind == "ls" and stock_with):
        raise UsageError(f"--contenders {name}: must be stock, ls or stock+ with {', '.join(BASELINES)}, got {name!r}")
    return Contender(kind, stock_with)


def why_not(contender: Contender, on_cuda: bool) -> str:
    """Why a contender cannot run here at all, or ""."""
    from ls_plugin.cli.doctor import find_apex

    if "apex" not in contender.stock_with.split("+"):
        return ""
    folder, is_nvidias = find_apex()
    if not is_nvidias:
        return "NVIDIA's apex is not installed" + (f" ({folder} is another package)" if folder else "")
    return "" if on_cuda else "apex works on a GPU only"


def check(arguments: list[str]) -> None:
    """That stock and ls can both train by these arguments of fairseq-train, without meeting in a file or a port.

    Raises:
        UsageError: a name is missing or ls's own; a flag is the report's.
        UnsupportedError: an architecture, criterion or optimizer without a twin.
    """
    if not arguments:
        raise UsageError(
            "after --: the arguments of fairseq-train are missing, as in lightseq-report run --out DIR -- data-bin --arch …"
        )
    for argument in arguments:
        flag = argument.partition("=")[0]
        remedy = _REFUSED.get(flag) or ("use --nproc of the report" if flag.startswith("--distributed-") else "")
        if remedy:
            raise UsageError(f"{flag}: cannot be in the command of a report; {remedy}")
    for user_dir in values(arguments, "--user-dir"):
        if user_dir == "ls_plugin" or is_plugin(user_dir):  # another copy of it, too
            raise UsageError(
                f"--user-dir {user_dir}: stock must train without the plugin; leave it out, ls gets it by itself"
            )
    for flag in dict.fromkeys(_NAMES.values()):
        names = values(arguments, *(alias for alias, of in _NAMES.items() if of == flag))
        if not names:
            raise UsageError(f"{flag}: must be in the command, so that its {PREFIX} twin can be taken")
        for name in names:
            _check_twin(flag, name)


def _check_twin(flag: str, name: str) -> None:
    from fairseq import criterions, models, optim

    registries = {
        "--arch": models.ARCH_MODEL_REGISTRY,
        "--criterion": criterions.CRITERION_REGISTRY,
        "--optimizer": optim.OPTIMIZER_REGISTRY,
    }
    registry = registries[flag]
    if name.startswith(PREFIX):
        raise UsageError(f"{flag} {name}: give stock's name, {name.removeprefix(PREFIX)}; ls takes the twin by itself")
    if PREFIX + name not in registry:
        twins = sorted(known.removeprefix(PREFIX) for known in registry if known.startswith(PREFIX))
        some = ", ".join(twins if len(twins) < 10 else [*twins[:9], "…"])
        raise UnsupportedError(f"{flag} {name}: has no {PREFIX} twin to be held against it; those with one: {some}")


def with_ls_names(arguments: list[str]) -> list[str]:
    """The same arguments with ``ls_`` before the architecture, criterion and optimizer."""
    made, is_name = [], False
    for argument in arguments:
        flag, equals, name = argument.partition("=")
        if is_name:
            made.append(PREFIX + argument)
        elif flag in _NAMES and equals:
            made.append(f"{flag}={PREFIX}{name}")
        else:
            made.append(argument)
        is_name = argument in _NAMES
    return made


def added(arguments: list[str], updates: int, nproc: int, on_cuda: bool, validate: bool) -> list[str]:
    """What the report gives to every contender beside the user's arguments: how long to train, on how many devices, and to save nothing."""
    flags = ["--max-update", str(updates), "--no-save", "--no-progress-bar"]
    flags += [] if validate else ["--disable-validation"]
    if nproc == 1:
        flags += ["--distributed-world-size", "1"]  # also where there are several GPUs
    elif not on_cuda and not values(arguments, "--ddp-backend"):
        flags += ["--ddp-backend", "legacy_ddp"]  # stock's other one works on GPUs only
    return flags


def train_arguments(contender: Contender, arguments: list[str], flags: list[str]) -> list[str]:
    return [*(with_ls_names(arguments) if contender.kind == "ls" else arguments), *flags]


def command(
    contender: Contender, arguments: list[str], record: Path, nproc: int = 1, port: int = 0, **options: int
) -> list[str]:
    """fairseq-train or lightseq-train by these arguments under the stop-watch, in as many processes on this machine.

    options: of the stop-watch, e.g. ``split_every``.
    """
    launch = [sys.executable]
    if nproc > 1:
        launch += ["-m", "torch.distributed.run", "--nproc_per_node", str(nproc)]
        launch += ["--master_addr", "127.0.0.1", "--master_port", str(port)]
    watch = [str(STOPWATCH), str(record), contender.kind]
    watch += ["--stock-with", contender.stock_with] if contender.stock_with else []
    for name, value in options.items():
        watch += [f"--{name.replace('_', '-')}", str(value)]
    return [*launch, *watch, "--", *arguments]
