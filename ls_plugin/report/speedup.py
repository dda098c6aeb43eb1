"""What a report tells of trainings that took turns: the gain, its cost, whether the losses agree, all figures, charts."""

from __future__ import annotations

import dataclasses
import math
import textwrap

from ls_plugin.report import charts, figures, tables
from ls_plugin.report.document import Block, Charts, Heading, Items, Lead, Paragraph, Table
from ls_plugin.report.records import CURVE_WINDOW, LOSS_TOLERANCE, PHASES, Run, running_mean

SCREEN_ROWS = ("tokens/s", "ms per step", *(f"  {phase}" for phase in PHASES), "kernels per step")
SCREEN_ROWS += ("peak memory, MiB", "peak GPU memory, MiB", "loss, bits/token")
BUSY = 0.15  # between the runs of a contender, in their median step: more, and something else used the machine


@dataclasses.dataclass
class Comparison:
    """Contenders that trained the same command in turn.

    One measure says how fast a contender is: ``figures.speedup``, the median ratio on the same batch. Its ms per step and tokens/s in ``medians``
    are stock's medians by that ratio, so that all figures of a report agree. Medians of each by themselves would not: they are of different batches.

    runs: by contender, those that have enough timed updates; where some have more, as after an interrupt, all are cut to the same updates.
    why_not: of each contender without, the reason.
    tolerance: relative, between the losses of two contenders that train alike.
    """

    runs: dict[str, list[Run]]
    why_not: dict[str, str] = dataclasses.field(default_factory=dict)
    tolerance: float = LOSS_TOLERANCE

    def __post_init__(self) -> None:
        whole = self.runs
        self.runs, short = figures.same_updates(whole)
        for name, n in short.items():
            text = f"it came to {n} updates, stock and ls to more"
            if "stock" in whole:
                text += (
                    f"; {ratio_text(figures.speedup(whole['stock'], whole[name], self.tolerance))} over stock on these"
                )
            self.why_not = {**self.why_not, name: text}
        n_updates = {len(run.updates) for of in self.runs.values() for run in of}
        # What was compared, where runs were cut for it; else 0.
        self.cut_to = (
            max(n_updates) if any(len(run.updates) > max(n_updates) for of in whole.values() for run in of) else 0
        )
        self.medians = {name: figures.medians(of) for name, of in self.runs.items()}
        stock = self.runs.get("stock")
        self.gains = {
            name: figures.speedup(stock, of, self.tolerance)
            for name, of in self.runs.items()
            if stock and name != "stock"
        }
        for name, gain in self.gains.items():
            if gain.ratio is not None:
                base = self.medians["stock"]
                self.medians[name] = dataclasses.replace(
                    self.medians[name],
                    step_ms=base.step_ms / gain.ratio,
                    tokens_per_s=base.tokens_per_s * gain.ratio,
                )

    @property
    def alike(self) -> bool:
        """Whether ls trains as stock does; a NaN does not."""
        return "ls" in self.gains and self.gains["ls"].ratio is not None

    @property
    def best(self) -> str:
        """The fastest of stock and its baselines that train as stock does; "" without stock."""
        return figures.best(self.runs, self.tolerance) if "stock" in self.runs else ""

    @property
    def busiest(self) -> tuple[str, float]:
        """The contender whose runs differ most in speed, and by how much, relative."""
        return max(((name, of.run_spread) for name, of in self.medians.items()), key=lambda pair: pair[1])

    def to_json(self) -> dict:
        return {
            "tolerance": self.tolerance,
            "contenders": {name: dataclasses.asdict(of) for name, of in self.medians.items()},
            "over_stock": {name: dataclasses.asdict(gain) for name, gain in self.gains.items()},
            "best_stock": self.best,
            "not_measured": self.why_not,
            "cut_to_updates": self.cut_to or None,
            "verdict": [f"{name}: {text}" for name, text in lead(self).lines],
        }


def percent(x: float) -> str:
    return f"{100 * x:.3g} %"


def ratio_text(gain: figures.Speedup | None) -> str:
    if gain is None:
        return "-"
    if gain.ratio is None:
        return "no claim"
    low, high = gain.quartiles
    return f"{gain.ratio:.2f}x ({low:.2f}-{high:.2f})"


# ---- In words ----


def lead(comparison: Comparison) -> Lead:
    """What was gained, at what cost, whether quality held: for someone who sees the project for the first time."""
    if "ls" not in comparison.gains:
        absent = [
            f"{name}: {comparison.why_not.get(name, 'not run')}"
            for name in ("stock", "ls")
            if name not in comparison.runs
        ]
        return Lead([("No comparison", "; ".join(absent))], good=False)
    lines = [("Gained", _gained(comparison)), ("Cost", _cost(comparison)), ("Quality", _quality(comparison))]
    if comparison.cut_to:
        text = f"some runs are longer; figures and losses are of the first {comparison.cut_to} updates, warm-up included, which all of them have"
        lines.append(("Compared", text))
    if comparison.busiest[1] > BUSY:
        name, spread = comparison.busiest
        text = f"the runs of {name} differ by {percent(spread)} in speed: something else used the machine; measure again when it is idle"
        lines.append(("Mind", text))
    return Lead(lines, good=comparison.alike and comparison.gains["ls"].ratio > 1)


