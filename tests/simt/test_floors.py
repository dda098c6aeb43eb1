"""Every op that memory bounds moves no more than its floor and 5 %, in either direction."""

import pytest

from . import floors

OPS = sorted(path.stem for path in (floors.BENCHMARKS / "ops").glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("op", OPS)
def test_op_moves_what_it_must(op):
    for count in floors.count(op):
        assert 0.95 <= count.of_floor <= 1.05, f"{count}: {count.of_floor:.1%} of the floor"
        # One row of fp32 sums per chunk of rows and column sum, written and read.
        assert count.partials <= 0.1 * count.floor, f"{count}: partial sums"
