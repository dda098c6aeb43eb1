"""Puts the fused modules in the place of the stock ones that a fairseq constructor made."""

from fairseq.modules import FairseqDropout
from torch import nn
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


def has_hooks(*modules: nn.Module | None) -> bool:
    """Whether calling one of the modules does more than its ``forward``: a hook on it, or on all modules."""
    return torch_module._has_any_global_hook() or any(
        m is not None and (m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks)
        for m in modules
    )
