"""Training end to end on a CPU: stock fairseq, the best that stock can be made to do, and ls, by the real commands on real text.

    python recipes/benchmarks/training.py [--rows S B B32 S256 LM] [--precisions fp32,bf16] [--rounds N] [--out FILE.json]
    python recipes/benchmarks/training.py --scaling [--inference] [--rounds N] [--out FILE.json]

Each run is fairseq-train or lightseq-train in a fresh process, with dropout 0.1 at three places, --clip-norm 1.0, and padded batches of the
Japanese-English Bible (``recipes/quickstart/prepare.py``) which are the same for all, since the seed is. Contenders take turns, in every second round in reverse; the
baselines, which only serve to find the best of stock, run in the first round. On a CPU stock cannot train in bf16, so ls in bf16 is held against stock's fp32.

    stock+medium      torch.set_float32_matmul_precision("medium")     stock+compile   torch.compile of layers and loss; ended after a limit, not
                                                                       tried where a smaller row gained nothing
    stock+fused_adam  torch.optim.AdamW(fused=True)                     best stock      the fastest of these and stock itself
    step              median over the updates, the first few left out; spread: quartiles
    speed-up          median over the updates of the ratio on the same batch, with quartiles; none is named where losses part by more than a tolerance
    floor             products of these very batches at the machine's best rate + bytes that must move at copy bandwidth: training_floor.py
    phases            as in timed_train.py: forward, backward, clip, update, rest (data, seeding, logging)
    memory            peak resident set of the process

Ctrl-C leaves the results of what has run. Writes FILE.json and beside it FILE.png, FILE_scaling.png; a part that an earlier call has left in FILE.json stays,
and so do other rows of the table, if they are of the same machine and commit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import re
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.append(str(HERE.parents[1]))  # the clone's ls_plugin, unless one is installed
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)  # fairseq's remarks about optional packages

import torch  # noqa: E402
import training_floor as floor  # noqa: E402
import training_pictures as pictures  # noqa: E402
import training_runs as runs  # noqa: E402
import training_scaling as scaling  # noqa: E402
from figures import step_ms  # noqa: E402

from ls_plugin.arguments import Listed  # noqa: E402
from ls_plugin.report import figures, op_timing, processes, records, tables  # noqa: E402
from ls_plugin.report.machine import machine as machine_of  # noqa: E402

BASELINES = ("medium", "fused_adam", "compile")
PRECISIONS = ("fp32", "bf16")
DEFAULT_ROWS = ("S", "B", "B32", "S256", "LM")
# Speed-up over stock that issue 6 asks for; over the best of stock; step over floor at most.
GOALS = {
    "fp32": {"S": 2.2, "B": 2.0, "B32": 2.0, "S256": 2.0, "LM": 2.0},
    "bf16": {"S": 4.0, "B": 4.0, "B32": 4.0, "S256": 3.0, "LM": 4.0},
}
GOALS_OVER_BEST = {"fp32": 1.5, "bf16": 2.5}
GOAL_OVER_FLOOR = 1.3
STARTUP_S, COMPILE_S = 8.0, 90.0  # first guesses; what was measured replaces the rest
GUESS_OVER_PRODUCTS = {"stock": 2.2, "ls": 1.4}
NEVER = "-"
# A model after so few updates does not know when to stop. The text has 1.3 English pieces for a Japanese one.
INFERENCE_UPDATES = 60
GENERATE = ["--gen-subset", "valid", "--beam", "4", "--max-tokens", "4000"]
GENERATE += ["--max-len-a", "1.4", "--max-len-b", "10", "--required-batch-size-multiple", "1", "--num-workers", "0"]
VALIDATE = [
    "--task",
    "translation",
    "--valid-subset",
    "valid",
    "--max-tokens",
    "2048",
    "--required-batch-size-multiple",
    "1",
]
VALIDATE += ["--num-workers", "0"]


Turn = tuple[runs.Row, int, runs.Contender]  # with the number of the round


class Clock:
    """How long the runs that are left will take: by the steps of like runs, and before there are any by the products' FLOPs."""

    def __init__(self, rates: floor.Rates, updates: int | None) -> None:
        self.rates, self.updates = rates, updates
        self.measured: dict[tuple[runs.Row, str], float] = {}  # ms
        self.left: list[tuple[runs.Row, runs.Contender]] = []  # the first one may be running

    def step_ms(self, row: runs.Row, contender: runs.Contender) -> float:
        if (row, contender.kind) in self.measured:
            return self.measured[row, contender.kind]
        return 30 + GUESS_OVER_PRODUCTS[contender.kind] * row.size / self.rates.gflop_per_s["fp32"] / 1e6

    def run_s(self, row: runs.Row, contender: runs.Contender) -> float:
        n_updates = runs.WARM_UP_UPDATES + (self.updates or row.updates)
        return STARTUP_S + contender.compiles * COMPILE_S + n_updates * self.step_ms(row, contender) / 1e3

    def told(self, fraction: float = 0.0) -> str:
        """The note beside the bar, when so much of the first is done."""
        seconds = [self.run_s(*run) for run in self.left]
        left = sum(seconds) - fraction * (seconds[0] if seconds else 0.0)
        return f"about {left / 60:.0f} min left in all"


