"""ls_adam against fairseq's Adam, alone and under fairseq's mixed-precision wrappers."""

import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from fairseq.optim import OPTIMIZER_REGISTRY, FP16Optimizer, MemoryEfficientFP16Optimizer, build_optimizer
from fairseq.optim import adam as stock_adam
from omegaconf import OmegaConf
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ls_plugin import _library
from ls_plugin.errors import CheckpointError, UnsupportedError
from ls_plugin.optim import ContiguousAdam, FairseqAdam, adam

SIZES = [*range(1, 10), 4095, 4096, 4097]
# Both compute in fp32; the scale is folded into one factor here and applied in two multiplications there.
TOLERANCE = 1e-5


def config(name="ls_adam", **options):
    return OmegaConf.create(
        {"_name": name, "adam_betas": "(0.9, 0.98)", "adam_eps": 1e-8, "weight_decay": 0.0, "use_old_adam": False}
        | {"fp16_adam_stats": False, "tpu": False, "lr": [1e-2]}
        | options
    )


def twins(shapes=((3, 5), (7,), (1,)), dtype=torch.float32, **options):
    """(params, optimizer) of stock and of ours, with equal parameters."""
    torch.manual_seed(1)
    values = [torch.randn(shape).to(dtype) for shape in shapes]
    pairs = []
    for cls in (stock_adam.FairseqAdam, FairseqAdam):
        params = [nn.Parameter(value.clone()) for value in values]
        pairs.append((params, cls(config(**options), params)))
    return pairs


def set_gradients(pairs, seed, skip=(), scale=1.0):
    """The same gradients on all, through autograd."""
    generator = torch.Generator().manual_seed(seed)
    for i, group in enumerate(zip(*(params for params, _ in pairs), strict=True)):
        gradient = torch.randn(group[0].shape, generator=generator).to(group[0].dtype) * scale
        if i not in skip:
            for p in group:
                (p * gradient).sum().backward()


