"""Tables for the terminal: as wide as it is, without losing a column."""

import io
import os
import re
import sys

import pytest

from ls_plugin.report import kernels, tables
from ls_plugin.report.op_timing import CONTENDERS, Result, Time

HEADER = ["", *(f"column {i}" for i in range(12))]
ROWS = [
    ["  a row", *(f"{i:,}" for i in range(1000, 1012))],
    ["another of forty letters, which is too long", *["-"] * 12],
]


@pytest.mark.parametrize("columns", [30, 60, 80, 100, 250])
def test_every_cell_is_there_and_no_line_is_too_long(columns):
    lines = tables.fit([HEADER, *ROWS], columns)
    assert max(map(len, lines)) <= columns
    text = " ".join(re.findall(r"\S+", "\n".join(lines)))
    for i in range(12):
        assert f"column {i}" in text and f"1,0{i:02}" in text
    assert lines[1].startswith("  a row")  # the indent stays
    if columns == 250:
        assert len(lines) == 3 and all("  " in line for line in lines)
    else:
        # Below each other, each part with its first column.
        n_parts = sum(line.startswith("  a row") for line in lines)
        assert n_parts > 1 and lines.count("") == n_parts - 1


@pytest.mark.parametrize("columns", [30, 60, 80, 100])
def test_every_part_has_the_columns_that_name_a_row(columns):
    """As ``lightseq-report estimate``: rows of one architecture differ by tokens and contender alone."""
    header = ["architecture", "tokens", "contender", *(f"figure {i}" for i in range(8))]
    names = [("transformer_big", tokens, contender) for tokens in ("512", "4,096") for contender in ("stock", "ls")]
    lines = tables.fit([header, *([*name, *["1,234"] * 8] for name in names)], columns, keys=3)
    assert max(map(len, lines)) <= columns
    parts = "\n".join(lines).split("\n\n")
    assert len(parts) > 1
    for part in parts:
        for column, cells in (("tokens", ("512", "4,096")), ("contender", ("stock", "ls"))):
            assert all(len(re.findall(rf"(?<!\S){cell}(?!\S)", part)) == 2 for cell in cells), (column, part)


def test_long_cells_are_wrapped():
    lines = tables.fit([["a", "b"], ["x", "three words here"]], 12)
    assert lines == ["a          b", "x      three", "       words", "        here"]


def test_a_file_gets_a_hundred_columns_and_a_terminal_its_own(monkeypatch, capsys):
    assert tables.width() == 100
    tables.show("title", HEADER, ROWS)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr(tables.shutil, "get_terminal_size", lambda fallback: os.terminal_size((47, 20)))
    assert tables.width() == 47


def test_rows_that_come_one_by_one_keep_the_headers_columns(monkeypatch):
    """The table of ``lightseq-report kernels``, which is some 150 columns wide."""
    time_ = Time(1.0, 2.0, 3.0, 0.01)
    result = Result(
        "layer_norm", "2,048 x 512", "fp32", dict.fromkeys(CONTENDERS, time_), 9, 1.0, (10.0, 11.0), (0.5, 0.6)
    )
    for columns in (80, 100, 200):
        monkeypatch.setattr(tables, "width", lambda columns=columns: columns)
        header, row = kernels.header().splitlines(), kernels.row(result).splitlines()
        assert max(map(len, [*header, *row])) <= columns
        assert len([line for line in header if line]) == 2 * len(row)  # two lines of header above each line of a row
        if columns == 200:
            assert header[1].endswith("spread") and len(header[1]) == len(row[0])