# ---- The table ----


def order(contenders: list[runs.Contender], rounds: int) -> list[tuple[int, runs.Contender]]:
    """(round, contender): in turn, in every second round the other way about; baselines in the first alone."""
    turns = []
    for index in range(1, rounds + 1):
        of_round = [c for c in contenders if index == 1 or not c.stock_with]
        turns += [(index, c) for c in (of_round if index % 2 else reversed(of_round))]
    return turns


class Table:
    """Rows and what was measured of them so far."""

    def __init__(self, rates: floor.Rates) -> None:
        self.rates = rates
        self.runs: dict[str, dict[str, list]] = {}
        self.why_not: dict[str, dict[str, str]] = {}

    def add(self, row: runs.Row, contender: runs.Contender, run: records.Run) -> None:
        self.runs.setdefault(row.name, {}).setdefault(contender.name, []).append(run)

    def refuse(self, row: runs.Row, contender: runs.Contender, reason: str) -> None:
        self.why_not.setdefault(row.name, {})[contender.name] = reason

    def why_not_compile(self, row: runs.Row) -> str:
        """Why torch.compile is not tried on this row: it was no faster on one with fewer products, where there is more for it to gain. Or ""."""
        for name in self.runs:
            other = runs.ROWS.get(name)
            if (
                "stock" not in self.runs[name]
                or other is None
                or other.language_model != row.language_model
                or other.size >= row.size
            ):
                continue
            for contender in (c for c in (*self.runs[name], *self.why_not.get(name, {})) if "compile" in c):
                if contender not in self.runs[name]:
                    return f"not tried: on {name} {self.why_not[name][contender]}"
                gain = figures.speedup(self.runs[name]["stock"], self.runs[name][contender])
                if gain.ratio is None or gain.ratio <= 1:
                    return f"not tried: on {name} {gain.why_not or f'{gain.ratio:.2f}x as fast as stock'}"
        return ""

    def result(self, name: str) -> dict:
        """What is known of a row: contenders, the best of stock, comparisons."""
        row, of = runs.ROWS[name], self.runs.get(name, {})
        contenders = {}
        for contender, done in of.items():
            measured = figures.medians(done)
            precision = "bf16" if contender.endswith("bf16") else "fp32"
            floors = [
                floor.floor_ms(row.model, update["batches"], done[0].n_params, precision, self.rates)
                for update in done[0].timed
            ]
            over = statistics.median(
                ms / least["all"] for ms, least in zip(figures.step_ms(done), floors, strict=False)
            )
            contenders[contender] = {
                **dataclasses.asdict(measured),
                "floor_ms": floor.median_floor_ms(floors),
                "over_floor": over,
            }
        result = {"title": row.title, "contenders": contenders, "why_not": self.why_not.get(name, {})}
        result["gflop_per_s"], result["gb_per_s"] = self.rates.gflop_per_s, self.rates.gb_per_s
        if "stock" in of:
            best = figures.best(of)
            result["best_stock"] = best
            result["speedup"] = {
                contender: {
                    "over_stock": dataclasses.asdict(figures.speedup(of["stock"], done)),
                    "over_best": dataclasses.asdict(figures.speedup(of[best], done)),
                }
                for contender, done in of.items()
                if contender != "stock"
            }
        return result

    def results(self) -> dict[str, dict]:
        return {name: self.result(name) for name in self.runs}


