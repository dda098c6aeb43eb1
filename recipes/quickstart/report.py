"""Figures, table, curves and report of a quickstart, from the records that ``ls_plugin/report/timed_train.py`` wrote.

python report.py [OUT]      makes report.md and loss_curves.png again from the records in OUT
"""

import json
import logging
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    logging.disable(logging.INFO)  # fairseq's remarks about optional packages, as it is imported
sys.path.append(str(Path(__file__).resolve().parents[2]))  # the clone's ls_plugin, unless one is installed

from ls_plugin.report.records import (
    CURVE_WINDOW,
    LOSS_TOLERANCE,
    PHASES,
    WARMUP_UPDATES,
    RecordError,
    Run,
    read_run,
    running_mean,
)

KINDS = ("stock", "ls")
LEAST_UPDATES = 12  # the first after the warm-up is timed, the second is the first to be split into phases
SPREAD_TOLERANCE = 0.15  # between the runs of one kind, of tokens/s; more than that, and the machine was busy otherwise


@dataclass
class Timing:
    """Medians over the updates of all runs of one kind, without the warm-up: phases over those split, the rest over the others."""

    tokens_per_s: float
    tokens_per_s_runs: list[float]  # of each run: the spread
    step_ms: float
    step_ms_quartiles: tuple[float, float]
    phase_ms: dict[str, float]
    peak_rss_mib: float
    peak_gpu_mib: float


def timing(runs: list[Run]) -> Timing:
    """Raises RecordError where a run is too short to be timed."""
    for run in runs:
        if not (run.timed and run.split):
            raise RecordError(
                f"report: runs must have {LEAST_UPDATES} updates or more to be timed, the first {WARMUP_UPDATES} being warm-up, "
                f"got {len(run.updates)}"
            )
    steps = [update["step_ms"] for run in runs for update in run.timed]
    phases = [update["phase_ms"] for run in runs for update in run.split]
    # A median, so that one step that another process held up does not count more than the rest.
    rates = [statistics.median(1e3 * u["tokens"] / u["step_ms"] for u in run.timed) for run in runs]
    quartiles = statistics.quantiles(steps, n=4) if len(steps) > 1 else [steps[0]] * 3
    return Timing(
        tokens_per_s=statistics.median(rates),
        tokens_per_s_runs=rates,
        step_ms=statistics.median(steps),
        step_ms_quartiles=(quartiles[0], quartiles[2]),
        phase_ms={phase: statistics.median(split[phase] for split in phases) for phase in PHASES},
        peak_rss_mib=max(run.updates[-1]["peak_rss_mib"] for run in runs),
        peak_gpu_mib=max(update["peak_gpu_mib"] for run in runs for update in run.updates),
    )


@dataclass
class Comparison:
    """Stock and ls over the same updates."""

    runs: dict[str, list[Run]]
    timing: dict[str, Timing]
    updates: int
    losses: dict[str, float]

    @property
    def loss_difference(self) -> float:
        """Of ls against stock, relative, signed."""
        return self.losses["ls"] / self.losses["stock"] - 1

    @property
    def alike(self) -> bool:
        """Whether the two train alike. False for a NaN too."""
        return abs(self.loss_difference) <= LOSS_TOLERANCE

    @property
    def speed_spread(self) -> tuple[str, float]:
        """The kind whose runs differ most in tokens/s, and by how much, relative."""
        rates = {kind: figures.tokens_per_s_runs for kind, figures in self.timing.items()}
        return max(((kind, max(runs) / min(runs) - 1) for kind, runs in rates.items()), key=lambda item: item[1])

    @property
    def comparable(self) -> bool:
        """Whether a speed-up may be claimed: the two train alike, and nothing else kept the machine busy."""
        return self.alike and self.speed_spread[1] <= SPREAD_TOLERANCE

    def repeats(self, kind: str) -> bool:
        """Whether all runs of a kind, which share the seed, had the same losses, bit for bit."""
        return len({run.loss_digest() for run in self.runs[kind]}) == 1