def assert_same(pairs, tolerance=TOLERANCE):
    (stock_params, stock), (our_params, ours) = pairs
    for p, q in zip(stock_params, our_params, strict=True):
        torch.testing.assert_close(q.data, p.data, rtol=tolerance, atol=tolerance)
        assert (p in stock.optimizer.state) == (q in ours.optimizer.state)
        if p in stock.optimizer.state:
            expected, got = stock.optimizer.state[p], ours.optimizer.state[q]
            assert got["step"] == expected["step"]
            for name in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(got[name], expected[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("clip_norm", [0.0, 0.5, 1e6])
def test_fifty_steps_equal_stock(weight_decay, clip_norm):
    pairs = twins(weight_decay=weight_decay)
    for step in range(50):
        norms = []
        for _, optimizer in pairs:
            optimizer.zero_grad()
        set_gradients(pairs, step)
        for _, optimizer in pairs:
            optimizer.set_lr(1e-2 / (1 + step))
            optimizer.multiply_grads(0.3 + step % 3)
            norms.append(optimizer.clip_grad_norm(clip_norm))
            optimizer.step()
        torch.testing.assert_close(norms[1], norms[0])
    assert_same(pairs)


@pytest.mark.parametrize("size", SIZES)
def test_every_element_is_updated(size):
    pairs = twins(shapes=[(size,), (3,), (size,)])
    for step in range(3):
        for _, optimizer in pairs:
            optimizer.zero_grad()
        set_gradients(pairs, step)
        for params, optimizer in pairs:
            before = [p.detach().clone() for p in params]
            optimizer.step()
            assert all((p != q).all() for p, q in zip(before, params, strict=True))
    assert_same(pairs)


def test_step_with_a_scale_divides_the_gradients():
    pairs = twins()
    for scale in (128.0, torch.tensor(4.0), 1.0):
        for _, optimizer in pairs:
            optimizer.zero_grad()
        set_gradients(pairs, 1)
        for _, optimizer in pairs:
            optimizer.step(scale=scale)
    assert_same(pairs)


def test_a_factor_may_be_a_tensor():
    """fairseq divides by a sample size that lives on the device."""
    pairs = twins()
    set_gradients(pairs, 1)
    for _, optimizer in pairs:
        optimizer.multiply_grads(1.0 / torch.tensor(7.0))
        optimizer.clip_grad_norm(0.1)
        optimizer.step()
    assert_same(pairs)


def test_norm_is_that_of_the_multiplied_gradients_and_may_be_aggregated():
    pairs = twins()
    set_gradients(pairs, 1)
    for _, optimizer in pairs:
        optimizer.multiply_grads(-3.0)
    plain = [optimizer.clip_grad_norm(0.0) for _, optimizer in pairs]
    doubled = [optimizer.clip_grad_norm(0.5, aggregate_norm_fn=lambda norm: norm * 2) for _, optimizer in pairs]
    torch.testing.assert_close(plain[1], plain[0])
    torch.testing.assert_close(doubled[1], doubled[0])
    for _, optimizer in pairs:
        optimizer.step()
    assert_same(pairs)


def test_norm_of_a_large_buffer_keeps_its_digits():
    params = [nn.Parameter(torch.zeros(3_000_017)), nn.Parameter(torch.zeros(5))]
    optimizer = FairseqAdam(config(), params)
    torch.manual_seed(1)
    for p in params:
        (p * torch.rand_like(p)).sum().backward()
    expected = torch.cat([p.grad for p in params]).double().norm()
    assert abs(optimizer.clip_grad_norm(0.0).item() / expected.item() - 1) < 1e-6


def test_norm_without_gradients_is_zero():
    (_, stock), (_, ours) = twins()
    assert ours.clip_grad_norm(1.0) == stock.clip_grad_norm(1.0) == 0
    ours.step()


def test_parameters_without_a_gradient_keep_their_bits():
    pairs = twins(shapes=[(5,)] * 6, weight_decay=0.1)
    for step, skip in enumerate([(2,), (0, 1), (), (5,), (1, 3), (0, 1, 2, 3, 4, 5)]):
        for _, optimizer in pairs:
            optimizer.zero_grad()
        set_gradients(pairs, step, skip=skip)
        before = [p.detach().clone() for p in pairs[1][0]]
        for _, optimizer in pairs:
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
        for i in skip:
            assert torch.equal(before[i], pairs[1][0][i])
    assert_same(pairs)


def test_frozen_parameters_before_and_after_building():
    pairs = twins(shapes=[(5,)] * 4)
    for params, optimizer in pairs:
        params[1].requires_grad_(False)
        optimizer.zero_grad()
    frozen = pairs[1][0][1].detach().clone()
    set_gradients([([p for p in params if p.requires_grad], o) for params, o in pairs], 1)
    for _, optimizer in pairs:
        optimizer.step()
    assert_same(pairs)
    assert torch.equal(frozen, pairs[1][0][1])

    for params, optimizer in pairs:
        params[1].requires_grad_(True)
        optimizer.zero_grad()
    set_gradients(pairs, 2)
    for _, optimizer in pairs:
        optimizer.step()
    assert_same(pairs)


def test_large_frozen_parameters():
    """Given to the optimizer itself; fairseq leaves them out."""
    params = [nn.Parameter(torch.ones(1 << 17)), nn.Parameter(torch.ones(1 << 17), requires_grad=False)]
    optimizer = ContiguousAdam(params, lr=0.1)
    params[0].sum().backward()
    optimizer.step()
    assert params[0].max() < 1 and params[1].min() == 1


def test_build_leaves_frozen_parameters_out():
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3), requires_grad=False)]
    optimizer = build_optimizer(config(), params)
    assert isinstance(optimizer, FairseqAdam)
    assert list(optimizer.params) == [params[0]]


def test_tied_parameters_sum_their_gradients():
    pairs = []
    for cls in (stock_adam.FairseqAdam, FairseqAdam):
        torch.manual_seed(1)
        embedding, projection = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
        projection.weight = embedding.weight
        optimizer = cls(config(), list(nn.ModuleList([embedding, projection]).parameters()))
        for step in range(3):
            optimizer.zero_grad()
            projection(embedding(torch.tensor([1, 2, step]))).square().sum().backward()
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
        assert projection.weight is embedding.weight
        pairs.append(([embedding.weight], optimizer))
    assert_same(pairs)


