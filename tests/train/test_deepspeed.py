"""``lightseq-train --deepspeed`` with the real DeepSpeed on CPUs: the losses of one process, checkpoints without DeepSpeed, refusals."""

import copy
import functools
import importlib.util
import json
import os
import pickle
import re
import socket
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from ls_plugin.cli import train
from ls_plugin.deepspeed import config as deepspeed_config
from ls_plugin.deepspeed import trainer as deepspeed_trainer
from ls_plugin.errors import UsageError

PARITY = 1e-3  # relative, per loss
N_UPDATES, SAVED = 10, 5  # an epoch is one update: the twenty sentences of the test split
FLAGS = ["--train-subset", "test", "--required-batch-size-multiple", "1", "--max-update", N_UPDATES]
FLAGS += ["--save-interval", SAVED, "--save-interval-updates", "0"]

has_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed here"
)


# --- real processes

# Imports once, which takes 10 s, then runs after one another what the JSON in its argument lists: each rank of a run is a process forked
# from it. {"ranks": the command line of each, "log": a file for the output of the first, "copy": [from, to] before it starts}
DRIVER = """
import json, os, shutil, sys
os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from ls_plugin.cli import train
CPU_Accelerator.is_fp16_supported = lambda self: True  # this CPU computes it, if slowly
for run in json.loads(sys.argv[1]):
    if "copy" in run:
        os.makedirs(os.path.dirname(run["copy"][1]))
        shutil.copy(*run["copy"])
    ranks = []
    for arguments in run["ranks"]:
        ranks.append(os.fork())
        if ranks[-1] == 0:
            output = os.open(f"{run['log']}.{len(ranks) - 1}", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.argv = ["lightseq-train", *arguments]
            try:
                train.main()
            finally:
                sys.stdout.flush()
                os._exit(0)
    for rank in ranks:
        os.waitpid(rank, 0)
"""
STAGE_1, STAGE_2 = ({"zero_optimization": {"stage": stage}} for stage in (1, 2))
ZERO_2 = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
ZERO_3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}  # nothing is whole on any rank
OVERFLOWING = {**STAGE_2, "fp16": {"initial_scale_power": 22, "hysteresis": 1}}
HALVES, WHOLE = ["--batch-size", "10"], ["--batch-size", "20"]
MASKED = [*WHOLE, "--dropout", "0.1", "--bf16"]
# name: (number of ranks, configuration, flags, the run from whose fifth update it goes on)
RUNS = {
    "zero_2": (2, ZERO_2, [*HALVES, "--no-save"], None),
    "zero_3": (2, ZERO_3, HALVES, None),
    "zero_3_resumed": (2, ZERO_3, HALVES, "zero_3"),
    "bf16": (1, STAGE_1, MASKED, None),
    "bf16_resumed": (1, STAGE_2, MASKED, "bf16"),
    "fp16": (1, OVERFLOWING, [*WHOLE, "--fp16", "--no-save"], None),
}


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def command_line(commands, training_flags, tmp_path_factory):
    def make(config, *flags):
        path = tmp_path_factory.mktemp("config") / "ds_config.json"
        path.write_text(json.dumps(config))
        return [str(flag) for flag in (commands.data, *training_flags["ours"], *FLAGS, "--deepspeed", path, *flags)]

    return make


@pytest.fixture(scope="module")
def runs(commands, command_line, tmp_path_factory):
    """{name: (save folder, log of the first rank)} of RUNS."""
    folder = tmp_path_factory.mktemp("runs")
    todo = []
    for name, (n_ranks, config, flags, resumed) in RUNS.items():
        line = command_line(config, *flags, "--save-dir", folder / name)
        ranks = [line]
        if n_ranks > 1:
            line += ["--distributed-init-method", f"tcp://localhost:{free_port()}", "--distributed-no-spawn"]
            line += ["--distributed-world-size", str(n_ranks), "--distributed-rank"]
            ranks = [[*line, str(rank)] for rank in range(n_ranks)]
        todo.append({"ranks": ranks, "log": str(folder / f"{name}.log")})
        if resumed:
            paths = (folder / resumed / f"checkpoint{SAVED}.pt", folder / name / "checkpoint_last.pt")
            todo[-1]["copy"] = [str(path) for path in paths]
    (commands.data.parent / "deepspeed_driver.py").write_text(DRIVER)  # the commands' working directory
    commands.run("deepspeed_driver", json.dumps(todo))
    return {name: (folder / name, (folder / f"{name}.log.0").read_text()) for name in RUNS}


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


def assert_parity(ours, expected, tolerance=PARITY):
    assert len(ours) == len(expected) == N_UPDATES
    for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
        assert abs(a - b) <= tolerance * b, f"loss {i}: {a} against {b}"


def assert_equal_weights(folders):
    states = [torch.load(folder / "checkpoint_last.pt", weights_only=False)["model"] for folder in folders]
    assert states[0].keys() == states[1].keys()
    for name, p in states[0].items():
        assert torch.equal(states[1][name], p), name