def _gained(comparison: Comparison) -> str:
    gain, stock, ls = comparison.gains["ls"], comparison.medians["stock"], comparison.medians["ls"]
    steps = f"a step took {ls.step_ms:,.1f} ms with ls_plugin and {stock.step_ms:,.1f} ms with stock fairseq"
    if gain.ratio is None:
        return f"**no speed-up is claimed**, since {gain.why_not}; {steps}"
    low, high = gain.quartiles
    text = f"training is **{gain.ratio:.2f} times as fast** ({low:.2f} to {high:.2f} for the middle half of the batches): {steps}"
    best = comparison.best
    if best != "stock":
        over = figures.speedup(comparison.runs[best], comparison.runs["ls"], comparison.tolerance)
        text += f"; {ratio_text(over)} over {best}, the fastest that PyTorch's own means make of stock"
    return text


def _cost(comparison: Comparison) -> str:
    stock, ls = comparison.medians["stock"], comparison.medians["ls"]
    if stock.peak_gpu_mib > 0:
        memory, before, after = "GPU memory", stock.peak_gpu_mib, ls.peak_gpu_mib
    else:
        memory, before, after = "memory of the process", stock.peak_rss_mib, ls.peak_rss_mib
    return (
        f"peak {memory}: {after:,.0f} MiB with ls_plugin, {before:,.0f} with stock fairseq ({after / before - 1:+.0%}); "
        f"{ls.startup_s:.1f} s from the start to the first update instead of {stock.startup_s:.1f}"
    )


def _quality(comparison: Comparison) -> str:
    gain, stock, ls = comparison.gains["ls"], comparison.medians["stock"], comparison.medians["ls"]
    losses = "training losses, bits per token: {:.3f} with stock, {:.3f} with ls".format(*gain.losses)
    tolerance = f"they differ by {gain.loss_difference:+.2%}, tolerance {percent(comparison.tolerance)}"
    if not abs(gain.loss_difference) <= comparison.tolerance:
        return f"**the two do not train alike**: {losses}; {tolerance}"
    text = f"held: {losses}; {tolerance}"
    if stock.valid_loss is not None and ls.valid_loss is not None:
        text += f"; last validation {stock.valid_loss:.3f} and {ls.valid_loss:.3f}"
    return text


def repeats(comparison: Comparison) -> str:
    """Whether runs of the same contender, which share the seed, had the same losses, bit for bit."""
    found = []
    for name, runs in comparison.runs.items():
        digests = sorted({run.loss_digest() for run in runs})
        same = "not repeated " if len(runs) == 1 else "yes " if len(digests) == 1 else "NO "
        found.append(f"{name} {same}({', '.join(digests)})")
    return "same seed, same losses: " + ", ".join(found)


def screen(comparison: Comparison) -> list[str]:
    """Lines for the terminal."""
    texts = [f"{name}: {text}".replace("**", "") for name, text in lead(comparison).lines]
    texts += [f"{name} was not measured: {reason}" for name, reason in comparison.why_not.items()]
    lines = [line for text in texts for line in textwrap.wrap(text, tables.width(), subsequent_indent="  ")]
    if not comparison.runs:
        return lines
    whole = table(comparison)
    cells = [whole.columns, *(row for row in whole.rows if row[0] in SCREEN_ROWS)]
    same = textwrap.wrap(repeats(comparison), tables.width(), subsequent_indent="  ")
    return [*lines, "", *tables.fit(cells), *same]


# ---- All of it ----


def blocks(comparison: Comparison) -> list[Block]:
    """Figures, charts, and how they were measured."""
    if not comparison.runs:
        return _absent(comparison)
    some = next(iter(comparison.runs.values()))[0]
    notes = [
        f"Each contender ran in fresh processes, in turn, in every second round the other way about, from the same seed and so on the same "
        f"batches. The first {some.warm_up} updates of each run are warm-up and left out. A contender's speed over stock is the median over "
        f"the other updates of the ratio on the same batch, with the quartiles of that ratio in brackets. Tokens/s and ms per step of stock are "
        f"medians; those of the others follow from stock's by the ratio. Phases are medians by themselves: they need not add up.",
        "forward: the criterion with the model; backward: the gradients; sync: what is waited for other processes' gradients; clip: the "
        "norm and the clipping; update: scaling, the optimizer, zeroing; rest: data, seeding, statistics, logging.",
        f"Runs of a contender share the seed; {repeats(comparison)} (digests of all losses).",
        "Loss is the mean over the last quarter of the updates; it differs a little between any two contenders, since their dropout masks do.",
    ]
    return [
        Heading("Figures"),
        table(comparison),
        *_absent(comparison),
        Charts(charts_of(comparison)),
        Heading("How it was measured"),
        *map(Paragraph, notes),
    ]


