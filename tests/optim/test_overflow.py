"""A thousand gradients that are not finite: nothing changes but the loss scale, which takes the course of stock's.

The reference for the scale is fairseq's own DynamicLossScaler, told at every step whether the gradients were finite. The reference for
weights and moments is a second optimizer that never gets to see the other steps: scales are powers of two, so it must hold the same bits.
"""

import copy
import math
import random
from types import SimpleNamespace

import pytest
import torch
from fairseq import optim
from fairseq.optim.dynamic_loss_scaler import DynamicLossScaler
from omegaconf import OmegaConf
from torch import nn

from ls_plugin import packing

SHAPES = [(5, 7), (7,), (64,), (1,), (33, 3)]
N_OVERFLOWS = 1000  # in all precisions; in fp16 of all courses of the scale together
CLIP_NORM = 1.0
# init scale, window, tolerance, threshold, least scale
SCALERS = {
    "held by a threshold": (2.0**7, 3, 0.0, 2.0**-2, 1e-4),
    "tolerance": (2.0**4, 5, 0.4, 0.5, 1e-4),
    "tolerance never reached": (2.0**4, 4, 1.5, None, 1e-4),
    "doubled at once": (2.0**4, 1, 0.0, 2.0**-6, 1e-4),
    "wide window": (2.0**10, 200, 0.2, 1.0, 1e-4),
}


def build(mode, scaler=SCALERS["held by a threshold"]):
    """(parameters, ls_adam over them) for fp32, bf16 or fp16."""
    generator = torch.Generator().manual_seed(1)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[mode]
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    options = {"_name": "ls_adam", "adam_betas": "(0.9, 0.98)", "adam_eps": 1e-8, "weight_decay": 0.01}
    options |= {"use_old_adam": False, "fp16_adam_stats": False, "tpu": False, "lr": [1e-3]}
    if mode == "fp32":
        return params, optim.build_optimizer(OmegaConf.create(options), params)
    init, window, tolerance, threshold, least = scaler
    common = {"fp16": mode == "fp16", "bf16": mode == "bf16", "fp16_no_flatten_grads": True, "min_loss_scale": least}
    common |= {"memory_efficient_fp16": False, "memory_efficient_bf16": False, "fp16_init_scale": init}
    common |= {"fp16_scale_window": window, "fp16_scale_tolerance": tolerance, "threshold_loss_scale": threshold}
    cfg = SimpleNamespace(optimizer=OmegaConf.create(options), common=SimpleNamespace(**common))
    return params, optim.FP16Optimizer.build_optimizer(cfg, params)


def reference_scaler(scaler):
    init, window, tolerance, threshold, least = scaler
    return DynamicLossScaler(init, scale_window=window, tolerance=tolerance, threshold=threshold, min_loss_scale=least)


