"""Resuming in another precision or layout than the one that was saved, with every optimizer of fairseq.

:func:`install` rebinds what stands in the way of it:

- An optimizer takes its state from the flat entry of ``--fp16`` as from the list of the other modes (``ls_plugin.optim.state``). The loss scale is
  taken where one was saved.
- fairseq compares the class of the optimizer with the one that was saved, and the class tells the precision too: FairseqAdam,
  FP16Optimizer, MemoryEfficientFP16Optimizer, AMPOptimizer. For these it is the name given to ``--optimizer`` that must agree.
- The figures of the log are saved as numbers: on the way to the log ls keeps them as tensors on the device, which stock cannot round.
- ``--store-ema`` from a checkpoint without an EMA starts from the weights, which fairseq has deleted by then.
"""

import contextvars
import logging
from collections.abc import Callable, Iterable

from fairseq import checkpoint_utils
from fairseq.optim import FairseqOptimizer
from fairseq.optim.fp16_optimizer import _FP16OptimizerMixin, _MemoryEfficientFP16OptimizerMixin
from fairseq.trainer import Trainer
from torch import Tensor

from ls_plugin.checkpoint import map_tensors
from ls_plugin.errors import CheckpointError
from ls_plugin.names import stock_name
from ls_plugin.optim.state import SCALE, to_flat, to_list, unscaled
from ls_plugin.rebinding import wrap

logger = logging.getLogger(__name__)

_SAVED_OPTIMIZER = (
    "ls_saved_optimizer"  # in the optimizer's history while it is loaded: --optimizer of the run that saved it
)
_WRAPPERS = frozenset(("FP16Optimizer", "MemoryEfficientFP16Optimizer", "AMPOptimizer"))

# The trainer that loads a checkpoint, and whether without the optimizer's state.
_loading: contextvars.ContextVar[tuple[Trainer, bool] | None] = contextvars.ContextVar("loading", default=None)


def install() -> None:
    """Makes fairseq resume across precisions.  Calling it again changes nothing."""
    wrap(FairseqOptimizer, "load_state_dict", _load_list)
    wrap(_MemoryEfficientFP16OptimizerMixin, "load_state_dict", _load_list)
    wrap(_FP16OptimizerMixin, "load_state_dict", _load_flat)
    wrap(Trainer, "state_dict", _state_dict)
    wrap(Trainer, "load_checkpoint", _load_checkpoint)
    wrap(Trainer, "_build_optimizer", build_and_compare)
    wrap(checkpoint_utils, "load_checkpoint_to_cpu", _load_checkpoint_to_cpu)


# --- the optimizer's state


def _load_list(stock, self, state_dict: dict, optimizer_overrides=None):
    return stock(self, _fitted(self, state_dict, to_list, self.params), optimizer_overrides)


def _load_flat(stock, self, state_dict: dict, optimizer_overrides=None):
    # A list is the business of the optimizer within; several flat ones are those of --pipeline-model-parallel.
    if self.has_flat_params and len(list(self.fp32_optimizer.params)) == 1:
        state_dict = _fitted(self, state_dict, to_flat, self.fp16_params)
    return stock(self, state_dict, optimizer_overrides)


def _fitted(optimizer: FairseqOptimizer, state_dict: dict, convert: Callable, params: Iterable[Tensor]) -> dict:
    """A saved state as ``optimizer`` keeps it."""
    if not {"state", "param_groups"} <= state_dict.keys():
        return state_dict  # of several optimizers, by name (--optimizer composite)
    state_dict = convert(state_dict, [p.shape for p in params])
    state = state_dict["state"]
    has_scales = any(name.endswith(SCALE) for entry in state.values() for name in entry)
    needs_scales = getattr(optimizer.optimizer, "use_fp16_stats", False)
    if needs_scales and state and not has_scales:
        raise CheckpointError(
            "--fp16-adam-stats: the saved state must have been written with this flag, and both runs with --fp16 or both without it, since the "
            "scales of its fp16 moments cannot be made afterwards; drop the flag, or resume with --reset-optimizer"
        )
    if has_scales and not needs_scales:
        state_dict = {**state_dict, "state": {key: unscaled(entry) for key, entry in state.items()}}
    return state_dict


# --- the trainer


def _state_dict(stock, self) -> dict:
    state = stock(self)
    extra_state = state["extra_state"]
    extra_state["metrics"] = map_tensors(lambda x: x.item() if x.numel() == 1 else x, extra_state["metrics"])
    return state


def _load_checkpoint(stock, self, filename, reset_optimizer=False, *args, **kwargs):
    token = _loading.set((self, reset_optimizer))
    try:
        return stock(self, filename, reset_optimizer, *args, **kwargs)
    finally:
        _loading.reset(token)
        for entry in self._optim_history or ():
            entry.pop(_SAVED_OPTIMIZER, None)


def _load_checkpoint_to_cpu(stock, *args, **kwargs) -> dict:
    """Runs on rank 0 alone, and what is added to the state reaches the others with it."""
    state = stock(*args, **kwargs)
    if _loading.get() is not None:
        trainer, reset_optimizer = _loading.get()
        if not reset_optimizer and state.get("last_optimizer_state") is not None and state.get("cfg") is not None:
            state["optimizer_history"][-1][_SAVED_OPTIMIZER] = _name_of(state["cfg"].optimizer)
        if trainer.cfg.ema.store_ema and "ema" not in state["extra_state"]:
            logger.info("the checkpoint holds no EMA, which starts from the weights")
            state["extra_state"]["ema"] = state["model"]
        _forget_figures(state["extra_state"], trainer.cfg)
    return state


def _forget_figures(extra_state: dict, cfg) -> None:
    """Takes out what this run will not log: it would stand there as null in every line of the log."""
    logged = {"loss_scale": cfg.common.fp16 or cfg.common.amp, "ema_decay": cfg.ema.store_ema}
    for name, figures in extra_state.get("metrics", {}).items():
        extra_state["metrics"][name] = [figure for figure in figures if logged.get(figure[1], True)]


def build_and_compare(stock, self) -> None:
    """Between building the optimizer and comparing its class with the saved one, calls the saved one the same if only the precision differs.

    Raises:
        CheckpointError: another --optimizer saved the state; under fairseq's wrappers for 16 bits the classes would not tell.
    """
    stock(self)
    if not self._optim_history:
        return
    last, built = self._optim_history[-1], type(self.optimizer).__name__
    saved, current = last.get(_SAVED_OPTIMIZER), _name_of(self.cfg.optimizer)
    if saved is None or _WRAPPERS.isdisjoint((last["optimizer_name"], built)):
        return
    if _kind_of_state(saved) != _kind_of_state(current):
        raise CheckpointError(
            f"--optimizer {current}: the checkpoint holds the state of --optimizer {saved}; train on with that one, or with --reset-optimizer"
        )
    if last["optimizer_name"] != built:
        logger.info("the optimizer was saved as %s and goes on as %s", last["optimizer_name"], built)
        last["optimizer_name"] = built


def _kind_of_state(optimizer: str) -> str:
    return {"cpu_adam": "adam"}.get(stock_name(optimizer), stock_name(optimizer))


def _name_of(optimizer_cfg) -> str | None:
    return getattr(optimizer_cfg, "_name", None)
