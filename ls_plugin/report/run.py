"""Trains one fairseq-train command, given in stock's names, in turn as stock, as stock with what PyTorch offers, and as ls; reports the difference.

    lightseq-report run --out DIR -- data-bin --arch transformer --criterion label_smoothed_cross_entropy --optimizer adam …

Contenders differ by ls_ before architecture, criterion and optimizer, and take turns in fresh processes from the same seed, in every second round
the other way about. Writes DIR/report.html (one page that needs nothing beside it), report.md and report.json; DIR/runs holds records and logs.

    speed-up                        the median of the ratio on the same batch, with quartiles; tokens/s and ms per step follow from it
    memory, kernels                 peak of the process, and of the GPU; kernels are counted in one more update, which is not timed
    loss                            in bits per target token; where the losses of two differ by more than --tolerance, no speed-up is claimed

Nothing is saved. Ctrl-C and SIGTERM leave the report of what has run; --resume goes on. With several processes the figures are rank 0's.
Exit status: 0; 1 stock or ls failed, or they did not train alike; 2 flags; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import time
from pathlib import Path

from ls_plugin.arguments import Listed, values
from ls_plugin.errors import UsageError

WARM_UP = 10  # first touch of memory, start of threads, compilation
UPDATES = {"cpu": 50, "cuda": 200}
ROUNDS = 2
DEFAULT_CONTENDERS = ["stock", "ls", "stock+fused_adam", "stock+apex"]
LEAST_UPDATES = 4  # timed: quartiles need two, and a GPU's phases are of every fourth
LIMIT_S = 900.0
SPLIT_EVERY = {"cpu": 1, "cuda": 4}  # on a GPU a phase is timed by waiting for it, which the others must not pay for
STOP_GRACE_S = 60.0
POLL_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the report, made if need be")
    parser.add_argument("--name", default="", help="title of the report (default: the architecture)")
    parser.add_argument(
        "--contenders",
        action=Listed,
        metavar="NAME",
        help="stock, ls, and stock+ with medium, fused_adam, compile, apex, several joined by + "
        "(default: stock,ls,stock+fused_adam,stock+apex; without apex where it is not installed; compile takes minutes, and runs "
        "only where it is asked for)",
    )
    parser.add_argument(
        "--updates", type=int, metavar="N", help="timed updates of a run (default: 50 on a CPU, 200 on a GPU)"
    )
    parser.add_argument(
        "--warm-up", type=int, default=WARM_UP, metavar="N", help="updates before them (default %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, metavar="N", help="turns of each contender (default %(default)s)"
    )
    parser.add_argument("--tolerance", type=float, metavar="X", help="of losses, relative (default 0.02)")
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        metavar="SECONDS",
        help="a baseline's run is ended then, its compilation included; what it has measured counts (default %(default)g)",
    )
    parser.add_argument(
        "--nproc", type=int, default=1, metavar="N", help="processes of a run, under torchrun (default 1)"
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="of a process (default: OMP_NUM_THREADS, else its share of the cores)"
    )
    parser.add_argument("--validate", action="store_true", help="validate as the command says (else not at all)")
    parser.add_argument("--resume", action="store_true", help="keep the runs that DIR holds, go on from there")
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="of fairseq-train, in stock's names")


def run(args: argparse.Namespace) -> int:
    """Raises UsageError where nothing can be run."""
    return Session(args).run()


class Clock:
    """How long the runs that are left will take, by those that have ended and the one that is running."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}  # of a run, by contender
        self.first: tuple[float, float] | None = (
            None  # of the current run: seconds after its start, and what was done then
        )

    def begin(self) -> None:
        """Another run begins."""
        self.first = None

    def told(self, left: list[str], now: str = "", began: float = 0.0, fraction: float = 0.0) -> str:
        """The note beside the bar, when so much of a run of ``now`` that began then is done, and ``left`` wait."""
        if not (left or now):
            return "all have run"
        elapsed_s = time.monotonic() - began if now else 0.0
        whole_s = self.whole(now, elapsed_s, fraction) if now else None
        known = self.seconds if whole_s is None else {**self.seconds, now: whole_s}
        if not known or (now and whole_s is None):
            return "time left: not known yet"
        guess = statistics.fmean(known.values())
        seconds = sum(known.get(name, guess) for name in left) + (max(0.0, whole_s - elapsed_s) if now else 0.0)
        if seconds >= 600:
            return f"about {seconds / 60:.0f} min left"
        minutes, seconds = divmod(round(seconds), 60)
        return f"about {minutes} min {seconds:02} s left" if minutes else f"about {seconds} s left"

    def whole(self, now: str, elapsed_s: float, fraction: float) -> float | None:
        """Seconds of the whole current run, None while it cannot be known.

        From its second look at the updates on by their rate, start-up and compilation aside; before that as an earlier run of the same contender,
        or of others, took, while it is not over that.
        """
        if fraction > 0:
            self.first = self.first or (elapsed_s, fraction)
            first_s, first_fraction = self.first
            if fraction > first_fraction:
                return elapsed_s + (1.0 - fraction) * (elapsed_s - first_s) / (fraction - first_fraction)
        expected = self.seconds.get(now) or (statistics.fmean(self.seconds.values()) if self.seconds else 0.0)
        return expected if expected > elapsed_s else None


