"""The estimate of a training step without a GPU: the lecture's figures, what a trace sees, the command."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ls_plugin import _library
from ls_plugin.cli import report
from ls_plugin.errors import UsageError
from ls_plugin.report import estimate, lecture, trace
from ls_plugin.report.roofline import GPUS, Op, seconds, total_seconds

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--encoder-layers", "1", "--decoder-layers", "2", "--encoder-embed-dim", "64", "--decoder-embed-dim", "64")
TINY += ("--encoder-ffn-embed-dim", "128", "--decoder-ffn-embed-dim", "128")

needs_library = pytest.mark.skipif(
    not _library.status().loaded, reason=f"no compiled library: {_library.status().reason}"
)

# As they stand in the lecture, in the order of lecture.figures().
LECTURE = [518_333, 6, 4, 1.8, 1.9, 3.0, 24, 99.73, 39.9, 1.44]


@pytest.mark.parametrize(
    "figure, right", [pytest.param(f, r, id=f.name) for f, r in zip(lecture.figures(), LECTURE, strict=True)]
)
def test_the_lectures_figures(figure, right):
    assert figure.lecture == right
    assert figure.model == pytest.approx(right, rel=0.05)


def test_the_lectures_exercises():
    """Exercise 1: three arrays of a million fp32 take 23.4 us by two kernels and 14.3 by one, on the lecture's A100."""
    two, one = (1e6 * total_seconds(ops, GPUS["A100"], "fp32") for ops in lecture.tri_mat_add(1_000_000))
    assert (two, one) == (pytest.approx(23.4, abs=0.05), pytest.approx(14.3, abs=0.05))


def test_time_is_launches_and_the_longer_of_bytes_and_flops():
    gpu = GPUS["H100"]
    assert seconds(Op("a", "", 1.0, 3.35e9, launches=3), gpu, "fp16") == pytest.approx(12e-6 + 1e-3)
    assert seconds(Op("a", "", 67e9, 1.0), gpu, "fp16") == pytest.approx(4e-6 + 1e-3)
    assert seconds(Op("a", "", 989e9, 1.0, on_tensor_cores=True), gpu, "bf16") == pytest.approx(4e-6 + 1e-3)


# ---- What a trace sees ----


def traced(run, *shapes, dtype=torch.float16) -> list[Op]:
    tensors = [torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape in shapes]
    with trace.as_on_gpu(), trace.Trace() as found:
        run(*tensors)
    return found.ops


def the_op(run, *shapes, dtype=torch.float16) -> Op:
    (op,) = traced(run, *shapes, dtype=dtype)
    return op


@pytest.mark.parametrize(
    "run, shapes, n_bytes",
    [
        (lambda x, y: x + y, [(8, 64), (8, 64)], 2 * 3 * 512),
        (lambda x, y: x + y.expand(8, 64), [(8, 64), (1, 64)], 2 * (2 * 512 + 64)),
        (lambda x: x * x, [(8, 64)], 2 * 2 * 512),
        (lambda x: x.float(), [(8, 64)], (2 + 4) * 512),
        (lambda x, y: x.detach().copy_(y), [(8, 64), (8, 64)], 2 * 2 * 512),
        (lambda x, y: x.detach().add_(y), [(8, 64), (8, 64)], 2 * 3 * 512),
        (lambda x: x.detach().zero_(), [(8, 64)], 2 * 512),
        (lambda x: torch.nn.functional.dropout(x, 0.1), [(8, 64)], (2 + 2 + 1) * 512),
    ],
)
def test_bytes_are_counted_once_a_launch(run, shapes, n_bytes):
    op = the_op(run, *shapes)
    assert (op.bytes, op.launches) == (n_bytes, 1)


def test_a_look_up_reads_its_rows():
    ids = torch.empty(5, dtype=torch.int64, device="meta")
    op = the_op(lambda table: torch.nn.functional.embedding(ids, table), (1000, 64))
    assert op.bytes == 5 * 8 + 2 * 2 * 5 * 64


def test_views_and_allocations_launch_nothing():
    assert traced(lambda x: torch.empty_like(x.view(64, 8).t()[2:].detach()), (8, 64)) == []


def test_products_run_on_tensor_cores():
    op = the_op(lambda x, w, b: torch.nn.functional.linear(x, w, b), (8, 64), (32, 64), (32,))
    assert (op.kind, op.on_tensor_cores, op.flops) == (trace.PRODUCTS, True, 2 * 8 * 64 * 32)
    assert op.bytes == 2 * (8 * 64 + 32 * 64 + 32 + 8 * 32)


