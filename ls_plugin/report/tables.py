"""Tables for the terminal and for Markdown."""

import sys
from collections.abc import Sequence

_FILE_WIDTH = 150


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """All columns but the first are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table: by rich where it is installed, else in plain columns."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        print(f"\n{title}")
        for row in (header, *rows):
            first, *others = (
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            print("  ".join((first, *others)).rstrip())
        return
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    # Into a file or a pipe rich would print 80 columns.
    Console(width=None if sys.stdout.isatty() else _FILE_WIDTH, highlight=False, markup=False).print(table)
