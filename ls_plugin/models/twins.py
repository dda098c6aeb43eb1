"""What the ``ls_`` models have in common: how they are registered, built, refused and loaded, whatever fairseq model they subclass."""

import contextlib
import types
from collections.abc import Iterator

from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_INV_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    BaseFairseqModel,
    register_model,
    register_model_architecture,
)

from ls_plugin.checkpoint import models_as_twins
from ls_plugin.models import module_tree
from ls_plugin.models.unsupported import refuse_unsupported
from ls_plugin.modules import TokenEmbedding
from ls_plugin.modules.embedding import is_plain_embedding
from ls_plugin.modules.scripting import ScriptedAsStock
from ls_plugin.names import PREFIX


def register_twins(stock_model: str):
    """Class decorator: registers the ``ls_`` twin of a fairseq model, and of each of its architectures with the architecture's defaults.

    Args:
        stock_model: the model's name in fairseq's registry. With a dataclass there, the twin takes the same one, on the command line
            and with Hydra (``model._name``).
    """

    def register(cls: type[BaseFairseqModel]) -> type[BaseFairseqModel]:
        twin = PREFIX + stock_model
        cls.stock_model = stock_model
        cls = register_model(twin, dataclass=MODEL_DATACLASS_REGISTRY.get(stock_model))(cls)
        for arch in ARCH_MODEL_INV_REGISTRY[stock_model]:
            if PREFIX + arch not in ARCH_MODEL_REGISTRY:  # a model with a dataclass registers its own name
                register_model_architecture(twin, PREFIX + arch)(ARCH_CONFIG_REGISTRY[arch])
        return cls

    return register


class Twin(ScriptedAsStock):
    """Mixin that stands before the fairseq model in the bases of an ``ls_`` model."""

    stock_model: str  # fairseq's name of the model; set when it is registered

    @classmethod
    def build_model(cls, args, task):
        """Raises UnsupportedError with every flag that the fused layers do not honour."""
        refuse_unsupported(args, cls.stock_model)
        return super().build_model(args, task)

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """As fairseq's, for checkpoints of either: the models come as ``ls_`` models, also where a stock model was saved."""
        with models_as_twins():
            return super().from_pretrained(*args, **kwargs)

    def train(self, mode: bool = True):
        return self if module_tree.are_all_in_mode(self, mode) else super().train(mode)

    def set_num_updates(self, num_updates: int) -> None:
        module_tree.set_num_updates(self, num_updates)


def fused_embedding(embedding):
    """fairseq's embedding on ours where it is the plain one, sharing its weight; adaptive and character embedders stay as they are."""
    return TokenEmbedding.of(embedding) if is_plain_embedding(embedding) else embedding


@contextlib.contextmanager
def names_mean(module: types.ModuleType, **classes: type) -> Iterator[None]:
    """For the time of the block, names in one of fairseq's modules mean our classes.

    Some of fairseq's ``build_model`` name the class of their decoder or encoder outright; this spares a copy of them.
    """
    stock = {name: getattr(module, name) for name in classes}
    vars(module).update(classes)
    try:
        yield
    finally:
        vars(module).update(stock)