def run_turns(
    turns: list[Turn], runner: runs.Runner, table: Table, save: Callable[[], None], updates: int | None
) -> None:
    """Runs all into the table, with progress; ``save`` is called after each."""
    display, clock = processes.Display(), Clock(table.rates, updates)
    for row in {(row.vocabulary, row.language_model): row for row, _, _ in turns}.values():
        runner.data(row)
    clock.left = [(row, contender) for row, _, contender in turns]
    display.say(f"{len(turns)} runs, {clock.told()}")
    for row, index, contender in turns:
        label = f"{row.name}, {contender.name}, round {index}"
        if contender.compiles and (reason := table.why_not_compile(row)):
            table.refuse(row, contender, reason)
            clock.left.pop(0)
            continue
        with display.task(label) as show:

            def told(done: float, note: str, show=show) -> None:
                show(done, f"{note}, {clock.told(done)}")

            try:
                run = runner.run(row, contender, str(index), told, updates)
            except runs.RunError as error:
                table.refuse(row, contender, str(error).splitlines()[0])
                display.say(f"{label}: {error}")
                continue
            finally:
                clock.left.pop(0)
        table.add(row, contender, run)
        clock.measured[row, contender.kind] = ms = figures.medians([run]).step_ms
        display.say(f"{label}: {ms:,.0f} ms a step, loss {run.losses[-1]:.3f}, {clock.told()}")
        save()


def measure_table(args: argparse.Namespace, runner: runs.Runner, rates: floor.Rates, save) -> None:
    """The rows that are asked for; ``save`` gets their results after each run."""
    contenders = [runs.STOCK]
    contenders += [runs.Contender("ls", precision=precision) for precision in args.precisions]
    contenders += [runs.Contender("stock", name) for name in args.baselines]
    table = Table(rates)
    turns = [(runs.ROWS[name], *turn) for name in args.rows for turn in order(contenders, args.rounds)]
    run_turns(turns, runner, table, lambda: save(rows=table.results()), args.updates)


def measure_scaling(args: argparse.Namespace, runner: runs.Runner, rates: floor.Rates, save) -> None:
    """Stock and ls along the axes of training_scaling.py; ``save`` gets the curves."""
    table = Table(rates)
    points = {row.name: row for along in scaling.rows().values() for row in along}.values()
    turns = [(row, *turn) for row in points for turn in order([runs.STOCK, runs.Contender("ls")], args.rounds)]

    def save_curves() -> None:
        curves = scaling.curves(table.runs)
        save(scaling={"curves": curves, "growth": scaling.growth(curves)})

    run_turns(turns, runner, table, save_curves, args.updates)


