"""Optimizer states between fairseq's two layouts, as functions and through every optimizer that loads them."""

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
from fairseq.optim import FairseqOptimizer, FP16Optimizer, MemoryEfficientFP16Optimizer, build_optimizer
from omegaconf import OmegaConf
from torch import nn

from ls_plugin.errors import CheckpointError
from ls_plugin.optim.state import to_flat, to_list

SHAPES = [torch.Size(shape) for shape in ((3, 5), (7,), (2, 2, 2), ())]
SIZES = [15, 7, 8, 1]
GROUP = {"lr": 0.1, "betas": (0.9, 0.98), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}


def list_state(steps=(5, 5, 5, 5), **extra):
    """Steps by parameter, None where it has no state."""
    generator = torch.Generator().manual_seed(1)
    state = {}
    for i, (shape, step) in enumerate(zip(SHAPES, steps, strict=True)):
        moments = [torch.rand(shape, generator=generator) for _ in range(2)]
        if step is not None:
            state[i] = {"step": step, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
    return {"state": state, "param_groups": [{**GROUP, "params": [0, 1, 2, 3]}], **extra}


def assert_equal_states(a, b):
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for key, entry in a["state"].items():
        assert entry.keys() == b["state"][key].keys()
        for name, value in entry.items():
            torch.testing.assert_close(value, b["state"][key][name], rtol=0, atol=0)


def test_there_and_back():
    saved = list_state(loss_scale=64.0, ls_master=[torch.ones(1)])
    flat = to_flat(saved, SHAPES)
    assert flat["param_groups"] == [{**GROUP, "params": [0]}]
    assert flat["state"][0]["step"] == 5
    assert flat["state"][0]["exp_avg"].shape == (31,)
    assert torch.equal(flat["state"][0]["exp_avg"][15:22], saved["state"][1]["exp_avg"])
    back = to_list(flat, SHAPES)
    assert_equal_states(back, saved)
    for converted in (flat, back):
        assert (converted["loss_scale"], converted["ls_master"]) == (64.0, saved["ls_master"])
    whole = flat["state"][0]["exp_avg"]
    assert back["state"][2]["exp_avg"].data_ptr() == whole[22:].data_ptr()  # no copy


def test_what_fits_passes_through():
    saved = list_state()
    assert to_list(saved, SHAPES) is saved
    flat = to_flat(saved, SHAPES)
    assert to_flat(flat, SHAPES) is flat
    one = {"state": {0: {"step": 1, "exp_avg": torch.ones(2, 3)}}, "param_groups": [{"params": [0]}]}
    assert to_list(one, [torch.Size((2, 3))]) is one
    flat_one = to_flat(one, [torch.Size((2, 3))])
    assert flat_one["state"][0]["exp_avg"].shape == (6,)
    assert to_list(flat_one, [torch.Size((2, 3))])["state"][0]["exp_avg"].shape == (2, 3)


def test_the_inputs_are_left_alone():
    saved = list_state()
    before = copy.deepcopy(saved)
    to_list(to_flat(saved, SHAPES), SHAPES)
    assert_equal_states(saved, before)


def test_flat_counts_the_largest_step_and_has_zeros_where_there_is_no_state():
    saved = list_state(steps=(3, None, 9, None))
    flat = to_flat(saved, SHAPES)["state"][0]
    assert flat["step"] == 9
    assert torch.equal(flat["exp_avg"][15:22], torch.zeros(7))
    assert torch.equal(flat["exp_avg_sq"][22:30].view(2, 2, 2), saved["state"][2]["exp_avg_sq"])
    assert flat["exp_avg_sq"].shape == (31,)


def test_before_the_first_update_there_is_no_state():
    flat = to_flat(list_state(steps=(None,) * 4), SHAPES)
    assert flat["state"] == {}
    assert to_list(flat, SHAPES) == {"state": {}, "param_groups": [{**GROUP, "params": [0, 1, 2, 3]}]}


def test_steps_of_the_group_as_apex_counts_them():
    saved = list_state()
    for entry in saved["state"].values():
        del entry["step"]
    saved["param_groups"][0]["step"] = 5
    flat = to_flat(saved, SHAPES)
    assert flat["param_groups"][0]["step"] == 5
    assert "step" not in flat["state"][0]
    assert_equal_states(to_list(flat, SHAPES), saved)


def test_steps_in_tensors_are_not_shared():
    flat = to_flat(list_state(), SHAPES)
    flat["state"][0]["step"] = torch.tensor(5.0)
    entries = to_list(flat, SHAPES)["state"]
    entries[0]["step"] += 1
    assert (entries[0]["step"], entries[1]["step"], flat["state"][0]["step"]) == (6, 5, 5)
    assert to_flat(to_list(flat, SHAPES), SHAPES)["state"][0]["step"] == 5


def test_moments_in_fp16_come_out_in_fp32_without_their_scale():
    saved = list_state()
    expected = copy.deepcopy(saved)
    for i, entry in enumerate(saved["state"].values()):
        for name in ("exp_avg", "exp_avg_sq"):
            entry[f"{name}_scale"] = 2.0 ** -(10 + i)
            entry[name] = (entry[name] / entry[f"{name}_scale"]).half()
            expected["state"][i][name] = entry[name].float() * entry[f"{name}_scale"]
    flat = to_flat(saved, SHAPES)
    assert flat["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert_equal_states(to_list(flat, SHAPES), expected)
    whole = flat["state"][0]
    scaled = {"step": 5, "exp_avg": (whole["exp_avg"] * 4).half(), "exp_avg_scale": torch.tensor(0.25)}
    entry = to_list({**flat, "state": {0: scaled}}, SHAPES)["state"][0]
    assert entry.keys() == {"step", "exp_avg"}
    assert torch.equal(entry["exp_avg"], (whole["exp_avg"][:15] * 4).half().float().view(3, 5) * 0.25)


def test_mismatches_are_told_with_the_remedy():
    saved = list_state()
    flat = to_flat(saved, SHAPES)
    two_groups = {**saved, "param_groups": [{"params": [0, 1]}, {"params": [2, 3]}]}
    other = [torch.Size((5, 3)), *SHAPES[1:]]
    cases = [
        (to_list, flat, SHAPES[:3], r"flat exp_avg of --fp16 must have 30 elements.*got 31"),
        (to_flat, flat, SHAPES[:3], r"flat exp_avg of --fp16 must have 30 elements.*got 31"),
        (to_list, saved, SHAPES[:3], r"must be of 3 parameters.*got 4; were other parameters frozen"),
        (to_flat, saved, SHAPES[:3], r"must be of 3 parameters.*got 4"),
        (to_list, saved, other, r"exp_avg must have the parameter's shape \(5, 3\), got \(3, 5\)"),
        (to_flat, saved, other, r"exp_avg must have the parameter's shape \(5, 3\), got \(3, 5\)"),
        (to_flat, two_groups, SHAPES, r"one parameter group, got 2; resume with --fp16-no-flatten-grads"),
    ]
    saved_by_adafactor = copy.deepcopy(saved)
    for entry in saved_by_adafactor["state"].values():
        entry["exp_avg_sq_row"] = torch.ones(3)
    cases.append(
        (to_flat, saved_by_adafactor, SHAPES, r"exp_avg_sq_row must have .* \(3, 5\) to become part of the flat")
    )
    for convert, state, shapes, message in cases:
        with pytest.raises(CheckpointError, match=rf"optimizer state: .*{message}.*--reset-optimizer"):
            convert(state, shapes)


# --- the optimizers

MODES = {
    "fp32": {},
    "fp16": {"fp16": True},
    "fp16 list": {"fp16": True, "fp16_no_flatten_grads": True},
    "bf16": {"bf16": True},
    "memory-efficient": {"fp16": True, "memory_efficient_fp16": True},
}


def build(mode, frozen=(), **optimizer):
    """(parameters, optimizer) of stock's Adam as the trainer builds it."""
    flags = {"fp16": False, "bf16": False, "fp16_no_flatten_grads": False, "memory_efficient_fp16": False} | MODES[mode]
    settings = {"_name": "adam", "adam_betas": "(0.9, 0.98)", "adam_eps": 1e-8, "weight_decay": 0.0, "lr": [1e-2]}
    scaling = {"fp16_scale_window": 4, "fp16_init_scale": 8, "fp16_scale_tolerance": 0.0, "threshold_loss_scale": None}
    cfg = OmegaConf.create(
        {
            "optimizer": settings | {"use_old_adam": False, "fp16_adam_stats": False, "tpu": False} | optimizer,
            "common": flags | scaling | {"min_loss_scale": 1e-4, "model_parallel_size": 1},
            "optimization": {"update_freq": [1]},
            "distributed_training": {"distributed_world_size": 1},
        }
    )
    torch.manual_seed(2)
    dtype = torch.half if flags["fp16"] else torch.bfloat16 if flags["bf16"] else torch.float
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for i, shape in enumerate(SHAPES) if i not in frozen]
    if mode == "fp32":
        return params, build_optimizer(cfg.optimizer, params)
    wrapper = MemoryEfficientFP16Optimizer if flags["memory_efficient_fp16"] else FP16Optimizer
    return params, wrapper.build_optimizer(cfg, params)


def update(params, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    loss = sum((p.float() * torch.randn(p.shape, generator=generator)).sum() for p in params)
    optimizer.backward(loss)
    optimizer.clip_grad_norm(0.0)
    optimizer.step()


def saved_by(mode, n_updates=3):
    params, optimizer = build(mode)
    for seed in range(n_updates):
        update(params, optimizer, seed)
    return optimizer.state_dict()


@pytest.mark.parametrize("source, target", [*itertools.permutations(MODES, 2), ("fp16", "fp16")])
def test_stock_optimizers_take_either_layout(source, target):
    """The moments are those that were saved, in the layout of the target, and the next update goes on from them."""
    saved = saved_by(source)
    expected = to_list(copy.deepcopy(saved), SHAPES)
    params, optimizer = build(target)
    optimizer.load_state_dict(copy.deepcopy(saved), {"lr": 0.5})
    assert optimizer.get_lr() == 0.5
    loaded = optimizer.state_dict()
    assert (loaded["param_groups"][0]["params"] == [0]) == (target == "fp16")
    assert_equal_states({**to_list(loaded, SHAPES), "param_groups": []}, {**expected, "param_groups": []})
    if target in ("fp16", "fp16 list", "memory-efficient"):  # 8 doubles at the first update; others save no scale
        assert loaded["loss_scale"] == saved.get("loss_scale", 8)
    update(params, optimizer, seed=9)
    assert {entry["step"] for entry in optimizer.state_dict()["state"].values()} == {4}


@pytest.mark.parametrize("mode", MODES)
def test_a_state_with_other_parameters_frozen_is_refused(mode):
    saved = saved_by(mode)
    _, optimizer = build(mode, frozen=(1,))
    with pytest.raises(CheckpointError, match=r"were other parameters frozen .*--reset-optimizer"):
        optimizer.load_state_dict(saved)


def test_scaled_moments_of_the_same_layout_lose_their_scale_unless_they_are_wanted():
    saved = saved_by("fp32")
    for entry in saved["state"].values():
        entry.update(exp_avg=(entry["exp_avg"] * 2).half(), exp_avg_scale=0.5)
    _, optimizer = build("fp32")
    optimizer.load_state_dict(copy.deepcopy(saved))
    for i, entry in optimizer.state_dict()["state"].items():
        assert torch.equal(entry["exp_avg"], saved["state"][i]["exp_avg"].float() * 0.5)
    optimizer.optimizer.use_fp16_stats = True
    optimizer.load_state_dict(copy.deepcopy(saved))
    assert optimizer.state_dict()["state"][0]["exp_avg_scale"] == 0.5
    with pytest.raises(
        CheckpointError, match=r"--fp16-adam-stats: the saved state must have been written with this flag"
    ):
        optimizer.load_state_dict(saved_by("fp16"))


def test_what_is_no_optimizer_state_passes_through():
    """--optimizer composite keeps states by name."""
    seen = []
    inner = SimpleNamespace(load_state_dict=seen.append, param_groups=[])
    optimizer = SimpleNamespace(optimizer=inner, params=[], param_groups=[])
    state = {"adam": {}, "sgd": {}}
    FairseqOptimizer.load_state_dict(optimizer, state)
    assert seen == [state]