def test_accumulation_over_several_backward_passes():
    pairs = twins()
    for seed in (1, 2, 3):
        set_gradients(pairs, seed)
    assert_same_gradients(pairs)
    for _, optimizer in pairs:
        optimizer.step()
    assert_same(pairs)


def test_backward_after_scaling_adds_to_the_scaled_gradient():
    pairs = twins()
    set_gradients(pairs, 1)
    for params, optimizer in pairs:
        optimizer.multiply_grads(0.25)
        optimizer.backward(sum(p.sum() for p in params))
        optimizer.step()
    assert_same(pairs)


def assert_same_gradients(pairs):
    for p, q in zip(pairs[0][0], pairs[1][0], strict=True):
        torch.testing.assert_close(q.grad, p.grad)


def test_materialize_grads_shows_the_true_gradients():
    pairs = twins()
    set_gradients(pairs, 1)
    for _, optimizer in pairs:
        optimizer.multiply_grads(0.5)
        optimizer.clip_grad_norm(0.1)
    pairs[1][1].optimizer.materialize_grads()
    assert_same_gradients(pairs)
    for _, optimizer in pairs:
        optimizer.step()
    assert_same(pairs)


def test_foreign_gradients_are_taken_over():
    """legacy_ddp and others assign tensors of their own to p.grad, also for parameters that got none from autograd."""
    pairs = twins()
    set_gradients(pairs, 1, skip=(1,))
    for params, optimizer in pairs:
        params[1].grad = torch.ones_like(params[1])
        optimizer.multiply_grads(0.5)
        params[0].grad = torch.full_like(params[0], 2.0)  # already in its true scale
        optimizer.step()
    assert_same(pairs)
    ours = pairs[1][1].optimizer.buffers[0]
    for i, p in enumerate(pairs[1][0]):
        assert p.grad.data_ptr() == ours.view(ours.grad, i).data_ptr()


def test_create_graph_leaves_the_views_in_place():
    params, optimizer = twins()[1]
    loss = sum(p.square().sum() for p in params)
    loss.backward(create_graph=True)
    loss = sum(p.pow(3).sum() for p in params)
    loss.backward(create_graph=True)
    torch.testing.assert_close(params[0].grad.detach(), 2 * params[0].detach() + 3 * params[0].detach() ** 2)
    optimizer.step()


def test_zero_grad_forgets_a_pending_factor_and_what_was_there():
    pairs = twins()
    set_gradients(pairs, 1)
    for _, optimizer in pairs:
        optimizer.multiply_grads(float("nan"))
        optimizer.zero_grad()
    assert all(p.grad is None for p in pairs[1][0])
    set_gradients(pairs, 2)
    for _, optimizer in pairs:
        optimizer.step()
    assert_same(pairs)


def test_memory_is_contiguous_and_aligned():
    params, optimizer = twins(shapes=[(3, 5), (7,), (0,), (), (64,)])[1]
    sum(p.sum() for p in params).backward()
    optimizer.clip_grad_norm(0.0)  # small gradients stay where autograd put them until somebody asks
    (buffer,) = optimizer.optimizer.buffers
    for i, p in enumerate(params):
        for tensor, base in ((p.data, buffer.param), (p.grad, buffer.grad)):
            assert tensor.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        assert buffer.offsets[i] * p.element_size() % 64 == 0
    assert len(list(buffer.runs())) == 1  # one launch


def test_one_launch_per_step(monkeypatch):
    calls = []
    original = adam.ops.adam_step
    monkeypatch.setattr(adam.ops, "adam_step", lambda *args, **kwargs: (calls.append(1), original(*args, **kwargs)))
    params, optimizer = twins(shapes=[(5,)] * 20)[1]
    for _ in range(3):
        optimizer.zero_grad()
        sum((p * p).sum() for p in params).backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
    assert len(calls) == 3