def gradients(seed):
    """Multiples of 1/8 up to 2, which fp16 holds exactly at every loss scale here."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-16, 17, shape, generator=generator) / 8.0 for shape in SHAPES]


def spoil(values, rng, mode):
    """Puts something that is not finite at a random place, or at several."""
    kinds = [math.inf, -math.inf, math.nan]
    if mode != "fp16":
        kinds.append(3e38)  # finite; its square is not
    for _ in range(rng.choice([1, 1, 1, 3])):
        value = values[rng.randrange(len(values))]
        value.view(-1)[rng.randrange(value.numel())] = rng.choice(kinds)


def backward(params, values, scale, rng):
    """Leaves the gradients where a backward does: in the optimizer's buffer, or where autograd allocated them.

    Returns whether the loss scale left them finite.
    """
    grads = [(value * scale).to(p.dtype) for p, value in zip(params, values, strict=True)]
    for p, grad in zip(params, grads, strict=True):
        place = packing.claim_grad([p]) if rng.random() < 0.5 else None
        p.grad = grad if place is None else place.copy_(grad)
    return all(grad.isfinite().all() for grad in grads)


def update(optimizer):
    """The error that the update ends in, if it does."""
    try:
        optimizer.multiply_grads(0.5)
        optimizer.clip_grad_norm(CLIP_NORM)
        optimizer.step()
    except (OverflowError, FloatingPointError) as error:
        optimizer.zero_grad()
        return type(error)
    return None


def bits(optimizer):
    """Every buffer that a step may change."""
    held = [
        [buffer.param, buffer.param_low, buffer.master, buffer.exp_avg, buffer.exp_avg_sq]
        for buffer in optimizer.optimizer.buffers
    ]
    return [t.clone() for buffers in held for t in buffers if t is not None]


def assert_same_bits(actual, expected, when):
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a.view(torch.int16), e.view(torch.int16)), when


def steps_of(optimizer):
    return [state["step"] for state in optimizer.optimizer.state.values()]


def run(ours, other, mode, seed, n_overflows=N_OVERFLOWS, check_scale=lambda is_finite, error: None):
    """Steps ``ours`` with so many gradients that overflow among finite ones, and ``other`` with the finite ones alone."""
    (params, optimizer), (other_params, other_optimizer) = ours, other
    rng = random.Random(seed)
    scaler = getattr(optimizer, "scaler", None)
    done = n_finite = 0
    while done < n_overflows:
        values = gradients(n_finite)
        # Often, then seldom, then in between.
        is_finite = rng.random() < (0.2, 0.6, 0.4)[(done // 20) % 3]
        if not is_finite:
            spoil(values, rng, mode)
        optimizer.zero_grad()
        before, steps = bits(optimizer), steps_of(optimizer)
        is_finite &= backward(params, values, 1.0 if scaler is None else scaler.loss_scale, rng)
        check_scale(is_finite, update(optimizer))
        if is_finite:
            n_finite += 1
            other_optimizer.zero_grad()
            backward(other_params, values, 1.0, rng)
            assert update(other_optimizer) is None
            assert steps_of(optimizer) == [n_finite] * len(SHAPES)
        else:
            done += 1
            assert_same_bits(bits(optimizer), before, f"overflow {done}")
            assert steps_of(optimizer) == steps
    assert n_finite > n_overflows / 4
    assert_same_bits(bits(optimizer), bits(other_optimizer), "in the end")
    assert steps_of(optimizer) == steps_of(other_optimizer)


@pytest.mark.parametrize("tells_before_the_step", [True, False], ids=["told by the norm", "told by the step"])
@pytest.mark.parametrize("name", SCALERS)
def test_fp16_takes_stocks_course(name, tells_before_the_step):
    ours = build("fp16", SCALERS[name])
    optimizer = ours[1]
    optimizer.waits_before_step = tells_before_the_step
    expected = reference_scaler(SCALERS[name])
    scales = set()

    def check_scale(is_finite, error):
        if is_finite:
            expected.update()
        else:
            with pytest.raises(OverflowError):
                expected.check_overflow(math.nan)
        assert error is (None if is_finite else OverflowError)
        # All that decides the rest of the course, too.
        assert vars(optimizer.scaler) == vars(expected)
        scales.add(expected.loss_scale)

    other = build("fp16", (1.0, 1 << 20, 0.0, None, 1e-4))
    run(ours, other, "fp16", seed=len(name), n_overflows=N_OVERFLOWS // len(SCALERS), check_scale=check_scale)
    assert len(scales) >= 3


@pytest.mark.parametrize("tells_before_the_step", [True, False], ids=["told by the norm", "told by the step"])
def test_the_least_loss_scale_ends_training(tells_before_the_step):
    course = (2.0**2, 1000, 0.0, None, 2.0**-3)
    params, optimizer = build("fp16", course)
    optimizer.waits_before_step = tells_before_the_step
    expected, before, errors = reference_scaler(course), bits(optimizer), []
    while FloatingPointError not in errors:
        with pytest.raises((OverflowError, FloatingPointError)) as raised:
            expected.check_overflow(math.inf)
        optimizer.zero_grad()
        backward(params, [torch.full(shape, math.inf) for shape in SHAPES], 1.0, random.Random(1))
        errors.append(update(optimizer))
        assert errors[-1] is raised.type and vars(optimizer.scaler) == vars(expected)
    assert len(errors) == 5 and optimizer.scaler.loss_scale == 2.0**-2
    assert_same_bits(bits(optimizer), before, "in the end")


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_without_a_loss_scale_the_step_changes_nothing(mode):
    """No error from the optimizer: the trainer looks at the norms, and ends training."""
    ours, other = build(mode), build(mode)
    optimizer = ours[1].optimizer
    optimizer.waits_for_overflow = True  # or the host counts the step, since it does not know

    def check(is_finite, error):
        assert error is None
        assert optimizer.skipped == (not is_finite)

    run(ours, other, mode, seed=5, check_scale=check)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16"])
def test_the_first_step_overflows(mode):
    """No state is there yet."""
    params, optimizer = build(mode)
    before = bits(optimizer)
    values = gradients(0)
    values[2][3] = math.nan
    optimizer.zero_grad()
    backward(params, values, 1.0, random.Random(1))
    assert update(optimizer) is (OverflowError if mode == "fp16" else None)
    assert_same_bits(bits(optimizer), before, mode)
    if mode == "fp16":
        assert copy.deepcopy(optimizer.state_dict())["state"] == {}
        assert optimizer.scaler.loss_scale == 2.0**6


def test_a_scaled_gradient_that_fp16_cannot_hold_is_an_overflow():
    """Finite as it is: the loss scale makes it infinite, and is halved until it does not."""
    params, optimizer = build("fp16", (2.0**12, 1000, 0.0, None, 1e-4))
    values = [torch.full(shape, 100.0) for shape in SHAPES]
    errors = []
    for _ in range(5):
        optimizer.zero_grad()
        optimizer.backward(sum((p * v.half()).sum() for p, v in zip(params, values, strict=True)))
        errors.append(update(optimizer))
    assert errors == [OverflowError] * 3 + [None] * 2  # 100 * 2^9 is the first below 65,504
    assert optimizer.scaler.loss_scale == 2.0**9 and set(steps_of(optimizer)) == {2}
