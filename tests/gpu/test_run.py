"""tests/gpu/run.sh itself: it says that there is no GPU, and its rehearsal passes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def run(out: Path, **variables: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "LS_PYTHON": sys.executable, **variables}
    command = ["bash", str(ROOT / "tests" / "gpu" / "run.sh"), str(out)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_says_that_there_is_no_gpu(tmp_path):
    done = run(tmp_path, LS_GPU_REHEARSAL="0")
    assert done.returncode == 2
    assert "tests/gpu/run.sh: no GPU: torch.cuda.is_available() is false" in done.stderr


@pytest.mark.slow
@pytest.mark.longest
def test_rehearsal_passes(tmp_path):
    done = run(tmp_path, LS_GPU_REHEARSAL="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failures 0, errors 0" in done.stdout
    expected = {f"tests_test_{stem}.{kind}" for stem in ("layer_norm", "adam") for kind in ("xml", "log")}
    assert expected <= {p.name for p in tmp_path.iterdir()}
    assert all((tmp_path / f"benchmark_{part}" / "kernels.json").exists() for part in ("first", "second"))


def test_summary_fails_where_no_test_passed_and_names_what_left_no_record(tmp_path):
    """A run whose tests were all skipped, or whose process died, is no success."""
    (tmp_path / "tests_test_adam.log").touch()
    (tmp_path / "tests_test_layer_norm.log").touch()
    (tmp_path / "tests_test_layer_norm.xml").write_text(
        '<testsuites><testsuite tests="3" failures="0" errors="0" skipped="3"/></testsuites>'
    )
    command = [sys.executable, str(ROOT / "tests" / "gpu" / "summary.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "tests 3, failures 0, errors 0, skipped 3" in done.stdout and "no test ran and passed" in done.stdout
    assert "test_adam: no record" in done.stdout
