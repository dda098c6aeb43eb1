"""A report's content, written once and rendered twice: as Markdown, and as one HTML page that needs nothing beside it."""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Callable, Iterable


@dataclasses.dataclass(frozen=True)
class Heading:
    text: str


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """``**bold**`` and ```code``` are marked as in Markdown, here and in lists and cells."""

    text: str


@dataclasses.dataclass(frozen=True)
class Lead:
    """What the report has found, before all else: lines of (title, text)."""

    lines: list[tuple[str, str]]
    good: bool


@dataclasses.dataclass(frozen=True)
class Items:
    lines: list[str]


@dataclasses.dataclass(frozen=True)
class Table:
    """The first column is text, the others are numbers, ranged right."""

    columns: list[str]
    rows: list[list[str]]


@dataclasses.dataclass(frozen=True)
class Code:
    text: str


@dataclasses.dataclass(frozen=True)
class Charts:
    """(caption, SVG) pairs, beside each other where there is room. Markdown has the captions alone."""

    charts: list[tuple[str, str]]


Block = Heading | Paragraph | Lead | Items | Table | Code | Charts


# ---- Markdown ----


def markdown(title: str, blocks: Iterable[Block], page: str = "report.html") -> str:
    """page: where the charts are to be seen."""
    lines = [f"# {title}", ""]
    for block in blocks:
        match block:
            case Heading(text):
                lines += [f"## {text}"]
            case Paragraph(text):
                lines += [text]
            case Lead(pairs):
                lines += [f"- **{name}**: {text}" for name, text in pairs]
            case Items(items):
                lines += [f"- {item}" for item in items]
            case Table(columns, rows):
                lines += [_markdown_row(columns), _markdown_row(["---"] + ["---:"] * (len(columns) - 1))]
                lines += [_markdown_row(row) for row in rows]
            case Code(text):
                lines += ["```", text, "```"]
            case Charts(charts):
                lines += [f"Charts in [{page}]({page}): {'; '.join(caption for caption, _ in charts)}."]
        lines.append("")
    return "\n".join(lines)


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("  ", "&nbsp;&nbsp;") for cell in cells) + " |"


# ---- HTML ----

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; color: #1c2430; background: #fff;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0 1rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; padding-top: .75rem; border-top: 1px solid #dde2ea; }
.lead { border-left: .35rem solid #2c7a4b; background: #f2f7f4; padding: .6rem 1rem; margin: 1rem 0; }
.lead.bad { border-color: #b3261e; background: #fbf2f1; }
.lead p { margin: .4rem 0; }
/* A shadow at the right edge while columns are hidden there: phones show no scroll bar. */
.scroll { overflow-x: auto; -webkit-overflow-scrolling: touch; margin: .75rem 0;
  background: linear-gradient(to left, #fff 40%, transparent) 100% 0 / 2rem 100% no-repeat local,
    linear-gradient(to left, rgba(28, 36, 48, .25), transparent) 100% 0 / .75rem 100% no-repeat scroll; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #e4e8ee; text-align: right; white-space: nowrap; vertical-align: top; }
th { border-bottom: 2px solid #b9c2cf; }
/* The rows' names stay where they are. */
th:first-child, td:first-child { text-align: left; white-space: pre-wrap; min-width: 8rem; max-width: 45vw;
  position: sticky; left: 0; background: #fff; }
td.long { white-space: normal; text-align: left; min-width: 16rem; }
code { font: .85em ui-monospace, Menlo, Consolas, monospace; background: #f3f5f8; padding: .05rem .25rem; }
pre { font: .8rem/1.45 ui-monospace, Menlo, Consolas, monospace; background: #f3f5f8; padding: .75rem; white-space: pre-wrap; overflow-wrap: anywhere; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1rem; }
figure { margin: 0; }
figcaption { font-size: .85rem; color: #4a5566; margin-bottom: .25rem; }
svg { width: 100%; height: auto; display: block; }
@media (max-width: 40rem) {
  th:first-child, td:first-child { min-width: 7rem; } td.long { min-width: 12rem; overflow-wrap: anywhere; }
}
@media print {
  @page { margin: 14mm; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  h2 { break-after: avoid; } figure, tr, .lead { break-inside: avoid; }
  .scroll { overflow: visible; background: none; } table { font-size: 7.5pt; } th, td { padding: .15rem .3rem; white-space: normal; }
  .charts { grid-template-columns: 1fr 1fr; } pre { font-size: 7pt; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""
_LONG_CELL = 30  # characters: beyond them a cell is text, and is wrapped


def page(title: str, blocks: Iterable[Block]) -> str:
    """One file without scripts, and without anything that is fetched."""
    body = "\n".join(_html(block) for block in blocks)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def _html(block: Block) -> str:
    match block:
        case Heading(text):
            return f"<h2>{html.escape(text)}</h2>"
        case Paragraph(text):
            return f"<p>{_inline(text)}</p>"
        case Lead(pairs, good):
            lines = "".join(f"<p><strong>{html.escape(name)}:</strong> {_inline(text)}</p>" for name, text in pairs)
            return f'<div class="lead{"" if good else " bad"}">{lines}</div>'
        case Items(items):
            return "<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in items) + "</ul>"
        case Table(columns, rows):
            head, body = _row("th", columns), "".join(_row("td", row) for row in rows)
            return f'<div class="scroll" tabindex="0"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'
        case Code(text):
            return f"<pre>{html.escape(text)}</pre>"
        case Charts(charts):
            figures = (f"<figure><figcaption>{_inline(caption)}</figcaption>{svg}</figure>" for caption, svg in charts)
            return f'<div class="charts">{"".join(figures)}</div>'


def _row(tag: str, cells: Iterable[str]) -> str:
    def cell(text: str) -> str:
        long = ' class="long"' if tag == "td" and len(text) > _LONG_CELL else ""
        return f"<{tag}{long}>{_inline(text)}</{tag}>"

    return f"<tr>{''.join(map(cell, cells))}</tr>"


def _inline(text: str) -> str:
    escaped = html.escape(text, quote=False)
    for pattern, tag in ((r"\*\*(.+?)\*\*", "strong"), (r"`(.+?)`", "code")):
        escaped = re.sub(pattern, _in_tag(tag), escaped)
    return escaped


def _in_tag(tag: str) -> Callable[[re.Match], str]:
    return lambda found: f"<{tag}>{found[1]}</{tag}>"