class Session:
    """One report in one folder."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        from ls_plugin.report import commands, processes
        from ls_plugin.report.records import LOSS_TOLERANCE

        self.args, self.out = args, args.out.resolve()
        self.tolerance = LOSS_TOLERANCE if args.tolerance is None else args.tolerance
        commands.check(args.arguments)
        self.on_cuda = torch.cuda.is_available() and "--cpu" not in args.arguments
        self.device = "cuda" if self.on_cuda else "cpu"
        self.updates = UPDATES[self.device] if args.updates is None else args.updates
        for name, value, least in (
            ("--updates", self.updates, LEAST_UPDATES),
            ("--warm-up", args.warm_up, 1),
            ("--rounds", args.rounds, 1),
            ("--nproc", args.nproc, 1),
            ("--threads", args.threads, 1),
            ("--tolerance", self.tolerance, 0),
            ("--limit", args.limit, 0),
        ):
            if value is not None and not value >= least:
                raise UsageError(f"{name} must be at least {least}, got {value}")
        n_gpus = torch.cuda.device_count()
        if self.on_cuda and args.nproc > n_gpus:
            raise UsageError(
                f"--nproc {args.nproc}: there are {n_gpus} GPUs; give at most that, or --cpu in the command"
            )
        share = max(1, len(os.sched_getaffinity(0)) // args.nproc)
        of_environment = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]  # a list: of nested levels
        self.threads = args.threads or (int(of_environment) if of_environment.isdecimal() else 0) or share
        self.skipped: dict[str, str] = {}
        self.contenders = self.choose()
        # Warm-up, timed updates, and one whose kernels are counted.
        self.total = args.warm_up + self.updates + 1
        self.flags = commands.added(args.arguments, self.total, args.nproc, self.on_cuda, args.validate)
        self.environment = processes.environment(self.threads)
        self.display = processes.Display()

    def choose(self) -> list:
        """The contenders that can run here, stock first and ls second; the report names those of the default that cannot.

        Raises:
            UsageError: one that was asked for cannot.
        """
        from ls_plugin.report import commands

        asked = self.args.contenders or []
        names = asked or DEFAULT_CONTENDERS
        chosen = []
        for contender in map(commands.parse, dict.fromkeys(names)):
            reason = commands.why_not(contender, self.on_cuda)
            if reason and asked:
                raise UsageError(f"--contenders {contender.name}: {reason}; leave it out")
            if reason:
                self.skipped[contender.name] = reason
            else:
                chosen.append(contender)
        if not {"stock", "ls"} <= {contender.name for contender in chosen}:
            raise UsageError(f"--contenders: stock and ls must be among them, got {','.join(names)}")
        return sorted(chosen, key=lambda contender: (contender.name != "stock", contender.name != "ls"))

    # ---- what the figures depend on

    def settings(self) -> dict:
        import torch

        from ls_plugin.report.machine import machine

        torch.set_num_threads(self.threads)  # as the trainings have them
        args = self.args
        return {
            "arguments": args.arguments,
            "updates": self.updates,
            "warm_up": args.warm_up,
            "processes": args.nproc,
            "validate": args.validate,
            "device": self.device,
            "machine": machine(torch.device(self.device)),
        }

    def start(self) -> None:
        """Makes the folder and keeps the settings in it.

        Raises:
            UsageError: it holds a report already, or other settings than those to go on with.
        """
        path, settings = self.out / "settings.json", self.settings()
        before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        if self.args.resume and before is None:
            raise UsageError(f"--resume: {self.out} holds no report to go on with; leave --resume out")
        if before is not None and not self.args.resume:
            raise UsageError(f"--out {self.out}: holds a report already; go on with --resume, or give another folder")
        if before is not None:
            changed = _changes(before, settings)
            if changed:
                raise UsageError(
                    f"--resume must go on with the same settings, changed: {', '.join(changed)}; undo that, or give another --out"
                )
        self.out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings, indent=1), encoding="utf-8")

    # ---- the runs

    def folder(self, contender, index: int) -> Path:
        return self.out / "runs" / f"{contender.name}-{index}"

    def turns(self) -> list[tuple]:
        """(contender, round), in every second round the other way about."""
        return [
            (contender, index)
            for index in range(1, self.args.rounds + 1)
            for contender in (self.contenders if index % 2 else reversed(self.contenders))
        ]

    def measure(self) -> None:
        """Runs what is not there yet. A contender that has failed is not tried in later rounds."""
        turns = self.turns()
        waiting = [turn for turn in turns if _outcome(self.folder(*turn)).get("ended") not in ("complete", "limit")]
        if len(waiting) < len(turns):
            self.display.say(f"{len(turns) - len(waiting)} of {len(turns)} runs kept from before")
        clock = Clock()
        while waiting:
            contender, index = waiting.pop(0)
            label, began = f"{contender.name} {index}/{self.args.rounds}", time.monotonic()
            left = [of.name for of, _ in waiting]
            clock.begin()
            with self.display.task(label) as show:
                told = functools.partial(clock.told, left, contender.name, began)
                outcome = self.train(contender, index, _with_time_left(show, told))
            if outcome["ended"] == "failed":
                waiting = [turn for turn in waiting if turn[0] != contender]
            clock.seconds[contender.name] = time.monotonic() - began
            self.display.say(f"{label}: {outcome['told']}; {clock.told([of.name for of, _ in waiting])}")

    def train(self, contender, index: int, show) -> dict:
        """One run, to its end or to what ends it; what came of it, which is kept in outcome.json beside the record and the log.

        Raises:
            KeyboardInterrupt: the run is asked to end with the update in hand; several processes are ended at once.
        """
        from ls_plugin.report import commands, processes

        folder = self.folder(contender, index)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        record, log = folder / "record.jsonl", folder / "log.txt"
        flags = [*self.flags, "--save-dir", str(folder / "checkpoints")]
        arguments = commands.train_arguments(contender, self.args.arguments, flags)
        watch = {"split_every": SPLIT_EVERY[self.device], "count_at": self.total}
        command = commands.command(contender, arguments, record, self.args.nproc, _free_port(), **watch)
        # Without the plugin fairseq cannot load a checkpoint on torch >= 2.6 (--finetune-from-model).
        loads = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"} if contender.kind == "stock" else {}
        outcome = {"contender": contender.name, "round": index, "ended": "interrupted", "told": "interrupted"}
        outcome["command"] = shown_command(contender, arguments, self.args.nproc)
        limit_s = self.args.limit if contender.is_baseline else float("inf")
        follower, began, late = processes.Follower(record), time.monotonic(), False
        try:
            with processes.process(command, log, {**self.environment, **loads}, cwd=Path.cwd()) as training:
                try:
                    while training.poll() is None and not late:
                        time.sleep(POLL_S)
                        elapsed_s = time.monotonic() - began
                        show(*_progress(follower.read(), self.total, elapsed_s))
                        late = elapsed_s > limit_s
                except KeyboardInterrupt:
                    self.display.say("stopping after this update (Ctrl-C again: at once)")
                    self.stop(training)
                    raise
            outcome |= self.judge(record, log, training.returncode, late)
            return outcome
        finally:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # empty: fairseq tries whether it can write there
            (folder / "outcome.json").write_text(json.dumps(outcome, indent=1), encoding="utf-8")

    def stop(self, training) -> None:
        """With several processes each would stop after another update, and wait for the others."""
        if self.args.nproc == 1:
            training.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                training.wait(STOP_GRACE_S)

    def judge(self, record: Path, log: Path, status: int, late: bool) -> dict:
        """What a run that has ended is worth: "ended" is complete, limit (enough updates before it) or failed."""
        from ls_plugin.report.records import Run, read_run

        run = read_run(record, self.args.warm_up) if record.exists() else Run("")
        if late:
            told = f"{len(run.timed)} timed updates in {self.args.limit:g} s (--limit)"
            return {"ended": "limit" if len(run.timed) >= LEAST_UPDATES else "failed", "told": told}
        if status:
            return {"ended": "failed", "told": f"ended with status {status}: {cause(log)}"}
        if len(run.updates) < self.total - 1:
            return {
                "ended": "failed",
                "told": f"ended after {len(run.updates)} of {self.total - 1} updates: {cause(log)}",
            }
        ms = statistics.median(update["step_ms"] for update in run.timed)
        return {"ended": "complete", "told": f"{ms:,.1f} ms a step, loss {run.final_loss():.3f}"}

    # ---- the report

    def comparison(self):
        """Of all runs that the folder holds, those of an earlier call with other contenders included."""
        from ls_plugin.report.records import read_run
        from ls_plugin.report.speedup import Comparison

        runs: dict[str, list] = {}
        reasons, partial = dict(self.skipped), {}
        for outcome, folder in _outcomes(self.out):
            name, ended = outcome["contender"], outcome["ended"]
            if ended in ("complete", "limit"):
                runs.setdefault(name, []).append(read_run(folder / "record.jsonl", self.args.warm_up))
            elif ended == "failed":
                reasons[name] = outcome["told"]
            elif (folder / "record.jsonl").exists():
                partial[name] = read_run(folder / "record.jsonl", self.args.warm_up)
        for name, run in partial.items():  # counts where there is nothing better
            if name not in runs and len(run.timed) >= LEAST_UPDATES:
                runs[name] = [run]
            elif name not in runs:
                reasons.setdefault(name, f"interrupted after {len(run.updates)} updates")
        order = sorted(runs, key=_place)
        reasons = {name: reason for name, reason in reasons.items() if name not in runs}
        return Comparison({name: runs[name] for name in order}, reasons, self.tolerance)

    def write(self, interrupted: bool):
        """report.json, report.md and report.html; gives the comparison."""
        from ls_plugin.report import document, speedup

        comparison = self.comparison()
        settings = json.loads((self.out / "settings.json").read_text(encoding="utf-8"))
        typed = {
            outcome["contender"]: outcome["command"] for outcome, _ in _outcomes(self.out) if outcome["round"] == 1
        }
        arch = values(self.args.arguments, "--arch", "-a")[-1]
        title = f"{self.args.name or arch}: stock fairseq and ls_plugin"
        content = {"title": title, "interrupted": interrupted, "settings": settings, "commands": typed}
        content |= comparison.to_json()
        text = json.dumps(speedup.finite(content), indent=1)
        (self.out / "report.json").write_text(text + "\n", encoding="utf-8")
        blocks = self.blocks(comparison, settings, typed, interrupted)
        (self.out / "report.md").write_text(document.markdown(title, blocks), encoding="utf-8")
        (self.out / "report.html").write_text(document.page(title, blocks), encoding="utf-8")
        return comparison

    def blocks(self, comparison, settings: dict, commands: dict[str, str], interrupted: bool) -> list:
        from ls_plugin.report import speedup
        from ls_plugin.report.commands import BASELINES
        from ls_plugin.report.document import Code, Heading, Items, Paragraph, Table

        made = settings["machine"]
        intro = (
            "ls_plugin is a Fairseq plugin that trains the same models by fused kernels. Here one training command ran in turn with stock "
            f"fairseq and with the plugin, from the same seed, on {made['processor']}"
            + (f", {settings['processes']} processes (figures of the first)" if settings["processes"] > 1 else "")
            + "."
        )
        used = [name for name in BASELINES if any(name in contender.split("+") for contender in commands)]
        return [
            speedup.lead(comparison),
            *(
                [Paragraph("**Interrupted**: the figures are of what had run; --resume goes on.")]
                if interrupted
                else []
            ),
            Paragraph(intro),
            *speedup.blocks(comparison),
            Heading("Machine and settings"),
            Table(["machine", ""], [[name.replace("_", " "), str(value)] for name, value in made.items()]),
            Table(
                ["setting", ""],
                [
                    [name.replace("_", " "), str(settings[name])]
                    for name in ("updates", "warm_up", "processes", "validate")
                ],
            ),
            Heading("Commands"),
            Paragraph("Each with a stop-watch around the trainer; the report adds the flags from --max-update on."),
            *(block for name, line in commands.items() for block in (Paragraph(f"**{name}**"), Code(line))),
            *([Items([f"`{name}`: {BASELINES[name]}" for name in used])] if used else []),
        ]

    def run(self) -> int:
        """Measures, writes the report in any case, tells it; the exit status."""
        from ls_plugin.report import speedup

        self.start()
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's stop is a Ctrl-C
        interrupted = False
        try:
            for name, reason in self.skipped.items():
                self.display.say(f"{name} is left out: {reason}")
            self.measure()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            signal.signal(signal.SIGTERM, before)
        comparison = self.write(interrupted)
        print("\n" + "\n".join(speedup.screen(comparison)))
        if interrupted:
            print("interrupted: what was measured is kept; go on with --resume and the same command")
        print(f"report: {self.out / 'report.html'}, report.md, report.json")
        return 130 if interrupted else 0 if comparison.alike else 1


def shown_command(contender, arguments: list[str], nproc: int) -> str:
    """What somebody would type to train as this contender does, without the stop-watch."""
    program = "lightseq-train" if contender.kind == "ls" else "fairseq-train"
    words = shlex.join(arguments)
    if nproc > 1:
        return f"torchrun --nproc_per_node {nproc} $(which {program}) {words}"
    return f"{program} {words}"


def cause(log: Path) -> str:
    """The line of a log that says why its process ended: the last that names an error, else the last."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip() and "ChildFailedError" not in line]
    errors = [
        line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b|\S+( \(rank \d+\))?: error: ", line)
    ]
    return ((errors or lines or ["it left no log"])[-1])[:300]


