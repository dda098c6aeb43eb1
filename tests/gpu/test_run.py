"""tests/gpu/run.sh itself: it says that there is no GPU, and its rehearsal passes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.limits import LIMIT_S

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
    limits = dict.fromkeys(("LS_GPU_TOTAL_S", "LS_GPU_TEST_S", "LS_GPU_BENCH_S"), str(LIMIT_S))
    done = run(tmp_path, LS_GPU_REHEARSAL="1", **limits)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "failures 0, errors 0" in done.stdout
    expected = {f"tests_test_{stem}.{kind}" for stem in ("layer_norm", "adam") for kind in ("xml", "log")}
    assert expected <= {p.name for p in tmp_path.iterdir()}
    assert all((tmp_path / f"benchmark_{part}" / "kernels.json").exists() for part in ("first", "second"))
    assert "fp32     64 tokens   stock" in done.stdout and "fp32    128 tokens   stock" in done.stdout


def test_a_training_that_failed_is_told_though_a_later_one_was_cut(tmp_path):
    """The interpreter is a stand-in: the first training fails, the second runs into its time limit, all else passes."""
    stub = tmp_path / "python"
    stub.write_text(
        '#!/bin/bash\n[ "$2 $3" = "ls_plugin.cli.report run" ] || exit 0\n[[ "$*" == *training_fp32_64* ]] && exit 1\nexit 124\n'
    )
    stub.chmod(0o755)
    done = run(tmp_path / "out", LS_GPU_REHEARSAL="1", LS_PYTHON=str(stub))
    assert done.returncode == 1 and "train: failed with status 1" in done.stdout, done.stdout + done.stderr


def test_summary_names_speed_ups_goals_and_what_is_none(tmp_path):
    (tmp_path / "tests_test_adam.log").touch()
    (tmp_path / "tests_test_adam.xml").write_text(
        '<testsuites><testsuite tests="1" failures="0" errors="0" skipped="0"/></testsuites>'
    )
    sides = {
        kind: {"step_ms": ms, "peak_gpu_mib": 2048.0, "peak_rss_mib": 1.0} for kind, ms in (("stock", 9.0), ("ls", 3.0))
    }
    gains = {
        "fp16_512": {"ratio": 3.0, "why_not": ""},
        "fp16_8192": {"ratio": 1.6, "why_not": ""},
        "bf16_512": {"ratio": None, "why_not": "losses part by +9 %"},
    }
    for name, gain in gains.items():
        folder = tmp_path / f"training_{name}"
        folder.mkdir()
        (folder / "report.json").write_text(json.dumps({"contenders": sides, "over_stock": {"ls": gain}}))
    (tmp_path / "training_bf16_1024").mkdir()
    (tmp_path / "training_bf16_1024" / "report.json").write_text(
        json.dumps({"contenders": {"stock": sides["stock"]}, "over_stock": {}})
    )
    command = [sys.executable, str(ROOT / "tests" / "gpu" / "summary.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no benchmark was measured" in done.stdout
    lines = {line[:18].strip(): line for line in done.stdout.splitlines() if " tokens   " in line}
    assert lines["fp16    512 tokens"].endswith("ls      3.0 ms,   2,048 MiB   3.00x (goal 3.1x missed)")
    assert lines["fp16  8,192 tokens"].endswith("1.60x (goal 1.6x met)")
    assert lines["bf16    512 tokens"].endswith("no speed-up: losses part by +9 %")
    assert lines["bf16  1,024 tokens"].endswith("not both were measured")


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