def _absent(comparison: Comparison) -> list[Block]:
    lines = [f"**{name}** was not measured: {reason}" for name, reason in comparison.why_not.items()]
    lines += [
        f"**{name}**: no speed-up is claimed, since {gain.why_not}"
        for name, gain in comparison.gains.items()
        if gain.ratio is None
    ]
    return [Items(lines)] if lines else []


def table(comparison: Comparison) -> Table:
    """A column for each contender, and how many times better ls is than stock: a dash where the two do not train alike."""
    of, rows = comparison.medians, []

    def add(name: str, value, form: str, better: int = 0) -> None:
        """value: Medians -> a number, or None where there is none. better: 1 where more is, -1 where less is."""
        values = {contender: value(medians) for contender, medians in of.items()}
        if all(x is None for x in values.values()):
            return
        stock, ls, gain = values.get("stock"), values.get("ls"), "-"
        if better and comparison.alike and stock and ls:
            gain = f"{(ls / stock) ** better:.2f}x"
        rows.append([name, *("-" if x is None else format(x, form) for x in values.values()), gain])

    ratios = {name: "1" if name == "stock" else ratio_text(comparison.gains.get(name)) for name in of}
    rows.append(["over stock", *ratios.values(), "-"])
    add("tokens/s", lambda m: m.tokens_per_s, ",.0f", 1)
    add("ms per step", lambda m: m.step_ms, ",.1f", -1)
    for phase in PHASES:
        # Without other processes nothing is waited for.
        if phase != "sync" or any(m.phase_ms.get(phase, 0.0) > charts.LEAST_SHARE * m.step_ms for m in of.values()):
            add(f"  {phase}", lambda m, phase=phase: m.phase_ms.get(phase), ",.1f", -1)
    add("kernels per step", lambda m: m.kernels, ",", -1)
    add("peak memory, MiB", lambda m: m.peak_rss_mib, ",.0f", -1)
    add("peak GPU memory, MiB", lambda m: m.peak_gpu_mib or None, ",.0f", -1)
    add("start-up, s", lambda m: m.startup_s, ".1f", -1)
    add("loss, bits/token", lambda m: m.final_loss, ".3f")
    add("validation loss", lambda m: m.valid_loss, ".3f")
    add("runs", lambda m: m.runs, "")
    add("timed updates of each", lambda m: m.updates, "")
    add("runs differ by", lambda m: m.run_spread if m.runs > 1 else None, ".1%")
    return Table(["", *of, "gain of ls"], rows)


def charts_of(comparison: Comparison) -> list[tuple[str, str]]:
    of = comparison.medians
    colors = {name: charts.color_of(name, i) for i, name in enumerate(of)}
    phases = {name: figure.phase_ms or {"rest": figure.step_ms} for name, figure in of.items()}
    totals = {name: round(figure.step_ms, 1) for name, figure in of.items()}
    memory = {name: {"peak": figure.peak_gpu_mib or figure.peak_rss_mib} for name, figure in of.items()}
    runs = {name: runs[0] for name, runs in comparison.runs.items()}
    losses = {name: running_mean(run.losses) for name, run in runs.items()}
    updates = {name: ([u["update"] for u in run.updates], losses[name]) for name, run in runs.items()}
    seconds = {name: (elapsed_s(run), losses[name]) for name, run in runs.items()}
    steps = {
        name: ([u["update"] for u in comparison.runs[name][0].timed][: len(ms)], ms)
        for name, ms in ((name, figures.step_ms(of)) for name, of in comparison.runs.items())
    }
    smooth = f"running mean of {CURVE_WINDOW} updates"
    shown = [
        ("A step by phase", charts.bars(phases, charts.PARTS, "step time by phase", "ms", totals)),
        ("Peak memory", charts.bars(memory, {"peak": charts.PARTS["forward"]}, "peak memory", "MiB")),
        (f"Training loss by updates, {smooth}", charts.lines(updates, colors, "loss by updates", "updates")),
        (f"Training loss by time, {smooth}", charts.lines(seconds, colors, "loss by time", "seconds of training")),
        ("Time of each step, ms", charts.lines(steps, colors, "step time", "update", from_zero=True)),
    ]
    kernels = {name: {"kernels": figure.kernels} for name, figure in of.items() if figure.kernels}
    if kernels:
        svg = charts.bars(kernels, {"kernels": charts.PARTS["update"]}, "kernels per step", "kernels")
        shown.insert(2, ("Kernels of a step", svg))
    return shown


def elapsed_s(run: Run) -> list[float]:
    """Training time at the end of each update: without start-up and validation."""
    total, times = 0.0, []
    for update in run.updates:
        total += update["step_ms"] / 1e3
        times.append(total)
    return times


def finite(value):
    """For JSON, which knows no NaN and no infinity: None in their place."""
    if isinstance(value, dict):
        return {key: finite(of) for key, of in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(of) for of in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
