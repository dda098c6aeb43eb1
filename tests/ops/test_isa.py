"""The CPU kernels in the instruction sets that this processor would not choose."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ls_plugin import _library

ROOT = Path(__file__).resolve().parents[2]
ORDER = ["plain", "avx2", "avx512"]


def run(arguments, isa):
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "LS_CPU_ISA": isa, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("isa", ORDER[:-1])
def test_narrower_sets_pass_the_op_tests(isa):
    status = _library.status()
    if not status.loaded or ORDER.index(isa) >= ORDER.index(status.isa):
        pytest.skip(f"the other tests run {status.isa or 'the reference'}, which is no wider than {isa}")
    result = run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ops", "--ignore=tests/ops/test_isa.py", "-k", "cpu"],
        isa,
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert " passed" in result.stdout


@pytest.mark.parametrize(
    ("isa", "message"), [("sse9", "must be plain, avx2 or avx512"), ("avx512", "this processor lacks it")]
)
def test_a_wrong_wish_is_refused_by_name(isa, message):
    if isa == "avx512" and _library.status().isa == "avx512":
        pytest.skip("this processor has AVX-512")
    if not _library.status().loaded:
        pytest.skip(_library.status().reason)
    result = run(["-c", "import ls_plugin"], isa)
    assert result.returncode != 0 and message in result.stderr
