"""Charts as SVG text, small enough to lie inside of a page and to be read on a phone: stacked bars, and lines."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

WIDTH = 440  # of the drawing's own units; a phone shows them at nearly this size
COLORS = ("#c1442e", "#1f5fa8", "#d08a1d", "#2c7a4b", "#7b4fa3", "#5b6675", "#b0508a")
PARTS = {
    "forward": "#4477aa",
    "backward": "#ee8866",
    "sync": "#aa4499",
    "clip": "#999933",
    "update": "#228833",
    "rest": "#bbbbbb",
}
LEAST_SHARE = 0.005  # of a bar: a part that is to be seen
_SIZE = 12  # of the text
_MOST_POINTS = 400  # of a line


def color_of(name: str, index: int) -> str:
    """The same contender has the same colour in all charts of all reports."""
    fixed = {"stock": COLORS[0], "ls": COLORS[1]}
    return fixed.get(name) or COLORS[2 + index % (len(COLORS) - 2)]


def _text(x: float, y: float, text: str, anchor: str = "start", size: float = _SIZE, more: str = "") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size:g}" fill="#1c2430"{more}>'
        f"{html.escape(text)}</text>"
    )


def _svg(height: float, parts: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{html.escape(title)}" xmlns="http://www.w3.org/2000/svg" '
        f'font-family="system-ui, sans-serif">{"".join(parts)}</svg>'
    )


def _legend(entries: dict[str, str], y: float) -> tuple[list[str], float]:
    """Squares with names, wrapped; and the height that they take."""
    parts, x, row = [], 4.0, 0
    for name, color in entries.items():
        width = 22 + 6.6 * len(name)
        if x + width > WIDTH and x > 4:
            x, row = 4.0, row + 1
        top = y + 18 * row
        parts.append(f'<rect x="{x:.1f}" y="{top:.1f}" width="11" height="11" fill="{color}"/>')
        parts.append(_text(x + 15, top + 10, name))
        x += width + 8
    return parts, 18.0 * (row + 1)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers within the range, some ``count`` of them."""
    span = high - low
    if not (math.isfinite(span) and span > 0):
        return [low]
    raw = span / count
    scale = 10.0 ** math.floor(math.log10(raw))
    step = next(scale * factor for factor in (1, 2, 5, 10) if scale * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    return [step * i for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == round(value) else f"{value:.4g}"


def bars(
    rows: dict[str, dict[str, float]],
    colors: dict[str, str],
    title: str,
    unit: str,
    totals: dict[str, float] | None = None,
) -> str:
    """A horizontal bar for each row, stacked of its parts; at its end its total, by default their sum. Parts too small to be seen are left out."""
    totals = totals or {name: sum(of.values()) for name, of in rows.items()}
    largest = max((sum(of.values()) for of in rows.values()), default=0.0) or 1.0
    shown = {
        part: color
        for part, color in colors.items()
        if any(of.get(part, 0.0) > LEAST_SHARE * largest for of in rows.values())
    }
    top, bar, step = 6.0, 18.0, 40.0
    scale = (WIDTH - 90) / largest
    parts = []
    for i, (name, of) in enumerate(rows.items()):
        y, x = top + i * step, 4.0
        parts.append(_text(4, y + _SIZE - 1, name))
        for part, color in shown.items():
            width = max(0.0, of.get(part, 0.0)) * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{y + 15:.1f}" width="{width:.1f}" height="{bar:g}" fill="{color}">'
                f"<title>{html.escape(f'{name}, {part}: {_number(of.get(part, 0.0))} {unit}')}</title></rect>"
            )
            x += width
        parts.append(_text(x + 5, y + 28, f"{_number(totals[name])} {unit}"))
    height = top + step * len(rows) + 2
    if len(shown) > 1:
        legend, more = _legend(shown, height)
        parts, height = [*parts, *legend], height + more
    return _svg(height, parts, title)


def lines(
    series: dict[str, tuple[Sequence[float], Sequence[float]]],
    colors: dict[str, str],
    title: str,
    x_label: str,
    from_zero: bool = False,
) -> str:
    """A line for each series of (x, y); values that are not finite leave gaps. from_zero: of the vertical axis."""
    left, right, top, bottom = 52.0, WIDTH - 10.0, 8.0, 226.0
    points = {
        name: [(x, y) for x, y in list(zip(xs, ys, strict=True))[:: 1 + len(ys) // _MOST_POINTS]]
        for name, (xs, ys) in series.items()
    }
    finite = [(x, y) for of in points.values() for x, y in of if math.isfinite(x) and math.isfinite(y)]
    if not finite:
        return _svg(40, [_text(4, 24, "no finite values")], title)
    x_low, x_high = min(x for x, _ in finite), max(x for x, _ in finite)
    y_low, y_high = 0.0 if from_zero else min(y for _, y in finite), max(y for _, y in finite)
    margin = 0.04 * (y_high - y_low) or abs(y_high) * 0.05 or 1.0
    y_low, y_high = y_low if from_zero else y_low - margin, y_high + margin
    x_of = _scale(x_low, x_high, left, right)
    y_of = _scale(y_low, y_high, bottom, top)
    parts = []
    for value in ticks(y_low, y_high):
        y = y_of(value)
        parts.append(f'<line x1="{left:g}" y1="{y:.1f}" x2="{right:g}" y2="{y:.1f}" stroke="#e4e8ee"/>')
        parts.append(_text(left - 5, y + 4, _number(value), "end"))
    for value in ticks(x_low, x_high):
        x = x_of(value)
        parts.append(f'<line x1="{x:.1f}" y1="{top:g}" x2="{x:.1f}" y2="{bottom:g}" stroke="#eef1f5"/>')
        parts.append(_text(x, bottom + 16, _number(value), "middle"))
    for name, of in points.items():
        path, drawing = [], False
        for x, y in of:
            if math.isfinite(x) and math.isfinite(y):
                path.append(f"{'L' if drawing else 'M'}{x_of(x):.1f} {y_of(y):.1f}")
                drawing = True
            else:
                drawing = False
        parts.append(
            f'<path d="{"".join(path)}" fill="none" stroke="{colors[name]}" stroke-width="1.8"><title>{html.escape(name)}</title></path>'
        )
    parts.append(_text((left + right) / 2, bottom + 34, x_label, "middle"))
    legend, more = _legend({name: colors[name] for name in series}, bottom + 44)
    return _svg(bottom + 44 + more, [*parts, *legend], title)


def _scale(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: begin + (value - low) / span * (end - begin)
