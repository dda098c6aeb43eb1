"""``lightseq-train --deepspeed`` with the real DeepSpeed on CPUs: the losses of one process, checkpoints without DeepSpeed, refusals."""

import copy
import functools
import importlib.util
import json
import pickle
import re
import shutil
import socket
import sys

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from ls_plugin.cli import train
from ls_plugin.deepspeed import config as deepspeed_config
from ls_plugin.errors import UsageError

PARITY = 1e-3  # relative, per loss
N_UPDATES, SAVED = 10, 5  # an epoch is one update: the twenty sentences of the test split
FLAGS = ["--train-subset", "test", "--required-batch-size-multiple", "1", "--max-update", N_UPDATES]
FLAGS += ["--save-interval", SAVED, "--save-interval-updates", "0"]

has_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed here"
)


# --- real processes


@pytest.fixture(scope="module")
def start_ranks(commands, training_flags, tmp_path_factory):
    """Starts the ranks of one run, each a process of its own; returns them in order."""

    def start(n_ranks, config, folder, *flags, torchrun=False, **options):
        path = tmp_path_factory.mktemp("config") / "ds_config.json"
        path.write_text(json.dumps(config))
        command = [commands.data, *training_flags["ours"], *FLAGS, "--save-dir", folder, "--deepspeed", path, *flags]
        if torchrun:
            launch = ["--standalone", "--nproc_per_node", n_ranks, "--module", "ls_plugin.cli.train"]
            return [commands.start("torch.distributed.run", *launch, *command, **options)]
        if n_ranks > 1:
            with socket.socket() as probe:
                probe.bind(("localhost", 0))
                address = f"tcp://localhost:{probe.getsockname()[1]}"
            command += ["--distributed-init-method", address, "--distributed-world-size", n_ranks]
            command += ["--distributed-no-spawn", "--distributed-rank"]
        ranks = [[rank] if n_ranks > 1 else [] for rank in range(n_ranks)]
        return [commands.start("ls_plugin.cli.train", *command, *rank, **options) for rank in ranks]

    return start


@pytest.fixture(scope="module")
def run_ranks(commands, start_ranks):
    """Runs all ranks; returns the log of the first."""

    def run(*args, **options):
        logs = [commands.finish(process) for process in start_ranks(*args, **options)]
        return logs[0]

    return run


@pytest.fixture(scope="module")
def one_process(commands, training_flags, losses, tmp_path_factory):
    """The losses of ls_adam in fp32, one process, the whole batch; without --deepspeed, DeepSpeed is not even imported."""
    folder = tmp_path_factory.mktemp("one")
    (folder / "imported").mkdir()
    (folder / "imported" / "__init__.py").write_text(
        "import sys, ls_plugin\nprint('DeepSpeed is imported:', 'deepspeed' in sys.modules, flush=True)\n"
    )
    flags = ["--batch-size", "20", "--user-dir", folder / "imported", "--no-save"]
    log = commands.run("ls_plugin.cli.train", commands.data, *training_flags["ours"], *FLAGS, *flags)
    assert "DeepSpeed is imported: False" in log
    return losses(log)


def assert_parity(ours, expected):
    assert len(ours) == len(expected) == N_UPDATES
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        assert abs(a - b) <= PARITY * b, f"loss {i}: {a} against {b}"


ZERO_3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


@pytest.fixture(scope="module")
def zero_3(run_ranks, tmp_path_factory):
    """Two ranks with half the batch each, nothing whole on either; (save folder, log)."""
    folder = tmp_path_factory.mktemp("zero_3")
    return folder, run_ranks(2, ZERO_3, folder, "--batch-size", "10")


@has_deepspeed
def test_zero_3_on_two_ranks_equals_one_process(zero_3, one_process, losses):
    folder, log = zero_3
    assert_parity(losses(log), one_process)
    last = json.loads(log.split("| train_inner | ")[-1].splitlines()[0])
    assert {"loss", "ppl", "gnorm", "clip", "wps", "ups", "wpb", "bsz", "lr", "train_wall"} <= last.keys()
    assert (last["wpb"], last["bsz"], last["num_updates"]) == ("152", "20", str(N_UPDATES))
    assert {path.name for path in folder.iterdir()} == {
        "checkpoint5.pt",
        "checkpoint10.pt",
        "checkpoint_last.pt",
    }


