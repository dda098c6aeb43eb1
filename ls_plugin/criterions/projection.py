"""When a criterion may leave the output projection to ``ops.linear_cross_entropy``, and when that pays."""

import torch
from fairseq.distributed import LegacyDistributedDataParallel, ModuleProxyWrapper
from fairseq.distributed.distributed_timeout_wrapper import DistributedTimeoutWrapper
from fairseq.models import BaseFairseqModel, FairseqLanguageModel
from fairseq.models.bart import BARTModel
from fairseq.models.transformer import TransformerDecoderBase, TransformerModelBase
from fairseq.nan_detector import NanDetector
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ls_plugin import _library
from ls_plugin.models.transformer_decoder import LightSeqTransformerDecoder
from ls_plugin.modules.swap import are_classes_as_built
from ls_plugin.ops.checks import product_dtype
from ls_plugin.ops.linear_cross_entropy import block_rows
from ls_plugin.rebinding import beneath_wraps

# What passes its arguments on to the module inside.
_PARALLEL = (ModuleProxyWrapper, DistributedTimeoutWrapper, DistributedDataParallel, LegacyDistributedDataParallel)

# Methods by which features_only=True gives exactly what the output projection gets otherwise, or that are none of its business.
_MODEL_METHODS = {
    "forward": {TransformerModelBase.forward, FairseqLanguageModel.forward, beneath_wraps(BARTModel.forward)},
    "get_targets": {BaseFairseqModel.get_targets},  # it is given the features
}
_DECODER_METHODS = {
    "forward": {TransformerDecoderBase.forward},
    "output_layer": {TransformerDecoderBase.output_layer, LightSeqTransformerDecoder.output_layer},
}

_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_WATCHERS = {NanDetector.fhook_fn, NanDetector.bhook_fn}  # hooks that change nothing


def saves_memory(weight: Tensor, n_tokens: int, reduce: bool) -> bool:
    """Whether the loss step of n_tokens by blocks needs less memory than with all logits.

    Memory decides because time does not: on one thread, in fp32, for V 8,000 and 32,000, C 256 and 512 and 256 to 4,096 tokens, blocks took
    0.72 to 1.08 of the other way's time in training and 0.69 to 1.07 in validation, the low figures where there were several blocks. The
    peak of a whole training step of 2+2 layers at V 32,000, C 512 and 2,048 tokens fell from 670 to 470 MiB (stock: 1,143).
    Losses of single tokens with gradients are the exception: their backward makes the logits again.

    Args:
        weight: (V, C), of the projection; the logits have its dtype, or autocast's.
        reduce: a sum is wanted, not the losses of single tokens.
    """
    n_classes, n_columns = weight.shape
    item_bytes = (product_dtype(weight) or weight.dtype).itemsize
    logits, block = (rows * n_classes * item_bytes for rows in (n_tokens, min(n_tokens, block_rows(n_classes))))
    if not torch.is_grad_enabled():
        return block < logits
    if not reduce:
        return False
    # The gradients of features and weight are fp32 here, whatever the dtype; in 16 bits a block's product and the result come on top.
    n_weight = weight.numel()
    by_blocks = block + 4 * (n_tokens * n_columns + n_weight) + (2 * n_weight * item_bytes if item_bytes < 4 else 0)
    return by_blocks < logits + n_weight * item_bytes


def projection_of(model) -> nn.Linear | None:
    """The output projection of a model or of one that is wrapped for distributed training, if it is a bare, bias-free nn.Linear."""
    decoder = getattr(_unwrapped(model), "decoder", None)
    projection = getattr(decoder, "output_projection", None)
    return projection if type(projection) is nn.Linear and projection.bias is None else None


def reasons_against_blocks(model, report_accuracy: bool, cfg=None) -> list[str]:
    """All reasons why the output projection of ``model`` cannot be fused with the loss; empty if it can.

    Args:
        report_accuracy: the criterion counts correct tokens.
        cfg: fairseq's configuration, if the model is yet to be wrapped as it says.
    """
    reasons = []
    if report_accuracy:
        reasons.append("--report-accuracy counts correct tokens in the logits")
    if _searches_unused_parameters(model) or (cfg is not None and _will_search_unused_parameters(cfg)):
        reasons.append("--find-unused-parameters would take the projection's weight for unused")
    model = _unwrapped(model)
    decoder = getattr(model, "decoder", None)
    for part, cls, methods in (
        (model, BaseFairseqModel, _MODEL_METHODS),
        (decoder, TransformerDecoderBase, _DECODER_METHODS),
    ):
        if not isinstance(part, cls):
            reasons.append(f"{type(part).__name__} is none of fairseq's {cls.__name__}")
            continue
        reasons += [
            f"{type(part).__name__}.{name} is not fairseq's own"
            for name, known in methods.items()
            if not _is_known(part, name, known)
        ]
        if any(hook not in _WATCHERS for hook in _hooks(part, ("_forward_hooks", "_backward_hooks"))):
            reasons.append(f"hooks on {type(part).__name__} expect logits")
    projection = getattr(decoder, "output_projection", None)
    if type(projection) is not nn.Linear:
        reasons.append(f"the output projection must be an nn.Linear, got {type(projection).__name__}")
        return reasons
    if projection.bias is not None:
        reasons.append("the output projection must have no bias")
    if "forward" in vars(projection) or any(hook not in _WATCHERS for hook in _hooks(projection, _FORWARD_HOOKS)):
        reasons.append("hooks on the output projection would not run")
    if not are_classes_as_built():
        reasons.append("a hook on all modules, or the patched forward of a class, would not run")
    if not _library.has_kernel(projection.weight):
        reasons.append(
            f"no compiled kernels serve its weight, {projection.weight.dtype} on {projection.weight.device.type}"
            + (f" ({_library.status().reason})" if not _library.status().loaded else "")
        )
    return reasons


def _unwrapped(model):
    while isinstance(model, _PARALLEL):
        model = model.module
    return model


def _searches_unused_parameters(model) -> bool:
    """DistributedDataParallel looks for them from the model's output, where the projection's weight is not, unless it is tied."""
    while isinstance(model, _PARALLEL):
        if isinstance(model, DistributedDataParallel) and model.find_unused_parameters:
            return True
        model = model.module
    return False


def _will_search_unused_parameters(cfg) -> bool:
    parallel = cfg.distributed_training
    is_wrapped = parallel.distributed_world_size > 1 and parallel.ddp_backend in ("c10d", "pytorch_ddp")
    return is_wrapped and parallel.find_unused_parameters


def _is_known(module, name: str, known: set) -> bool:
    """Whether a bound method is one of ``known``, or the plugin's, whose models keep fairseq's meaning of features_only."""
    function = beneath_wraps(getattr(getattr(module, name, None), "__func__", None))
    return function in known or getattr(function, "__module__", "").startswith("ls_plugin.")


def _hooks(module: nn.Module, kinds: tuple[str, ...]):
    """The functions behind a module's hooks."""
    for kind in kinds:
        for hook in getattr(module, kind).values():
            yield getattr(hook, "__func__", hook)
