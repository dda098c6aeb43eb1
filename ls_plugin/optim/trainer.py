"""fairseq's trainer under ``ls_adam``: no wait for the device between two log intervals, and checkpoints with the exact weights.

:func:`install` wraps methods of ``fairseq.trainer.Trainer``. Each does what stock's does for every other optimizer.

A training step of stock's reads some ten numbers from the device: whether the norm is finite (twice), and what it logs, rounded, which
nobody looks at between two log intervals. Here numbers stay on the device until they are shown. A norm that is not finite makes the
update itself do nothing; with fp16 the trainer learns of that when the update is launched (fairseq's count of updates depends on it),
in other precisions at the next log interval, or before the next checkpoint, and training ends as in stock. On a CPU nothing has to be
waited for, so it ends at once.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping

import torch
from fairseq import checkpoint_utils, utils
from fairseq.file_io import PathManager
from fairseq.logging import metrics
from fairseq.nan_detector import NanDetector
from fairseq.trainer import Trainer
from torch import Tensor

from ls_plugin import host
from ls_plugin.errors import CheckpointError, UnsupportedError
from ls_plugin.optim import mixed_precision
from ls_plugin.optim.adam import FairseqAdam
from ls_plugin.rebinding import wrap

logger = logging.getLogger(__name__)

NAME = "ls_adam"
_CRASH = "crash.pt"  # fairseq's name for what a run that fails ends with
_OUT_OF_MEMORY = "out of memory"  # in the message of torch's RuntimeError
# What moves, shards or copies parameters by itself, or steps them in another way: the condition on the configuration, the flag, a remedy.
_REFUSED = (
    (lambda cfg: cfg.common.amp, "--amp", "--fp16 or --bf16 do the same with exact fp32 masters"),
    (
        lambda cfg: cfg.distributed_training.ddp_backend == "fully_sharded",
        "--ddp-backend fully_sharded",
        "lightseq-train --deepspeed shards",
    ),
    (lambda cfg: cfg.distributed_training.ddp_backend == "slowmo", "--ddp-backend slowmo", "take pytorch_ddp"),
    (
        lambda cfg: cfg.distributed_training.zero_sharding != "none",
        "--zero-sharding",
        "lightseq-train --deepspeed shards",
    ),
    (lambda cfg: cfg.optimization.use_bmuf, "--use-bmuf", "drop it"),
)


def install() -> None:
    """Wraps the trainer's methods.  Calling it again changes nothing."""
    mixed_precision.install()
    wrap(Trainer, "_build_optimizer", _build_optimizer)
    wrap(Trainer, "train_step", _train_step)
    wrap(Trainer, "_set_seed", _set_seed)
    wrap(Trainer, "state_dict", _state_dict)
    wrap(Trainer, "load_checkpoint", _load_checkpoint)
    wrap(Trainer, "save_checkpoint", _save_one_checkpoint)
    wrap(Trainer, "lr_step", _lr_step)
    wrap(NanDetector, "__init__", _watch_forward)
    wrap(checkpoint_utils, "save_checkpoint", _save_checkpoint)


def _is_asked_for(trainer: Trainer) -> bool:
    return getattr(trainer.cfg.optimizer, "_name", None) == NAME


def _is_ours(trainer: Trainer) -> bool:
    return isinstance(trainer.optimizer, FairseqAdam)


# --- building


def refuse_unsupported(cfg) -> None:
    """Raises UnsupportedError for what ``ls_adam`` does not work with, if the whole configuration asks for that optimizer."""
    if getattr(cfg.optimizer, "_name", None) != NAME:
        return
    for is_set, flag, remedy in _REFUSED:
        if is_set(cfg):
            raise UnsupportedError(f"--optimizer {NAME}: {flag} is unsupported; {remedy}, or use --optimizer adam")


def _build_optimizer(stock, self) -> None:
    refuse_unsupported(self.cfg)
    stock(self)
    if _is_ours(self):
        self.optimizer.waits_before_step = False
        self._norms = []  # of the updates since the last look at them
        self._last_zeros = None  # see _accumulate