@has_deepspeed
def test_zero_3_resumes_to_the_bit(zero_3, run_ranks, losses, tmp_path):
    shutil.copy(zero_3[0] / f"checkpoint{SAVED}.pt", tmp_path / "checkpoint_last.pt")
    log = run_ranks(2, ZERO_3, tmp_path, "--batch-size", "10")
    assert losses(log) == losses(zero_3[1])[SAVED:]
    states = [torch.load(folder / "checkpoint_last.pt", weights_only=False) for folder in (zero_3[0], tmp_path)]
    for name, p in states[0]["model"].items():
        assert torch.equal(states[1]["model"][name], p)


@has_deepspeed
def test_zero_1_under_torchrun_accumulates_as_one_batch(run_ranks, one_process, losses, tmp_path):
    config = {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2, "gradient_clipping": "auto"}
    log = run_ranks(2, config, tmp_path, "--batch-size", "5", "--update-freq", "2", "--no-save", torchrun=True)
    assert_parity(losses(log), one_process)


@has_deepspeed
def test_zero_2_with_the_optimizer_on_the_cpu(run_ranks, one_process, losses, tmp_path):
    config = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    log = run_ranks(2, config, tmp_path, "--batch-size", "10", "--no-save")
    assert_parity(losses(log), one_process)


# What DeepSpeed refuses on this CPU it can compute all the same.
WITH_FP16 = """
import os
os.environ["DS_ACCELERATOR"] = "cpu"
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
CPU_Accelerator.is_fp16_supported = lambda self: True
"""


@has_deepspeed
def test_masters_survive_and_overflows_do_not_count(commands, start_ranks, losses, one_process, tmp_path):
    """bf16 without ZeRO's sharding resumes to the bit, also on another stage; fp16 begins with a scale that overflows."""
    (tmp_path / "with_fp16").mkdir()
    (tmp_path / "with_fp16" / "__init__.py").write_text(WITH_FP16)
    flags = ["--batch-size", "20", "--dropout", "0.1"]
    half = ["--batch-size", "20", "--fp16", "--user-dir", tmp_path / "with_fp16", "--no-save"]
    scale = {"zero_optimization": {"stage": 2}, "fp16": {"initial_scale_power": 22, "hysteresis": 1}}
    runs = [
        *start_ranks(1, {"zero_optimization": {"stage": 1}}, tmp_path / "whole", *flags, "--bf16"),
        *start_ranks(1, scale, tmp_path, *half),
    ]
    whole, overflowing = (commands.finish(run) for run in runs)

    assert overflowing.count("NOTE: gradient overflow") >= 1
    assert len(losses(overflowing)) == N_UPDATES
    assert '"num_updates": "10"' in overflowing
    scales = [float(scale) for scale in re.findall(r'"loss_scale": "([0-9.]+)"', overflowing)]
    assert 2 <= scales[-1] < 2**22
    for ours, expected in zip(losses(overflowing), one_process, strict=True):
        assert abs(ours - expected) <= 1e-2 * expected

    (tmp_path / "rest").mkdir()
    shutil.copy(tmp_path / "whole" / f"checkpoint{SAVED}.pt", tmp_path / "rest" / "checkpoint_last.pt")
    (run,) = start_ranks(1, {"zero_optimization": {"stage": 2}}, tmp_path / "rest", *flags, "--bf16")
    assert losses(commands.finish(run)) == losses(whole)[SAVED:]
    states = [torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=False) for name in ("whole", "rest")]
    assert states[0]["optimizer_history"][-1]["optimizer_name"] == "FP16Optimizer"
    for name, p in states[0]["model"].items():
        assert torch.equal(states[1]["model"][name], p)
        assert p.dtype == torch.float32
    weight = states[0]["model"]["encoder.layers.0.fc1.weight"]
    assert not torch.equal(weight, weight.bfloat16().float())  # the exact masters


