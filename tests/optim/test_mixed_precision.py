"""``ls_adam`` in 16 bits: the exact master, what it costs, and when nothing may change."""

import copy
import gc
import math
from types import SimpleNamespace

import pytest
import torch
from fairseq import optim
from omegaconf import OmegaConf
from torch import nn

from ls_plugin import reference
from ls_plugin.errors import UsageError
from ls_plugin.optim.mixed_precision import MixedPrecisionAdam

BF16, FP16 = torch.bfloat16, torch.float16
SHAPES = ((5, 7), (9,), (1,), (3, 4))


def config(dtype, name="ls_adam", update_freq=(1,), **common):
    adam = {"_name": name, "adam_betas": "(0.9, 0.98)", "adam_eps": 1e-8, "weight_decay": 0.01, "lr": [1e-2]}
    adam |= {"use_old_adam": False, "fp16_adam_stats": False, "tpu": False}
    defaults = dict(
        fp16=dtype == FP16,
        bf16=dtype == BF16,
        memory_efficient_fp16=False,
        memory_efficient_bf16=False,
        fp16_no_flatten_grads=False,
        fp16_init_scale=8,
        fp16_scale_window=2**14,
        fp16_scale_tolerance=0.0,
        threshold_loss_scale=None,
        min_loss_scale=1e-4,
        model_parallel_size=1,
    )
    return SimpleNamespace(
        optimizer=OmegaConf.create(adam),
        common=SimpleNamespace(**{**defaults, **common}),
        optimization=SimpleNamespace(update_freq=list(update_freq)),
        distributed_training=SimpleNamespace(distributed_world_size=1),
    )


def parameters(dtype, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def build(dtype, params=None, **options):
    params = parameters(dtype) if params is None else params
    return params, MixedPrecisionAdam(config(dtype, **options), params)


def draw(params, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator).to(dtype) for p in params]


def update(params, optimizer, gradients, max_norm=1.0):
    """One update through the protocol of fairseq's trainer, with these gradients of the loss."""
    optimizer.zero_grad()
    pairs = [(p, g) for p, g in zip(params, gradients, strict=True) if g is not None]
    optimizer.backward(sum((p * g).sum() for p, g in pairs))
    optimizer.multiply_grads(0.5)
    norm = optimizer.clip_grad_norm(max_norm)
    optimizer.step()
    return norm


def masters_of(params, optimizer):
    named = optimizer.optimizer.with_masters({str(i): p.detach() for i, p in enumerate(params)})
    return [named[str(i)] for i in range(len(params))]