# --- a training step


def _train_step(stock, self, samples, raise_oom=False):
    if not _is_ours(self):
        return stock(self, samples, raise_oom)
    with metrics.aggregate("train"):
        return _step(self, samples, raise_oom)


def _step(self, samples: list, raise_oom: bool) -> Mapping | None:
    """One update from a list of batches; returns what is logged, or None where there was no update."""
    self._set_seed()
    self.model.train()
    self.criterion.train()
    self.zero_grad()
    metrics.log_start_time("train_wall", priority=800, round=0)

    accumulated = _accumulate(self, samples, raise_oom)
    if accumulated is None:
        return None
    logging_outputs, sample_size, is_dummy = accumulated
    if self._sync_stats():
        train_time = self._local_cumulative_training_time()
        logging_outputs, (sample_size, train_time) = _sum_over_ranks(
            self, logging_outputs, (sample_size, train_time), is_dummy
        )
        self._cumulative_training_time = train_time / self.data_parallel_world_size

    output = None
    try:
        grad_norm = _update(self, sample_size)
        self._norms.append(grad_norm)
        n_updates = self.get_num_updates() + 1
        if not host.waits_for(grad_norm.device) or n_updates % self.cfg.common.log_interval == 0:
            _check_norms(self, n_updates)
    except OverflowError as overflow:
        logger.info("NOTE: gradient overflow detected, ignoring gradient, %s", overflow)
        _name_overflows(self)
        self.zero_grad()
    except FloatingPointError as error:
        _save_crash(self, error)
        _name_modules(self, samples)
        raise
    except RuntimeError as error:
        if _OUT_OF_MEMORY in str(error):
            self._log_oom(error)
            logger.error("OOM during optimization, irrecoverable")
        raise
    else:
        self.set_num_updates(self.get_num_updates() + 1)
        _step_ema(self)
        log_memory(self)
        output = _log(self, logging_outputs, sample_size, grad_norm)
    if self.cfg.common.fp16:
        metrics.log_scalar("loss_scale", self.optimizer.scaler.loss_scale, priority=700, round=4, weight=0)
    metrics.log_stop_time("train_wall")
    return output


def _set_seed(stock, self) -> None:
    """Stock's; on a CPU without the generators of all other devices, for which torch formats the stack that a late start would need."""
    if _is_ours(self) and self.device.type == "cpu":
        torch.default_generator.manual_seed(self.cfg.common.seed + self.get_num_updates())
    else:
        stock(self)


def _accumulate(self, samples: list, raise_oom: bool) -> tuple[list[dict], float | Tensor, bool] | None:
    """Forward and backward of every batch: (logging outputs, sample size, whether they are a dummy's, to be counted as 0).

    None where memory ran out and no other rank goes on. Where others do, this rank's share of the update is 0.
    """
    logging_outputs, sample_size, ran_out = [], 0.0, False
    # Ranks must agree on names, and on what lies on the device: a logging output, and a sample size of 0 like the criterion's.
    zeros = None
    ema = (
        {"ema_model": self.ema.get_model()} if self.cfg.ema.store_ema and getattr(self.task, "uses_ema", False) else {}
    )
    for i, sample in enumerate(samples):
        sample, is_dummy = self._prepare_sample(sample)
        postpones = self.data_parallel_world_size > 1 and hasattr(self.model, "no_sync") and i < len(samples) - 1
        try:
            with self.model.no_sync() if postpones else contextlib.nullcontext():
                _, batch_size, logging_output = self.task.train_step(
                    sample=sample,
                    model=self.model,
                    criterion=self.criterion,
                    optimizer=self.optimizer,
                    update_num=self.get_num_updates(),
                    ignore_grad=is_dummy,
                    **ema,
                )
            zeros = logging_output, batch_size * 0
            if not is_dummy:
                logging_outputs.append(logging_output)
                sample_size = sample_size + batch_size
            if self.cuda and self.get_num_updates() == 0:
                torch.cuda.empty_cache()  # the first batch leaves the most fragments
        except RuntimeError as error:
            if _OUT_OF_MEMORY not in str(error):
                raise
            self._log_oom(error)
            zeros = zeros or self._last_zeros
            if raise_oom or (zeros is None and self.data_parallel_world_size > 1):
                raise
            ran_out = True
        except Exception:
            _save_crash(self)
            raise
        if ran_out:
            # Outside of the handler, whose exception holds the frames of the forward pass and what they allocated.
            logger.warning("attempting to recover from OOM in forward/backward pass")
            ran_out = False
            self.zero_grad()
            if self.cuda:
                torch.cuda.empty_cache()
            if self.data_parallel_world_size == 1:
                return None
            logging_outputs, sample_size = [], 0.0
    self._last_zeros = zeros
    is_dummy = not logging_outputs
    if is_dummy:
        logging_outputs, sample_size = [zeros[0]], zeros[1]
    return logging_outputs, sample_size.float() if torch.is_tensor(sample_size) else float(sample_size), is_dummy


