"""Gradients that somebody keeps over ``zero_grad``: they keep their values, as with torch's optimizers; where nobody keeps one, nothing is copied."""

import copy

import pytest
import torch
from torch import nn

from ls_plugin.optim import engine
from ls_plugin.optim.adam import ContiguousAdam
from tests.models import families

# What people keep of a gradient.
KEPT = {
    "itself": lambda p: p.grad,
    "data": lambda p: p.grad.data,
    "detached": lambda p: p.grad.detach(),
    "view": lambda p: p.grad.view(-1),
    "slice": lambda p: p.grad[:1],
    "numpy": lambda p: p.grad.numpy(),
    "graph": lambda p: (p.grad * p).sum(),  # autograd keeps it, to be differentiated later
}
RESETS = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "model": lambda model, optimizer: model.zero_grad(),
    "by hand": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
}


@pytest.fixture
def trained():
    """A function of a dtype: a model of ours, its optimizer, which holds masters of 16-bit parameters, and two losses."""

    def build(dtype=None):
        torch.manual_seed(3)
        # Wide enough that some gradients are adopted at once, and others before the step.
        model = families.build("transformer", True, encoder_ffn_embed_dim=2100, share_decoder_input_output_embed=True)
        optimizer = ContiguousAdam(list(model.parameters()), lr=1e-2, dtype=dtype)
        batches = families.batch(), families.batch(padding="right")
        return model, optimizer, [lambda batch=batch: model(**batch)[0].float().square().mean() for batch in batches]

    return build


def value(kept):
    return torch.as_tensor(kept).detach().clone()


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("reset", RESETS)
@pytest.mark.parametrize("kind", KEPT)
def test_a_kept_gradient_keeps_its_value(trained, kind, reset, steps):
    model, optimizer, losses = trained()
    optimizer.zero_grad()
    losses[0]().backward()
    if steps:
        optimizer.step()
    params = [p for p in model.parameters() if p.grad is not None]
    kept = [KEPT[kind](p) for p in params]
    before = [value(each) for each in kept] if kind != "graph" else [p.grad.clone() for p in params]
    for _ in range(2):
        RESETS[reset](model, optimizer)
        losses[1]().backward()
        optimizer.clip_grad_norm(1.0)
        if kind != "graph":
            optimizer.step()
    after = torch.autograd.grad(kept, params) if kind == "graph" else [value(each) for each in kept]
    for mine, theirs in zip(after, before, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("which", ["optimizer", "model"])
def test_gradient_surgery_over_two_losses(trained, dtype, which):
    """PCGrad (Yu et al. 2020): the gradient of each loss loses what conflicts with the other's. Without a clone, as with torch's optimizers."""

    def surgery(model, optimizer, losses, keep):
        found, params = [], [p for p in model.parameters() if p.requires_grad]
        for loss in losses:
            RESETS[which](model, optimizer)
            loss().backward()
            found.append([keep(p.grad) for p in params])
        RESETS[which](model, optimizer)
        for p, *grads in zip(params, *found, strict=True):
            if grads[0] is None:
                continue
            g, h = (grad.double() for grad in grads)
            conflict = (g * h).sum().clamp(max=0.0)
            p.grad = (g + h - conflict * (h / (h * h).sum().clamp_min(1e-30) + g / (g * g).sum().clamp_min(1e-30))).to(
                p
            )
        optimizer.step()

    def cloned(grad):
        return None if grad is None else grad.clone()

    results = []
    for keep in (lambda grad: grad, cloned):
        model, optimizer, losses = trained(dtype)
        for _ in range(3):
            surgery(model, optimizer, losses, keep)
        results.append([p.detach().clone() for p in model.parameters()])
    for kept, clone in zip(*results, strict=True):
        assert torch.equal(kept, clone)


def test_a_gradient_replaced_by_one_that_was_made_from_it(trained):
    model, optimizer, losses = trained()
    optimizer.zero_grad()
    losses[0]().backward()
    params = [p for p in model.parameters() if p.grad is not None]
    kept = [p.grad for p in params]
    before = [grad.clone() for grad in kept]
    for p in params:
        p.grad = p.grad * 2.0
    optimizer.step()
    for grad, old, p in zip(kept, before, params, strict=True):
        assert torch.equal(grad, old)
        assert torch.equal(p.grad, 2.0 * old)


def test_a_kept_gradient_accumulates_until_it_is_reset(trained):
    """As in torch, where a second backward pass adds to ``p.grad`` in place."""
    model, optimizer, losses = trained()
    optimizer.zero_grad()
    losses[0]().backward()
    optimizer.clip_grad_norm(0.0)  # everything is in the buffer
    p = model.encoder.layers[0].fc1.weight
    kept, once = p.grad, p.grad.clone()
    losses[0]().backward()
    assert p.grad is kept
    torch.testing.assert_close(kept, 2.0 * once)


def test_a_history_of_one_gradient_does_not_keep_the_buffer(trained):
    model, optimizer, losses = trained()
    history = []
    address = optimizer.buffers[0].grad.data_ptr()
    for _ in range(4):
        optimizer.zero_grad()
        losses[0]().backward()
        history.append(model.encoder.layers[0].self_attn.k_proj.bias.grad)
        optimizer.step()
        history.append(model.encoder.layers[0].fc1.weight.grad)
    optimizer.zero_grad()
    assert optimizer.buffers[0].grad.data_ptr() == address
    assert [grad.untyped_storage().nbytes() for grad in history] == [grad.nbytes for grad in history]


def test_nothing_is_copied_where_nobody_keeps_a_gradient(trained, monkeypatch):
    _, optimizer, losses = trained()
    buffer = optimizer.buffers[0]
    address, homes = buffer.grad.data_ptr(), list(map(id, buffer._grad_views))

    def refuse(*_):
        raise AssertionError("a gradient was taken for kept")

    monkeypatch.setattr(engine.ContiguousBuffer, "_allocate_grad", refuse)
    monkeypatch.setattr(engine.torch.Tensor, "clone", refuse)
    for step in range(4):
        optimizer.zero_grad()
        for loss in losses[: 1 + step % 2]:
            loss().backward()
        optimizer.multiply_grads(0.5)
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
    assert buffer.grad.data_ptr() == address
    assert list(map(id, buffer._grad_views)) == homes


def test_the_update_after_a_kept_gradient_is_the_usual_one(trained):
    """The engine's buffer may be another one by then; so may single places in it."""
    results = []
    for keep in (None, *KEPT.values()):
        model, optimizer, losses = trained()
        kept = []
        for _ in range(3):
            optimizer.zero_grad()
            losses[0]().backward()
            losses[1]().backward()
            if keep is not None:
                kept.append(keep(model.decoder.layers[0].fc1.weight))
            optimizer.clip_grad_norm(0.1)
            optimizer.step()
        results.append(copy.deepcopy(nn.ParameterList(model.parameters())))
    for other in results[1:]:
        for usual, p in zip(results[0], other, strict=True):
            assert torch.equal(usual, p)
