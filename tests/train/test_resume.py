"""Runs that go on from a checkpoint of another optimizer, precision or layout of its state; what resets; what a killed run leaves.

Each run is fairseq's real command line. Those of the matrix come one after another in one process, others each in its own.
"""

import json
import re
import shlex
import signal
from pathlib import Path

import pytest
import torch

from tests.train.conftest import OURS, ROOT, STOCK, TRAINING

MODES = {
    "fp32": [],
    "bf16": ["--bf16"],
    "memory-efficient-bf16": ["--memory-efficient-bf16"],
    "fp16": ["--fp16"],
    "memory-efficient-fp16": ["--memory-efficient-fp16"],
    "fp16 list": ["--fp16", "--fp16-no-flatten-grads"],
}
OPTIMIZERS = {"adam": STOCK, "ls_adam": OURS}
N_SAVED, N_WHOLE = 3, 6  # updates
SAVED_SCALE, OTHER_SCALE = 64, 32  # --fp16-init-scale of the runs that save, and of those that go on
SETTING = [
    *TRAINING,
    *shlex.split(f"--encoder-layers 1 --decoder-layers 1 --max-update {N_WHOLE} --no-epoch-checkpoints"),
]
SAVING = [*SETTING, *shlex.split(f"--save-interval-updates {N_SAVED} --fp16-init-scale {SAVED_SCALE}")]
# Losses come from the log, with three decimals. Measured over all 36 pairs of modes: 8e-4 where bf16 takes part (eps 8e-3), and 2.6e-4, a
# digit of the log, elsewhere. A run that loses its moments is off by 4e-2.
BF16_ROUNDING, ROUNDING = 2e-3, 5e-4

FREEZES_ENCODER = """
from fairseq.tasks import register_task
from fairseq.tasks.translation import TranslationConfig, TranslationTask

@register_task("translation_with_frozen_encoder", dataclass=TranslationConfig)
class Frozen(TranslationTask):
    def build_model(self, cfg, from_checkpoint=False):
        model = super().build_model(cfg, from_checkpoint)
        model.encoder.requires_grad_(False)
        return model
"""

_modes = list(MODES)
UNBROKEN = [(("ls_adam", mode), ("ls_adam", mode)) for mode in MODES]
# Each mode as source and as target of both optimizers.
EXCHANGED = [
    *((("adam", mode), ("ls_adam", _modes[i - 5])) for i, mode in enumerate(_modes)),
    *((("ls_adam", mode), ("adam", _modes[i - 3])) for i, mode in enumerate(_modes)),
]
# Within one optimizer: from the flat layout to the list, and back.
CONVERTED = [
    (("adam", "fp32"), ("adam", "fp16")),
    (("adam", "fp16"), ("adam", "memory-efficient-bf16")),
    (("ls_adam", "fp16"), ("ls_adam", "fp32")),
    (("ls_adam", "bf16"), ("ls_adam", "fp16")),
]
IN_ONE_PROCESS = [*UNBROKEN, *EXCHANGED, *CONVERTED]
IN_PROCESSES_OF_THEIR_OWN = [  # stock's optimizer through fairseq-train --user-dir ls_plugin
    (("ls_adam", "fp32"), ("adam", "fp16")),
    (("adam", "fp16"), ("ls_adam", "fp32")),
    (("ls_adam", "fp16"), ("adam", "bf16")),
    (("adam", "memory-efficient-bf16"), ("ls_adam", "bf16")),
]
RESETS = {
    "optimizer": "--reset-optimizer --restore-file",
    "scheduler and meters": "--reset-lr-scheduler --reset-meters --restore-file",
    "dataloader": "--reset-dataloader --restore-file",
    "fine-tuning": "--finetune-from-model",
}
RESET_SOURCE, RESET_TARGETS = ("adam", "fp16"), [("adam", "fp32"), ("ls_adam", "bf16")]
EMA = shlex.split("--store-ema --ema-fp32 --ema-decay 0.75 --save-interval-updates 1")


def is_scaled(run) -> bool:
    return "fp16" in run[1]


def rounding(*runs) -> float:
    return BF16_ROUNDING if any("bf16" in mode for _, mode in runs) else ROUNDING


def name_of(*runs) -> str:
    return " to ".join(map(" ".join, runs))


def flags_of(run) -> list[str]:
    optimizer, mode = run
    return [*OPTIMIZERS[optimizer], *MODES[mode]]


