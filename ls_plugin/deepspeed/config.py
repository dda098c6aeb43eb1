"""The JSON of ``--deepspeed`` and fairseq's flags: one configuration, or an error that names every pair that disagrees."""

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

from ls_plugin.errors import UsageError

AUTO = "auto"  # a value of the JSON that the flags give
_OFFLOAD_DEVICES = ("none", "cpu")

# What this trainer hands on to DeepSpeed, which knows more; every other key is refused, for it would change what fairseq computes or logs,
# or has been tried by nobody.
_KEYS = {
    "bf16",
    "comms_logger",
    "communication_data_type",
    "csv_monitor",
    "dump_state",
    "flops_profiler",
    "fp16",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "memory_breakdown",
    "optimizer",
    "steps_per_print",
    "tensorboard",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "wall_clock_breakdown",
    "wandb",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization",
}
_WHY_NOT = {
    "scheduler": "the learning rate is fairseq's; use --lr-scheduler and its flags",
    "amp": "use --fp16 or --bf16",
    "bfloat16": "write bf16",
}
_BLOCK_KEYS = {
    "bf16": {"enabled", "check_grad_overflow"},
    "fp16": {
        "enabled",
        "loss_scale",
        "initial_scale_power",
        "loss_scale_window",
        "hysteresis",
        "consecutive_hysteresis",
        "min_loss_scale",
    },
    "optimizer": {"type", "params"},
}
_OPTIMIZER_PARAMS = {"lr", "betas", "eps", "weight_decay"}
# Parts of ZeRO that need DeepSpeed's own Adam, or leave out the norm that fairseq logs.
_ZERO_REFUSED = {"zenflow", "super_offload", "legacy_stage1"}

# fairseq's flags that mean nothing under DeepSpeed: (part of the configuration, field, value without the flag, what to do)
_GRADIENTS = "DeepSpeed reduces the gradients"
_SCALE = "the loss scale is DeepSpeed's; set it in the JSON's fp16 block"
_SHARDING = "ZeRO is set in the JSON's zero_optimization"
_FLAGS_REFUSED = (
    ("common", "amp", False, "use --fp16 or --bf16"),
    ("common", "memory_efficient_fp16", False, "use --fp16"),
    ("common", "memory_efficient_bf16", False, "use --bf16"),
    ("common", "fp16_no_flatten_grads", False, "the buffers are DeepSpeed's"),
    ("common", "fp16_init_scale", 2**7, _SCALE),
    ("common", "fp16_scale_window", None, _SCALE),
    ("common", "fp16_scale_tolerance", 0.0, _SCALE),
    ("common", "min_loss_scale", 1e-4, _SCALE),
    ("common", "threshold_loss_scale", None, _SCALE),
    ("common", "tpu", False, "DeepSpeed has no TPUs"),
    ("common", "model_parallel_size", 1, "only data parallel training is supported"),
    ("common", "quantization_config_path", None, "quantization replaces parameters that DeepSpeed holds"),
    ("distributed_training", "ddp_backend", "pytorch_ddp", _GRADIENTS),
    ("distributed_training", "ddp_comm_hook", "none", _GRADIENTS),
    ("distributed_training", "bucket_cap_mb", 25, "use zero_optimization.reduce_bucket_size, in elements"),
    ("distributed_training", "find_unused_parameters", False, _GRADIENTS),
    ("distributed_training", "gradient_as_bucket_view", False, _GRADIENTS),
    ("distributed_training", "broadcast_buffers", False, _GRADIENTS),
    ("distributed_training", "heartbeat_timeout", -1, "the watchdog is part of fairseq's own wrapper"),
    ("distributed_training", "pipeline_model_parallel", False, "only data parallel training is supported"),
    ("distributed_training", "zero_sharding", "none", _SHARDING),
    ("distributed_training", "no_reshard_after_forward", False, _SHARDING),
    ("distributed_training", "fp32_reduce_scatter", False, "use communication_data_type"),
    ("distributed_training", "cpu_offload", False, "use zero_optimization.offload_optimizer"),
    ("distributed_training", "use_sharded_state", False, "checkpoints are whole"),
    ("optimization", "use_bmuf", False, _GRADIENTS),
    ("ema", "store_ema", False, "ZeRO keeps no whole parameters to average"),
    ("optimizer", "use_old_adam", False, "the update is one kernel"),
    ("optimizer", "fp16_adam_stats", False, "moments are kept in fp32"),
)


