"""What wraps the model of a distributed run: ``--ddp-backend`` and ``--ddp-comm-hook``, on GPUs and CPUs, under ``ls_adam`` and stock's.

:func:`install` wraps ``fairseq.models.DistributedFairseqModel``. ``pytorch_ddp`` and ``legacy_ddp`` under ``ls_adam`` give
:class:`ContiguousDataParallel`, with and without overlap; all else is stock's, whose PyTorch wrapper works on CPUs too now and compresses to
bf16 as well as to fp16, and looks for unused parameters where layers are dropped.
"""

import logging

from fairseq import models
from fairseq.dataclass import configs, constants
from fairseq.dataclass.initialize import hydra_init
from fairseq.distributed import DistributedTimeoutWrapper, ModuleProxyWrapper
from fairseq.models import distributed_fairseq_model
from fairseq.modules import LayerDropModuleList
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ls_plugin.distributed.data_parallel import ContiguousDataParallel
from ls_plugin.errors import UnsupportedError
from ls_plugin.rebinding import wrap

logger = logging.getLogger(__name__)

_OVERLAPS = {"pytorch_ddp": True, "c10d": True, "legacy_ddp": False, "no_c10d": False}
_HOOKS = {
    "none": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
}


def install() -> None:
    wrap(models, "DistributedFairseqModel", _distributed_model)
    distributed_fairseq_model.DistributedDataParallel = DistributedDataParallel
    _add_comm_hooks()


def _add_comm_hooks() -> None:
    """Lets ``--ddp-comm-hook`` take what is in the table above: in fairseq's parser, and in the configuration that it checks the value with."""
    field = configs.DistributedTrainingConfig.__dataclass_fields__["ddp_comm_hook"]
    if set(_HOOKS) <= {choice.value for choice in field.type}:
        return
    choices = constants.ChoiceEnum(list(_HOOKS))
    constants.DDP_COMM_HOOK_CHOICES = configs.DDP_COMM_HOOK_CHOICES = field.type = choices
    configs.DistributedTrainingConfig.__annotations__["ddp_comm_hook"] = choices
    hydra_init()  # keeps copies of the configuration's classes


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """PyTorch's, for modules on CPUs too: fairseq names a device in any case, which PyTorch refuses for them."""

    def __init__(self, module: nn.Module, device_ids=None, output_device=None, **kwargs):
        if any(p.device.type == "cpu" for p in module.parameters()):
            device_ids = output_device = None
        super().__init__(module, device_ids=device_ids, output_device=output_device, **kwargs)


def _distributed_model(stock, args, model: nn.Module, process_group, device) -> nn.Module:
    """Wraps a model, or a criterion with parameters.

    Args:
        args: ``cfg.distributed_training``, a part of the whole configuration.
    Raises:
        UnsupportedError: a communication hook for a backend that has none.
    """
    hook = str(args.ddp_comm_hook)
    overlaps = _OVERLAPS.get(args.ddp_backend)
    if overlaps is not None and _optimizer_name(args) == "ls_adam":
        wrapped = ModuleProxyWrapper(
            ContiguousDataParallel(
                model.to(device),
                process_group,
                overlaps=overlaps,
                bucket_cap_mb=args.bucket_cap_mb,
                hook=_HOOKS[hook],
                broadcast_buffers=args.broadcast_buffers,
                zero_unused=not overlaps,  # as stock's
            )
        )
        timeout = args.heartbeat_timeout
        return DistributedTimeoutWrapper(wrapped, timeout) if timeout > 0 else wrapped
    if hook != "none" and args.ddp_backend not in ("pytorch_ddp", "c10d"):
        raise UnsupportedError(
            f"--ddp-comm-hook {hook}: --ddp-backend {args.ddp_backend} would ignore it; take pytorch_ddp, or --optimizer ls_adam"
        )
    if hook == "bf16" and device.type == "cpu":
        raise UnsupportedError(
            "--ddp-comm-hook bf16: PyTorch's own wrapper compresses to bf16 on GPUs only; take fp16, or --optimizer ls_adam"
        )
    if overlaps and not args.find_unused_parameters and _drops_layers(model):
        logger.info(
            "--find-unused-parameters is on, since --encoder-layerdrop or --decoder-layerdrop leaves layers out"
        )
        args.find_unused_parameters = True
    wrapped = stock(args, model, process_group, device)
    if hook == "bf16":  # stock knows fp16
        ddp = next(m for m in wrapped.modules() if isinstance(m, DistributedDataParallel))
        ddp.register_comm_hook(process_group, default_hooks.bf16_compress_hook)
    return wrapped


def _drops_layers(model: nn.Module) -> bool:
    """Whether steps leave layers out; PyTorch's wrapper ends the run at the first of them, unless it looks for unused parameters."""
    return any(isinstance(m, LayerDropModuleList) and m.p > 0 for m in model.modules())


def _optimizer_name(args) -> str | None:
    return getattr(args._get_root().get("optimizer"), "_name", None)