class Matrix:
    """What the runs of the matrix logged and saved."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.runs: list = []
        self.logs: dict[str, str] = {}

    def saved(self, name: str, file: str = "checkpoint_last.pt") -> Path:
        return self.folder / name / file

    def source(self, run) -> Path:
        return self.saved(name_of(run), f"checkpoint_1_{N_SAVED}.pt")

    def add(self, name: str, *flags) -> None:
        self.runs.append((name, [*map(str, flags), "--save-dir", str(self.folder / name)]))


def continuing(target, source_file) -> list:
    return [*SETTING, *flags_of(target), "--fp16-init-scale", OTHER_SCALE, "--restore-file", source_file]


@pytest.fixture(scope="module")
def matrix(commands, tmp_path_factory) -> Matrix:
    matrix = Matrix(tmp_path_factory.mktemp("matrix"))
    data = commands.data
    for run in ((optimizer, mode) for optimizer in OPTIMIZERS for mode in MODES):
        matrix.add(name_of(run), data, *SAVING, *flags_of(run))
    for source, target in IN_ONE_PROCESS:
        keeps = [] if source == target else ["--no-save"]
        matrix.add(name_of(source, target), data, *continuing(target, matrix.source(source)), *keeps)
    for name, reset in RESETS.items():
        for target in RESET_TARGETS:
            flags = [*shlex.split(reset), matrix.source(RESET_SOURCE), "--no-save"]
            matrix.add(f"{name} {name_of(target)}", data, *SETTING, *flags_of(target), *flags)
    exact = ["--max-update", 4, *EMA]
    matrix.add("ema", data, *SETTING, *flags_of(("ls_adam", "bf16")), *exact)
    matrix.add("ema resumed", data, *continuing(("ls_adam", "bf16"), matrix.saved("ema", "checkpoint_1_2.pt")), *exact)
    for target in (("adam", "fp32"), ("ls_adam", "bf16")):
        matrix.add(f"ema from none {target[0]}", data, *continuing(target, matrix.source(("adam", "fp16"))), *EMA)
    matrix.add("overflow", data, *SETTING, *flags_of(("adam", "fp16")), "--fp16-init-scale", 2**20, "--no-save")
    matrix.add("nag", data, *SETTING, *STOCK, "--optimizer", "nag", "--fp16", "--max-update", N_SAVED)
    matrix.add("refused from nag", data, *continuing(("adam", "fp16"), matrix.saved("nag")))
    matrix.add(
        "reset after nag", data, *continuing(("adam", "fp16"), matrix.saved("nag")), "--reset-optimizer", "--no-save"
    )
    plugin = matrix.folder / "freezing"
    plugin.mkdir()
    (plugin / "__init__.py").write_text(FREEZES_ENCODER)
    freezing = ["--user-dir", plugin, "--task", "translation_with_frozen_encoder"]
    run = ("ls_adam", "bf16")
    matrix.add("frozen", data, *SETTING, *flags_of(run), *freezing, "--max-update", N_SAVED)
    matrix.add("frozen still", data, *continuing(run, matrix.saved("frozen")), *freezing)
    matrix.add("refused unfrozen", data, *continuing(run, matrix.saved("frozen")))
    listed = matrix.folder / "runs.json"
    listed.write_text(json.dumps(matrix.runs))
    output = commands.run("tests.train.many_runs", listed)
    _, *parts = re.split(r"^=== (?!status )(.*)\n", output, flags=re.MULTILINE)
    matrix.logs = dict(zip(parts[::2], parts[1::2], strict=True))
    assert list(matrix.logs) == [name for name, _ in matrix.runs]
    for name, log in matrix.logs.items():
        assert ("=== status" in log) == name.startswith("refused"), f"{name}: {log[-4000:]}"
    return matrix


def records(log: str) -> list[dict]:
    """What was logged of each update."""
    lines = (line.split("| train_inner | ")[1] for line in log.splitlines() if "| train_inner | " in line)
    return [{key: float(value) for key, value in json.loads(line).items()} for line in lines]


def losses(log: str) -> list[float]:
    return [record["loss"] for record in records(log)]


def assert_close(got, expected, tolerance):
    assert len(got) == len(expected) > 0
    for a, b in zip(got, expected, strict=True):
        assert abs(a - b) <= tolerance * b, (got, expected)


def assert_same_tensors(a, b, path="state"):
    if torch.is_tensor(a):
        assert torch.equal(a, b), path
    elif isinstance(a, dict | list):
        assert len(a) == len(b), path
        for key in a if isinstance(a, dict) else range(len(a)):
            assert_same_tensors(a[key], b[key], f"{path}[{key!r}]")
    else:
        assert a == b, path


def assert_goes_on(log: str, matrix: Matrix, source, target):
    assert f"Loaded checkpoint {matrix.source(source)}" in log
    expected = losses(matrix.logs[name_of(target)])[N_SAVED:]
    assert_close(losses(log), expected, rounding(source, target))
    assert [record["num_updates"] for record in records(log)] == [*range(N_SAVED + 1, N_WHOLE + 1)]
    scale = SAVED_SCALE if is_scaled(source) else OTHER_SCALE
    assert records(log)[-1].get("loss_scale") == (scale if is_scaled(target) else None)


def test_the_matrix_has_every_mode_as_source_and_target():
    everything = {(optimizer, mode) for optimizer in OPTIMIZERS for mode in MODES}
    assert {source for source, _ in EXCHANGED} == {target for _, target in EXCHANGED} == everything


@pytest.mark.parametrize("run", [(optimizer, mode) for optimizer in OPTIMIZERS for mode in MODES], ids=name_of)
def test_every_mode_trains_as_fp32_does(matrix, run):
    expected = losses(matrix.logs["adam fp32"])
    assert len(expected) == N_WHOLE
    assert_close(losses(matrix.logs[name_of(run)]), expected, 2 * rounding(run))


def test_stock_survives_an_overflow_on_the_cpu(matrix):
    """What the runs of stock in fp16 are compared with needs that."""
    log = matrix.logs["overflow"]
    n_overflows = log.count("gradient overflow detected")
    assert n_overflows > 0
    assert len(losses(log)) == N_WHOLE
    assert records(log)[-1]["loss_scale"] == 2**20 / 2**n_overflows


@pytest.mark.parametrize("source, target", [*EXCHANGED, *CONVERTED], ids=lambda run: name_of(run))
def test_a_run_goes_on_in_another_mode(matrix, source, target):
    assert_goes_on(matrix.logs[name_of(source, target)], matrix, source, target)


@pytest.mark.parametrize("mode", MODES)
def test_ls_adam_goes_on_as_if_it_had_never_stopped(matrix, mode):
    """To the bit: the checkpoint holds the exact fp32 weights."""
    run = ("ls_adam", mode)
    assert_goes_on(matrix.logs[name_of(run, run)], matrix, run, run)
    resumed, whole = (torch.load(matrix.saved(name)) for name in (name_of(run, run), name_of(run)))
    for part in ("model", "last_optimizer_state"):
        assert_same_tensors(resumed[part], whole[part], part)


def test_processes_of_their_own(matrix, commands, tmp_path):
    for source, target in IN_PROCESSES_OF_THEIR_OWN:
        module, more = "ls_plugin.cli.train", []
        if target[0] == "adam":
            module, more = "fairseq_cli.train", ["--user-dir", ROOT / "ls_plugin"]
        flags = [*continuing(target, matrix.source(source)), *more, "--no-save", "--save-dir", tmp_path]
        assert_goes_on(commands.run(module, commands.data, *flags), matrix, source, target)


# --- resets


@pytest.mark.parametrize("reset", RESETS)
def test_resets_do_the_same_for_both_optimizers(matrix, reset):
    """From a checkpoint of --fp16, stock in fp32 and ls_adam in bf16."""
    stock, ours = (records(matrix.logs[f"{reset} {name_of(target)}"]) for target in RESET_TARGETS)
    assert_close([record["loss"] for record in ours], [record["loss"] for record in stock], BF16_ROUNDING)
    for key in ("num_updates", "lr"):
        assert [record[key] for record in ours] == [record[key] for record in stock]
    starts_again = reset in ("optimizer", "fine-tuning")
    assert stock[0]["num_updates"] == (1 if starts_again else N_SAVED + 1)
    unbroken = losses(matrix.logs["adam fp32"])
    if reset in (
        "dataloader",
        "all",
        "fine-tuning",
    ):  # the first batch of the epoch once more, by the weights after three updates
        assert ours[0]["loss"] < 0.95 * unbroken[0]
    else:
        assert_close([ours[0]["loss"]], [unbroken[N_SAVED]], BF16_ROUNDING)
    if reset == "scheduler and meters":
        assert_close([record["loss"] for record in ours], unbroken[N_SAVED:], BF16_ROUNDING)


# --- moving averages of the weights


def weights(matrix, name, update) -> dict:
    return torch.load(matrix.saved(name, f"checkpoint_1_{update}.pt"))["model"]


def average_after(matrix, name, start: dict, updates) -> dict:
    for update in updates:
        model = weights(matrix, name, update)
        start = {key: 0.75 * x + 0.25 * model[key] for key, x in start.items() if "version" not in key}
    return start


def test_the_moving_average_of_a_bf16_run_is_that_of_the_exact_weights(matrix):
    """It begins with the model's own, 16-bit weights after the first update."""
    begin = {key: x.bfloat16().float() for key, x in weights(matrix, "ema", 1).items()}
    saved = torch.load(matrix.saved("ema"))["extra_state"]["ema_fp32_params"]
    expected = average_after(matrix, "ema", begin, range(1, 5))
    for key, x in expected.items():
        torch.testing.assert_close(saved[key], x, rtol=1e-6, atol=1e-7)
    rounded = max((x.bfloat16().float() - x).abs().max() for x in expected.values())
    assert rounded > 1e-4  # so it would show