@has_deepspeed
def test_stock_generates_from_the_checkpoint_without_plugin_and_deepspeed(zero_3, commands):
    flags = ["--path", zero_3[0] / "checkpoint_last.pt", "--beam", 2, "--max-len-b", 10, "--cpu"]
    flags += ["--required-batch-size-multiple", 1]
    log = commands.run("fairseq_cli.generate", commands.data, *flags, plugin=False)
    assert len(re.findall(r"^H-", log, re.MULTILINE)) == 20
    state = torch.load(zero_3[0] / "checkpoint_last.pt", weights_only=False)
    assert state["cfg"]["model"].arch == "transformer"
    assert not hasattr(state["cfg"]["model"], "deepspeed")
    assert [entry["step"] for entry in state["last_optimizer_state"]["state"].values()] == [N_UPDATES] * len(
        state["last_optimizer_state"]["state"]
    )


# --- configuration


BASE = ["data", "--task", "translation", "--arch", "ls_transformer", "--criterion", "ls_label_smoothed_cross_entropy"]
BASE += ["--optimizer", "ls_adam", "--lr", "5e-4", "--adam-betas", "(0.9, 0.98)", "--clip-norm", "1.0"]


@functools.cache
def parsed():
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), BASE))


def configuration(**fields):
    """fairseq's configuration of BASE with other values, each named part__field; parsing takes a second."""
    cfg = copy.deepcopy(parsed())
    for name, value in fields.items():
        part, _, field = name.partition("__")
        setattr(cfg[part], field, value)
    return cfg


def test_what_is_left_to_the_flags_comes_from_them():
    given = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.98], "weight_decay": "auto"}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    }
    before = json.dumps(given)
    config = deepspeed_config.resolve(given, configuration(common__bf16=True, optimization__update_freq=[4]))
    assert json.dumps(given) == before
    assert config["gradient_accumulation_steps"] == 4
    assert config["gradient_clipping"] == 1.0
    assert config["bf16"] == {"enabled": True}
    assert config["fp16"] == {"enabled": False}
    assert config["zero_optimization"] == {"stage": 2}
    assert "optimizer" not in config  # an object, not a block
    assert pickle.loads(pickle.dumps(functools.partial(train.worker_main, deepspeed=config))).keywords == {
        "deepspeed": config
    }


