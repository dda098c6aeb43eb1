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


def fit(rows: Sequence[Sequence[str]], columns: int | None = None, gap: str = "  ") -> list[str]:
    """Lines of a table of at most so many columns (``width()``), the first row being its header.

    The first column is aligned left, the others right. No column is lost: where they do not fit beside each other they stand below each
    other, each part with the first column, and a cell that is too long for its line is wrapped.
    """
    columns = width() if columns is None else columns
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sizes[0] = min(sizes[0], max(columns // 2, 8))
    room = max(columns - sizes[0] - len(gap), 4)
    sizes[1:] = [min(size, room) for size in sizes[1:]]
    parts, left = [[0]], columns - sizes[0]
    for i, size in enumerate(sizes[1:], 1):
        if left < len(gap) + size and len(parts[-1]) > 1:
            parts.append([0])
            left = columns - sizes[0]
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

    def add_row(self, *cells: str) -> None:
        """Cells that are missing at the end stay empty."""
        self.rows.append([*cells, *[""] * (len(self.header) - len(cells))])

    def __str__(self) -> str:
        title = textwrap.wrap(self.title, width())
        return "\n".join(["", *title, *fit([self.header, *self.rows])])


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table."""
    print(Table(title, header, [list(row) for row in rows]))
