"""The gradient of a table that embeddings and the output projection share, written into the optimizer's buffer by all of them."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ls_plugin import ops, packing
from ls_plugin.modules.layer_node import Projection
from ls_plugin.optim import ContiguousAdam

PAD, C = 1, 16
USES = ("projection", "source", "target", "foreign")


def inputs(n_words: int):
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, n_words, (2, 4, 7), generator=generator)
    tokens[:, 1, 4:] = PAD
    return tokens, torch.randn(4, 7, C, generator=generator), torch.randn(n_words, C, generator=generator)


def loss(table, order, tokens, features, ours: bool):
    """The sum of what each use gives. Autograd goes through them from the last to the first."""
    embed = ops.embedding if ours else lambda t, w, _, pad, scale: scale * F.embedding(t, w, pad)
    uses = {
        "projection": lambda: (Projection.apply if ours else F.linear)(features, table).square().sum(),
        "source": lambda: (embed(tokens[0], table, None, PAD, 2.0) * features).sum(),
        "target": lambda: embed(tokens[1], table, None, PAD, 3.0).square().sum(),
        "foreign": lambda: (table * table).sum(),
    }
    return sum(uses[use]() for use in order)


@pytest.fixture(
    params=[30, 5000], ids=["small", "large"]
)  # large gradients are adopted at once, small ones before the step
def pair(request):
    tokens, features, weight = inputs(request.param)
    table, plain = nn.Parameter(weight.clone()), nn.Parameter(weight.clone())
    return table, plain, ContiguousAdam([table]), (tokens, features)


@pytest.mark.parametrize("n_uses", range(1, 5))
def test_every_order_of_users_gives_the_sum(pair, n_uses):
    table, plain, optimizer, batch = pair
    for order in itertools.permutations(USES, n_uses):
        optimizer.zero_grad()
        plain.grad = None
        for _ in range(2):  # the second pass accumulates
            loss(table, order, *batch, ours=True).backward()
            loss(plain, order, *batch, ours=False).backward()
            optimizer.materialize_grads()
            assert table.grad is optimizer.buffers[0].grad_view(0)
            torch.testing.assert_close(table.grad, plain.grad, rtol=1e-5, atol=1e-4, msg=f"{order}")


def test_users_add_to_one_place(pair, monkeypatch):
    table, _, optimizer, batch = pair
    copied = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *lists: copied.append(lists))
    claims, claim = [], packing.claim_shared_grad

    def noted(p):
        home, is_first = claim(p)
        claims.append((home is not None, is_first))  # who keeps the tensor itself makes autograd copy it
        return home, is_first

    monkeypatch.setattr(packing, "claim_shared_grad", noted)  # for the embeddings
    loss(table, ("source", "target", "projection"), *batch, ours=True).backward()
    optimizer.materialize_grads()
    assert not copied
    assert claims == [(True, False)] * 2


def test_a_hook_sees_the_whole_gradient(pair):
    table, plain, _, batch = pair
    seen = []
    table.register_hook(lambda grad: seen.append(grad.clone()))
    for order in (("source", "target", "projection"), ("projection", "source", "foreign", "target")):
        table.grad = plain.grad = None
        seen.clear()
        loss(table, order, *batch, ours=True).backward()
        loss(plain, order, *batch, ours=False).backward()
        torch.testing.assert_close(seen, [plain.grad], rtol=1e-5, atol=1e-4)


def test_a_gradient_that_a_hook_kept_takes_no_other_backward_s(pair):
    table, plain, _, batch = pair
    kept = []
    table.register_hook(kept.append)
    for _ in range(2):
        table.grad = plain.grad = None  # not by the optimizer: the place stays taken
        loss(table, USES[:3], *batch, ours=True).backward()
        loss(plain, USES[:3], *batch, ours=False).backward()
        torch.testing.assert_close(table.grad, plain.grad, rtol=1e-5, atol=1e-4)


def test_gradients_that_were_asked_for_through_a_frozen_node_belong_to_the_caller(pair):
    table, _, optimizer, batch = pair
    frozen = nn.Parameter(torch.randn(3, C), requires_grad=False)
    y = Projection.apply(ops.embedding(batch[0][0], table, None, PAD), frozen)  # the first node has no leaf to ask
    (grad,) = torch.autograd.grad(y.sum(), table)
    assert grad.any() and not optimizer.buffers[0].grad.any()


def test_gradients_that_were_asked_for_belong_to_the_caller(pair):
    table, plain, optimizer, batch = pair
    order = USES[:3]
    (grad,) = torch.autograd.grad(loss(table, order, *batch, ours=True), table)
    (expected,) = torch.autograd.grad(loss(plain, order, *batch, ours=False), plain)
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-4)
    assert not optimizer.buffers[0].grad.any()


def test_after_a_backward_that_failed_nothing_is_left(pair):
    table, plain, optimizer, batch = pair
    fails = [True]

    def fail(grad):
        if fails[0]:
            raise RuntimeError("out of memory")

    for _ in range(2):
        optimizer.zero_grad()
        features = batch[1].clone().requires_grad_()
        features.register_hook(fail)
        total = loss(table, ("source", "target", "projection"), batch[0], features, ours=True)
        if fails[0]:
            with pytest.raises(RuntimeError, match="out of memory"):
                total.backward()
            fails[0] = False
        else:
            total.backward()
    loss(plain, ("source", "target", "projection"), *batch, ours=False).backward()
    torch.testing.assert_close(table.grad, plain.grad, rtol=1e-5, atol=1e-4)