def _sum_over_ranks(self, logging_outputs: list[dict], extra: tuple, is_dummy: bool) -> tuple[list[dict], list]:
    """What was logged, and further numbers, summed over all ranks; a dummy's outputs count as 0.

    Stock sends everything by way of the device, from which the host's numbers then are read again and again. Here they go from host to
    host, and only what lies on the device goes there.
    """
    if self.cfg.common.model_parallel_size > 1 or not self.task.logging_outputs_can_be_summed(self.get_criterion()):
        return self._aggregate_logging_outputs(logging_outputs, *extra, ignore=is_dummy)
    values = {key: sum(log[key] for log in logging_outputs if key in log) for key in logging_outputs[0]}
    if is_dummy:
        values = {key: torch.zeros_like(value) if torch.is_tensor(value) else 0 for key, value in values.items()}
    values.update(enumerate(extra))
    device = {key: value for key, value in values.items() if torch.is_tensor(value)}
    numbers = {key: value for key, value in values.items() if key not in device}
    if device:
        totals = torch.stack([value.reshape(()).to(self.device, torch.float64) for value in device.values()])
        torch.distributed.all_reduce(totals, group=self.data_parallel_process_group)
        values.update(zip(device, totals.unbind(), strict=True))
    totals = torch.tensor(list(numbers.values()), dtype=torch.float64)
    torch.distributed.all_reduce(totals, group=_host_group(self))
    values.update(zip(numbers, totals.tolist(), strict=True))
    return [{key: values[key] for key in logging_outputs[0]}], [values[i] for i in range(len(extra))]


def _host_group(trainer: Trainer):
    """The trainer's ranks, to send from host to host."""
    group = trainer.data_parallel_process_group
    if "gloo" in torch.distributed.get_backend(group):
        return group
    if not hasattr(trainer, "_gloo_group"):  # kept nowhere else, so that it ends with the run (distributed/launch.py)
        ranks = torch.distributed.get_process_group_ranks(group)
        trainer._gloo_group = torch.distributed.new_group(ranks, backend="gloo")
    return trainer._gloo_group


def _update(self, sample_size: float | Tensor) -> Tensor:
    """Reduces the gradients over ranks, scales, clips and applies them.  Returns their norm, on the device."""
    with torch.autograd.profiler.record_function("reduce-grads"):
        self.optimizer.all_reduce_grads(self.model)
        if utils.has_parameters(self.criterion):
            self.optimizer.all_reduce_grads(self.criterion)
    with torch.autograd.profiler.record_function("multiply-grads"):
        # Ranks were averaged. Without any token the gradients are 0 already.
        n_tokens = sample_size + (sample_size == 0)
        self.optimizer.multiply_grads(self.data_parallel_world_size / n_tokens)
    with torch.autograd.profiler.record_function("clip-grads"):
        grad_norm = self.clip_grad_norm(self.cfg.optimization.clip_norm)
    with torch.autograd.profiler.record_function("optimizer"):
        self.task.optimizer_step(self.optimizer, model=self.model, update_num=self.get_num_updates())
    return grad_norm


