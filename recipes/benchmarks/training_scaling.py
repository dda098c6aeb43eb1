"""How a step's time and memory grow with tokens, layers and vocabulary, of stock and of ls, around model S."""

from __future__ import annotations

import dataclasses
import itertools

import training_runs as runs

from ls_plugin.report import figures
from ls_plugin.report.records import Run

BASE = dataclasses.replace(runs.ROWS["S"], updates=4)
AXES = {
    "tokens per batch": ("max_tokens", (256, 512, 1024, 2048, 4096, 8192)),
    "layers of encoder and decoder": ("layers", (2, 4, 8, 16, 24)),
    "vocabulary": ("vocabulary", (4000, 8000, 16_000, 32_000, 64_000)),
}
MEASURES = {"step_ms": "time", "peak_rss_mib": "memory"}


def rows() -> dict[str, list[runs.Row]]:
    """Axis -> the rows along it; a point that two axes share is one row."""
    return {
        axis: [
            dataclasses.replace(BASE, **{field: n}, name="S" if n == getattr(BASE, field) else f"S-{field}-{n}")
            for n in sizes
        ]
        for axis, (field, sizes) in AXES.items()
    }


def curves(measured: dict[str, dict[str, list[Run]]]) -> dict[str, list[dict]]:
    """Axis -> points with size, step time and memory of each contender, of the rows (by name) that all contenders have run."""
    kinds = ("stock", "ls fp32")
    found = {}
    for axis, along in rows().items():
        found[axis] = []
        for row in along:
            of = measured.get(row.name, {})
            if not all(of.get(kind) for kind in kinds):
                continue
            medians = {kind: figures.medians(of[kind]) for kind in kinds}
            gain = figures.speedup(of["stock"], of["ls fp32"])
            found[axis].append(
                {
                    "size": getattr(row, AXES[axis][0]),
                    **{measure: {kind: getattr(medians[kind], measure) for kind in kinds} for measure in MEASURES},
                    "speedup": dataclasses.asdict(gain),
                }
            )
    return found


def growth(points: dict[str, list[dict]]) -> list[dict]:
    """What each step along each axis adds, to the time and to the memory of each contender; worse: ls's adds more."""
    return [
        {"axis": axis, "measure": MEASURES[measure], "from": low["size"], "to": high["size"], **added}
        | {"worse": added["ls fp32"] > added["stock"]}
        for axis, along in points.items()
        for measure in MEASURES
        for low, high in itertools.pairwise(along)
        for added in [{kind: high[measure][kind] - low[measure][kind] for kind in low[measure]}]
    ]


def verdict(steps: list[dict]) -> list[str]:
    """One line where ls nowhere grows faster than stock, else one more for each place where it does."""
    worse = [step for step in steps if step["worse"]]
    if not worse:
        return [f"growth of time and memory is no worse than stock's at any of the {len(steps)} steps along the curves"]
    units = {"time": "ms", "memory": "MiB"}
    return [f"growth is WORSE than stock's at {len(worse)} of {len(steps)} steps along the curves:"] + [
        f"  {step['measure']}, {step['axis']} {step['from']:,} to {step['to']:,}: ls adds {step['ls fp32']:,.0f} "
        f"{units[step['measure']]}, stock {step['stock']:,.0f}"
        for step in worse
    ]
