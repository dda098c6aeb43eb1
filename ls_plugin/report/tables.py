"""Tables for the terminal and for Markdown."""

import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Sequence

FILE_WIDTH = 100  # columns, where there is no terminal


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """All columns but the first are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def width() -> int:
    """Columns of the terminal, ``FILE_WIDTH`` in a file or a pipe."""
    return shutil.get_terminal_size((FILE_WIDTH, 24)).columns if sys.stdout.isatty() else FILE_WIDTH


def fit(rows: Sequence[Sequence[str]], columns: int | None = None, gap: str = "  ", keys: int = 1) -> list[str]:
    """Lines of a table of at most so many columns (``width()``), the first row being its header.

    The first column is aligned left, the others right. No column is lost: where they do not fit beside each other they stand below each
    other, each part with the first ``keys`` columns, which name the row. A cell that is too long for its line is wrapped.
    """
    columns = width() if columns is None else columns
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sizes[1:keys] = [min(size, max(columns // 6, 6)) for size in sizes[1:keys]]
    further = sum(len(gap) + size for size in sizes[1:keys])
    sizes[0] = min(sizes[0], max(columns * keys // (keys + 1) - further, 8))
    names, names_size = list(range(keys)), sizes[0] + further
    room = max(columns - names_size - len(gap), 4)
    sizes[keys:] = [min(size, room) for size in sizes[keys:]]
    parts, left = [[*names]], columns - names_size
    for i, size in enumerate(sizes[keys:], keys):
        if left < len(gap) + size and len(parts[-1]) > keys:
            parts.append([*names])
            left = columns - names_size
        parts[-1].append(i)
        left -= len(gap) + size
    lines = []
    for n, part in enumerate(parts):
        lines += [""] if n and len(rows) > 1 else []
        for row in rows:
            lines += _line([row[i] for i in part], [sizes[i] for i in part], gap)
    return lines


def _line(cells: list[str], sizes: list[int], gap: str) -> list[str]:
    """A row, in several lines where a cell is longer than its column."""
    wrapped = [
        [cell] if len(cell) <= size else textwrap.wrap(cell, size) for cell, size in zip(cells, sizes, strict=True)
    ]
    lines = []
    for n in range(max(map(len, wrapped))):
        texts = [cell[n] if n < len(cell) else "" for cell in wrapped]
        padded = [
            text.rjust(size) if i else text.ljust(size) for i, (text, size) in enumerate(zip(texts, sizes, strict=True))
        ]
        lines.append(gap.join(padded).rstrip())
    return lines


@dataclasses.dataclass
class Table:
    """A table for the terminal, made row by row; ``str`` gives it."""

    title: str
    header: Sequence[str]
    rows: list[list[str]] = dataclasses.field(default_factory=list)
    keys: int = 1  # columns that name a row

    def add_row(self, *cells: str) -> None:
        """Cells that are missing at the end stay empty."""
        self.rows.append([*cells, *[""] * (len(self.header) - len(cells))])

    def __str__(self) -> str:
        title = textwrap.wrap(self.title, width())
        return "\n".join(["", *title, *fit([self.header, *self.rows], keys=self.keys)])


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], keys: int = 1) -> None:
    """Prints a table, whose first ``keys`` columns name a row."""
    print(Table(title, header, [list(row) for row in rows], keys))