def _step_ema(self) -> None:
    if self.cfg.ema.store_ema:
        self.ema.step(_Exact(self.get_model(), self.optimizer), self.get_num_updates())
        metrics.log_scalar("ema_decay", self.ema.get_decay(), priority=10000, round=5, weight=0)


class _Exact:
    """What the moving average takes of a model, with the masters instead of its 16-bit parameters."""

    def __init__(self, model, optimizer: FairseqAdam):
        self._model, self._optimizer = model, optimizer

    def state_dict(self) -> dict:
        return self._optimizer.optimizer.with_masters(self._model.state_dict())


def log_memory(self: Trainer) -> None:
    """Logs the least free memory of the GPU during the update, and empties torch's cache as often as ``--empty-cache-freq`` says."""
    if self.cuda and self.cuda_env is not None:
        used = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
        metrics.log_scalar("gb_free", self.cuda_env.total_memory_in_GB - used, priority=1500, round=1, weight=0)
        frequency = self.cfg.common.empty_cache_freq
        if frequency > 0 and (self.get_num_updates() + frequency - 1) % frequency == 0:
            torch.cuda.empty_cache()


def _log(self, logging_outputs: list, sample_size: float | Tensor, grad_norm: Tensor) -> Mapping:
    metrics.log_speed("ups", 1.0, priority=100, round=2)
    metrics.log_scalar("gnorm", grad_norm, priority=400, round=3)
    clip_norm = self.cfg.optimization.clip_norm
    if clip_norm > 0:
        metrics.log_scalar("clip", (grad_norm > clip_norm) * 100.0, priority=500, round=1)
    with metrics.aggregate() as meters:
        self.task.reduce_metrics(logging_outputs, self.get_criterion())
        if "loss" not in meters:
            if "loss" not in self._warn_once:
                self._warn_once.add("loss")
                logger.warning("the criterion's reduce_metrics did not log a 'loss', which some functions need")
            metrics.log_scalar("loss", -1)
    return _Values(meters, sample_size)


class _Values(Mapping):
    """What stock's train_step returns, as numbers that are read from the device when somebody looks at them."""

    def __init__(self, meters, sample_size: float | Tensor):
        self._meters, self._sample_size = meters, sample_size
        self._known: dict | None = None

    def _values(self) -> dict:
        if self._known is None:
            hidden = ("ppl", "wps", "wpb", "bsz")  # as in stock
            values = {key: value for key, value in self._meters.get_smoothed_values().items() if key not in hidden}
            self._known = {**values, "sample_size": self._sample_size}
        return self._known

    def __getitem__(self, key: str):
        return self._values()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())


# --- gradients that are not finite


def _check_norms(self, n_updates: int) -> None:
    """Ends training if a norm since the last look was not finite, or ranks differ; ``n_updates`` counts the last of them.

    Raises:
        FloatingPointError: says which update it was. It changed nothing.
    """
    norms, self._norms = self._norms, []
    self._check_grad_norms(norms[-1].nan_to_num(0.0, 0.0))  # stock calls what is not finite inconsistent
    finite = torch.stack([norm.reshape(()) for norm in norms]).isfinite().tolist()
    if not all(finite):
        failed = n_updates - len(finite) + 1 + finite.index(False)
        raise FloatingPointError(
            f"gradients are Nan/Inf at update {failed}, which left the weights as they were; lower --lr, lengthen --warmup-updates, or "
            "set --clip-norm"
        )


def _check_norms_not_seen(self) -> None:
    """The same for updates since the last log interval, of which there are some where the host waits for the device."""
    if not vars(self).get("_norms"):  # an attribute of no other trainer; a mock would make one up
        return
    try:
        _check_norms(self, self.get_num_updates())
    except FloatingPointError as error:
        _save_crash(self, error)
        raise


