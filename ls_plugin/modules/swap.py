"""Replaces the stock modules that a fairseq constructor made by fused ones, and checks whether a module is still as built."""

from collections.abc import Iterable, Mapping

import torch
from fairseq.modules import (
    FairseqDropout,
    LearnedPositionalEmbedding,
    MultiheadAttention,
    SinusoidalPositionalEmbedding,
)
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.modules import module as torch_module

from ls_plugin.modules.dropout import Dropout
from ls_plugin.modules.layer_norm import LayerNorm


def use_fused_modules(module: nn.Module, stock_name: str) -> None:
    """Replaces the layer norms and dropouts that are direct children of ``module``, sharing their parameters.

    Args:
        module: as its stock constructor left it.  Children of children are left alone: attention keeps its own.
        stock_name: the class name under which ``--retain-dropout-modules`` knows the module.
    """
    for name, child in list(module.named_children()):
        if _is_layer_norm(child):
            fused = LayerNorm(child.normalized_shape, child.eps)
            fused.weight, fused.bias = child.weight, child.bias
            setattr(module, name, fused)
        elif type(child) is FairseqDropout:
            setattr(module, name, Dropout(child.p, module_name=stock_name))


def _is_layer_norm(module: nn.Module) -> bool:
    """torch's layer norm, or the one of apex that fairseq takes where a GPU and apex are present."""
    return type(module) is nn.LayerNorm or type(module).__name__ == "FusedLayerNorm"


# Types of parameters that the kernels read. Others (quantised, sharded) have a ``__torch_function__`` that a module's call would respect.
_PARAMETER_TYPES = frozenset((nn.Parameter, Tensor, FakeTensor))
# Classes that a fused op stands for, and their forward as imported: somebody may patch a class, too.
_CLASSES = (nn.Linear, nn.LayerNorm, nn.Embedding, FairseqDropout, MultiheadAttention)
_CLASSES += (LearnedPositionalEmbedding, SinusoidalPositionalEmbedding, LayerNorm, Dropout)
_FORWARDS = [cls.forward for cls in _CLASSES]

# The parameters that a fused op reads from a module.
NO_PARAMETER, WEIGHT, WEIGHT_AND_BIAS = range(3)


def are_as_built(modules: Iterable[nn.Module | None], kinds: Mapping[type, int]) -> bool:
    """Whether a fused op does all that calling these modules would do.

    A module is not as built if it has another type (``register_parametrization`` changes it), a hook (the older ``weight_norm``,
    ``spectral_norm`` and pruning add one), a ``forward`` of its own, or lacks a parameter. All of these may change between two calls, so this
    is asked in every forward, with :func:`are_classes_as_built`: 11 us for a decoder layer.

    Args:
        modules: None stands for a module that the model does not have.
        kinds: the types that the op stands for, and which parameters it reads from each.
    """
    for module in modules:
        if module is None:
            continue
        kind = kinds.get(type(module))
        if kind is None:
            return False
        own = module.__dict__
        if (
            "forward" in own
            or own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
        ):
            return False
        if kind:
            parameters = own["_parameters"]
            if type(parameters.get("weight")) not in _PARAMETER_TYPES:
                return False
            if kind == WEIGHT_AND_BIAS and type(parameters.get("bias")) not in _PARAMETER_TYPES:
                return False
    return True


def are_classes_as_built() -> bool:
    """Whether no hook is on all modules, no ``forward`` of a class that fused ops stand for was replaced, and ``torch.jit.trace``, which records
    operators of torch only, is not at work."""
    return (
        not torch_module._has_any_global_hook()
        and not torch._C._is_tracing()
        and [cls.forward for cls in _CLASSES] == _FORWARDS
    )
