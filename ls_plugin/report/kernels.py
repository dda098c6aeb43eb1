"""Times every fused op on this machine against what stock fairseq executes, torch.compile of it, and apex and Liger-Kernel where they are installed.

    lightseq-report kernels --out DIR [--device cpu|cuda] [--ops layer_norm adam …] [--dtypes fp32 bf16] [--seconds S] [--no-compile]

Writes DIR/report.html (one page that needs nothing beside it), report.md, speedup_DTYPE.svg and, after each case, kernels.json. The columns of the table on the screen:

    ms forward, ms backward    medians of eager (E), torch.compile (C), apex (A), Liger-Kernel (G), ls (L), and of our kernels without autograd
                               (K); - where there is none
    ls over eager, over best   how many times as fast ls is as eager, and as the fastest of the others: forward, backward, total
    GB/s                       bytes that the fused op must move over the time of K (of L without K), forward and backward, and as a share of
                               the copy bandwidth (of an in-place pass for ops that update in place). Operands that fit the caches pass 100 %.
    spread                     of eager / ls: half the distance between the quartiles over the median

op_timing.py says how they are measured. Why something was not measured is in the JSON (why_not), and below the table. Ctrl-C leaves the report of
what has run. Exit status: 0; 1 an op of ours, or its cases, did not run; 2 flags; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ls_plugin.arguments import Listed
from ls_plugin.errors import UsageError
from ls_plugin.report import tables

STEMS = sorted(path.stem for path in Path(__file__).with_name("op_cases").glob("*.py") if path.stem != "__init__")
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
PARTS = ("forward", "backward", "total")
LETTERS = {"eager": "E", "compiled": "C", "apex": "A", "liger": "G", "ls": "L", "kernel": "K"}
NAMES = {
    "eager": "eager",
    "compiled": "torch.compile",
    "apex": "apex",
    "liger": "Liger",
    "ls": "ls",
    "kernel": "kernel",
}
CASES_PER_OP, COMPILE_S = 4, 3.0  # for the estimate
SECONDS = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the report, made if need be")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--ops", action=Listed, default=STEMS, metavar="OP", help=f"default: all: {', '.join(STEMS)}")
    parser.add_argument("--dtypes", action=Listed, choices=DTYPES, default=list(DTYPES), help="default: all three")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: as torch has it)")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, metavar="S", help="timing of a case, at most (default %(default)g)"
    )
    parser.add_argument("--shape", default="", metavar="TEXT", help="only the cases whose shape contains this text")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


# ---- Table ----


def shown_contenders() -> list[str]:
    """Those with a column: without the packages that are not installed."""
    from ls_plugin.report import op_timing

    return [name for name in op_timing.CONTENDERS if name not in op_timing.PACKAGES or not op_timing.absent(name)]


def header() -> str:
    letters = "".join(f"{LETTERS[name]:>8}" for name in shown_contenders())
    width = len(letters)
    groups = [("", 37), ("ms forward", width), ("ms backward", width), ("ls over eager", 20), ("ls over best", 20)]
    cells = [*(f"{name:^{size}}" for name, size in groups), f"{'GB/s, of copy':^26}", " " * 11]
    named = [
        " " * 37,
        letters,
        letters,
        *[f"{'fwd   bwd   all':>19} "] * 2,
        f"{'forward':>13}{'backward':>13}",
        f"{'spread':>11}",
    ]
    return "\n".join(tables.fit([cells, named], gap=""))


def row(result) -> str:
    """One row of the table, of an op_timing.Result; in several lines where the terminal is narrow."""
    times = result.times
    cells = [f"{'  ' + result.shape:<37}"]
    for part in ("forward", "backward"):
        cells.append("".join(f"{_ms(getattr(times[name], f'{part}_ms')):>8}" for name in shown_contenders()))
    for over in ("eager", "best"):
        cells.append(" " + "".join(f"{_gain(result.speedup(over, part)):>6}" for part in PARTS) + " ")
    rates = zip(result.gb_per_s, result.share, strict=True)
    cells.append("".join(f"{'-' if rate is None else f'{rate:.1f} {share:>4.0%}':>13}" for rate, share in rates))
    spreads = [times[name].spread for name in ("eager", "ls")]
    cells.append(f"{' / '.join('-' if s is None else f'{s:.0%}' for s in spreads):>11}")
    return "\n".join(tables.fit([cells], gap=""))


def _ms(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.3f}" if ms < 100 else f"{ms:.1f}"


def _gain(gain: float | None) -> str:
    return "-" if gain is None else f"{gain:.1f}x" if gain < 100 else f"{gain:.0f}x"


class Display:
    """Prints lines; on a terminal below them a bar with the case at work and the time that is left."""

    def __init__(self, n_steps: int) -> None:
        self.bar, self.task = None, None
        if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            with contextlib.suppress(ImportError):
                from rich import progress

                self.bar = progress.Progress(
                    progress.BarColumn(bar_width=24),
                    progress.MofNCompleteColumn(),
                    progress.TextColumn("{task.description}"),
                    progress.TimeElapsedColumn(),
                    progress.TextColumn("left"),
                    progress.TimeRemainingColumn(elapsed_when_finished=True),
                    transient=True,
                )
                self.task = self.bar.add_task("starting", total=n_steps)

    def say(self, text: str) -> None:
        if self.bar:
            self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def show(self, label: str, advance: int = 0) -> None:
        if self.bar:
            self.bar.update(self.task, description=label, advance=advance)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with self.bar or contextlib.nullcontext():
            yield


# ---- Report ----


def chart(results: list, dtype: str) -> str:
    """A bar for each case: how many times as fast ls is as the fastest of the others. SVG."""
    from ls_plugin.report import charts

    of_dtype = [result for result in results if result.dtype == dtype]
    best = {f"{r.op} {r.shape}": {"gain": round(gain, 2)} for r in of_dtype if (gain := r.speedup("best")) is not None}
    return charts.bars(best, {"gain": charts.COLORS[1]}, f"speed-up, {dtype}", "x")


def blocks(results: list, notes: list[str], machine: dict, bandwidth, interrupted: bool) -> list:
    """Of op_timing.Results, with what was not measured or is slower."""
    from ls_plugin.report import op_timing
    from ls_plugin.report.document import Charts, Heading, Items, Lead, Paragraph, Table

    gains = [gain for result in results if (gain := result.speedup("best")) is not None]
    slower = sum(gain < 1.0 for gain in gains)
    measured = {name for result in results for name, time_ in result.times.items() if time_.forward_ms is not None}
    rivals = ", ".join(NAMES[name] for name in op_timing.RIVALS if name in measured)
    told = [
        (
            "Ops",
            f"{len({result.op for result in results})} fused ops of ls_plugin in {len(results)} cases on {machine['processor']}",
        )
    ]
    if gains:
        middle = f"{statistics.median(gains):.2f}x, from {min(gains):.2f}x to {max(gains):.2f}x"
        told.append(
            (
                "Speed",
                f"over the fastest of {rivals}, forward and backward together: median {middle}; slower in {slower} of {len(gains)} cases",
            )
        )
    missing = [op_timing.absent(name) for name in op_timing.PACKAGES if op_timing.absent(name)]
    if missing:
        told.append(("Left out", ", ".join(missing)))
    made = [Lead(told, good=bool(gains) and statistics.median(gains) > 1)]
    if interrupted:
        made.append(Paragraph("**Interrupted**: the figures are of what had run."))
    names = [name for name in op_timing.CONTENDERS if name in measured]
    columns = [
        "op",
        "shape",
        *(f"{NAMES[name]}, ms" for name in names),
        "over eager",
        "over best",
        "share of copy: forward",
        "backward",
    ]
    for dtype in dict.fromkeys(result.dtype for result in results):
        of_dtype = [result for result in results if result.dtype == dtype]
        rows = [
            [
                result.op,
                result.shape,
                *(_ms(result.times[name].total_ms) for name in names),
                _gain(result.speedup("eager")),
                _gain(result.speedup("best")),
                *("-" if share is None else f"{share:.0%}" for share in result.share),
            ]
            for result in of_dtype
        ]
        made += [
            Heading(dtype),
            Table(columns, rows),
            Charts([(f"ls over the fastest of the others, {dtype}", chart(results, dtype))]),
        ]
    explained = (
        f"Medians, forward and backward together, of contenders that took turns; compilation is not counted. The share is of what a large copy "
        f"reaches here, {bandwidth.copy:.1f} GB/s (reads plus writes; in place {bandwidth.in_place:.1f}); operands that fit the caches pass 100 %. "
        f"kernel: ours without autograd."
    )
    made += [Heading("How it was measured"), Paragraph(explained)]
    made += [Items(notes)] if notes else []
    return [*made, Heading("Machine"), Table(["machine", ""], [[name, str(value)] for name, value in machine.items()])]


class Session:
    """The cases that are asked for, and their report."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        from ls_plugin.report import op_timing
        from ls_plugin.report.machine import machine

        unknown = sorted(set(args.ops) - set(STEMS))
        if unknown:
            raise UsageError(f"--ops {' '.join(unknown)}: unknown; choose from {', '.join(STEMS)}")
        try:
            kind = torch.device(args.device).type
        except RuntimeError:
            kind = ""
        if kind not in ("cpu", "cuda"):
            raise UsageError(f"--device must be cpu or cuda, got {args.device}")
        if not args.seconds > 0:
            raise UsageError(f"--seconds must be more than 0, got {args.seconds}")
        n_gpus = torch.cuda.device_count()
        if kind == "cuda" and (torch.device(args.device).index or 0) >= n_gpus:
            seen = f"{n_gpus} GPUs, counted from 0" if n_gpus else "no GPU; lightseq-doctor says why"
            raise UsageError(f"--device {args.device}: torch sees {seen}")
        if args.threads is not None and args.threads < 1:
            raise UsageError(f"--threads must be at least 1, got {args.threads}")
        self.args, self.device = args, torch.device(args.device)
        if args.threads:
            torch.set_num_threads(args.threads)
        op_timing.keep_freed_memory()
        self.machine, self.bandwidth = machine(self.device), op_timing.measure_bandwidth(self.device)
        self.results: list = []
        self.failed: list[str] = []
        args.out.mkdir(parents=True, exist_ok=True)

    def measure(self) -> None:
        import torch

        from ls_plugin.report import op_timing

        args = self.args
        per_case = (0.0 if args.no_compile else COMPILE_S) + 0.7 * args.seconds
        minutes = len(args.ops) * len(args.dtypes) * CASES_PER_OP * per_case / 60
        expected = "less than a minute" if minutes < 1 else f"about {minutes:.0f} min"
        display = Display(len(args.ops) * len(args.dtypes))
        with display.running():
            display.say(", ".join(f"{key} {value}" for key, value in self.machine.items()))
            for name in op_timing.PACKAGES:
                if op_timing.absent(name):
                    display.say(op_timing.absent(name))
            display.say(
                f"bandwidth, reads plus writes: copy {self.bandwidth.copy:.1f} GB/s, in place {self.bandwidth.in_place:.1f} GB/s. "
                f"{_count(len(args.ops), 'op')}, {', '.join(args.dtypes)}: {expected}\n"
            )
            display.say(header())
            for stem in args.ops:
                for name in args.dtypes:
                    display.say(f"{stem}, {name}")
                    torch.manual_seed(0)
                    try:
                        module = importlib.import_module(f"ls_plugin.report.op_cases.{stem}")
                        for case in module.cases(self.device, getattr(torch, DTYPES[name])):
                            if args.shape in case.shape:
                                display.show(f"{stem} {name}: {case.shape}")
                                result = op_timing.measure(
                                    case, name, self.bandwidth, self.device, args.seconds, not args.no_compile
                                )
                                self.results.append(result)
                                display.say(row(result))
                                self.write_json()
                    except (
                        Exception
                    ) as error:  # no memory for its tensors, say: the other ops are measured all the same
                        self.failed.append(f"{stem} {name}: {op_timing.first_line(error)}")
                        display.say(self.failed[-1])
                    display.show("", advance=1)

    def write_json(self) -> None:
        content = {"machine": self.machine, "bandwidth": dataclasses.asdict(self.bandwidth)}
        content |= {"seconds_per_case": self.args.seconds, "results": [result.to_json() for result in self.results]}
        (self.args.out / "kernels.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def notes(self) -> list[str]:
        """What did not run, and where another is faster."""
        from ls_plugin.report import op_timing

        expected = {name for name in op_timing.PACKAGES if op_timing.absent(name)}
        expected |= {"compiled"} if self.args.no_compile else set()
        missing = [
            f"{r.op} {r.shape} {r.dtype}, {NAMES[name]}: {time_.why_not}"
            for r in self.results
            for name, time_ in r.times.items()
            if time_.why_not and name not in expected and not time_.why_not.endswith(op_timing.NO_SUCH_OP)
        ]
        slower = [
            f"{r.op} {r.shape} {r.dtype}: {gain:.2f}x of the fastest of the others"
            for r in self.results
            if (gain := r.speedup("best")) is not None and gain < 1.0
        ]
        return [*self.failed, *missing, *slower]

    def run(self) -> int:
        from ls_plugin.report import document

        begin, interrupted = time.monotonic(), False
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            self.measure()
        except KeyboardInterrupt:
            interrupted = True
        finally:
            signal.signal(signal.SIGTERM, before)
        if not (self.results or self.failed or interrupted):
            raise UsageError(f"--shape {self.args.shape!r}: no case has this in its shape")
        notes, title = self.notes(), "The fused ops of ls_plugin"
        found = blocks(self.results, notes, self.machine, self.bandwidth, interrupted)
        (self.args.out / "report.md").write_text(document.markdown(title, found), encoding="utf-8")
        (self.args.out / "report.html").write_text(document.page(title, found), encoding="utf-8")
        for dtype in dict.fromkeys(result.dtype for result in self.results):
            (self.args.out / f"speedup_{dtype}.svg").write_text(chart(self.results, dtype), encoding="utf-8")
        print("\n" + "\n".join([*notes, f"{_count(len(self.results), 'case')} in {time.monotonic() - begin:,.0f} s"]))
        print(f"report: {self.args.out / 'report.html'}, report.md, kernels.json")
        if interrupted:
            return 130
        return int(bool(self.failed) or any(result.times["ls"].why_not for result in self.results))


def run(args: argparse.Namespace) -> int:
    """Raises UsageError where nothing can be run."""
    return Session(args).run()