def test_what_the_host_reads_is_answered_or_refused():
    with trace.Trace() as found:
        padding = torch.empty(8, dtype=torch.int64, device="meta").eq(1)
        assert padding.any() and found.host_reads == 1
        with pytest.raises(RuntimeError, match="no rule answers"):
            torch.empty((), device="meta").item()


def test_nothing_stays_of_a_trace():
    x = torch.ones(4, device="meta")
    with trace.as_on_gpu():
        assert x.data_ptr() != 0
    assert x.data_ptr() == 0
    with trace.Trace() as found:
        torch.nn.functional.dropout(x, 0.5)
    assert "aten::native_dropout" not in [op.name for op in found.ops]


# ---- Whole steps ----


@functools.cache
def one_step(
    contender: str, precision: str = "fp16", arch: str = "transformer", flags=TINY, fused_attention: bool = False
):
    """8 sentences of 8 tokens, V 104."""
    from ls_plugin.report import contenders

    asked = contenders.Step(arch, precision, 104, 8, flags, fused_attention)
    (step,) = contenders.trace_steps(asked, contender, [64])
    return step


def product_flops(step) -> float:
    return sum(op.flops for _, op in step.ops if op.kind == trace.PRODUCTS)


@needs_library
def test_stock_and_ls_compute_the_same_products():
    """By hand: 1 encoder and 2 decoder layers, C 64, F 128, V 104, 8 sentences of 8 tokens, forward and twice as much backward."""
    n, t, c, f, v = 64, 8, 64, 128, 104
    self_attention, cross = 2 * n * 4 * c * c + 4 * n * t * c, 2 * n * 4 * c * c + 4 * n * t * c
    expected = 3 * (3 * (self_attention + 2 * n * 2 * c * f) + 2 * cross + 2 * n * c * v)
    stock, ours = (one_step(name) for name in ("stock", "ls"))
    assert product_flops(stock) == product_flops(ours) == expected
    assert stock.n_parameters == ours.n_parameters
    assert 2 * ours.launches < stock.launches


@needs_library
def test_the_update_of_ls_is_one_pass():
    step = one_step("ls")
    adam = [op for phase, op in step.ops if op.name == "ls::adam_step"]
    # fp32 master and moments read and written, 16-bit gradient read, 16-bit copy written; 64-byte alignment between parameters
    assert len(adam) == 1 and adam[0].bytes == pytest.approx(28 * step.n_parameters, rel=0.01)
    assert step.host_reads == 1


@needs_library
def test_apex_saves_what_its_adam_saves():
    stock, apex = (one_step(name) for name in ("stock", "stock + apex"))
    assert [op for phase, op in stock.ops if phase in ("forward", "backward")] == [
        op for phase, op in apex.ops if phase in ("forward", "backward")
    ]
    saved = sum(op.bytes for _, op in stock.ops) - sum(op.bytes for _, op in apex.ops)
    # Scale 8, two moments 8 + 12 + 8 + 12, root 8 + 8, update 16, against 28 in one
    assert saved == pytest.approx((80 - 28) * stock.n_parameters, rel=0.05)


@needs_library
def test_language_models_are_traced():
    flags = ("--decoder-layers", "1", "--decoder-embed-dim", "64", "--decoder-ffn-embed-dim", "128")
    stock, ours = (one_step(name, "bf16", "transformer_lm", flags, fused_attention=True) for name in ("stock", "ls"))
    assert ours.launches < stock.launches and ours.n_parameters == stock.n_parameters
    fused = [phase for phase, op in stock.ops if op.name.startswith("aten::_scaled_dot_product_efficient_attention")]
    assert fused == ["forward", "backward"]


@needs_library
def test_bart_is_traced():
    """Its initial weights are drawn on the host, where tensors without values cannot go."""
    flags = (*TINY, "--encoder-attention-heads", "4", "--decoder-attention-heads", "4")
    assert one_step("stock", arch="bart_base", flags=flags).launches > one_step("stock").launches


# ---- The command ----