def measure_inference(args: argparse.Namespace, runner: runs.Runner, save) -> None:
    """Generation and validation by stock and ls in turn from one checkpoint, which ls trains first."""
    display, row = processes.Display(), runs.ROWS[args.inference]
    kept = runner.folder / "checkpoints"
    options = ("--save-dir", str(kept), "--no-epoch-checkpoints", "--disable-validation")
    updates = args.updates or INFERENCE_UPDATES
    display.say(f"inference: ls trains a checkpoint by {updates} updates")
    runner.run(row, runs.Contender("ls"), "checkpoint", updates=updates, options=options)
    data = str(runner.data(row))
    commands = {"generate": [data, *GENERATE], "validate": [data, *VALIDATE]}
    found: dict[str, dict[str, list[runs.Inference]]] = {command: {"stock": [], "ls": []} for command in commands}
    for index in range(1, args.rounds + 1):
        for command, flags in commands.items():
            for kind in ("stock", "ls") if index % 2 else ("ls", "stock"):
                done = runner.infer(kind, command, kept / "checkpoint_last.pt", str(index), flags)
                found[command][kind].append(done)
                display.say(f"{command}, {kind}, round {index}: {sum(done.batches_ms) / 1e3:.2f} s")
                save(inference=inference_results(found))


def inference_results(found: dict[str, dict[str, list[runs.Inference]]]) -> dict[str, dict]:
    """Command -> seconds of each side (sum over the batches of the medians over the rounds), their ratio, and how many results differ."""
    results = {}
    for command, of in found.items():
        if not all(of.values()):
            continue
        seconds = {
            kind: sum(map(statistics.median, zip(*(one.batches_ms for one in done), strict=True))) / 1e3
            for kind, done in of.items()
        }
        stock, ours = (of[kind][0].results for kind in ("stock", "ls"))
        results[command] = {
            "seconds": seconds,
            "speedup": seconds["stock"] / seconds["ls"],
            "results": len(stock),
            "differing": sum(a != b for a, b in zip(stock, ours, strict=True)),
        }
    return results


# ---- Told ----


def ratio_text(gain: dict | None) -> str:
    if gain is None:
        return NEVER
    if gain["ratio"] is None:
        return "void"
    low, high = gain["quartiles"]
    return f"{gain['ratio']:.2f}x ({low:.2f}-{high:.2f})"


def make_tables(results: dict[str, dict], precisions: list[str]) -> list[tables.Table]:
    """The end-to-end table, and every contender's figures."""
    columns = ["stock, ms", "best stock, ms"]
    for precision in precisions:
        columns += [f"ls {precision}, ms", "over stock", "over best", "over floor"]
    whole = tables.Table("Training: a step, stock's median and the others by their ratio", ["", *columns])
    detail_columns = ["ms", "quartiles", "tokens/s", *records.PHASES, "peak MiB", "floor, ms", "over it", "loss"]
    detail = tables.Table("Each contender", ["", *detail_columns])
    for name, row in results.items():
        known = row["contenders"]
        if "stock" in known:
            best = row["best_stock"]
            short = "" if best == "stock" else f" {best.removeprefix('stock')}"
            cells = [f"{step_ms(row, 'stock'):,.0f}", f"{step_ms(row, best):,.0f}{short}"]
            for precision in precisions:
                ours, gain = known.get(f"ls {precision}"), row["speedup"].get(f"ls {precision}")
                if ours is None:
                    cells += [NEVER] * 4
                    continue
                cells += [f"{step_ms(row, f'ls {precision}'):,.0f}", ratio_text(gain["over_stock"])]
                cells += [ratio_text(gain["over_best"]).split(" ")[0], f"{ours['over_floor']:.2f}"]
            whole.add_row(name, *cells)
        detail.add_row(f"{name}: {row['title']}")
        for contender, measured in known.items():
            low, high = measured["step_ms_quartiles"]
            detail.add_row(
                f"  {contender}",
                f"{measured['step_ms']:,.0f}",
                f"{low:,.0f}-{high:,.0f}",
                f"{measured['tokens_per_s']:,.0f}",
                *(f"{measured['phase_ms'][phase]:,.1f}" for phase in records.PHASES),
                f"{measured['peak_rss_mib']:,.0f}",
                f"{measured['floor_ms']['all']:,.0f}",
                f"{measured['over_floor']:.2f}",
                f"{measured['losses'][-1]:.3f}",
            )
        for contender, reason in row["why_not"].items():
            detail.add_row(f"  {contender}", reason)
    return [whole, detail]