def test_nothing_is_read_on_the_host():
    """From the sample size to the update: scaling, norm, clipping and step leave every value where the gradients are."""

    class Recorder(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.append(function.__name__)
            return function(*args, **(kwargs or {}))

    params, optimizer = twins(shapes=[(5,)] * 20)[1]
    sum((p * p).sum() for p in params).backward()
    with Recorder() as recorder:
        optimizer.multiply_grads(1.0 / torch.tensor(7.0))
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
    assert not [name for name in recorder.names if "local_scalar_dense" in name or "is_nonzero" in name]
    if _library.status().loaded:
        assert recorder.names.count("grad_norm.default") == recorder.names.count("adam_step.default") == 1


def test_replaced_memory_is_noticed():
    params, optimizer = twins()[1]
    sum(p.sum() for p in params).backward()
    params[1].data = params[1].data.clone()
    with pytest.raises(RuntimeError, match=r"shape \(7,\).*build the optimizer after"):
        optimizer.step()


def test_building_again_moves_the_parameters_and_frees_the_old_buffers():
    """fairseq builds the optimizer again after it loads a checkpoint."""
    params, first = twins()[1]
    values = [p.detach().clone() for p in params]
    old = weakref.ref(first.optimizer.buffers[0])
    second = FairseqAdam(config(), params)
    del first
    gc.collect()
    assert old() is None
    assert all(torch.equal(p, value) for p, value in zip(params, values, strict=True))
    sum(p.sum() for p in params).backward()
    second.step()
    assert not torch.equal(params[0], values[0])


def test_parameters_outlive_the_optimizer():
    params, optimizer = twins()[1]
    del optimizer
    gc.collect()
    sum(p.sum() for p in params).backward()
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in params)


def test_sparse_gradient_is_refused():
    embedding = nn.Embedding(5, 3, sparse=True)
    optimizer = FairseqAdam(config(), [embedding.weight])
    assert len(optimizer.optimizer.buffers) == 1
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()


# --- state


def run_steps(pair, seeds, skip=()):
    _params, optimizer = pair
    for seed in seeds:
        optimizer.zero_grad()
        set_gradients([pair], seed, skip=skip)
        optimizer.multiply_grads(0.5)
        optimizer.clip_grad_norm(1.0)
        optimizer.step()


@pytest.mark.parametrize(
    "source, target", [(0, 1), (1, 0), (1, 1)], ids=["adam->ls_adam", "ls_adam->adam", "ls_adam->ls_adam"]
)
def test_state_moves_between_the_two(source, target):
    """Five steps, save, load into the other, five more: as ten steps of the first."""
    whole, first, second = (twins(weight_decay=0.01)[i] for i in (source, source, target))
    run_steps(whole, range(10))
    run_steps(first, range(5), skip=())
    saved = copy.deepcopy(first[1].state_dict())
    with torch.no_grad():
        for p, q in zip(second[0], first[0], strict=True):
            p.copy_(q)
    second[1].load_state_dict(saved)
    run_steps(second, range(5, 10))
    for p, q in zip(whole[0], second[0], strict=True):
        torch.testing.assert_close(q, p, rtol=TOLERANCE, atol=TOLERANCE)
    if source == target:
        assert all(torch.equal(p, q) for p, q in zip(whole[0], second[0], strict=True))


def test_state_dict_has_stock_keys():
    (_, stock), (_, ours) = pairs = twins()
    set_gradients(pairs, 1, skip=(1,))
    for _, optimizer in pairs:
        optimizer.step()
    expected, got = stock.state_dict(), ours.state_dict()
    assert got["state"].keys() == expected["state"].keys()
    assert all(got["state"][i].keys() == expected["state"][i].keys() for i in expected["state"])
    assert all(got["state"][i]["exp_avg"].shape == expected["state"][i]["exp_avg"].shape for i in expected["state"])
    assert got["param_groups"] == expected["param_groups"]


def test_loading_keeps_the_views_and_forgets_what_is_not_in_the_state():
    pair, other = twins()[1], twins()[1]
    run_steps(other, range(2), skip=(1,))
    run_steps(pair, range(3))
    pair[1].load_state_dict(other[1].state_dict())
    assert pair[0][1] not in pair[1].optimizer.state
    assert pair[1].optimizer.state[pair[0][0]]["step"] == 2
    (buffer,) = pair[1].optimizer.buffers
    assert pair[1].optimizer.state[pair[0][0]]["exp_avg"].data_ptr() == buffer.exp_avg.data_ptr()
    run_steps(pair, [7])
    assert pair[1].optimizer.state[pair[0][1]]["step"] == 1