def run(*arguments: str) -> int:
    arguments = ["estimate", *arguments]
    return estimate.run(report.parser(arguments).parse_args(arguments))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "--arch: required"),
        (["--arch", "no_such"], "--arch no_such: unknown; did you mean"),
        (["--arch", "lstm"], "--arch lstm: it has no ls_ twin"),
        (["--arch", "roberta_base"], "--arch roberta_base: its loss looks up"),
        (["--arch", "transformer", "--gpu", "A100,B1"], "--gpu B1: unknown; choose from A100, V100, H100, H200"),
        (["--arch", "transformer", "--gpu", "V100", "--precision", "bf16"], "--gpu V100: has no bf16 products"),
        (
            ["--arch", "transformer", "--max-tokens", "many"],
            "--max-tokens: must be a whole number of at least 1, got 'many'",
        ),
        (["--arch", "transformer", "--max-tokens", "16"], "--max-tokens 16: must hold a sentence of 32 tokens"),
        (["--arch", "transformer", "--vocab", "0"], "--vocab: must be a whole number of at least 8, got '0'"),
        (["--arch", "transformer", "--", "--no-such-flag"], "flags after --: unrecognized arguments: --no-such-flag"),
        (["--lecture", "--published"], "--lecture, --published: one at a time"),
        (["--lecture", "--arch", "transformer"], "--arch: has no meaning beside --lecture"),
        (["--published", "--gpu", "H100"], "--gpu: has no meaning beside --lecture and --published"),
        (["--published", "--max-tokens", "4096"], "--max-tokens: has no meaning beside"),
        (["--lecture", "--", "--dropout", "0"], "flags after --: has no meaning beside"),
    ],
)
def test_bad_input_is_refused_by_name(arguments, message):
    with pytest.raises(UsageError) as refused:
        run(*arguments)
    assert message in str(refused.value)


@pytest.mark.parametrize("arguments", [["--arch", "transformer", "--gpu", ","], ["--arch", ""]])
def test_a_list_of_nothing_is_refused_by_name(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(*arguments)
    assert f"argument {arguments[-2]}: must name one or more, got '{arguments[-1]}'" in capsys.readouterr().err


@needs_library
def test_the_command_from_flags_to_files(tmp_path):
    pytest.importorskip("matplotlib")
    command = [
        sys.executable,
        "-m",
        "ls_plugin.cli.report",
        "estimate",
        "--arch",
        "transformer",
        "--max-tokens",
        "64,256",
    ]
    command += [
        "--gpu",
        "A100,H200",
        "--vocab",
        "104",
        "--sentence-length",
        "8",
        "--out",
        str(tmp_path / "out"),
        "--",
        *TINY,
    ]
    # A new machine, where matplotlib has to list the fonts first.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLCONFIGDIR": str(tmp_path / "matplotlib")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("ESTIMATE, no measurement")
    for words in ("A100 data sheet, SXM4", "A100, fp16: estimated ms", "H200, fp16: estimated ms"):
        assert words in " ".join(done.stdout.split())
    content = json.loads((tmp_path / "out" / "report.json").read_text())
    assert content["estimate"] == "ESTIMATE, no measurement"
    steps = {(s["contender"], s["max_tokens"]): s for s in content["steps"]}
    assert len(steps) == 6
    for step in steps.values():
        for gpu, time in step["gpus"].items():
            assert sum(time["kinds"].values()) == pytest.approx(time["ms"])
            assert time["launch_ms"] == pytest.approx(1e3 * GPUS[gpu].launch_s * step["launches"])
    stock, ours = steps["stock", 64]["gpus"]["A100"]["ms"], steps["ls", 64]["gpus"]["A100"]["ms"]
    text = (tmp_path / "out" / "report.md").read_text()
    assert "ESTIMATE, no measurement" in text and f"{stock / ours:.2f}x" in text
    assert (tmp_path / "out" / "estimate.png").stat().st_size > 10_000


def test_the_file_of_the_published_table_says_what_was_computed(tmp_path, monkeypatch):
    """Not the defaults of a step: LightSeq's vocabulary, and attention in separate kernels."""
    side = {"launches": 2, "host_reads": 1, "n_parameters": 3, "sentence_length": 32, "max_tokens": 0, "arch": "a"}
    side["gpus"] = {"A100": {"ms": 1.0, "kinds": dict.fromkeys(trace.KINDS, 0.0)}}

    def estimated(step, sizes, gpus):
        return [side | {"contender": name, "max_tokens": n} for n in sizes for name in ("stock", "stock + apex", "ls")]

    monkeypatch.setattr(estimate, "_estimate", estimated)
    monkeypatch.setattr(estimate, "_import_matplotlib", lambda: None)
    assert run("--published", "--out", str(tmp_path)) == 0
    content = json.loads((tmp_path / "report.json").read_text())
    assert (content["vocab"], content["stock_attention"], content["precision"]) == ("32768", "unfused", "fp16")
