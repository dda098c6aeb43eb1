"""The pictures of training.py: where a step's time goes, and how time and memory grow."""

from __future__ import annotations

from pathlib import Path

from ls_plugin.report.records import PHASES

COLORS = dict(zip(PHASES, ("tab:blue", "tab:orange", "tab:red", "tab:gray", "tab:green", "tab:purple"), strict=True))


def draw_phases(results: dict[str, dict], title: str, path: Path) -> None:
    """Stacked bars of a step's phases: a panel for each row, a bar for each contender; dashes mark the floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = {name: row for name, row in results.items() if row["contenders"]}
    figure, axes = pyplot.subplots(
        1, len(shown), figsize=(1.5 + 2.7 * len(shown), 4.6), squeeze=False, layout="constrained"
    )
    for axis, (name, row) in zip(axes[0], shown.items(), strict=True):
        best = row.get("best_stock", "stock")
        wanted = [c for c in dict.fromkeys(("stock", best, "ls fp32", "ls bf16")) if c in row["contenders"]]
        bars = [row["contenders"][contender] for contender in wanted]
        base = [0.0] * len(bars)
        for phase, color in COLORS.items():
            heights = [bar["phase_ms"][phase] for bar in bars]
            axis.bar(range(len(bars)), heights, bottom=base, color=color, label=phase, width=0.7)
            base = [low + height for low, height in zip(base, heights, strict=True)]
        for i, (contender, bar) in enumerate(zip(wanted, bars, strict=True)):
            least = bar["floor_ms"]["all"]
            axis.plot((i - 0.42, i + 0.42), (least, least), "--", color="black", linewidth=1.2, label="floor")
            gain = row.get("speedup", {}).get(contender, {}).get("over_stock", {}).get("ratio")
            axis.text(i, base[i], f"{gain:.2f}x" if gain else "", ha="center", va="bottom", fontsize=8)
        axis.set_xticks(range(len(bars)), [name.replace("+", "\n+") for name in wanted], fontsize=8)
        model, batch = row["title"].rsplit(", V", 1)
        axis.set_title(f"{name}: {model}\nV{batch}", fontsize=8.5)
        axis.margins(y=0.1)
    axes[0][0].set_ylabel("ms per update, medians of the phases")
    handles = dict(zip(*reversed(axes[0][0].get_legend_handles_labels()), strict=True))
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=3 if len(shown) < 3 else len(handles),
        fontsize=8,
    )
    figure.suptitle(f"{title}\nabove the bars: speed-up over stock", fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def draw_scaling(curves: dict[str, list[dict]], title: str, path: Path) -> None:
    """Time above, memory below, a column for each axis; stock and ls."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    shown = {axis: points for axis, points in curves.items() if points}
    figure, axes = pyplot.subplots(
        2, len(shown), figsize=(1 + 3.7 * len(shown), 6.6), squeeze=False, sharex="col", layout="constrained"
    )
    styles = {"stock": {"color": "#c1442e", "marker": "o"}, "ls fp32": {"color": "#1f5fa8", "marker": "s"}}
    for column, (axis_name, points) in enumerate(shown.items()):
        sizes = [point["size"] for point in points]
        for axis, measure, scale in (
            (axes[0][column], "step_ms", 1e-3),
            (axes[1][column], "peak_rss_mib", 2**-10),
        ):
            for kind, style in styles.items():
                values = [scale * point[measure][kind] for point in points]
                axis.plot(sizes, values, label=kind, markersize=4, **style)
            axis.set_xscale("log", base=2)
            if measure == "step_ms":
                axis.set_yscale("log", base=2)
            axis.set_xticks(sizes, [f"{n:,}" for n in sizes], fontsize=8)
            axis.xaxis.set_minor_locator(ticker.NullLocator())
            axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%.4g"))
            axis.grid(alpha=0.3)
        axes[1][column].set_ylim(bottom=0)
        axes[1][column].set_xlabel(axis_name)
    axes[0][0].set_ylabel("s per update, median")
    axes[1][0].set_ylabel("peak memory of the process, GiB")
    axes[0][0].legend(frameon=False)
    figure.suptitle(
        f"{title}\nmodel S: 3+3 layers, C 256, V 8,000, 1,024 tokens a batch, one of them varied", fontsize=9
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
