"""Times the fused ops against what stock fairseq executes and against torch.compile of it: table, JSON and picture.

Use run.sh, which sets up the environment first. The columns:

    ms forward, ms backward    medians of eager (E), torch.compile (C), ls (L), and of our kernels without autograd (K); - where there is none
    ls over eager, over best   how many times as fast ls is as eager, and as the better of eager and torch.compile: forward, backward, total
    GB/s                       bytes that the fused op must move over the time of K (of L without K), forward and backward, and as a share of
                               the copy bandwidth (of an in-place pass for ops that update in place). Operands that fit the caches pass 100 %.
    spread                     of eager / ls: half the distance between the quartiles over the median

harness.py says how they are measured. Why something was not measured is in the JSON (why_not), and below the table.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.append(str(HERE.parents[1]))  # the clone's ls_plugin, unless one is installed
warnings.simplefilter("ignore")
logging.disable(logging.INFO)  # fairseq's remarks about optional packages

import harness  # noqa: E402
import torch  # noqa: E402

STEMS = sorted(path.stem for path in (HERE / "ops").glob("*.py") if path.stem != "__init__")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PARTS = ("forward", "backward", "total")
CASES_PER_OP, COMPILE_S = 4, 3.0  # for the estimate
HEADER = (
    f"{'':<37}{'ms forward':^32}{'ms backward':^32}{'ls over eager':^20}{'ls over best':^20}{'GB/s, of copy':^26}\n"
    f"{'':<37}{'E':>8}{'C':>8}{'L':>8}{'K':>8}{'E':>8}{'C':>8}{'L':>8}{'K':>8}"
    f"{'fwd   bwd   all':>19} {'fwd   bwd   all':>19} {'forward':>13}{'backward':>13}{'spread':>11}"
)


# ---- Table ----


def row(result: harness.Result) -> str:
    """One line of the table."""
    times = result.times
    cells = [f"{'  ' + result.shape:<37}"]
    for part in ("forward", "backward"):
        for name in harness.CONTENDERS:
            ms = getattr(times[name], f"{part}_ms")
            cells.append(f"{'-' if ms is None else f'{ms:.3f}' if ms < 100 else f'{ms:.1f}':>8}")
    for over in ("eager", "best"):
        gains = [result.speedup(over, part) for part in PARTS]
        shown = ["-" if gain is None else f"{gain:.1f}x" if gain < 100 else f"{gain:.0f}x" for gain in gains]
        cells.append(" " + "".join(f"{gain:>6}" for gain in shown) + " ")
    for rate, share in zip(result.gb_per_s, result.share, strict=True):
        cells.append(f"{'-' if rate is None else f'{rate:.1f} {share:>4.0%}':>13}")
    spreads = [times[name].spread for name in ("eager", "ls")]
    cells.append(f"{' / '.join('-' if s is None else f'{s:.0%}' for s in spreads):>11}")
    return "".join(cells)


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


# ---- Picture ----


def draw(results: list[harness.Result], title: str, path: Path) -> None:
    """Horizontal bars: total speed-up of ls over eager and over torch.compile, one panel for each dtype, a line at 1x."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    dtypes = list(dict.fromkeys(result.dtype for result in results))
    panels = [[r for r in results if r.dtype == dtype] for dtype in dtypes]
    tallest = max(len(panel) for panel in panels)
    size = (1.5 + 4.5 * len(panels), 1.6 + 0.4 * tallest)
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, squeeze=False, sharex=True, layout="constrained")
    for axis, dtype, panel in zip(axes[0], dtypes, panels, strict=True):
        for offset, over, color in ((-0.2, "eager", "tab:blue"), (0.2, "compiled", "tab:orange")):
            gains = [r.speedup(over) for r in panel]
            heights = [i + offset for i in range(len(panel))]
            bars = axis.barh(
                heights, [(g or 1.0) - 1.0 for g in gains], 0.38, left=1.0, color=color, label=f"over {over}"
            )
            axis.bar_label(bars, [f"{g:.1f}" if g else "-" for g in gains], fontsize=7, padding=2)
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        axis.margins(x=0.15)
        axis.set_yticks(range(len(panel)), [f"{r.op}\n{r.shape}" for r in panel], fontsize=7)
        axis.invert_yaxis()
        axis.set_title(dtype)
    figure.supxlabel("speed-up of ls, forward and backward together", fontsize=9)
    figure.suptitle(title, fontsize=9)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower right", fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


