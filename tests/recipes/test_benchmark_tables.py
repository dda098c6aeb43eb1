"""The tables that the benchmarks print, of the results that are kept."""

import json

import pytest

from ls_plugin import _library
from tests.recipes.conftest import ROOT

RESULTS = ROOT / "recipes" / "benchmarks" / "results"

pytestmark = pytest.mark.skipif(not _library.status().loaded, reason=f"no compiled library: {_library.status().reason}")


def tables_of_training(module):
    results = json.loads((RESULTS / "training_cpu.json").read_text())["rows"]["results"]
    return module.make_tables(results, ["fp32", "bf16"])


def tables_of_train_step(module):
    content = json.loads((RESULTS / "train_step_cpu_1_thread.json").read_text())
    return [tabulate(content[name]) for name, (_, tabulate) in module.PARTS.items() if name in content]


def tables_of_update_step(module):
    return [module.make_table(json.loads((RESULTS / "update_step_cpu.json").read_text())["results"])]


@pytest.mark.parametrize("make", [tables_of_training, tables_of_train_step, tables_of_update_step])
def test_tables_fit_a_hundred_columns(benchmark, make):
    tables = make(benchmark(make.__name__.removeprefix("tables_of_")))
    assert tables
    for table in tables:
        text = str(table)
        assert max(map(len, text.splitlines())) <= 100 and table.title[:20] in text
        assert all(row[0].split()[0] in text for row in table.rows if row[0])