def test_the_moving_average_goes_on_as_if_the_run_had_never_stopped(matrix):
    whole, resumed = (torch.load(matrix.saved(name))["extra_state"] for name in ("ema", "ema resumed"))
    for part in ("ema", "ema_fp32_params"):
        assert_same_tensors(resumed[part], whole[part], part)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_moving_average_may_begin_with_a_checkpoint_that_has_none(matrix, optimizer):
    name = f"ema from none {optimizer}"
    begin = torch.load(matrix.source(("adam", "fp16")))["model"]
    if optimizer == "ls_adam":
        begin = {key: x.bfloat16().float() for key, x in begin.items()}
    expected = average_after(matrix, name, begin, range(N_SAVED + 1, N_WHOLE + 1))
    saved = torch.load(matrix.saved(name))["extra_state"]["ema_fp32_params"]
    for key, x in expected.items():
        torch.testing.assert_close(saved[key], x, rtol=1e-6, atol=1e-7)


# --- what is refused


def test_the_state_of_another_optimizer_is_refused(matrix):
    """Both are an FP16Optimizer to fairseq."""
    assert matrix.logs["refused from nag"].splitlines()[-2:] == [
        "lightseq-train: error: --optimizer adam: the checkpoint holds the state of --optimizer nag; train on with that one, "
        "or with --reset-optimizer",
        "=== status 1",
    ]
    assert len(losses(matrix.logs["reset after nag"])) == N_WHOLE