def compare(runs: dict[str, list[Run]]) -> Comparison:
    """Raises RecordError unless both kinds are there with the same number of updates in every run."""
    counts = {kind: sorted({len(run.updates) for run in runs.get(kind, [])}) for kind in KINDS}
    if any(len(lengths) != 1 for lengths in counts.values()) or counts["stock"] != counts["ls"]:
        raise RecordError(f"report: stock and ls must have made the same number of updates in every run, got {counts}")
    return Comparison(
        runs=runs,
        timing={kind: timing(runs[kind]) for kind in KINDS},
        updates=counts["stock"][0],
        losses={kind: statistics.fmean(run.final_loss() for run in runs[kind]) for kind in KINDS},
    )


def comparison_rows(comparison: Comparison) -> list[tuple[str, str, str, str]]:
    """(name, stock, ls, ratio) as text. The ratio is over 1 where ls is better; a dash where the comparison is void."""
    stock, ls = comparison.timing["stock"], comparison.timing["ls"]

    def ratio(better: float, worse: float) -> str:
        return f"{better / worse:.2f}x" if comparison.comparable and worse > 0 and better > 0 else "-"

    rows = [
        (
            "tokens/s",
            f"{stock.tokens_per_s:,.0f}",
            f"{ls.tokens_per_s:,.0f}",
            ratio(ls.tokens_per_s, stock.tokens_per_s),
        ),
        ("ms per step", f"{stock.step_ms:.1f}", f"{ls.step_ms:.1f}", ratio(stock.step_ms, ls.step_ms)),
    ]
    for phase in PHASES:
        before, after = stock.phase_ms[phase], ls.phase_ms[phase]
        rows.append((f"  {phase}", f"{before:.1f}", f"{after:.1f}", ratio(before, after)))
    for name, attribute in (("peak memory, MiB", "peak_rss_mib"), ("peak GPU memory, MiB", "peak_gpu_mib")):
        before, after = getattr(stock, attribute), getattr(ls, attribute)
        if before or after:
            rows.append((name, f"{before:,.0f}", f"{after:,.0f}", ratio(before, after)))
    rows.append(("loss, bits/token", *(f"{comparison.losses[kind]:.3f}" for kind in KINDS), ""))
    return rows


def verdict(comparison: Comparison) -> str:
    """One sentence on whether the two trained alike and undisturbed, and so whether the timings may be compared."""
    difference = f"losses differ by {100 * comparison.loss_difference:+.2f} % (tolerance {100 * LOSS_TOLERANCE:g} %)"
    if not comparison.alike:
        return f"{difference}: THE TWO DO NOT TRAIN ALIKE, so no speed-up is claimed"
    if not comparison.comparable:
        kind, spread = comparison.speed_spread
        return (
            f"{difference}, but the {kind} runs differ by {100 * spread:.0f} % in speed: a busy machine; measure again"
        )
    ls, stock = comparison.timing["ls"], comparison.timing["stock"]
    return f"{difference}: ls trains {ls.tokens_per_s / stock.tokens_per_s:.2f}x as fast as stock"


def repeat_line(comparison: Comparison) -> str:
    parts = []
    for kind in KINDS:
        runs = comparison.runs[kind]
        digests = sorted({run.loss_digest() for run in runs})
        if len(runs) == 1:
            parts.append(f"{kind} {digests[0]}")
        else:
            parts.append(f"{kind} {'yes' if len(digests) == 1 else 'NO'} ({', '.join(digests)})")
    return "same seed, same losses: " + ", ".join(parts)