@has_deepspeed
@pytest.mark.parametrize("name", ["zero_2", "zero_3"])
def test_two_ranks_with_half_the_batch_equal_one_process(name, runs, one_process, losses):
    """ZeRO 2 with the optimizer on the CPU, and ZeRO 3."""
    log = runs[name][1]
    assert_parity(losses(log), one_process)
    last = json.loads(log.split("| train_inner | ")[-1].splitlines()[0])
    assert {"loss", "ppl", "gnorm", "clip", "wps", "ups", "wpb", "bsz", "lr", "train_wall"} <= last.keys()
    assert (last["wpb"], last["bsz"], last["num_updates"]) == ("152", "20", str(N_UPDATES))


@has_deepspeed
def test_zero_1_under_torchrun_accumulates_as_one_batch(commands, command_line, one_process, losses, tmp_path):
    config = {**STAGE_1, "gradient_accumulation_steps": 2, "gradient_clipping": "auto"}
    flags = ["--batch-size", "5", "--update-freq", "2", "--no-save", "--save-dir", tmp_path]
    launch = ["--standalone", "--nproc_per_node", "2", "--module", "ls_plugin.cli.train"]
    log = commands.run("torch.distributed.run", *launch, *command_line(config, *flags))
    assert_parity(losses(log), one_process)


@has_deepspeed
def test_zero_3_resumes_to_the_bit(runs, losses):
    folder, log = runs["zero_3"]
    assert {path.name for path in folder.iterdir()} == {"checkpoint5.pt", "checkpoint10.pt", "checkpoint_last.pt"}
    assert losses(runs["zero_3_resumed"][1]) == losses(log)[SAVED:]
    assert_equal_weights([folder, runs["zero_3_resumed"][0]])


@has_deepspeed
def test_bf16_resumes_to_the_bit_on_another_stage(runs, losses):
    folder, log = runs["bf16"]
    assert losses(runs["bf16_resumed"][1]) == losses(log)[SAVED:]
    assert_equal_weights([folder, runs["bf16_resumed"][0]])
    state = torch.load(folder / "checkpoint_last.pt", weights_only=False)
    assert state["optimizer_history"][-1]["optimizer_name"] == "FP16Optimizer"
    weight = state["model"]["encoder.layers.0.fc1.weight"]
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float())  # the exact masters


@has_deepspeed
def test_updates_that_overflow_in_fp16_do_not_count(runs, one_process, losses):
    log = runs["fp16"][1]
    assert log.count("NOTE: gradient overflow") >= 1
    assert f'"num_updates": "{N_UPDATES}"' in log
    scales = [float(scale) for scale in re.findall(r'"loss_scale": "([0-9.]+)"', log)]
    assert 2 <= scales[-1] < 2**22
    assert_parity(losses(log), one_process, tolerance=1e-2)


@has_deepspeed
def test_stock_generates_from_the_checkpoint_without_plugin_and_deepspeed(runs, commands):
    path = runs["zero_3"][0] / "checkpoint_last.pt"
    flags = ["--path", path, "--beam", 2, "--max-len-b", 10, "--cpu", "--required-batch-size-multiple", 1]
    log = commands.run("fairseq_cli.generate", commands.data, *flags, plugin=False)
    assert len(re.findall(r"^H-", log, re.MULTILINE)) == 20
    state = torch.load(path, weights_only=False)
    assert state["cfg"]["model"].arch == "transformer"
    assert not hasattr(state["cfg"]["model"], "deepspeed")
    entries = state["last_optimizer_state"]["state"].values()
    assert {entry["step"] for entry in entries} == {N_UPDATES}


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
        "steps_per_print": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.98], "weight_decay": "auto"}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    }
    before = json.dumps(given)
    config = deepspeed_config.resolve(given, configuration(common__bf16=True, optimization__update_freq=[4]))
    assert json.dumps(given) == before
    assert config["gradient_accumulation_steps"] == 4
    assert config["gradient_clipping"] == 1.0
    assert config["steps_per_print"] > 10**9
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
    ({"optimizer": {"params": "auto"}}, {}, ["optimizer.params: must be an object", "auto"]),
    ({"scheduler": {"type": "WarmupLR"}}, {}, ["scheduler", "--lr-scheduler"]),
    ({"curriculum_learning": {}}, {}, ["curriculum_learning: unsupported"]),
    ({"zero_optimization": {"stage": 4}}, {}, ["zero_optimization.stage", "got 4"]),
    ({"zero_optimization": {"stage": "2"}}, {}, ["zero_optimization.stage", 'got "2"']),
    ({"zero_optimization": {"stage": 2.0}}, {}, ["zero_optimization.stage", "got 2.0"]),
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


def test_what_deepspeed_refuses_is_told_in_one_line():
    pydantic = pytest.importorskip("pydantic")

    class Block(pydantic.BaseModel, extra="forbid"):
        size: int = 0

    with pytest.raises(pydantic.ValidationError) as caught:
        Block(size="many", nonsense=1)
    message = str(deepspeed_config.refusal(caught.value))
    assert re.search(r'--deepspeed: Block: size "many": .*; Block: nonsense 1: .*', message)


def test_the_device_is_fairseqs_whatever_another_job_has_left(monkeypatch):
    module = SimpleNamespace(ops=SimpleNamespace(__compatible_ops__={}))
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", MagicMock())
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    cfg = SimpleNamespace(
        distributed_training=SimpleNamespace(device_id=1), common=SimpleNamespace(fp16=False, bf16=False)
    )
    assert deepspeed_trainer._import_deepspeed(True, cfg) is module
    assert os.environ["LOCAL_RANK"] == "1"


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