def _save_checkpoint(stock, cfg, trainer, *args, **kwargs):
    """Called on every rank, before a run ends by its updates, its time or its patience too, with ``--no-save`` as well."""
    _check_norms_not_seen(trainer)
    return stock(cfg, trainer, *args, **kwargs)


def _lr_step(stock, self, *args, **kwargs):
    """Ends an epoch, the last one too."""
    _check_norms_not_seen(self)
    return stock(self, *args, **kwargs)


def _name_overflows(self) -> None:
    for name, p in zip(getattr(self, "param_names", ()), self.optimizer.params, strict=False):  # --debug-param-names
        if p.grad is not None and not p.grad.isfinite().all():
            logger.info("overflow in param %s", name)


def _name_modules(self, samples: list) -> None:
    """Logs which parameters' gradients are not finite, and which module's output is not finite first, on these batches."""
    names = [
        name for name, p in self.get_model().named_parameters() if p.grad is not None and not p.grad.isfinite().all()
    ]
    if names:
        logger.warning("gradients are not finite in %d parameters: %s", len(names), ", ".join(names[:8]))
    self.zero_grad()
    self._set_seed()
    with NanDetector(self.get_model()), torch.no_grad():
        for sample in samples:
            sample, _ = self._prepare_sample(sample)
            self.criterion(self.model, sample)


def _watch_forward(stock, self, model, forward=True, backward=True) -> None:
    """Without the detector's hooks on the backward pass, which end in StopIteration at an encoder's output and hide why training ended."""
    stock(self, model, forward, backward=False)


def _save_crash(self, diverged: FloatingPointError | None = None) -> None:
    """Saves what a run ends with, and adds to the message of a run that diverged whether that could be written."""
    self.consolidate_optimizer()
    written = self.save_checkpoint(os.path.join(self.cfg.checkpoint.save_dir, _CRASH), {})
    if diverged is not None and written is not None:  # None: another rank writes
        diverged.args = (f"{diverged}; {f'the weights are in {_CRASH}' if written else f'{_CRASH} cannot be written'}",)


def _save_one_checkpoint(stock, self, filename, *args, **kwargs):
    """Stock's; False for a ``crash.pt`` that cannot be written. The error of training that it is written for must not be hidden by that."""
    if os.path.basename(filename) != _CRASH:
        return stock(self, filename, *args, **kwargs)
    cause = sys.exc_info()[1]
    try:
        return stock(self, filename, *args, **kwargs)
    except CheckpointError as error:
        logger.error("training ends at update %d: %s", self.get_num_updates() + 1, cause)
        logger.error("%s", error)
        return False


# --- checkpoints


def _state_dict(stock, self) -> dict:
    """Stock's, with the exact masters as the weights of 16-bit models (stock saves those in fp32 as well, but rounded)."""
    state = stock(self)
    if _is_ours(self):
        for part in ("model", "criterion"):
            if state[part] is not None:
                state[part] = self.optimizer.optimizer.with_masters(state[part])
    return state


def _load_checkpoint(stock, self, filename, *args, **kwargs):
    """Loads the weights of a 16-bit model in full: they lie in the model as fp32 until the optimizer takes them over."""
    dtype = torch.float16 if self.cfg.common.fp16 else torch.bfloat16 if self.cfg.common.bf16 else None
    if not _is_asked_for(self) or dtype is None or not PathManager.isfile(filename):
        return stock(self, filename, *args, **kwargs)
    modules = (self._model, self._criterion)
    params = [p for module in modules for p in module.parameters() if p.dtype == dtype and p.requires_grad]
    for p in params:
        p.data = p.data.float()
    extra_state = stock(self, filename, *args, **kwargs)
    if any(p.dtype == torch.float32 for p in params):
        self._build_optimizer()  # a reset one
    return extra_state