def test_loading_ones_own_state_changes_nothing():
    pair = twins()[1]
    run_steps(pair, range(3), skip=(1,))
    before = copy.deepcopy(pair[1].state_dict())
    pair[1].load_state_dict(pair[1].state_dict())
    torch.testing.assert_close(pair[1].state_dict(), before, rtol=0, atol=0)
    assert all(state["exp_avg"].any() for state in before["state"].values())


def test_overrides_win_over_the_saved_options():
    pair, other = twins()[1], twins()[1]
    run_steps(other, range(1))
    saved = copy.deepcopy(other[1].state_dict())
    saved["param_groups"][0]["lr"] = 0.125
    pair[1].load_state_dict(saved)
    assert pair[1].get_lr() == 0.125
    pair[1].load_state_dict(saved, optimizer_overrides={"lr": 0.5})
    assert pair[1].get_lr() == 0.5


def test_state_of_apex_counts_steps_per_group():
    pair, other = twins()[1], twins()[1]
    run_steps(other, range(4))
    saved = copy.deepcopy(other[1].state_dict())
    saved["param_groups"][0]["step"] = 4
    for state in saved["state"].values():
        del state["step"]
    pair[1].load_state_dict(saved)
    assert pair[1].optimizer.state[pair[0][0]]["step"] == 4


