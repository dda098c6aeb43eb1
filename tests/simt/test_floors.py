"""Every op that memory bounds moves no more than its floor and 5 %, in either direction."""

import pytest

from ls_plugin.report import kernels

from . import floors


@pytest.mark.parametrize("op", kernels.STEMS)
def test_op_moves_what_it_must(op):
    for count in floors.count(op):
        assert 0.95 <= count.of_floor <= 1.05, f"{count}: {count.of_floor:.1%} of the floor"
        # One row of fp32 sums per chunk of rows and column sum, written and read.
        assert count.partials <= 0.1 * count.floor, f"{count}: partial sums"
