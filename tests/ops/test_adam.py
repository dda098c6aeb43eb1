import pytest
import torch
from fairseq.optim.adam import Adam as FairseqAdam

from ls_plugin import ops, reference
from ls_plugin.reference import join_master, split_master
from tests.ops.accuracy import DTYPES, dtype_name, misaligned, needs_library

# Every tail of a vector, and sizes around a thread's and a block's share.
SIZES = [*range(1, 10), 31, 257, 4095, 4096, 4097]
HALF = [torch.float16, torch.bfloat16]
OPTIONS = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.01}


def sample_inputs(n_elem, device, dtype=torch.float32, grad_dtype=None):
    """param, grad, exp_avg, exp_avg_sq."""
    generator = torch.Generator().manual_seed(4)
    param, grad, exp_avg, exp_avg_sq = (torch.randn(n_elem, generator=generator).to(device) for _ in range(4))
    return param.to(dtype), grad.to(grad_dtype or dtype), exp_avg * 0.1, exp_avg_sq.square() * 0.01


def fairseq_steps(param, grads, lr, beta1, beta2, eps, weight_decay):
    parameter = torch.nn.Parameter(param.clone())
    optimizer = FairseqAdam([parameter], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    state = optimizer.state[parameter]
    return parameter.detach(), state["exp_avg"], state["exp_avg_sq"]


@pytest.mark.parametrize("size", SIZES)
def test_equals_fairseq_over_steps(backend, size):
    param, _, exp_avg, exp_avg_sq = sample_inputs(size, backend.device)
    grads = [torch.randn(size, generator=torch.Generator().manual_seed(i)).to(backend.device) for i in range(5)]
    expected = fairseq_steps(param, grads, **OPTIONS)
    exp_avg.zero_(), exp_avg_sq.zero_()
    for step, grad in enumerate(grads, start=1):
        ops.adam_step(param, grad.clone(), exp_avg, exp_avg_sq, step=step, **OPTIONS)
    for name, actual, wanted in zip(
        ("param", "exp_avg", "exp_avg_sq"), (param, exp_avg, exp_avg_sq), expected, strict=True
    ):
        torch.testing.assert_close(actual, wanted, rtol=2e-6, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("grad_dtype", DTYPES, ids=dtype_name)
def test_dtypes(backend, dtype, grad_dtype):
    """Arithmetic is fp32 whatever is stored: the result is the oracle's, rounded once."""
    if {dtype, grad_dtype} == set(HALF):
        with pytest.raises(RuntimeError, match="adam_step: grad must be Float or of the 16-bit type of param or"):
            ops.adam_step(*sample_inputs(8, backend.device, dtype, grad_dtype), step=1, **OPTIONS)
        return
    actual = sample_inputs(1003, backend.device, dtype, grad_dtype)
    expected = [t.clone() for t in actual]
    scale = torch.tensor(0.25, device=backend.device)
    ops.adam_step(*actual, step=3, grad_scale=scale, **OPTIONS)
    reference.adam_step(*expected, step=3, grad_scale=scale, **OPTIONS)
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(actual[0], expected[0], rtol=ulp, atol=1e-7)
    for a, e in zip(actual[2:], expected[2:], strict=True):
        torch.testing.assert_close(a, e, rtol=1e-6, atol=1e-8)


def test_misaligned_slices(backend):
    actual = [misaligned(t) for t in sample_inputs(4097, backend.device)]
    expected = [t.clone() for t in actual]
    ops.adam_step(*actual, step=1, **OPTIONS)
    reference.adam_step(*expected, step=1, **OPTIONS)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("zero_grad", [False, True])
def test_zero_grad(backend, zero_grad):
    param, grad, exp_avg, exp_avg_sq = sample_inputs(1001, backend.device)
    before = grad.clone()
    ops.adam_step(param, grad, exp_avg, exp_avg_sq, step=1, zero_grad=zero_grad, **OPTIONS)
    assert torch.equal(grad, torch.zeros_like(before) if zero_grad else before)


def test_neighbours_of_a_slice_stay(backend):
    buffers = [torch.full((300,), 7.0, device=backend.device) for _ in range(4)]
    buffers[1][101:198] = 3.0
    ops.adam_step(*(buffer[101:198] for buffer in buffers), step=1, zero_grad=True, **OPTIONS)
    for buffer in buffers:
        assert (buffer[:101] == 7).all() and (buffer[198:] == 7).all() and (buffer[101:198] != 7).all()


@pytest.mark.parametrize("grad_dtype", [torch.float32, None], ids=["fp32 grad", "16-bit grad"])
@pytest.mark.parametrize("copy_dtype", HALF, ids=dtype_name)
@pytest.mark.parametrize("size", SIZES)
def test_param_copy_is_the_param_rounded(backend, copy_dtype, grad_dtype, size):
    """And beside it the param has the bits that it has without."""
    param, grad, *moments = sample_inputs(size, backend.device, grad_dtype=grad_dtype or copy_dtype)
    without = [t.clone() for t in (param, grad, *moments)]
    copy = torch.full_like(param, torch.nan, dtype=copy_dtype)
    ops.adam_step(param, grad, *moments, step=3, param_copy=copy, zero_grad=True, **OPTIONS)
    ops.adam_step(*without, step=3, zero_grad=True, **OPTIONS)
    assert torch.equal(copy, param.to(copy_dtype))
    assert all(torch.equal(a, b) for a, b in zip((param, grad, *moments), without, strict=True))


def kinds(device):
    """Every way to keep a parameter: (name, buffers, further arguments, the further buffers)."""
    for dtype in DTYPES:
        yield dtype_name(dtype), sample_inputs(1003, device, dtype), {}
    for dtype in HALF:
        inputs = sample_inputs(1003, device, grad_dtype=dtype)
        yield f"fp32 with a {dtype_name(dtype)} copy", inputs, {"param_copy": inputs[0].to(dtype)}
    param, grad, *moments = sample_inputs(1003, device)
    weight, low = split_master(param)
    yield "split", (weight, grad.bfloat16(), *moments), {"param_low": low}


@pytest.mark.parametrize("zero_grad", [False, True])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_overflow_leaves_every_bit(backend, bad, zero_grad):
    overflow = torch.tensor(True, device=backend.device)
    scale = torch.tensor(torch.nan, device=backend.device)
    for name, (param, grad, *moments), extra in kinds(backend.device):
        grad[501] = bad
        kept = (param, *moments, *extra.values())
        before, grad_before = [t.clone() for t in kept], grad.clone()
        ops.adam_step(
            param, grad, *moments, step=1, grad_scale=scale, overflow=overflow, zero_grad=zero_grad, **extra, **OPTIONS
        )
        assert all(torch.equal(a, b) for a, b in zip(kept, before, strict=True)), name
        if zero_grad:
            assert (grad == 0).all(), name
        else:
            assert torch.equal(grad.nan_to_num(1.0), grad_before.nan_to_num(1.0)), name


def test_without_overflow_the_flag_changes_nothing(backend):
    for (name, inputs, extra), (_, others, more) in zip(kinds(backend.device), kinds(backend.device), strict=True):
        ops.adam_step(*inputs, step=1, **extra, **OPTIONS)
        ops.adam_step(*others, step=1, overflow=torch.tensor(False, device=backend.device), **more, **OPTIONS)
        for a, b in zip((*inputs, *extra.values()), (*others, *more.values()), strict=True):
            assert torch.equal(a, b), name


# --- the fp32 master in two halves


def special_masters():
    """Every upper half with low halves around the ties, and random bits: subnormals, ties, largest values, inf and NaN among them."""
    upper = torch.arange(-0x8000, 0x8000, dtype=torch.int32).view(-1, 1) << 16
    lower = torch.tensor([0, 1, 2, 0x3FFF, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0x8002, 0xC000, 0xFFFE, 0xFFFF])
    generator = torch.Generator().manual_seed(1)
    random = torch.randint(-(2**31), 2**31, (1_000_000,), generator=generator).to(torch.int32)
    return torch.cat([(upper | lower.to(torch.int32)).view(-1), random]).view(torch.float32)


def test_split_master_loses_nothing_but_nan_payloads():
    master = special_masters()
    weight, low = split_master(master)
    joined, nan = join_master(weight, low), master.isnan()
    assert torch.equal(joined.view(torch.int32)[~nan], master.view(torch.int32)[~nan])
    assert joined[nan].isnan().all() and weight[nan].isnan().all() and not weight[~nan].isnan().any()


def assert_rounded(weight, master):
    """weight is the nearest bf16 to master, the larger in magnitude of two that are as near; exact in fp64."""
    rounded = master.to(torch.bfloat16)
    tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    same = (weight.view(torch.int16) == rounded.view(torch.int16)) | (weight.isnan() & rounded.isnan())
    assert same[~tie | master.isnan()].all()
    away = ((master.view(torch.int32) >> 16) + 1).to(torch.int16)
    assert (weight.view(torch.int16) == away)[tie & ~master.isnan()].all()


def test_split_master_rounds_to_nearest_and_ties_away_from_zero():
    master = special_masters()
    assert_rounded(split_master(master)[0], master)


def test_ties_to_even_would_not_fit():
    """One master more than there are low halves rounds to an even bf16: 1 - 2^-9 (a tie) to 1 + 2^-8 (a tie)."""
    bits = torch.arange(0x3F7F_7000, 0x3F81_9000, dtype=torch.int32)
    masters = bits.view(torch.float32)
    to_even = masters.to(torch.bfloat16)
    assert ((to_even == 1.0).sum(), (to_even == 1.0 + 2**-7).sum()) == (0x10001, 0xFFFF)
    away = split_master(masters)[0]
    assert ((away == 1.0).sum(), (away == 1.0 + 2**-7).sum()) == (0x10000, 0x10000)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_split_storage_equals_an_fp32_master_bit_for_bit_over_1000_steps(backend, grad_dtype):
    n_elem = 157 if backend.name == "simt" else 4099
    generator = torch.Generator().manual_seed(3)
    master = torch.randn(n_elem, generator=generator).to(backend.device)
    weight, low = split_master(master)
    copy = weight.clone()
    moments = [torch.zeros(n_elem, device=backend.device) for _ in range(2)]
    split_moments = [t.clone() for t in moments]
    for step in range(1, 1001):
        size = 10.0 ** (step % 7 - 4)  # of the gradients: the update vanishes against the weight in some steps
        grad = (torch.randn(n_elem, generator=generator) * size).to(grad_dtype).to(backend.device)
        scale = torch.tensor(0.5 + step % 3, device=backend.device)
        options = {**OPTIONS, "lr": 1e-2 / (1 + step % 100), "step": step, "grad_scale": scale}
        ops.adam_step(master, grad, *moments, param_copy=copy, **options)
        ops.adam_step(weight, grad.clone(), *split_moments, param_low=low, zero_grad=True, **options)
        assert torch.equal(join_master(weight, low).view(torch.int32), master.view(torch.int32)), f"step {step}"
        assert_rounded(weight, master)
    assert all(torch.equal(a, b) for a, b in zip(moments, split_moments, strict=True))
    assert (weight != copy).sum() <= n_elem // 100  # they differ in ties alone


@pytest.mark.parametrize("lr", [0.0, 1e-39, 1e38])
def test_split_storage_of_special_masters(backend, lr):
    """Subnormals, ties, the largest values and those that become inf or NaN in the step: the bits of an fp32 master."""
    stride = 97 if backend.name == "simt" else 1
    master = special_masters()[::stride].contiguous().to(backend.device)
    weight, low = split_master(master)
    generator = torch.Generator().manual_seed(2)
    grad = torch.randn(master.shape, generator=generator).to(backend.device)
    results = []
    for param, param_low in ((master, None), (weight, low)):
        moments = [torch.zeros_like(grad) for _ in range(2)]
        options = {**OPTIONS, "lr": lr, "weight_decay": 0.0}
        ops.adam_step(param, grad, *moments, step=1, param_low=param_low, **options)
        results.append(moments)
    joined = join_master(weight, low)
    assert torch.equal(joined.isnan(), master.isnan()) and (lr < 1.0 or master.isinf().any())
    assert torch.equal(joined.view(torch.int32)[~joined.isnan()], master.view(torch.int32)[~master.isnan()])
    assert_rounded(weight, master)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_empty(backend):
    ops.adam_step(*sample_inputs(0, backend.device), step=1, **OPTIONS)


def test_same_bits_twice(backend):
    runs = []
    for _ in range(2):
        tensors = sample_inputs(5003, backend.device)
        ops.adam_step(*tensors, step=2, **OPTIONS)
        runs.append(tensors)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_errors_name_what_was_expected(backend):
    param, grad, exp_avg, exp_avg_sq = sample_inputs(8, backend.device)
    with pytest.raises(RuntimeError, match=r"adam_step: grad must have the shape of param, \(8,\), got \(7,\)"):
        ops.adam_step(param, grad[:7], exp_avg, exp_avg_sq, step=1, **OPTIONS)
    with pytest.raises(RuntimeError, match="adam_step: exp_avg must be Float, got Half"):
        ops.adam_step(param, grad, exp_avg.half(), exp_avg_sq, step=1, **OPTIONS)
    with pytest.raises(RuntimeError, match="adam_step: param, with a param_copy, must be Float, got BFloat16"):
        ops.adam_step(param.bfloat16(), grad, exp_avg, exp_avg_sq, step=1, param_copy=param.half(), **OPTIONS)
    with pytest.raises(RuntimeError, match="adam_step: param_copy must be Half or BFloat16, got Float"):
        ops.adam_step(param, grad, exp_avg, exp_avg_sq, step=1, param_copy=param.clone(), **OPTIONS)
    with pytest.raises(RuntimeError, match="adam_step: param_low must be Short, got Int"):
        ops.adam_step(param.bfloat16(), grad, exp_avg, exp_avg_sq, step=1, param_low=param.int(), **OPTIONS)
    with pytest.raises(RuntimeError, match="adam_step: param, with a param_low, must be BFloat16, got Float"):
        ops.adam_step(param, grad, exp_avg, exp_avg_sq, step=1, param_low=param.to(torch.int16), **OPTIONS)
    with pytest.raises(RuntimeError, match="adam_step: overflow must be Bool, got Float"):
        ops.adam_step(param, grad, exp_avg, exp_avg_sq, step=1, overflow=param[0], **OPTIONS)
    with pytest.raises(RuntimeError, match=r"adam_step: grad_scale must have one element, got shape \(8,\)"):
        ops.adam_step(param, grad, exp_avg, exp_avg_sq, step=1, grad_scale=param, **OPTIONS)
    with pytest.raises(ValueError, match="step counts from 1, got 0"):
        ops.adam_step(param, grad, exp_avg, exp_avg_sq, step=0, **OPTIONS)


def test_tells_autograd(backend):
    param, grad, exp_avg, exp_avg_sq = sample_inputs(8, backend.device)
    leaf = torch.ones(8, device=backend.device, requires_grad=True)
    saved = (leaf * param).sum()
    ops.adam_step(param, grad, exp_avg, exp_avg_sq, step=1, **OPTIONS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


@needs_library
def test_opcheck():
    flags = (torch.tensor(0.5), torch.tensor(False), 1e-3, 0.9, 0.98, 1e-8, 0.01, 1, True)
    for _, inputs, extra in kinds("cpu"):
        torch.library.opcheck(
            torch.ops.ls.adam_step.default, (*inputs, extra.get("param_copy"), extra.get("param_low"), *flags)
        )


def test_reference_serves_the_same_arguments():
    """As in fp64, on other devices and without the library."""
    for name, inputs, extra in kinds("cpu"):
        outputs = []
        for function in (ops.adam_step, reference.adam_step):
            tensors = [t.clone() for t in inputs]
            more = {key: t.clone() for key, t in extra.items()}
            function(*tensors, step=2, zero_grad=True, grad_scale=torch.tensor(0.5), **more, **OPTIONS)
            outputs.append([*tensors[1:], *more.values(), tensors[0]])
        for a, e in zip(*outputs, strict=True):
            if a.dtype == torch.int16:  # the low bits of masters that differ in rounding
                a, e = (join_master(o[-1], o[-2]) for o in outputs)
            torch.testing.assert_close(a, e, rtol=max(2e-6, torch.finfo(a.dtype).eps), atol=1e-7, msg=name)