def test_state_of_fp16_adam_stats_is_scaled_back():
    """apex's FusedAdam, with stock's --fp16-adam-stats, keeps each moment as fp16 with a scale."""
    pair, other = twins()[1], twins()[1]
    run_steps(other, range(2))
    saved = copy.deepcopy(other[1].state_dict())
    expected = copy.deepcopy(saved["state"])
    for state in saved["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            scale = 1e-8 + state[name].abs().max() / torch.finfo(torch.float16).max
            state[f"{name}_scale"], state[name] = scale, (state[name] / scale).half()
    pair[1].load_state_dict(saved)
    for p, state in zip(pair[0], expected.values(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            peak = state[name].abs().max().item()
            torch.testing.assert_close(pair[1].optimizer.state[p][name], state[name], rtol=1e-3, atol=1e-3 * peak)


@pytest.mark.parametrize(
    "change, message", [("group", "must be of 3 parameters"), ("shape", "shape"), ("amsgrad", "amsgrad")]
)
def test_a_state_that_does_not_fit_is_refused(change, message):
    pair = twins()[1]
    run_steps(pair, range(1))
    saved = copy.deepcopy(pair[1].state_dict())
    if change == "group":
        saved["param_groups"][0]["params"].pop()
    elif change == "shape":
        saved["state"][0]["exp_avg"] = torch.zeros(2)
    else:
        saved["param_groups"][0]["amsgrad"] = True
    with pytest.raises(CheckpointError, match=f"{message}.*--reset-optimizer"):
        pair[1].load_state_dict(saved)


# --- options


@pytest.mark.parametrize("option", ["use_old_adam", "fp16_adam_stats", "tpu"])
def test_unsupported_option_is_refused_by_name(option):
    with pytest.raises(UnsupportedError, match=f"--{option.replace('_', '-')} is unsupported.*--optimizer adam"):
        FairseqAdam(config(**{option: True}), [nn.Parameter(torch.ones(2))])


def test_experts_groups_and_late_groups_are_refused():
    p = nn.Parameter(torch.ones(2))
    p.expert = True
    with pytest.raises(UnsupportedError, match="expert"):
        FairseqAdam(config(), [p])
    optimizer = FairseqAdam(config(), [nn.Parameter(torch.ones(2))])
    with pytest.raises(UnsupportedError, match="groups"):
        optimizer.step(groups=[1])
    with pytest.raises(UnsupportedError, match="group"):
        optimizer.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_copies_are_refused_since_their_parameters_would_lie_elsewhere():
    optimizer = FairseqAdam(config(), [nn.Parameter(torch.ones(2))])
    with pytest.raises(UnsupportedError, match="copying or pickling the optimizer is unsupported"):
        copy.deepcopy(optimizer)


def test_class_name_is_stock_so_that_checkpoints_resume():
    assert OPTIMIZER_REGISTRY["ls_adam"].__name__ == OPTIMIZER_REGISTRY["adam"].__name__


def test_parameter_groups_with_their_own_options():
    results = []
    for cls in (stock_adam.Adam, ContiguousAdam):
        torch.manual_seed(1)
        params = [nn.Parameter(torch.randn(5)) for _ in range(3)]
        optimizer = cls([{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "lr": 0.5}], lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            sum(p.square().sum() for p in params).backward()
            optimizer.step()
        results.append(params)
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(q, p)


# --- fairseq's wrappers for 16-bit training


def wrapper_config(name, bf16):
    common = {
        "bf16": bf16,
        "fp16": not bf16,
        "memory_efficient_fp16": False,
        "fp16_no_flatten_grads": True,
        "fp16_scale_window": 4,
        "fp16_init_scale": 8,
    }
    common |= {"fp16_scale_tolerance": 0.0, "threshold_loss_scale": None, "min_loss_scale": 1e-4}
    return SimpleNamespace(optimizer=config(name), common=SimpleNamespace(**common))


@pytest.mark.parametrize("wrapper", [FP16Optimizer, MemoryEfficientFP16Optimizer])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_fairseqs_wrappers(wrapper, dtype):
    torch.manual_seed(1)
    values = [torch.randn(4, 5).to(dtype), torch.randn(9).to(dtype)]
    pairs = []
    for name in ("adam", "ls_adam"):
        params = [nn.Parameter(value.clone()) for value in values]
        cfg = wrapper_config(name, bf16=dtype == torch.bfloat16)
        pairs.append((params, wrapper.build_optimizer(cfg, params)))
    for step in range(12):
        generator = torch.Generator().manual_seed(step)
        gradients = [torch.randn(v.shape, generator=generator).to(dtype) for v in values]
        norms = []
        for params, optimizer in pairs:
            optimizer.zero_grad()
            optimizer.backward(sum((p * g).sum() for p, g in zip(params, gradients, strict=True)))
            optimizer.multiply_grads(0.5)
            norms.append(optimizer.clip_grad_norm(1.0))
            optimizer.step()
        torch.testing.assert_close(norms[1], norms[0], check_dtype=False)
    # The fp32 results round to 16 bits; where the last bit differs, they lay at a rounding boundary.
    eps = torch.finfo(dtype).eps
    for p, q in zip(pairs[0][0], pairs[1][0], strict=True):
        torch.testing.assert_close(q.float(), p.float(), rtol=2 * eps, atol=2 * eps)
    state, expected = pairs[1][1].state_dict(), pairs[0][1].state_dict()
    for i in expected["state"]:
        # Stock rounds the scaled gradient to 16 bits before the moments take it in; here it stays fp32.
        torch.testing.assert_close(
            state["state"][i]["exp_avg"], expected["state"][i]["exp_avg"].float(), rtol=4 * eps, atol=eps / 8
        )
        assert state["state"][i]["exp_avg"].dtype == torch.float32
    pairs[1][1].load_state_dict(copy.deepcopy(state))
    torch.testing.assert_close(pairs[1][1].state_dict()["state"], copy.deepcopy(state)["state"])


def test_overflow_leaves_parameters_and_moments_untouched():
    params = [nn.Parameter(torch.randn(9).half())]
    optimizer = MemoryEfficientFP16Optimizer.build_optimizer(wrapper_config("ls_adam", bf16=False), params)
    before = params[0].detach().clone()
    optimizer.zero_grad()
    optimizer.backward((params[0] * torch.inf).sum())
    optimizer.multiply_grads(0.5)
    with pytest.raises(OverflowError):
        optimizer.clip_grad_norm(1.0)
    optimizer.zero_grad()
    assert torch.equal(params[0], before)
    assert optimizer.optimizer.state_dict()["state"] == {}
    assert optimizer.optimizer.grad_scale.is_one
