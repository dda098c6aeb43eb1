"""TorchScript: scripting compiles the stock modules over the same parameters, since the fused ones are Python around kernels."""

import copy

from torch import nn


class ScriptedAsStock:
    """Mixin of the plugin's modules: ``torch.jit.script`` gets a module of the class of fairseq's or torch's that this one subclasses.

    Parameters and buffers are shared, submodules are replaced in the same way, and the module itself stays as it is. In a module of somebody
    else, such as fairseq's SequenceGenerator, torch puts the stock modules where ours were; they compute the same.
    """

    def __prepare_scriptable__(self):
        return _as_stock(self)


def _as_stock(module: nn.Module | None) -> nn.Module | None:
    """A shallow copy of a tree of modules, down to the containers, in which torch would replace modules."""
    if module is None:
        return None
    stock = copy.copy(module)
    if isinstance(module, ScriptedAsStock):
        stock.__class__ = next(cls for cls in type(module).__mro__ if not cls.__module__.startswith("ls_plugin"))
    stock.__dict__["_modules"] = {name: _as_stock(child) for name, child in module._modules.items()}
    return stock