def verdicts(results: dict[str, dict]) -> list[str]:
    """A line for each row and precision: goals met and missed, or why no speed-up is claimed."""
    lines = []
    for name, row in results.items():
        for precision in PRECISIONS:
            gain = row.get("speedup", {}).get(f"ls {precision}")
            if gain is None:
                continue
            over, best = gain["over_stock"], gain["over_best"]
            if over["ratio"] is None or best["ratio"] is None:
                lines.append(f"{name} {precision}: no speed-up is claimed: {over['why_not'] or best['why_not']}")
                continue
            measured = [
                ("over stock", over["ratio"], GOALS[precision].get(name), True),
                (f"over the best, {row['best_stock']}", best["ratio"], GOALS_OVER_BEST[precision], True),
                ("of the floor", row["contenders"][f"ls {precision}"]["over_floor"], GOAL_OVER_FLOOR, False),
            ]
            told = [
                f"{value:.2f}x {what} ({'met' if (value >= goal if more else value <= goal) else 'missed'}: {goal}x)"
                for what, value, goal, more in measured
                if goal is not None
            ]
            spread = max(row["contenders"][side]["run_spread"] for side in ("stock", f"ls {precision}"))
            lines.append(
                f"{name} {precision}: {', '.join(told)}; losses differ by {over['loss_difference']:+.2%}, rounds by up to {spread:.0%}"
            )
    return lines


# ---- Command ----


def to_json(content: dict) -> str:
    """Indented, but lists of numbers in one line."""
    text = json.dumps(content, indent=1)
    return re.sub(r"\[\s+([^\[\]{}\"]+?)\s+\]", lambda found: "[" + " ".join(found[1].split()) + "]", text) + "\n"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", action=Listed, choices=runs.ROWS, default=list(DEFAULT_ROWS), help="default: S B B32 S256 LM"
    )
    parser.add_argument(
        "--scaling", action="store_true", help="not the table but the curves along tokens, layers and V"
    )
    parser.add_argument(
        "--inference",
        nargs="?",
        const="S",
        choices=runs.ROWS,
        help="not the table but generation (beam 4) and validation, of this row's model (default S)",
    )
    parser.add_argument("--precisions", action=Listed, default=list(PRECISIONS), help="of ls (default fp32,bf16)")
    parser.add_argument(
        "--baselines",
        action=Listed,
        nargs="*",
        default=list(BASELINES),
        help="what stock is given, several at once joined by + (default medium,fused_adam,compile; none: '')",
    )
    parser.add_argument("--rounds", type=int, default=2, help="turns of stock and ls (default 2)")
    parser.add_argument("--updates", type=int, help="timed updates of each run (default: by row)")
    parser.add_argument("--threads", type=int, default=2, help="of every run (default 2)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, default=HERE / "out", help="for data, records and logs (default: out/)")
    parser.add_argument("--out", type=Path, help="write the results here as JSON, and beside it the picture")
    args = parser.parse_args(arguments)
    op_timing.check_names(parser, "precision", args.precisions, PRECISIONS)
    for combination in args.baselines:
        op_timing.check_names(parser, "baseline", combination.split("+"), BASELINES)
    for name, least in (("rounds", 1), ("threads", 1), ("updates", runs.LEAST_TIMED_UPDATES)):
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name} must be at least {least}, got {value}")
    if args.inference and runs.ROWS[args.inference].language_model:
        parser.error(f"--inference translates, and {args.inference} is a language model")
    op_timing.check_out(parser, args.out)
    args.work = args.work.resolve()
    return args


