"""apex and --amp. A package called apex: NVIDIA's serves stock fairseq as ever and nothing of ours; another one is never imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.optim import AMPOptimizer
from fairseq.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]

# What fairseq imports of NVIDIA's apex, without a GPU. Its FusedAdam counts steps per group.
NVIDIAS = {
    "amp_C.py": "def multi_tensor_l2norm(*args):\n    raise AssertionError('for GPUs')\n",
    "apex/__init__.py": "",
    "apex/multi_tensor_apply/__init__.py": "class multi_tensor_applier:\n    available = True\n",
    "apex/normalization/__init__.py": """
import torch

class FusedLayerNorm(torch.nn.Module):
    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True):
        super().__init__()
        self.normalized_shape, self.eps = torch.Size([normalized_shape]), eps
        self.weight = torch.nn.Parameter(torch.ones(normalized_shape))
        self.bias = torch.nn.Parameter(torch.zeros(normalized_shape))

    def forward(self, x):
        return torch.nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
""",
    "apex/optimizers/__init__.py": """
import torch

class FusedAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        defaults = dict(lr=lr, bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, defaults)
        self.multi_tensor_adam, self.adam_w_mode = object(), 1
""",
}
USES = """
import json
from unittest import mock

import ls_plugin
import torch
from fairseq import optim
from omegaconf import OmegaConf
from tests.models.families import FAMILIES, batch, build

def config(name):
    return OmegaConf.create({"_name": name, "adam_betas": "(0.9, 0.98)", "adam_eps": 1e-8, "weight_decay": 0.0,
                             "use_old_adam": False, "fp16_adam_stats": False, "tpu": False, "lr": [1e-3]})

def of_apex(model):
    return sum(isinstance(module, apex.normalization.FusedLayerNorm) for module in model.modules())

def optimizer(name):
    return type(optim.build_optimizer(config(name), [torch.nn.Parameter(torch.ones(3))]).optimizer).__name__

import apex.normalization
norms = {}
with mock.patch("torch.cuda.is_available", return_value=True):  # what fairseq asks before it takes apex
    models = {family: [build(family, ls) for ls in (False, True)] for family in FAMILIES}
    optimizers = [optimizer(name) for name in ("adam", "ls_adam")]
for family, pair in models.items():
    norms[family] = [of_apex(model) for model in pair]
    outputs = [model.eval()(**batch(family))[0] for model in pair]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
print(json.dumps({"optimizers": optimizers, "norms": norms}))
"""


def run(code, folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


def test_nvidias_apex_is_for_stock_alone(tmp_path):
    done = run(USES, tmp_path, NVIDIAS)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["optimizers"] == ["FusedAdamV2", "ContiguousAdam"]
    for family, (stock, ours) in told["norms"].items():
        assert stock > 0 and ours == 0, family


def test_another_apex_is_never_imported(tmp_path):
    """fairseq by itself dies of it: what it expects of an import that fails is an ImportError."""
    files = {"apex/__init__.py": "print('apex was imported')\nraise AttributeError('as under a newer pyramid')\n"}
    done = run("import ls_plugin, fairseq.optim.fused_adam as f; print(f.get_fused_adam_class())", tmp_path, files)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "None" and "apex was imported" not in done.stdout


@pytest.mark.parametrize("update_freq", ["1", "2"])
def test_amp_with_stocks_adam_trains_our_models(update_freq, tmp_path):
    """fairseq's --amp is autocast and torch's gradient scaler, both for GPUs: here the steps around them run."""
    losses = []
    flags = [
        "--task",
        "dummy_mt",
        "--dict-size",
        "96",
        "--src-len",
        "10",
        "--tgt-len",
        "9",
        "--batch-size",
        "4",
        "--cpu",
    ]
    flags += ["--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "32", "--decoder-embed-dim", "16"]
    flags += ["--decoder-ffn-embed-dim", "32", "--encoder-layers", "1", "--decoder-layers", "1", "--dropout", "0"]
    flags += ["--encoder-attention-heads", "2", "--decoder-attention-heads", "2", "--save-dir", str(tmp_path)]
    flags += ["--lr", "5e-3", "--clip-norm", "1.0", "--amp", "--optimizer", "adam", "--update-freq", update_freq]
    for prefix in ("", "ls_"):
        names = ["--arch", f"{prefix}transformer", "--criterion", f"{prefix}label_smoothed_cross_entropy"]
        arguments = options.parse_args_and_arch(options.get_training_parser(), [*flags, *names])
        cfg = convert_namespace_to_omegaconf(arguments)
        torch.manual_seed(1)
        task = tasks.setup_task(cfg.task)
        trainer = Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
        assert type(trainer.optimizer) is AMPOptimizer
        task.load_dataset("train")
        batch = task.dataset("train").collater([task.dataset("train")[i] for i in range(4)])
        with metrics.aggregate(new_root=True):
            trainer.begin_epoch(1)
            losses.append([trainer.train_step([batch] * int(update_freq))["loss"] for _ in range(4)])
        assert trainer.get_num_updates() == 4
    assert losses[1] == pytest.approx(losses[0], abs=2e-3) and losses[0][-1] < losses[0][0] - 0.1