# ---- Command ----


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", help=f"which ops (default: all): {', '.join(STEMS)}")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="default: all three")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--shape", default="", help="only the cases whose shape contains this text")
    parser.add_argument("--seconds", type=float, default=3.0, help="timing of one case, at most (default 3)")
    parser.add_argument("--out", type=Path, help="write the results here as JSON, and beside it the picture")
    args = parser.parse_args()
    harness.check_names(parser, "op", args.ops, STEMS)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch sees no GPU")
    harness.check_out(parser, args.out)
    return args


def main() -> int:
    """Measures the chosen cases, prints the table, writes JSON and picture. 1 when an op of ours, or its case, did not run."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    harness.keep_freed_memory()
    device = torch.device(args.device)
    stems = args.ops or STEMS
    machine, bandwidth = harness.machine(device), harness.measure_bandwidth(device)
    per_case = (0.0 if args.no_compile else COMPILE_S) + 0.7 * args.seconds
    minutes = len(stems) * len(args.dtypes) * CASES_PER_OP * per_case / 60
    display = Display(len(stems) * len(args.dtypes))
    results: list[harness.Result] = []
    failed: list[str] = []

    def report() -> None:
        if args.out:
            content = {"machine": machine, "bandwidth": dataclasses.asdict(bandwidth), "seconds_per_case": args.seconds}
            content["results"] = [result.to_json() for result in results]
            args.out.write_text(json.dumps(content, indent=1) + "\n")

    begin = time.monotonic()
    with display.running():
        display.say(", ".join(f"{key} {value}" for key, value in machine.items()))
        display.say(
            f"bandwidth, reads plus writes: copy {bandwidth.copy:.1f} GB/s, in place {bandwidth.in_place:.1f} GB/s. "
            f"{len(stems)} ops, {', '.join(args.dtypes)}: about {max(minutes, 0.1):.0f} minutes\n"
        )
        display.say(HEADER)
        for stem in stems:
            for name in args.dtypes:
                display.say(f"{stem}, {name}")
                torch.manual_seed(0)
                try:
                    for case in importlib.import_module(f"ops.{stem}").cases(device, DTYPES[name]):
                        if args.shape in case.shape:
                            display.show(f"{stem} {name}: {case.shape}")
                            result = harness.measure(case, name, bandwidth, device, args.seconds, not args.no_compile)
                            results.append(result)
                            display.say(row(result))
                            report()
                except Exception as error:  # no memory for its tensors, say: the other ops are measured all the same
                    failed.append(f"{stem} {name}: {harness.first_line(error)}")
                    display.say(failed[-1])
                display.show("", advance=1)
    if not results and not failed:
        print(f"no case has --shape {args.shape!r} in its shape", file=sys.stderr)
        return 1
    missing = [
        f"{r.op} {r.shape} {r.dtype}, {name}: {time_.why_not}"
        for r in results
        for name, time_ in r.times.items()
        if time_.why_not and not (name == "compiled" and args.no_compile)
    ]
    slower = [
        f"{r.op} {r.shape} {r.dtype}: {gain:.2f}x of the better of eager and torch.compile"
        for r in results
        if (gain := r.speedup("best")) is not None and gain < 1.0
    ]
    last = f"{len(results)} cases in {(time.monotonic() - begin) / 60:.1f} minutes"
    print("\n" + "\n".join([*failed, *missing, *slower, last]))
    if args.out and results:
        picture = args.out.with_suffix(".png")
        title = f"{machine['processor']}, {machine['threads']} threads, torch {machine['torch']}, {machine['commit']}"
        draw(results, title, picture)
        print(f"{args.out}, {picture}")
    return int(bool(failed) or any(result.times["ls"].why_not for result in results))


if __name__ == "__main__":
    sys.exit(main())
