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
def test_rehearsal_passes(tmp_path):
    done = run(tmp_path, LS_GPU_REHEARSAL="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failures 0, errors 0" in done.stdout
    assert {"tests.xml", "tests.log", "benchmark_first.json", "benchmark_second.json"} <= {
        p.name for p in tmp_path.iterdir()
    }