@dataclass
class Translation:
    """The test split, translated."""

    sources: list[str]
    references: list[str]
    hypotheses: list[str]
    bleu: str  # sacrebleu's own line, with its signature
    bleu_score: float
    chrf_score: float
    seconds: float

    def samples(self, count: int = 5) -> list[tuple[str, str, str]]:
        """(source, reference, hypothesis), spread evenly over the split."""
        step = max(1, len(self.sources) // count)
        triples = list(zip(self.sources, self.references, self.hypotheses, strict=True))
        return triples[step // 2 :: step][:count]


@dataclass
class Quickstart:
    """All that a quickstart has to tell; parts that have not run yet are None."""

    out: Path
    settings: dict
    manifest: dict | None = None
    comparison: Comparison | None = None
    training: Run | None = None  # ls, going on from the comparison's last run
    translation: Translation | None = None
    interrupted: str = ""  # the part that was cut short


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def heading(quickstart: Quickstart) -> str:
    settings = quickstart.settings
    return (
        f"Bible ja->en, Transformer 3+3 layers, C 256, {settings['precision']}, {settings['device_name']}, "
        f"{settings['threads']} threads, seed {settings['seed']}"
    )


def training_line(run: Run, budget_minutes: float) -> str:
    """What the trained-on run did, in one line."""
    first, last = run.losses[: max(1, len(run.losses) // 20)], run.losses[-max(1, len(run.losses) // 20) :]
    text = (
        f"ls trained on: {len(run.updates):,} updates to {run.updates[-1]['update']:,} in {run.updates[-1]['time_s']:.0f} s "
        f"(budget {budget_minutes:g} min), loss {statistics.fmean(first):.2f} -> {statistics.fmean(last):.2f}"
    )
    return text + (f", valid {run.valid[-1][1]:.2f}" if run.valid else "")


def summary(quickstart: Quickstart) -> str:
    """The closing screen: at most 24 lines of 100 characters."""
    lines = [heading(quickstart), ""]
    if quickstart.comparison:
        comparison = quickstart.comparison
        rounds = len(comparison.runs["stock"])
        title = f"{comparison.updates} updates each, {rounds} times in turn"
        lines.append(f"{title:<36}{'stock':>10}{'ls':>10}{'gain':>9}")
        lines += [f"{name:<36}{stock:>10}{ls:>10}{gain:>9}" for name, stock, ls, gain in comparison_rows(comparison)]
        lines += [verdict(comparison), repeat_line(comparison)]
    if quickstart.training and quickstart.training.updates:
        lines += ["", training_line(quickstart.training, quickstart.settings["minutes"])]
    if quickstart.translation:
        translation = quickstart.translation
        lines.append(
            f"test: BLEU {translation.bleu_score:.2f}, chrF {translation.chrf_score:.1f} on "
            f"{len(translation.sources)} verses, translated in {translation.seconds:.0f} s"
        )
    if quickstart.interrupted:
        lines += ["", f"interrupted in: {quickstart.interrupted}. What was measured is kept; to go on:"]
        lines.append("  bash recipes/quickstart/run.sh --continue")
    lines.append(f"report: {quickstart.out / 'report.md'}   curves: {quickstart.out / 'loss_curves.png'}")
    return "\n".join(lines)


def markdown(quickstart: Quickstart) -> str:
    """report.md."""
    lines = ["# Quickstart report", "", heading(quickstart) + ".", ""]
    if quickstart.interrupted:
        lines += [f"**Interrupted in: {quickstart.interrupted}.** The figures are of what had run.", ""]
    if quickstart.manifest:
        verses, pieces = quickstart.manifest["verses"], quickstart.manifest["pieces"]
        lines += ["| split | verses | pieces ja | pieces en |", "| --- | ---: | ---: | ---: |"]
        lines += [
            f"| {split} | {count:,} | {pieces[f'{split}.ja']:,} | {pieces[f'{split}.en']:,} |"
            for split, count in verses.items()
        ]
        lines += [
            "",
            f"{quickstart.manifest['dropped']} training verses that a held-out book repeats were dropped.",
            "",
        ]
    if quickstart.comparison:
        lines += _comparison_markdown(quickstart.comparison)
    if quickstart.training and quickstart.training.updates:
        lines += ["## Training on", "", training_line(quickstart.training, quickstart.settings["minutes"]) + ".", ""]
        lines += ["![loss curves](loss_curves.png)", ""]
    if quickstart.translation:
        translation = quickstart.translation
        lines += ["## Test split", "", f"`{translation.bleu}`, chrF {translation.chrf_score:.1f}", ""]
        for source, reference, hypothesis in translation.samples():
            lines += [f"- ja: {source}", f"  - reference: {reference}", f"  - ls: {hypothesis or '(empty)'}"]
        lines.append("")
    lines += ["## Settings", "", "```json", json.dumps(quickstart.settings, indent=1, ensure_ascii=False), "```", ""]
    return "\n".join(lines)


def _comparison_markdown(comparison: Comparison) -> list[str]:
    lines = ["## Stock and ls in turn", "", "| | stock | ls | gain |", "| --- | ---: | ---: | ---: |"]
    lines += [
        f"| {name.replace('  ', '&nbsp;&nbsp;')} | {stock} | {ls} | {gain} |"
        for name, stock, ls, gain in comparison_rows(comparison)
    ]
    lines += ["", f"{verdict(comparison)}. {repeat_line(comparison)}.".replace("losses", "Losses", 1), ""]
    for kind in KINDS:
        figures = comparison.timing[kind]
        low, high = figures.step_ms_quartiles
        runs = ", ".join(f"{rate:,.0f}" for rate in figures.tokens_per_s_runs)
        lines.append(
            f"- {kind}: half of the steps took between {low:.1f} and {high:.1f} ms; tokens/s of each run: {runs}"
        )
    lines += [
        "",
        f"Medians over all updates but the first {WARMUP_UPDATES} of each run. Every fourth update is split into phases, and left out "
        "of tokens/s and ms per step; phases are medians by themselves and need not add up. Each run is a fresh process with the same seed. Tokens are target tokens. Peak memory is the process's largest "
        "resident set. Loss is the mean over the last quarter of the updates.",
        "",
    ]
    return lines


def plot(quickstart: Quickstart, path: Path) -> None:
    """Both loss curves, over time and over updates."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    series = {}
    if quickstart.comparison:
        series = {kind: list(runs[-1].updates) for kind, runs in quickstart.comparison.runs.items()}
    if quickstart.training and quickstart.training.updates:
        before = series.get("ls", [])
        offset_s = before[-1]["time_s"] if before else 0.0
        series["ls"] = before + [{**u, "time_s": u["time_s"] + offset_s} for u in quickstart.training.updates]

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    styles = {"stock": {"color": "#c1442e", "linewidth": 2.2}, "ls": {"color": "#1f5fa8", "linewidth": 1.6}}
    for axis, key, label in ((axes[0], "time_s", "training time, s"), (axes[1], "update", "updates")):
        for kind, updates in series.items():
            losses = [update["loss"] for update in updates]
            name = "stock fairseq" if kind == "stock" else "ls_plugin"
            axis.plot([update[key] for update in updates], running_mean(losses), label=name, **styles[kind])
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    axes[0].set_ylabel("training loss, bits per token")
    figure.suptitle(f"{heading(quickstart)}\nrunning mean of {CURVE_WINDOW} updates", fontsize=9.5)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write(quickstart: Quickstart) -> None:
    """Writes report.md and, once there is something to draw, loss_curves.png."""
    (quickstart.out / "report.md").write_text(markdown(quickstart), encoding="utf-8")
    if quickstart.comparison or (quickstart.training and quickstart.training.updates):
        plot(quickstart, quickstart.out / "loss_curves.png")


def read_translation(out: Path) -> Translation | None:
    """What the quickstart kept of its test translation, or None."""
    path = out / "translation.json"
    return Translation(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def collect(out: Path) -> Quickstart:
    """Everything that the records in ``out`` tell.

    Raises:
        RecordError: there is no quickstart in ``out``, or a record is damaged.
    """
    try:
        settings = json.loads((out / "settings.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecordError(
            f"report: {out} must hold a quickstart's settings.json, found none; run the quickstart"
        ) from None
    quickstart = Quickstart(out, settings)
    manifest = out / "data" / "manifest.json"
    if manifest.exists():
        quickstart.manifest = json.loads(manifest.read_text(encoding="utf-8"))
    records = {kind: sorted((out / "runs").glob(f"{kind}-[0-9]*/record.jsonl")) for kind in KINDS}
    # A run that Ctrl-C stopped has its end in the record too, short of its updates.
    runs = {kind: [run for run in map(read_run, paths) if run.complete] for kind, paths in records.items()}
    pairs = min(len(runs[kind]) for kind in KINDS)
    if pairs:
        quickstart.comparison = compare({kind: runs[kind][:pairs] for kind in KINDS})
    training = out / "runs" / "ls-train" / "record.jsonl"
    if training.exists():
        quickstart.training = read_run(training)
    quickstart.translation = read_translation(out)
    return quickstart


if __name__ == "__main__":
    try:
        told = collect(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "out"))
    except RecordError as error:
        sys.exit(str(error))
    write(told)
    print(summary(told))