def main(arguments: list[str] | None = None) -> int:
    """Runs what is asked for; the exit status: 0, 1 without data or a checkpoint, 130 after Ctrl-C. It reports what has run in any case."""
    args = parse_arguments(arguments)
    from rich.console import Console

    console = Console(width=tables.width(), highlight=False)
    torch.set_num_threads(args.threads)
    machine = machine_of(torch.device("cpu"))
    product_rates = floor.product_rates(floor.PRODUCT_SIZE)
    fma_peak = floor.fma_peak(args.threads)
    bandwidth = dataclasses.asdict(op_timing.measure_bandwidth(torch.device("cpu")))
    rates = floor.rates_of(product_rates, max(bandwidth["copy_"], bandwidth["memmove"]))
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()), markup=False)
    told = [f"{name} {rate:,.0f}" for name, rate in product_rates.items()]
    told.append(f"fp32 multiply-adds alone {fma_peak or float('nan'):,.0f}")
    console.print(f"products, GFLOP/s: {', '.join(told)}; copy, GB/s: {rates.gb_per_s:.1f}", markup=False)
    content = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    runner = runs.Runner(args.work, args.threads, args.seed)
    began, status, found = time.monotonic(), 0, {}

    def save(**parts: dict) -> None:
        """Each part with what it was measured on; those that other calls have left in the file stay."""
        found.update(parts)
        for name, part in parts.items():
            before = content.get(name)
            if name == "rows" and before and before["machine"] == machine:
                part = {**before["results"], **part}
            content[name] = {
                "machine": machine,
                "product_gflop_per_s": product_rates,
                "fma_gflop_per_s": fma_peak,
                "bandwidth_gb_per_s": bandwidth,
                "rounds": args.rounds,
                "seed": args.seed,
                "results": part,
            }
        if args.out:
            args.out.write_text(to_json(content))

    try:
        if args.scaling:
            measure_scaling(args, runner, rates, save)
        if args.inference:
            measure_inference(args, runner, save)
        if not (args.scaling or args.inference):
            measure_table(args, runner, rates, save)
    except KeyboardInterrupt:
        print("interrupted; what follows is of what had run")
        status = 130
    except (runs.RunError, runs.prepare.DataError) as error:
        print(f"training: {error}", file=sys.stderr)
        status = 1
    title = f"{machine['processor']}, {args.threads} threads, torch {machine['torch']}, {machine['commit']}"
    tell(found, args, title)
    print(f"{(time.monotonic() - began) / 60:.1f} minutes")
    return status


def tell(found: dict, args: argparse.Namespace, title: str) -> None:
    """Tables, verdicts and pictures of the parts that have run."""
    if "rows" in found:
        for table in make_tables(found["rows"], args.precisions):
            print(table)
        print("\n".join(verdicts(found["rows"])))
        if args.out:
            pictures.draw_phases(found["rows"], title, args.out.with_suffix(".png"))
    if "scaling" in found:
        curves = found["scaling"]["curves"]
        for axis, points in curves.items():
            for point in points:
                time_ms, memory = point["step_ms"], point["peak_rss_mib"]
                print(
                    f"{axis} {point['size']:>6,}: {time_ms['stock']:8,.0f} -> {time_ms['ls fp32']:8,.0f} ms, "
                    f"{ratio_text(point['speedup'])}; {memory['stock']:6,.0f} -> {memory['ls fp32']:6,.0f} MiB"
                )
        print("\n".join(scaling.verdict(found["scaling"]["growth"])))
        if args.out and any(curves.values()):
            pictures.draw_scaling(curves, title, args.out.with_name(f"{args.out.stem}_scaling.png"))
    for command, result in found.get("inference", {}).items():
        seconds = result["seconds"]
        print(
            f"{command}: stock {seconds['stock']:.2f} s, ls {seconds['ls']:.2f} s, {result['speedup']:.2f}x "
            f"({'met' if result['speedup'] >= 1 else 'missed'}: 1x); {result['differing']} of {result['results']} results differ"
        )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's stop is a Ctrl-C
    sys.exit(main())
