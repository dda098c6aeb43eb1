"""The benchmark of the update step runs, and lets both sides do the same work."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ls_plugin import _library

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "recipes" / "benchmarks"

pytestmark = pytest.mark.skipif(not _library.status().loaded, reason=f"no compiled library: {_library.status().reason}")


@pytest.fixture
def update_step(benchmark):
    return benchmark("update_step")


def test_from_command_to_json(tmp_path):
    out = tmp_path / "update.json"
    flags = ["--sizes", "tiny", "--modes", "bf16", "fp16", "--threads", "1", "--rounds", "2", "--out", str(out)]
    command = [sys.executable, str(BENCHMARKS / "update_step.py"), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for words in ("least speed-up over stock", "least share of the faster copy", "bf16 state"):
        assert words in done.stdout
    bf16, fp16 = json.loads(out.read_text())["results"]
    assert list(bf16["ms"]) == ["stock", "ls"] and list(fp16["ms"]) == ["stock", "stock, not flat", "ls"]
    for result in (bf16, fp16):
        assert result["threads"] == 1
        for ms in result["ms"].values():
            assert ms["clip"] > 0 and ms["step"] > 0 and ms["all"] > 0
        assert result["speedup"]["stock"] == pytest.approx(result["ms"]["stock"]["all"] / result["ms"]["ls"]["all"])
    n_bytes = sum(bf16["bytes_per_param"].values()) * bf16["n_params"]
    assert bf16["gb_per_s"] == pytest.approx(n_bytes / bf16["ms"]["ls"]["all"] / 1e6)
    assert out.with_suffix(".png").stat().st_size > 1000


# weights, gradients, masters or what is missing to them, moments
STATE = {
    "fp32": {"stock": 4 + 4 + 8, "ls": 4 + 4 + 8},
    "bf16": {"stock": 2 + 2 + 4 + 4 + 8, "ls": 2 + 2 + 2 + 8},
    "fp16": {"stock": 2 + 2 + 4 + 4 + 8, "stock, not flat": 2 + 2 + 4 + 4 + 8, "ls": 2 + 2 + 4 + 8},
}


@pytest.mark.parametrize("mode", STATE)
def test_all_do_the_same_and_hold_what_they_should(update_step, mode):
    shapes = update_step.parameter_shapes(*update_step.SIZES["tiny"])
    generator = torch.Generator().manual_seed(2)
    entrants = update_step.contenders(shapes, mode)
    assert list(entrants) == list(STATE[mode])
    dtype = update_step.MODES[mode]
    for _ in range(3):
        gradients = [torch.randn(shape, generator=generator).to(dtype) for shape, _ in shapes]
        for contender in entrants.values():
            assert set(update_step.timed_round(contender, gradients)) == set(update_step.PHASES)
    first, *others = entrants.values()
    for other in others:
        for p, q in zip(first.params, other.params, strict=True):
            ulp = torch.finfo(dtype).eps
            torch.testing.assert_close(q, p, rtol=2 * ulp, atol=1e-5)
    for name, contender in entrants.items():
        contender.set_gradients(gradients)
        # A Transformer this small pays visibly for the alignment of its buffers.
        assert STATE[mode][name] <= contender.state_bytes() < 1.03 * STATE[mode][name], name


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--threads", "2", "0"], "--threads must be at least 1, got 0"),
        (["--out", "nowhere/update.json"], "there is no folder nowhere"),
    ],
)
def test_refuses_what_it_cannot_do(update_step, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["update_step.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        update_step.main()
    assert stopped.value.code == 2 and message in capsys.readouterr().err
