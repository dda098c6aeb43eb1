"""``ls_adam`` under ``--fp16``, ``--bf16`` and their memory-efficient forms, which are one and the same here.

fairseq wraps an optimizer for 16-bit training in one of two classes, which copy parameters and gradients to fp32 and back, or do
without a master. Neither is needed around buffers that hold exact masters: fairseq's two names are rebound to classes that build our
optimizer where it is asked for, and stock's otherwise.
"""

import torch
from fairseq import optim
from fairseq.optim.dynamic_loss_scaler import DynamicLossScaler

from ls_plugin.errors import UsageError
from ls_plugin.optim.adam import FairseqAdam


class MixedPrecisionAdam(FairseqAdam):
    """``ls_adam`` with 16-bit parameters and gradients, fp32 masters and moments; with fp16 the loss is scaled, as stock does it.

    Args:
        cfg: fairseq's whole configuration.
        params: 16 bits wide, or fp32 and then taken over in full: what a checkpoint holds.
    Attributes:
        scaler: with fp16 fairseq's own, so that the scale takes stock's course; else None.
    """

    def __init__(self, cfg, params):
        common = cfg.common
        super().__init__(cfg.optimizer, params, dtype=torch.float16 if common.fp16 else torch.bfloat16)
        self.saves_flat = common.fp16 and not (common.memory_efficient_fp16 or common.fp16_no_flatten_grads)
        if common.fp16:
            self.optimizer.waits_for_overflow = True
            self.scaler = DynamicLossScaler(
                init_scale=common.fp16_init_scale,
                scale_window=_scale_window(cfg),
                tolerance=common.fp16_scale_tolerance,
                threshold=common.threshold_loss_scale,
                min_loss_scale=common.min_loss_scale,
            )
            self.zero_grad()


def _scale_window(cfg) -> int:
    """Updates without overflow after which the loss scale doubles: 2^14 batches where ``--fp16-scale-window`` does not say.

    Raises:
        UsageError: the number of batches in an update changes from epoch to epoch.
    """
    if cfg.common.fp16_scale_window is not None:
        return cfg.common.fp16_scale_window
    if len(cfg.optimization.update_freq) > 1:
        raise UsageError("--fp16-scale-window: must be given where --update-freq has more than one value")
    n_replicas = int(cfg.distributed_training.distributed_world_size / cfg.common.model_parallel_size)
    return int(2**14 / n_replicas / cfg.optimization.update_freq[0])


def _rebound(stock: type) -> type:
    # Resuming compares class names, so both bear stock's.
    ours = type(stock.__name__, (MixedPrecisionAdam,), {})

    class Rebound(stock):
        @classmethod
        def build_optimizer(cls, cfg, params, **kwargs):
            if getattr(cfg.optimizer, "_name", None) == "ls_adam":
                return ours(cfg, params)
            return super().build_optimizer(cfg, params, **kwargs)

    Rebound.__name__ = Rebound.__qualname__ = stock.__name__
    return Rebound


def install() -> None:
    """Rebinds fairseq's two names.  Calling it again changes nothing."""
    for name in ("FP16Optimizer", "MemoryEfficientFP16Optimizer"):
        stock = getattr(optim, name)
        if stock.__module__ != __name__:
            setattr(optim, name, _rebound(stock))