def test_freezing_goes_on_and_unfreezing_needs_another_optimizer_state(matrix):
    assert len(losses(matrix.logs["frozen still"])) == N_WHOLE - N_SAVED
    *_, line, status = matrix.logs["refused unfrozen"].splitlines()
    assert re.search(
        r"error: optimizer state: must be of \d+ parameters, .* were other parameters frozen .*--reset-optimizer", line
    )
    assert status == "=== status 1"


# --- a killed run

KILLS_ITSELF = """
import os, signal
from ls_plugin import checkpoint

counted, flush = iter(range(1, 100)), os.fsync

def fsync(descriptor):
    if next(counted) == int(os.environ["KILL_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)
    flush(descriptor)

os.fsync = fsync
"""


@pytest.mark.parametrize("n_saved", [1, 2])
def test_a_run_that_is_killed_while_it_saves_goes_on_from_the_newest(matrix, commands, losses, tmp_path, n_saved):
    """In the copy that becomes checkpoint_last.pt, of the first save or of the second."""
    (tmp_path / "killer").mkdir()
    (tmp_path / "killer" / "__init__.py").write_text(KILLS_ITSELF)
    saves = tmp_path / "saves"
    flags = [*SETTING, *flags_of(("ls_adam", "bf16")), "--save-interval-updates", "1", "--save-dir", saves]
    commands.run(
        "ls_plugin.cli.train",
        commands.data,
        *flags,
        *("--user-dir", tmp_path / "killer"),
        env={"KILL_AT": str(4 * n_saved - 1)},  # a file is flushed twice
        status=-signal.SIGKILL,
    )
    left = sorted(path.name for path in saves.iterdir())
    whole = [f"checkpoint_1_{n}.pt" for n in range(1, n_saved + 1)] + ["checkpoint_last.pt"] * (n_saved > 1)
    assert left == [*whole, "checkpoint_last.pt.tmp"]
    updates = [torch.load(saves / name)["optimizer_history"][-1]["num_updates"] for name in whole]
    assert updates == [1, 2, 1][: len(whole)]
    log = commands.run("ls_plugin.cli.train", commands.data, *flags)
    assert f"going on from {saves}/checkpoint_1_{n_saved}.pt ({n_saved} updates)" in log
    assert losses(log) == losses(matrix.logs["ls_adam bf16"])[n_saved:]
    assert not list(saves.glob("*.tmp"))