STAGE_3 = {"zero_optimization": {"stage": 3}}
CONFLICTS = [
    ({"gradient_clipping": 0.5}, {}, ["gradient_clipping 0.5", "--clip-norm 1.0"]),
    ({"gradient_accumulation_steps": 2}, {}, ["gradient_accumulation_steps 2", "--update-freq 1"]),
    (
        {"gradient_accumulation_steps": 2},
        {"optimization__update_freq": [2, 4]},
        ["gradient_accumulation_steps 2", "--update-freq 2,4"],
    ),
    ({"train_batch_size": 32}, {}, ["train_batch_size 32", "--max-tokens"]),
    ({"train_micro_batch_size_per_gpu": 4}, {}, ["train_micro_batch_size_per_gpu 4", "--batch-size"]),
    ({"bf16": {"enabled": True}}, {}, ["bf16.enabled true", "no --bf16"]),
    ({"fp16": {"enabled": False}, **STAGE_3}, {"common__fp16": True}, ["fp16.enabled false", "--fp16"]),
    ({"bf16": True}, {}, ["bf16: must be an object"]),
    ({}, {"common__bf16": True}, ["zero_optimization.stage 0", "--bf16", "stage 1"]),
    ({"optimizer": {"type": "Lamb"}}, {}, ["optimizer.type", "Lamb", "--optimizer ls_adam"]),
    ({"optimizer": {"params": {"lr": 0.1}}}, {}, ["optimizer.params.lr 0.1", "--lr 0.0005"]),
    ({"optimizer": {"params": {"betas": [0.9, 0.999]}}}, {}, ["optimizer.params.betas", "--adam-betas"]),
    ({"optimizer": {"params": {"eps": 1e-6}}}, {}, ["optimizer.params.eps", "--adam-eps"]),
    ({"optimizer": {"params": {"weight_decay": 1}}}, {}, ["optimizer.params.weight_decay 1", "--weight-decay"]),
    ({"optimizer": {"params": {"adam_w_mode": False}}}, {}, ["optimizer.params.adam_w_mode"]),
    ({"scheduler": {"type": "WarmupLR"}}, {}, ["scheduler", "--lr-scheduler"]),
    ({"curriculum_learning": {}}, {}, ["curriculum_learning: unsupported"]),
    ({"zero_optimization": {"stage": 4}}, {}, ["zero_optimization.stage", "got 4"]),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, {}, ["offload_param.device", "nvme"]),
    ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, {}, ["offload_param: needs stage 3"]),
    ({"zero_optimization": {"stage": 2, "compute_grad_norm": False}}, {}, ["compute_grad_norm", "--clip-norm"]),
    (STAGE_3, {"model__encoder_layerdrop": 0.1}, ["--encoder-layerdrop", "stage 3"]),
    (STAGE_3, {"criterion__fused_projection": "always"}, ["--fused-projection always", "stage 3"]),
    (STAGE_3, {"task__eval_bleu": True}, ["--eval-bleu", "stage 3"]),
    ({}, {"common__amp": True}, ["--amp"]),
    (STAGE_3, {"common__memory_efficient_fp16": True}, ["--memory-efficient-fp16"]),
    (STAGE_3, {"common__fp16": True, "common__fp16_init_scale": 4}, ["--fp16-init-scale 4", "fp16 block"]),
    ({}, {"distributed_training__ddp_backend": "legacy_ddp"}, ["--ddp-backend legacy_ddp"]),
    ({}, {"distributed_training__ddp_backend": "fully_sharded"}, ["--ddp-backend fully_sharded"]),
    ({}, {"distributed_training__zero_sharding": "os"}, ["--zero-sharding os", "zero_optimization"]),
    ({}, {"optimization__use_bmuf": True}, ["--use-bmuf"]),
    ({}, {"ema__store_ema": True}, ["--store-ema"]),
    ({}, {"optimizer___name": "sgd"}, ["--optimizer sgd"]),
    ({}, {"optimizer__use_old_adam": True}, ["--use-old-adam"]),
]


@pytest.mark.parametrize("given, fields, named", CONFLICTS, ids=[" ".join(named) for _, _, named in CONFLICTS])
def test_conflicts_are_refused_by_name(given, fields, named):
    with pytest.raises(UsageError) as caught:
        deepspeed_config.resolve(given, configuration(**fields))
    for part in named:
        assert part in str(caught.value)


def test_all_conflicts_are_named_at_once():
    given = {"gradient_clipping": 2.0, "scheduler": {}, "zero_optimization": {}}
    with pytest.raises(UsageError, match=r"scheduler: .*; --store-ema: "):
        deepspeed_config.resolve(given, configuration(ema__store_ema=True))


def test_files_that_are_no_configuration(tmp_path, monkeypatch):
    monkeypatch.setattr(deepspeed_config.importlib.util, "find_spec", lambda name: object())
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "broken.json").write_text('{"zero_optimization": ')
    for name, message in (("nowhere", "cannot be read"), ("list", "got a list"), ("broken", "must be JSON")):
        with pytest.raises(UsageError, match=rf"--deepspeed \S*{name}\.json: .*{message}"):
            deepspeed_config.read(str(tmp_path / f"{name}.json"))


def test_without_deepspeed_one_line_says_how_to_get_it(monkeypatch, capsys, tmp_path):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "deepspeed" else find_spec(name, *a)
    )
    monkeypatch.setattr(train.stock, "main", train.stock.main)
    monkeypatch.setattr("ls_plugin.cli._fairseq_command.leave", sys.exit)
    monkeypatch.setattr("ls_plugin.cli._fairseq_command.set_up_logging", lambda: None)
    monkeypatch.setattr(sys, "argv", ["lightseq-train", *BASE, "--max-tokens", "9", "--deepspeed", "ds_config.json"])
    with pytest.raises(SystemExit) as caught:
        train.main()
    assert caught.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lightseq-train: error")]
    assert "--deepspeed: must have DeepSpeed" in line
    assert "pip install" in line