def read(path: str) -> dict:
    """The JSON in a file.

    Raises:
        UsageError: no DeepSpeed here, no such file, or no JSON object in it.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise UsageError(
            "--deepspeed: must have DeepSpeed installed, which is not there; "
            "DS_BUILD_OPS=0 pip install --no-build-isolation 'ls_plugin[deepspeed]', or drop the flag"
        )
    try:
        config = json.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"--deepspeed {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # of its encoding, too
        raise UsageError(f"--deepspeed {path}: must be JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"--deepspeed {path}: must hold a JSON object, got a {type(config).__name__}")
    return config


def stage_of(config: dict) -> int:
    return config.get("zero_optimization", {}).get("stage", 0)


def resolve(given: dict, cfg) -> dict:
    """The configuration for DeepSpeed: what the JSON leaves out, or leaves to ``"auto"``, comes from the flags.

    Args:
        given: the JSON.  cfg: fairseq's whole configuration.
    Raises:
        UsageError: with all keys and flags that disagree, or that are not supported together.
    """
    resolution = _Resolution(copy.deepcopy(given), cfg)
    resolution.run()
    if resolution.faults:
        raise UsageError(f"--deepspeed: {'; '.join(resolution.faults)}")
    return _without_auto(resolution.config)


class _Resolution:
    def __init__(self, config: dict, cfg):
        self.config, self.cfg = config, cfg
        self.faults: list[str] = []

    def run(self) -> None:
        self._refuse_keys()
        if not self.faults:  # otherwise blocks may be of any type
            self._precision()
            self._zero()
            self._batches()
            self._optimizer()
            clip_norm = self.cfg.optimization.clip_norm
            self._fill(self.config, "", "gradient_clipping", clip_norm, f"--clip-norm {clip_norm}")
        self._refuse_flags()

    def _fill(self, block: dict, name: str, key: str, value: Any, flag: str) -> None:
        """Sets a value that the flags give; notes a fault if the JSON gives another."""
        given = block.get(key, AUTO)
        if given == AUTO:
            block[key] = value
        elif given != value or isinstance(given, bool) != isinstance(value, bool):
            self.faults.append(
                f"{name}{key} {json.dumps(given)} against {flag}; make them agree, or write {json.dumps(AUTO)}"
            )

    def _refuse_keys(self) -> None:
        for key in self.config:
            if key not in _KEYS:
                self.faults.append(f"{key}: unsupported, {_WHY_NOT.get(key, 'leave it out')}")
        for name in ("bf16", "fp16", "optimizer", "zero_optimization"):
            block = self.config.get(name, {})
            if not isinstance(block, dict):
                self.faults.append(f"{name}: must be an object, got {json.dumps(block)}")
                continue
            if not isinstance(block.get("params", {}), dict):
                self.faults.append(f"{name}.params: must be an object, got {json.dumps(block['params'])}")
            unknown = set(block) - _BLOCK_KEYS.get(name, set(block))
            self.faults += [f"{name}.{key}: unsupported, leave it out" for key in sorted(unknown)]

    def _precision(self) -> None:
        for name in ("fp16", "bf16"):
            enabled = bool(getattr(self.cfg.common, name))
            block = self.config.setdefault(name, {})
            if "enabled" not in block and len(block) > 0:
                block["enabled"] = AUTO
            self._fill(block, f"{name}.", "enabled", enabled, f"--{name}" if enabled else f"no --{name}")

    def _zero(self) -> None:
        zero = self.config.setdefault("zero_optimization", {})
        stage = zero.setdefault("stage", 0)
        if type(stage) is not int or stage not in (0, 1, 2, 3):
            self.faults.append(f"zero_optimization.stage: must be 0, 1, 2 or 3, got {json.dumps(stage)}")
            return
        for key, needed in (("offload_optimizer", 1), ("offload_param", 3)):
            block = zero.get(key) or {}
            device = block.get("device", "none") if isinstance(block, dict) else block
            if device not in _OFFLOAD_DEVICES:
                self.faults.append(f"zero_optimization.{key}.device: must be none or cpu, got {json.dumps(device)}")
            elif device == "cpu" and stage < needed:
                self.faults.append(f"zero_optimization.{key}: needs stage {needed} or more, got {stage}")
        self.faults += [
            f"zero_optimization.{key}: unsupported, leave it out" for key in sorted(_ZERO_REFUSED & set(zero))
        ]
        if zero.get("compute_grad_norm", True) is not True:
            self.faults.append("zero_optimization.compute_grad_norm: must be true, since --clip-norm needs the norm")
        if stage == 0:
            for name in ("fp16", "bf16"):
                if getattr(self.cfg.common, name):
                    self.faults.append(
                        f"zero_optimization.stage 0 against --{name}; use stage 1, which computes the same in less memory"
                    )
        if stage == 3:
            # Ranks would wait for each other in decoders that end at different steps, or in different layers.
            if getattr(self.cfg.task, "eval_bleu", False):
                self.faults.append("--eval-bleu: unsupported with zero_optimization.stage 3; use stage 2, or drop it")
            for flag in ("encoder_layerdrop", "decoder_layerdrop"):
                if getattr(self.cfg.model, flag, 0):
                    name = f"--{flag.replace('_', '-')}"
                    self.faults.append(f"{name}: unsupported with zero_optimization.stage 3; use stage 2, or drop it")
            if getattr(self.cfg.criterion, "fused_projection", None) == "always":
                self.faults.append(
                    "--fused-projection always: unsupported with zero_optimization.stage 3, which holds a part of the projection only; "
                    "drop it"
                )
        # The update is our own kernel on DeepSpeed's partitions, on the CPU, too.
        self.config["zero_allow_untested_optimizer"] = True
        self.config["zero_force_ds_cpu_optimizer"] = False

    def _batches(self) -> None:
        for key in ("train_batch_size", "train_micro_batch_size_per_gpu"):
            if self.config.get(key, AUTO) != AUTO:
                self.faults.append(
                    f"{key} {json.dumps(self.config[key])} against --max-tokens and --batch-size, which make the batches; "
                    f"write {json.dumps(AUTO)}"
                )
            self.config.pop(key, None)
        update_freq = list(self.cfg.optimization.update_freq)
        flag = f"--update-freq {','.join(map(str, update_freq))}"
        # The trainer says itself where an update ends; several frequencies are its business, too.
        value = update_freq[0] if len(set(update_freq)) == 1 else flag
        self._fill(self.config, "", "gradient_accumulation_steps", value, flag)
        self.config["gradient_accumulation_steps"] = max(update_freq)
        self.config["train_micro_batch_size_per_gpu"] = 1  # DeepSpeed wants a figure, for its own log
        if self.config.get("steps_per_print", AUTO) == AUTO:
            self.config["steps_per_print"] = 2**31  # fairseq logs

    def _optimizer(self) -> None:
        optimizer, options = self.config.pop("optimizer", {}), self.cfg.optimizer
        name = getattr(options, "_name", None)
        if name not in ("adam", "ls_adam"):
            self.faults.append(f"--optimizer {name}: unsupported; use ls_adam or adam")
            return
        kind = optimizer.get("type", AUTO)
        if str(kind).lower() not in ("adam", "adamw", AUTO):
            self.faults.append(f"optimizer.type {json.dumps(kind)} against --optimizer {name}; write AdamW")
        params = dict(optimizer.get("params", {}))
        self.faults += [
            f"optimizer.params.{key}: unsupported, leave it out" for key in sorted(set(params) - _OPTIMIZER_PARAMS)
        ]
        lr = self.cfg.optimization.lr[0]
        betas = list(adam_options(options)["betas"])
        self._fill(params, "optimizer.params.", "lr", lr, f"--lr {lr}")
        self._fill(params, "optimizer.params.", "betas", betas, f"--adam-betas '({betas[0]}, {betas[1]})'")
        self._fill(params, "optimizer.params.", "eps", options.adam_eps, f"--adam-eps {options.adam_eps}")
        decay = options.weight_decay
        self._fill(params, "optimizer.params.", "weight_decay", decay, f"--weight-decay {decay}")

    def _refuse_flags(self) -> None:
        for part, field, default, remedy in _FLAGS_REFUSED:
            value = getattr(getattr(self.cfg, part, None), field, default)
            value = getattr(value, "value", value)  # a choice is an Enum
            if value != default:
                shown = "" if value is True else f" {value}"
                self.faults.append(f"--{field.replace('_', '-')}{shown}: unsupported with --deepspeed, {remedy}")


def refusal(error: ValueError) -> UsageError:
    """What to raise for pydantic's error about a block that DeepSpeed itself checks."""
    faults = [
        f"{error.title}: {'.'.join(map(str, e['loc']))} {json.dumps(e['input'], default=str)}: {e['msg']}"
        for e in error.errors()
    ]
    return UsageError(f"--deepspeed: {'; '.join(faults)}; correct the JSON file")


def adam_options(options) -> dict:
    """betas, eps and weight_decay from the configuration of ``--optimizer adam``, where betas may be text."""
    betas = options.adam_betas
    if isinstance(betas, str):
        betas = json.loads(f"[{betas.strip('()[] ')}]")
    return {"betas": tuple(betas), "eps": options.adam_eps, "weight_decay": options.weight_decay}


def _without_auto(value):
    """The configuration without what is still ``"auto"``: DeepSpeed's own defaults hold there."""
    if isinstance(value, dict):
        return {key: _without_auto(member) for key, member in value.items() if member != AUTO}
    return value
