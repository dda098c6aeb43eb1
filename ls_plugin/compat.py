"""What fairseq 0.12 still expects of old releases of Python's world, given to it where it is gone; nothing installed is edited.

:func:`install` rebinds names in fairseq's modules, each only under the condition that needs it:

- ``--bf16``, ``--memory-efficient-bf16``: fairseq takes them for a TPU run, which they are not without torch_xla.
- ``--num-batch-buckets``, ``--sample-break-mode eos`` and others: names that numpy has removed.
- ``--encoder-layers-to-keep``, ``--decoder-layers-to-keep``: fairseq's parser makes lists where its models expect strings, and
  loading would prune the checkpoint of a pruned model once more.
- ``--lr-scheduler polynomial_decay``: fairseq's parser does not know that ``--total-num-update`` is ``--max-update`` where it is not given.
- ``--fp16 --cpu``: the flat fp32 copy is made on the current CUDA device, and so is the norm of gradients that overflowed.
- ``--save-async`` is refused: it saves nothing to resume from.
- Reading ahead: the thread that prepares batches is still at it when a run ends by ``--max-update``; it is stopped before the process
  ends, for Python's shutdown in the middle of torch's code aborts ("terminate called without an active exception", status 134).
"""

import atexit
import contextlib
import functools
import importlib.util
import inspect
import queue
import re
import time
import types
import weakref
from argparse import ArgumentParser, Namespace

import numpy as np
import torch
from fairseq import checkpoint_utils, options, trainer
from fairseq.data import data_utils, iterators, language_pair_dataset, token_block_dataset
from fairseq.modules import dynamic_crf_layer
from fairseq.optim.fp16_optimizer import _FP16OptimizerMixin
from omegaconf import DictConfig, open_dict

from ls_plugin.errors import UnsupportedError
from ls_plugin.rebinding import wrap

# fairseq's modules that use a name which some numpy has removed
_MODULES_WITH_OLD_NUMPY = (data_utils, language_pair_dataset, token_block_dataset, dynamic_crf_layer)
_SIDES = ("encoder", "decoder")
_STOP_SECONDS = 10.0  # for reading ahead to end with the batch that it is at

# The threads that read ahead.
_consumers: weakref.WeakSet = weakref.WeakSet()


def install() -> None:
    """Makes fairseq run on this Python, numpy and torch.  Calling it again changes nothing."""
    wrap(options, "parse_args_and_arch", _parse_args_and_arch)
    wrap(checkpoint_utils, "prune_state_dict", _prune_state_dict)
    wrap(iterators.BufferedIterator, "_create_consumer", _create_consumer)
    wrap(_FP16OptimizerMixin, "build_fp32_params", _build_fp32_params)
    trainer.torch = Overlay(torch, {"tensor": _tensor})
    atexit.unregister(_stop_consumers)
    atexit.register(_stop_consumers)  # what is registered last runs first: before the data loader's own end
    removed = _removed_from_numpy()
    if removed:
        for module in _MODULES_WITH_OLD_NUMPY:
            module.np = Overlay(np, removed)


class Overlay(types.ModuleType):
    """A module, and the given names in it: what fairseq sees in the module's place."""

    def __init__(self, module: types.ModuleType, names: dict):
        super().__init__(module.__name__, module.__doc__)
        vars(self).update(names)
        self._module = module

    def __getattr__(self, name: str):
        return getattr(self._module, name)


# --- command line


def _parse_args_and_arch(stock, parser: ArgumentParser, input_args=None, parse_known: bool = False, **kwargs):
    parsed = stock(parser, input_args, parse_known, **kwargs)
    args = parsed[0] if parse_known else parsed
    if getattr(args, "tpu", False) and importlib.util.find_spec("torch_xla") is None:
        if getattr(parser.parse_known_args(input_args)[0], "tpu", False):  # what the user said
            raise UnsupportedError("--tpu: must have torch_xla, which is not installed; install it, or drop the flag")
        args.tpu = False
    if getattr(args, "write_checkpoints_asynchronously", False):
        raise UnsupportedError(
            "--write-checkpoints-asynchronously, --save-async: unsupported, since it writes no checkpoint_last.pt to resume from, and a run that is "
            "killed leaves half a file; drop the flag"
        )
    for side in _SIDES:
        layers = getattr(args, f"{side}_layers_to_keep", None)
        if isinstance(layers, list):
            setattr(args, f"{side}_layers_to_keep", ",".join(map(str, layers)))
    if getattr(args, "total_num_update", 0) is None:
        args.total_num_update = args.max_update
    return parsed


# --- fp16 on the CPU


def _build_fp32_params(stock, args, params, flatten: bool = True):
    """The fp32 copy of the parameters; for ``flatten`` (N,) by device index, which is None on the CPU and on the meta device."""
    if not flatten or params[0].device.type == "cuda":
        return stock(args, params, flatten)
    flat = torch.nn.Parameter(torch.cat([p.detach().float().flatten() for p in params]))
    flat.grad = torch.zeros_like(flat)
    return {params[0].device.index: flat}


def _tensor(*args, **kwargs) -> torch.Tensor:
    """torch.tensor for the trainer, which moves what it makes to a GPU, whether there is one or not."""
    made = torch.tensor(*args, **kwargs)
    if not torch.cuda.is_available():
        made.cuda = made.cpu
    return made


# --- reading ahead


def _create_consumer(stock, self) -> None:
    stock(self)
    _consumers.add(self._consumer)


def _stop_consumers() -> None:
    """Ends the threads that read ahead, after the batch that each is at."""
    deadline = time.monotonic() + _STOP_SECONDS
    for consumer in list(_consumers):
        consumer._max_len = 0  # reached with the next batch
        while consumer.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                consumer._queue.get_nowait()  # it may be waiting for room
            consumer.join(0.01)


# --- layers to keep


def _prune_state_dict(stock, state_dict: dict, model_cfg: Namespace | DictConfig | None) -> dict:
    """Prunes each side of a model (encoder, decoder) unless nothing is to be pruned there.

    A side that holds as many layers as are kept was pruned and renumbered before it was saved. A side for which no layers are named
    keeps all of them; fairseq would drop them when the other side has some named.
    """
    kept = {side: getattr(model_cfg, f"{side}_layers_to_keep", None) for side in _SIDES}
    if any(kept.values()):
        with open_dict(model_cfg) if isinstance(model_cfg, DictConfig) else contextlib.nullcontext():
            for side, layers in kept.items():
                n_layers = _n_layers(state_dict, side)
                if n_layers and (not layers or len(layers.split(",")) == n_layers):
                    setattr(model_cfg, f"{side}_layers_to_keep", ",".join(map(str, range(n_layers))))
    return stock(state_dict, model_cfg)


def _n_layers(state_dict: dict, side: str) -> int:
    numbers = (re.match(rf"{side}.*\.layers\.(\d+)\.", name) for name in state_dict)
    return len({match[1] for match in numbers if match})


# --- numpy


def _removed_from_numpy() -> dict:
    """What fairseq uses and this numpy no longer has, by name."""
    removed: dict = {}
    if not hasattr(getattr(np, "compat", None), "long"):  # until 1.26
        removed["compat"] = types.SimpleNamespace(long=int)
    if tuple(map(int, np.__version__.split(".")[:2])) >= (1, 24):
        removed["float"] = float
    if "interpolation" not in inspect.signature(np.percentile).parameters:  # until 2.3
        removed["percentile"] = _percentile
    return removed


@functools.wraps(np.percentile)
def _percentile(*args, interpolation: str | None = None, **kwargs):
    return np.percentile(*args, **kwargs, **({"method": interpolation} if interpolation else {}))
