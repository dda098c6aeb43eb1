"""Resuming in another precision or layout than the one that was saved, with every optimizer of fairseq.

:func:`install` rebinds what stands in the way of it:

- An optimizer takes its state from the flat entry of ``--fp16`` as from the list of the other modes (``ls_plugin.optim.state``). The loss scale is
  taken where one was saved.
- fairseq compares the class of the optimizer with the one that was saved, and the class tells the precision too: FairseqAdam,
  FP16Optimizer, MemoryEfficientFP16Optimizer, AMPOptimizer. What is compared is the name of ``--optimizer`` where both are known.
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

from ls_plugin.errors import CheckpointError
from ls_plugin.names import stock_name
from ls_plugin.optim.state import SCALE, to_flat, to_list, unscaled
from ls_plugin.rebinding import wrap

logger = logging.getLogger(__name__)

_SAVED_OPTIMIZER = (
    "ls_saved_optimizer"  # in the optimizer's history while it is loaded: --optimizer of the run that saved it
)
_WRAPPERS = frozenset(("FP16Optimizer", "MemoryEfficientFP16Optimizer", "AMPOptimizer"))

_loading: contextvars.ContextVar[Trainer | None] = contextvars.ContextVar("loading", default=None)


def install() -> None:
    """Makes fairseq resume across precisions.  Calling it again changes nothing."""
    wrap(FairseqOptimizer, "load_state_dict", _load_list)
    wrap(_MemoryEfficientFP16OptimizerMixin, "load_state_dict", _load_list)
    wrap(_FP16OptimizerMixin, "load_state_dict", _load_flat)
    wrap(Trainer, "load_checkpoint", _load_checkpoint)
    wrap(Trainer, "_build_optimizer", _build_optimizer)
    wrap(checkpoint_utils, "load_checkpoint_to_cpu", _load_checkpoint_to_cpu)


# --- the optimizer's state


def _load_list(stock, self, state_dict: dict, optimizer_overrides=None):
    return stock(self, _fitted(self, state_dict, to_list, self.params), optimizer_overrides)


def _load_flat(stock, self, state_dict: dict, optimizer_overrides=None):
    if self.has_flat_params:  # the list is the business of the optimizer within
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


def _load_checkpoint(stock, self, *args, **kwargs):
    token = _loading.set(self)
    try:
        return stock(self, *args, **kwargs)
    finally:
        _loading.reset(token)
        for entry in self._optim_history or ():
            entry.pop(_SAVED_OPTIMIZER, None)


def _load_checkpoint_to_cpu(stock, *args, **kwargs) -> dict:
    """Runs on rank 0 alone, and what is added to the state reaches the others with it."""
    state = stock(*args, **kwargs)
    trainer = _loading.get()
    if trainer is not None:
        if state.get("cfg") is not None and state["optimizer_history"]:
            state["optimizer_history"][-1][_SAVED_OPTIMIZER] = _name_of(state["cfg"].optimizer)
        if trainer.cfg.ema.store_ema and "ema" not in state["extra_state"]:
            logger.info("the checkpoint holds no EMA, which starts from the weights")
            state["extra_state"]["ema"] = state["model"]
    return state


def _build_optimizer(stock, self) -> None:
    """Between building the optimizer and comparing its class with the saved one, calls the saved one the same if only the precision differs."""
    stock(self)
    if _loading.get() is not self or not self._optim_history:
        return
    last, built = self._optim_history[-1], type(self.optimizer).__name__
    saved, current = (stock_name(str(name)) for name in (last.get(_SAVED_OPTIMIZER), _name_of(self.cfg.optimizer)))
    if (
        saved == current
        and last["optimizer_name"] != built
        and not _WRAPPERS.isdisjoint((last["optimizer_name"], built))
    ):
        logger.info("the optimizer was saved as %s and goes on as %s", last["optimizer_name"], built)
        last["optimizer_name"] = built


def _name_of(optimizer_cfg) -> str | None:
    return getattr(optimizer_cfg, "_name", None)