def assert_bits_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_master_is_that_of_a_run_in_fp32(dtype):
    """Gradients of 16 bits and nothing else distinguish the two: the masters are the same to the last bit, the weights their rounding."""
    params, optimizer = build(dtype)
    wide = [nn.Parameter(p.detach().float()) for p in params]
    other = optim.build_optimizer(config(torch.float32).optimizer, wide)
    for seed in range(60):
        gradients = draw(params, seed, dtype)
        # Without clipping: the norm's last bit depends on the buffers' layout.
        norm = update(params, optimizer, gradients, max_norm=0)
        torch.testing.assert_close(norm, update(wide, other, [g.float() for g in gradients], max_norm=0))
    masters = masters_of(params, optimizer)
    assert_bits_equal(masters, [p.detach() for p in wide])
    weights = [reference.split_master(m)[0] if dtype == BF16 else m.half() for m in masters]
    assert_bits_equal([p.detach() for p in params], weights)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_updates_below_the_weights_precision_add_up(dtype):
    params, optimizer = build(dtype, [nn.Parameter(torch.full((64,), 256.0, dtype=dtype))])
    optimizer.set_lr(1e-3)
    for _ in range(2000):
        update(params, optimizer, [torch.ones(64, dtype=dtype)], max_norm=0)
    torch.testing.assert_close(params[0].float(), torch.full((64,), 256.0 - 2 - 5), rtol=0, atol=0.3)  # decay is a 5th


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_masters_go_through_a_checkpoint(dtype):
    params, optimizer = build(dtype)
    for seed in range(5):
        update(params, optimizer, draw(params, seed, dtype))
    masters = [m.clone() for m in masters_of(params, optimizer)]
    state = copy.deepcopy(optimizer.state_dict())
    resumed, other = build(dtype, [nn.Parameter(m.clone()) for m in masters])
    other.load_state_dict(state)
    assert all(p.dtype == dtype for p in resumed)
    assert_bits_equal(masters_of(resumed, other), masters)
    for pair in ((params, optimizer), (resumed, other)):
        update(*pair, draw(params, 9, dtype))
    assert_bits_equal(masters_of(resumed, other), masters_of(params, optimizer))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_weight_that_somebody_writes_is_the_new_master(dtype):
    params, optimizer = build(dtype)
    update(params, optimizer, draw(params, 0, dtype))
    with torch.no_grad():
        params[0].copy_(torch.full(SHAPES[0], 1.5))
    masters = masters_of(params, optimizer)
    assert torch.equal(masters[0], torch.full(SHAPES[0], 1.5))
    assert not torch.equal(masters[1], params[1].float())  # untouched, with all its bits
    update(params, optimizer, draw(params, 1, dtype))
    assert (params[0].float() - 1.5).abs().max() < 0.1


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_parameters_without_a_gradient_keep_every_bit(dtype):
    params, optimizer = build(dtype)
    update(params, optimizer, draw(params, 0, dtype))
    before = [m.clone() for m in masters_of(params, optimizer)]
    gradients = draw(params, 1, dtype)
    update(params, optimizer, [None, *gradients[1:]])
    params[1].requires_grad_(False)
    update(params, optimizer, [gradients[0], None, *gradients[2:]])
    params[1].requires_grad_(True)
    after = masters_of(params, optimizer)
    steps = [optimizer.state_dict()["state"][0]["step"]] if optimizer.saves_flat else None
    assert [optimizer.optimizer.state[p]["step"] for p in params] == [2, 2, 3, 3] and steps in (None, [3])
    assert not any(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_tied_parameters_stay_tied_in_a_checkpoint(dtype):
    params, optimizer = build(dtype)
    update(params, optimizer, draw(params, 0, dtype))
    state = optimizer.optimizer.with_masters({"a": params[0].detach(), "b": params[0].detach(), "n": torch.ones(2)})
    assert state["a"] is state["b"] and state["a"].dtype == torch.float32 and torch.equal(state["n"], torch.ones(2))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_accumulated_gradients_are_those_of_one_batch(dtype):
    runs = [build(dtype) for _ in range(2)]
    for (params, optimizer), parts in zip(runs, (1, 2), strict=True):
        gradients = [torch.full(p.shape, 0.25, dtype=dtype) for p in params]
        optimizer.zero_grad()
        for _ in range(parts):
            optimizer.backward(sum((p * g).sum() for p, g in zip(params, gradients, strict=True)))
        optimizer.multiply_grads(1 / parts)
        optimizer.clip_grad_norm(0)
        optimizer.step()
    assert_bits_equal(masters_of(*runs[0]), masters_of(*runs[1]))


# --- memory


def tensors_of(*roots) -> dict:
    """The memory that an optimizer and its parameters hold on to: {address: bytes}."""
    storages, seen, stack = {}, set(), list(roots)
    while stack:
        value = stack.pop()
        if id(value) in seen or isinstance(value, (type, str, int, float)):
            continue
        seen.add(id(value))
        if torch.is_tensor(value):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            if value.is_leaf and value.grad is not None:
                stack.append(value.grad)
        elif isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, (list, tuple)):
            stack += value
        elif type(value).__module__.startswith(("ls_plugin", "fairseq", "torch.optim")):
            stack.append(vars(value))
    return storages


