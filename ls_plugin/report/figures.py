"""How fast trainings were, and how many times as fast as another: medians on the same batches."""

from __future__ import annotations

import dataclasses
import math
import statistics

from ls_plugin.report.records import LOSS_TOLERANCE, PHASES, Run


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Of a single value, that value."""
    return tuple(statistics.quantiles(values, n=4)) if len(values) > 1 else (values[0],) * 3


def step_ms(runs: list[Run]) -> list[float]:
    """Of each timed update that all runs have, the median over the runs."""
    return [
        statistics.median(update["step_ms"] for update in same)
        for same in zip(*(run.timed for run in runs), strict=False)  # a run that was ended early has fewer
    ]


def same_updates(runs: dict[str, list[Run]]) -> tuple[dict[str, list[Run]], dict[str, int]]:
    """The runs cut to the first updates that all of stock and ls have, and, of each baseline that has fewer, how many: it is left out.

    Batches differ in size and losses fall, so medians and losses of other updates would compare nothing.
    """
    fewest = {name: min(len(run.updates) for run in of) for name, of in runs.items()}
    n = min((fewest[name] for name in ("stock", "ls") if name in fewest), default=min(fewest.values(), default=0))
    short = {name: count for name, count in fewest.items() if count < n}
    return {name: [run.first(n) for run in of] for name, of in runs.items() if name not in short}, short


@dataclasses.dataclass(frozen=True)
class Figures:
    """Of one contender in one row: medians over the timed updates. Losses in bits per target token. run_spread: how much slower the slowest run was
    than the fastest, by their medians; much of it says that something else used the machine. phase_ms: {} where no update was split.
    startup_s: from the start of the process to the first update. kernels: of a step, None where they were not counted. final_loss: over the
    last quarter of the updates; valid_loss: of the last validation."""

    runs: int
    updates: int
    step_ms: float
    step_ms_quartiles: tuple[float, float]
    run_spread: float
    tokens_per_s: float
    phase_ms: dict[str, float]
    peak_rss_mib: float
    peak_gpu_mib: float
    startup_s: float
    kernels: int | None
    final_loss: float
    valid_loss: float | None
    losses: list[float]
    step_ms_runs: list[list[float]]


def medians(runs: list[Run]) -> Figures:
    """Of runs of one contender with the same seed."""
    updates = [update for run in runs for update in run.timed]
    splits = [update["phase_ms"] for run in runs for update in run.split]
    steps = [update["step_ms"] for update in updates]
    first, _, third = quartiles(steps)
    steps_ms = step_ms(runs)
    of_runs = [statistics.median(update["step_ms"] for update in run.timed) for run in runs]
    tokens = [update["tokens"] for update in runs[0].timed]
    return Figures(
        runs=len(runs),
        updates=len(steps_ms),
        step_ms=statistics.median(steps_ms),
        step_ms_quartiles=(first, third),
        run_spread=max(of_runs) / min(of_runs) - 1,
        tokens_per_s=statistics.median(1e3 * n / ms for n, ms in zip(tokens, steps_ms, strict=False)),
        phase_ms={phase: statistics.median(split[phase] for split in splits) for phase in PHASES} if splits else {},
        peak_rss_mib=max(run.updates[-1]["peak_rss_mib"] for run in runs),
        peak_gpu_mib=max(update["peak_gpu_mib"] for run in runs for update in run.updates),
        startup_s=statistics.median(run.startup_s for run in runs),
        kernels=next((run.kernels for run in runs if run.kernels is not None), None),
        final_loss=statistics.fmean(run.final_loss() for run in runs),
        valid_loss=runs[0].valid[-1][1] if runs[0].valid else None,
        losses=[round(loss, 4) for loss in runs[0].losses],
        step_ms_runs=[[update["step_ms"] for update in run.timed] for run in runs],
    )


@dataclasses.dataclass(frozen=True)
class Speedup:
    """How many times as fast a contender is as another, by the median over the updates of the ratio on the same batch; quartiles of that ratio.

    losses: of the base and of the contender, bits per token, over the last quarter of the updates that all runs of both have; their difference is
    relative. ratio is None where no speed-up may be called one; why_not says why.
    """

    ratio: float | None
    quartiles: tuple[float, float]
    losses: tuple[float, float]
    loss_difference: float
    why_not: str = ""


def speedup(base: list[Run], runs: list[Run], tolerance: float = LOSS_TOLERANCE) -> Speedup:
    """Of ``runs`` over ``base``, refused where they had other batches or their losses part by more than the tolerance, relative."""
    ratios = [b / r for b, r in zip(step_ms(base), step_ms(runs), strict=False)]
    first, middle, third = quartiles(ratios)
    n = min(len(run.updates) for run in (*base, *runs))
    tail = slice(n - max(1, n // 4), n)
    losses = tuple(statistics.fmean(statistics.fmean(run.losses[tail]) for run in side) for side in (base, runs))
    difference = losses[1] / losses[0] - 1 if losses[0] else 0.0 if losses[1] == 0 else math.inf
    shapes = {str([update["batches"] for update in run.updates[:n]]) for run in (*base, *runs)}
    why_not = ""
    if len(shapes) > 1:
        why_not = "they had other batches"
    elif not abs(difference) <= tolerance:  # a NaN parts, too
        why_not = f"losses part by {difference:+.2%}, tolerance {100 * tolerance:g}% ({losses[0]:.3f} and {losses[1]:.3f} bits per token)"
    return Speedup(None if why_not else middle, (first, third), losses, difference, why_not)


def best(runs: dict[str, list[Run]], tolerance: float = LOSS_TOLERANCE) -> str:
    """The fastest of stock and its variants that train as stock does; stock where its own losses are none (NaN)."""
    stock = runs["stock"]
    gains = {
        name: gain.ratio
        for name, of in runs.items()
        if name.startswith("stock") and of and (gain := speedup(stock, of, tolerance)).ratio is not None
    }
    return max(gains, key=gains.get, default="stock")
