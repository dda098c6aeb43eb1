"""What fairseq does to every module in each update: the same with the plugin's models, only cheaper."""

import types

import pytest
from fairseq.models import BaseFairseqModel
from torch import nn

from ls_plugin.models import module_tree
from tests.models.families import FAMILIES, build


class Listener(nn.Module):
    """Notes what it is told; ``train`` is its own, as where weights are merged in evaluation."""

    def __init__(self):
        super().__init__()
        self.told, self.n_train_calls = [], 0

    def set_num_updates(self, num_updates: int) -> None:
        self.told.append(num_updates)

    def train(self, mode: bool = True):
        self.n_train_calls += 1
        return super().train(mode)


class Proxy(nn.Module):
    """Passes on what it does not know, as fairseq's wrappers for distributed training do."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def test_each_module_comes_once(family="transformer"):
    model = build(family, ls=True, share_all_embeddings=True)
    listed = module_tree.modules_of(model)
    assert listed[0] is model
    assert len(listed) == len(set(listed))
    assert set(listed) == set(model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_module_in_another_mode_is_set_again(family):
    model = build(family, ls=True).train()
    for strayed in list(model.modules()):
        strayed.training = False
        assert model.train() is model
        assert all(m.training for m in model.modules())
    assert model.eval() is model
    assert not any(m.training for m in model.modules())
    with pytest.raises(ValueError, match="boolean"):
        model.train("yes")


def test_a_train_of_its_own_is_always_called():
    model = build("transformer", ls=True).train()
    model.encoder.layers[1].fc1.extra = Listener()
    for n in range(1, 3):
        model.train()
        assert model.encoder.layers[1].fc1.extra.n_train_calls == n


@pytest.mark.parametrize("family", FAMILIES)
def test_who_listens_is_told_the_number_of_updates(family):
    model = build(family, ls=True)
    inner = next(m for m in model.modules() if isinstance(m, nn.ModuleList))[0]
    listener, hidden, by_instance = Listener(), Listener(), nn.Linear(1, 1)
    told = []
    by_instance.set_num_updates = types.MethodType(lambda self, n: told.append(n), by_instance)
    inner.extra = nn.ModuleList([listener, Proxy(hidden), by_instance])
    for tell in (BaseFairseqModel.set_num_updates, type(model).set_num_updates):
        for who in (listener.told, hidden.told, told):
            who.clear()
        tell(model, 5)
        assert [set(who) for who in (listener.told, hidden.told, told)] == [{5}] * 3