@pytest.mark.parametrize("dtype, n_bytes", [(BF16, 2 + 2 + 2 + 8), (FP16, 2 + 4 + 2 + 8)], ids=["bf16", "fp16"])
def test_bytes_of_the_training_state(dtype, n_bytes):
    n_elem = 1 << 16
    params, optimizer = build(dtype, [nn.Parameter(torch.randn(n_elem).to(dtype))])
    update(params, optimizer, draw(params, 0, dtype))
    gc.collect()
    total = sum(tensors_of(params, optimizer).values())
    assert total / n_elem == pytest.approx(n_bytes, rel=2e-3)


def test_stocks_flat_fp16_takes_more():
    n_elem = 1 << 16
    params = [nn.Parameter(torch.randn(n_elem).half())]
    optimizer = optim.FP16Optimizer.build_optimizer(config(FP16, name="adam"), params)
    update(params, optimizer, draw(params, 0, FP16))
    assert sum(tensors_of(params, optimizer).values()) / n_elem == pytest.approx(2 + 2 + 4 + 4 + 8, rel=2e-3)


# --- overflow


def snapshot(params, optimizer):
    buffers = [t.clone() for b in optimizer.optimizer.buffers for t in (b.exp_avg, b.exp_avg_sq, *b.masters())]
    return [p.detach().clone() for p in params] + buffers


@pytest.mark.parametrize("waits_before_step", [True, False])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_an_overflow_changes_nothing_but_the_scale(waits_before_step, value):
    params, optimizer = build(FP16)
    optimizer.waits_before_step = waits_before_step
    update(params, optimizer, draw(params, 0, FP16))
    before, steps = snapshot(params, optimizer), [optimizer.optimizer.state[p]["step"] for p in params]
    gradients = draw(params, 1, FP16)
    gradients[2][0] = value
    with pytest.raises(OverflowError, match=r"loss scale to: 4\.0"):
        update(params, optimizer, gradients)
    assert_bits_equal(snapshot(params, optimizer), before)
    assert [optimizer.optimizer.state[p]["step"] for p in params] == steps
    assert optimizer.scaler.loss_scale == 4.0
    update(params, optimizer, draw(params, 2, FP16))  # with the new scale
    assert [optimizer.optimizer.state[p]["step"] for p in params] == [s + 1 for s in steps]


def test_an_overflow_of_the_scaled_gradient_alone():
    params, optimizer = build(FP16, fp16_init_scale=2.0**12)
    with pytest.raises(OverflowError):
        update(params, optimizer, [torch.full(p.shape, 100.0, dtype=FP16) for p in params])
    assert optimizer.optimizer.state_dict()["state"] == {}


def test_the_least_scale_ends_training():
    params, optimizer = build(FP16, fp16_init_scale=1.0, min_loss_scale=0.5)
    with pytest.raises(FloatingPointError, match="Minimum loss scale"):
        update(params, optimizer, [torch.full(p.shape, math.inf, dtype=FP16) for p in params])


def test_bf16_skips_what_is_not_finite():
    params, optimizer = build(BF16)
    update(params, optimizer, draw(params, 0, BF16))
    before = snapshot(params, optimizer)
    norm = update(params, optimizer, [torch.full(p.shape, math.nan, dtype=BF16) for p in params])
    assert norm.isnan()
    assert_bits_equal(snapshot(params, optimizer), before)


# --- configuration


@pytest.mark.parametrize("name", ["FP16Optimizer", "MemoryEfficientFP16Optimizer"])
def test_fairseqs_names_build_either(name):
    ours = getattr(optim, name).build_optimizer(config(BF16), parameters(BF16))
    assert isinstance(ours, MixedPrecisionAdam) and type(ours).__name__ == name and ours.scaler is None
    theirs = getattr(optim, name).build_optimizer(config(BF16, name="adam"), parameters(BF16))
    assert not isinstance(theirs, MixedPrecisionAdam) and type(theirs).__name__ == name


def test_scale_window():
    assert build(FP16, fp16_scale_window=None, update_freq=(4,))[1].scaler.scale_window == 2**14 / 4
    with pytest.raises(UsageError, match="--fp16-scale-window"):
        build(FP16, fp16_scale_window=None, update_freq=(1, 2))
