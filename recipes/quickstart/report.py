"""The report of a quickstart, from the records that ``ls_plugin/report/timed_train.py`` wrote.

python report.py [OUT]      makes report.html, report.md, report.json and quickstart.png again from the records in OUT
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

import torch

from ls_plugin.report import charts, document, speedup
from ls_plugin.report.machine import machine
from ls_plugin.report.records import CURVE_WINDOW, PHASES, WARMUP_UPDATES, RecordError, Run, read_run, running_mean
from ls_plugin.report.speedup import Comparison

TITLE = "Quickstart: stock fairseq and ls_plugin, King James's English to today's"
SOURCE = "kjv"  # of prepare.SOURCES
INTRODUCTION = (
    "ls_plugin is a Fairseq plugin that trains the same models by fused kernels. Here stock fairseq and the plugin trained the same updates in "
    "turn, then the plugin trained on and translated held-out books:"
)
EXPECTATION = (
    "What to expect: trained from nothing for 1,500 to 2,200 updates (some 4 minutes on two idle cores), the model writes readable English of "
    "today that follows the old text, with gaps, and with wrong words above all in rare names: BLEU 50 to 60. The old text as it is scores 61, "
    "since most words stay. With fewer updates it only stammers: give a slow or busy machine more --minutes."
)
KINDS = ("stock", "ls")
LEAST_UPDATES = 12  # the first after the warm-up is timed, the second is the first to be split into phases


def compare(runs: dict[str, list[Run]]) -> Comparison:
    """Raises RecordError unless both kinds are there with the same number of updates in every run, and enough of them."""
    counts = {kind: sorted({len(run.updates) for run in runs.get(kind, [])}) for kind in KINDS}
    if any(len(lengths) != 1 for lengths in counts.values()) or counts["stock"] != counts["ls"]:
        raise RecordError(f"report: stock and ls must have made the same number of updates in every run, got {counts}")
    if counts["stock"][0] < LEAST_UPDATES:
        raise RecordError(
            f"report: runs must have {LEAST_UPDATES} updates or more to be timed, the first {WARMUP_UPDATES} being warm-up, "
            f"got {counts['stock'][0]}"
        )
    return Comparison(runs)


@dataclass
class Translation:
    """The test split, translated."""

    sources: list[str]
    references: list[str]
    hypotheses: list[str]
    bleu: str  # sacrebleu's own line, with its signature
    bleu_score: float
    chrf_score: float
    unchanged_bleu_score: float  # of the sources as they are
    seconds: float

    def scores(self) -> str:
        return f"BLEU {self.bleu_score:.1f}, chrF {self.chrf_score:.1f} (the old text as it is: BLEU {self.unchanged_bleu_score:.1f})"

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


def heading(quickstart: Quickstart) -> str:
    settings = quickstart.settings
    return (
        f"Bible kjv->en, Transformer 3+3 layers, C 256, {settings['precision']}, {settings['device_name']}, "
        f"{settings['threads']} thread{'s' * (settings['threads'] > 1)}, seed {settings['seed']}"
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
    lines = [heading(quickstart)]
    if quickstart.comparison:
        lines += speedup.screen(quickstart.comparison)
    if quickstart.training and quickstart.training.updates:
        lines.append(training_line(quickstart.training, quickstart.settings["minutes"]))
    if quickstart.translation:
        translation = quickstart.translation
        lines.append(
            f"test: {translation.scores()}; {len(translation.sources)} verses, translated in {translation.seconds:.0f} s"
        )
    if quickstart.interrupted:
        lines += [f"interrupted in: {quickstart.interrupted}. What was measured is kept; to go on:"]
        lines.append("  bash recipes/quickstart/run.sh --continue")
    lines.append(f"report: {quickstart.out / 'report.html'}, report.md   picture: quickstart.png")
    return "\n".join(lines)


def blocks(quickstart: Quickstart) -> list[document.Block]:
    """What report.md and report.html hold."""
    made: list[document.Block] = []
    if quickstart.comparison:
        made.append(speedup.lead(quickstart.comparison))
    if quickstart.interrupted:
        made.append(
            document.Paragraph(f"**Interrupted in: {quickstart.interrupted}.** The figures are of what had run.")
        )
    made.append(document.Paragraph(f"{INTRODUCTION} {heading(quickstart)}."))
    if quickstart.comparison:
        made += speedup.blocks(quickstart.comparison)
    if quickstart.training and quickstart.training.updates:
        line = training_line(quickstart.training, quickstart.settings["minutes"])
        chart = document.Charts([("Losses of all training, bits per token", _curves(quickstart))])
        made += [document.Heading("Training on"), document.Paragraph(f"{line}."), chart]
    if quickstart.translation:
        translation = quickstart.translation
        made += [
            document.Heading("Translations of the test split"),
            document.Paragraph(f"{translation.scores()}. {EXPECTATION}"),
            document.Paragraph(f"The samples are spread evenly over the split, not chosen. `{translation.bleu}`"),
            *(
                document.Items([f"kjv: {source}", f"reference: {reference}", f"ls: {hypothesis or '(empty)'}"])
                for source, reference, hypothesis in translation.samples()
            ),
        ]
    if quickstart.manifest:
        verses, pieces = quickstart.manifest["verses"], quickstart.manifest["pieces"]
        rows = [
            [split, f"{count:,}", f"{pieces[f'{split}.{SOURCE}']:,}", f"{pieces[f'{split}.en']:,}"]
            for split, count in verses.items()
        ]
        dropped = f"{quickstart.manifest['dropped']} training verses that a held-out book repeats were dropped."
        made += [document.Heading("Data"), document.Table(["split", "verses", "pieces kjv", "pieces en"], rows)]
        made.append(document.Paragraph(dropped))
    settings = [[name, str(value)] for name, value in quickstart.settings.items()]
    return [*made, document.Heading("Settings"), document.Table(["setting", ""], settings)]


def _all_updates(quickstart: Quickstart) -> dict[str, list[dict]]:
    """Of stock's last run, and of ls's with what it trained on from there; times go on."""
    series = {}
    if quickstart.comparison:
        series = {kind: list(runs[-1].updates) for kind, runs in quickstart.comparison.runs.items()}
    if quickstart.training and quickstart.training.updates:
        before = series.get("ls", [])
        offset_s = before[-1]["time_s"] if before else 0.0
        series["ls"] = before + [{**u, "time_s": u["time_s"] + offset_s} for u in quickstart.training.updates]
    return series


def _curves(quickstart: Quickstart) -> str:
    """Training and validation losses over updates, as SVG."""
    series = {
        kind: ([u["update"] for u in updates], running_mean([u["loss"] for u in updates]))
        for kind, updates in _all_updates(quickstart).items()
    }
    if quickstart.training and quickstart.training.valid:
        series["ls, validation"] = tuple(zip(*quickstart.training.valid, strict=True))
    colors = {name: charts.color_of(name, i) for i, name in enumerate(series)}
    return charts.lines(series, colors, "losses by updates", "updates")


def plot(quickstart: Quickstart, path: Path) -> None:
    """The time of a step by phase, and both loss curves, over time and over updates."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = {"stock": "stock fairseq", "ls": "ls_plugin"}
    panels = (["phases"] if quickstart.comparison else []) + ["time_s", "update"]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.6 * len(panels), 4.0), layout="constrained")
    of = dict(zip(panels, axes, strict=True))
    if quickstart.comparison:
        axis, medians = of["phases"], quickstart.comparison.medians
        left = dict.fromkeys(KINDS, 0.0)
        for phase in PHASES:
            ms = {kind: medians[kind].phase_ms[phase] for kind in KINDS}
            if max(ms.values()) <= charts.LEAST_SHARE * max(medians[kind].step_ms for kind in KINDS):
                continue
            axis.barh(
                [names[kind] for kind in KINDS],
                list(ms.values()),
                left=list(left.values()),
                label=phase,
                color=charts.PARTS[phase],
            )
            left = {kind: left[kind] + ms[kind] for kind in KINDS}
        for row, kind in enumerate(KINDS):
            axis.text(left[kind], row, f" {medians[kind].step_ms:,.0f} ms", va="center")
        gain = quickstart.comparison.gains["ls"]
        axis.set_title(
            "no speed-up is claimed" if gain.ratio is None else f"{gain.ratio:.2f} times as fast", fontsize=11
        )
        axis.set_xlabel("a training step, ms")
        axis.set_xlim(right=1.25 * max(left.values()))
        axis.invert_yaxis()
        axis.legend(frameon=False, fontsize=9, loc="lower right")
    styles = {"stock": {"color": "#c1442e", "linewidth": 2.2}, "ls": {"color": "#1f5fa8", "linewidth": 1.6}}
    for key, label in (("time_s", "training time, s"), ("update", "updates")):
        axis = of[key]
        for kind, updates in _all_updates(quickstart).items():
            losses = [update["loss"] for update in updates]
            axis.plot([update[key] for update in updates], running_mean(losses), label=names[kind], **styles[kind])
        axis.set_xlabel(label)
        axis.set_ylabel("training loss, bits per token")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.suptitle(f"{heading(quickstart)}\nlosses: running mean of {CURVE_WINDOW} updates", fontsize=9.5)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def write(quickstart: Quickstart) -> None:
    """Writes report.html and report.md and, once there is something to tell or to draw, report.json and quickstart.png."""
    told = blocks(quickstart)
    (quickstart.out / "report.md").write_text(document.markdown(TITLE, told), encoding="utf-8")
    (quickstart.out / "report.html").write_text(document.page(TITLE, told), encoding="utf-8")
    if quickstart.comparison:
        content = {"settings": quickstart.settings, "machine": machine(torch.device(quickstart.settings["device"]))}
        content |= quickstart.comparison.to_json()
        if quickstart.translation and quickstart.training:
            translation = quickstart.translation
            content |= {"bleu": translation.bleu_score, "chrf": translation.chrf_score}
            content |= {"unchanged_bleu": translation.unchanged_bleu_score, "samples": translation.samples()}
            content["trained_updates"] = quickstart.training.updates[-1]["update"]
        text = json.dumps(speedup.finite(content), indent=1)
        (quickstart.out / "report.json").write_text(text + "\n", encoding="utf-8")
    if quickstart.comparison or (quickstart.training and quickstart.training.updates):
        plot(quickstart, quickstart.out / "quickstart.png")


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
