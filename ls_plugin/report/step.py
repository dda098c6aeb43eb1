"""One training step of fairseq's, stock or ls, phase by phase.

    forward    criterion with model          clip      multiply_grads, clip_grad_norm
    backward   optimizer.backward            update    zero_grad, optimizer.step

An optimizer that defers work pays for it in the phase that does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest import mock

import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer
from torch import Tensor

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
