"""One training step of fairseq's, stock or ls, phase by phase; and which of the ops in it are kernels.

    forward    criterion with model          clip      multiply_grads, clip_grad_norm
    backward   optimizer.backward            update    zero_grad, optimizer.step

An optimizer that defers work pays for it in the phase that does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PHASES = ("forward", "backward", "clip", "update")
CLIP_NORM = 1.0


def build_trainer(arguments: Sequence[str], device: str | None = None) -> Trainer:
    """fairseq's trainer as a command line of fairseq-train sets it up, with model and optimizer in it.

    Args:
        device: "meta" builds the model there, without memory and values; None: on the device that the flags give.
    """
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), list(arguments)))
    torch.manual_seed(1)
    task = tasks.setup_task(cfg.task)
    if device is None:
        model = task.build_model(cfg.model)
    else:
        # fairseq's init_bert_params draws on the host, where a tensor without values cannot go.
        with torch.device(device), mock.patch.object(Tensor, "cpu", lambda t: t):
            model = task.build_model(cfg.model)
        model.to = _unless_elsewhere(model)
    trainer = Trainer(cfg, task, model, task.build_criterion(cfg.criterion))
    trainer.model.train()
    trainer.optimizer  # noqa: B018 (built when first asked for)
    return trainer


def _unless_elsewhere(model: torch.nn.Module):
    """``model.to`` that leaves the model on its device, from which the trainer would move it to the one of the flags."""

    def to(*args, device=None, **kwargs):
        return type(model).to(model, *args, **kwargs) if args or kwargs else model

    return to


def step(trainer: Trainer, sample: dict, zero_grad: bool = True) -> Iterator[str]:
    """One training step; gives the name of each phase as it ends ("update" at the start too, for zero_grad)."""
    optimizer = trainer.optimizer
    if zero_grad:
        optimizer.zero_grad()
    yield "update"
    loss, sample_size, _ = trainer.criterion(trainer.model, sample)
    yield "forward"
    optimizer.backward(loss)
    yield "backward"
    optimizer.multiply_grads(1.0 / sample_size)
    optimizer.clip_grad_norm(CLIP_NORM)
    yield "clip"
    optimizer.step()
    yield "update"


def tensors_in(values) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts; several times as fast as torch's own, which knows every kind of container."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


def storages(values) -> dict[int, torch.UntypedStorage]:
    """The storages of all tensors in nested containers, by address of their C++ object."""
    return {storage._cdata: storage for tensor in tensors_in(values) for storage in (tensor.untyped_storage(),)}


def category(func, args, kwargs, result) -> str:
    """What an op that autograd leaves over does: "kernel", "view" (memory of an input, nothing written) or "allocation"."""
    if func._schema.is_mutable:
        return "kernel"
    if "empty" in func._schema.name:
        return "allocation"
    outputs = storages(result)
    return "view" if outputs and outputs.keys() <= storages((args, kwargs)).keys() else "kernel"


class OpCounter(TorchDispatchMode):
    """Counts ops by name, apart for "kernel", "view" and "allocation"."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, Counter] = {}
        self.clear()

    def clear(self) -> None:
        self.counts = {category: Counter() for category in ("kernel", "view", "allocation")}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.counts[category(func, args, kwargs, result)][str(func)] += 1
        return result