def _with_time_left(show, told):
    return lambda fraction, text: show(fraction, f"{text}  {told(fraction)}")


def _progress(updates: list[dict], total: int, elapsed_s: float) -> tuple[float, str]:
    if not updates:
        return 0.0, f"starting for {elapsed_s:.0f} s"
    recent = updates[-20:]
    loss = statistics.fmean(update["loss"] for update in recent)
    ms = statistics.median(update["step_ms"] for update in recent)
    return len(updates) / total, f"update {len(updates):,} of {total:,}  {ms:,.0f} ms  loss {loss:.3f}"


def _outcome(folder: Path) -> dict:
    try:
        return json.loads((folder / "outcome.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none, or cut short by a kill: the run is done again
        return {}


def _outcomes(out: Path) -> list[tuple[dict, Path]]:
    """What came of the runs that a report's folder holds, with their folders, by round and contender."""
    found = [(_outcome(folder), folder) for folder in (out / "runs").glob("*")]
    return sorted(
        ((of, at) for of, at in found if of), key=lambda pair: (_place(pair[0]["contender"]), pair[0]["round"])
    )


def _place(name: str) -> tuple[bool, bool, str]:
    """Sorts stock first and ls second."""
    return name != "stock", name != "ls", name


def _changes(before: dict, after: dict, path: str = "") -> list[str]:
    """The settings that differ, by name."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = dict.fromkeys([*before, *after])
        return [
            text for name in names for text in _changes(before.get(name), after.get(name), f"{path} {name}".strip())
        ]
    if before == after:
        return []
    shown = [shlex.join(value) if isinstance(value, list) else str(value) for value in (before, after)]
    return [f"{path} {shown[0]} -> {shown[1]}"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
