import mmap

import pytest
import torch
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss

from ls_plugin import ops, reference
from tests.ops.accuracy import (
    DTYPES,
    GRAD_FACTOR,
    VALUE_FACTOR,
    assert_as_accurate,
    dtype_name,
    misaligned,
    needs_library,
    noncontiguous,
    shape_name,
)

PAD = 1
MAP_NORESERVE = 0x4000  # of Linux; the mmap module names it from Python 3.13 on
# Vocabularies that are multiples of nothing, of everything, and larger than any block or register file.
SHAPES = [(3, 1), (1, 2), (3, 5), (7, 31), (4, 64), (3, 257), (2, 1000), (2, 5003), (1, 33_333), (0, 16)]


def sample_inputs(shape, device, dtype, scale=3.0):
    """logits, target (some of them PAD), grad_loss."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(shape, generator=generator) * scale
    target = torch.randint(0, shape[1], shape[:1], generator=generator)
    if shape[0] > 2 and shape[1] > PAD:
        target[1] = PAD
    return logits.to(device, dtype), target.to(device), torch.rand(shape[:1], generator=generator).to(device) + 0.5


def run(function, logits, target, grad_loss, epsilon, **options):
    """loss, nll, grad_logits."""
    leaf = logits.detach().requires_grad_()
    loss, nll = function(leaf, target, epsilon, PAD, **options)
    return loss, nll, torch.autograd.grad(loss, leaf, grad_loss.to(loss.dtype))[0]


def compare(logits, target, grad_loss, epsilon):
    actual = run(ops.label_smoothed_cross_entropy, logits, target, grad_loss, epsilon)
    torch_result = run(reference.label_smoothed_cross_entropy, logits, target, grad_loss, epsilon)
    exact = run(reference.label_smoothed_cross_entropy, logits.double().cpu(), target.cpu(), grad_loss.cpu(), epsilon)
    for name, a, t, e in zip(("loss", "nll"), actual[:2], torch_result[:2], exact[:2], strict=True):
        assert_as_accurate(a, t, e, VALUE_FACTOR, name)
    # The target's gradient is near -1, the others' near 0: apart, so that the floor of the one does not hide an error in the others.
    at_target = torch.nn.functional.one_hot(target.cpu(), logits.shape[1]).bool()
    for name, part in (("grad at the target", at_target), ("grad elsewhere", ~at_target)):
        a, t, e = (grad.cpu().where(part, 0.0) for grad in (actual[2], torch_result[2], exact[2]))
        assert_as_accurate(a, t, e, GRAD_FACTOR, name)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shape", SHAPES, ids=shape_name)
@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_as_accurate_as_torch(backend, shape, dtype, epsilon):
    compare(*sample_inputs(shape, backend.device, dtype), epsilon)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("change", [misaligned, noncontiguous])
def test_layouts(backend, change, dtype):
    logits, target, grad_loss = sample_inputs((6, 264), backend.device, dtype)
    compare(change(logits), target, grad_loss, 0.1)


def test_more_than_65536_rows(backend):
    compare(*sample_inputs((65_600, 3), backend.device, torch.float32), 0.1)


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0])
def test_equals_fairseq(backend, epsilon):
    logits, target, _ = sample_inputs((13, 101), backend.device, torch.float32)
    leaf = logits.clone().requires_grad_()
    fairseq_loss, fairseq_nll = label_smoothed_nll_loss(
        torch.log_softmax(leaf, dim=-1), target, epsilon, ignore_index=PAD, reduce=True
    )
    fairseq_loss.backward()
    ours = logits.clone().requires_grad_()
    loss, nll = ops.label_smoothed_cross_entropy(ours, target, epsilon, PAD)
    loss.sum().backward()
    torch.testing.assert_close(loss.sum(), fairseq_loss)
    torch.testing.assert_close(nll.sum(), fairseq_nll)
    torch.testing.assert_close(ours.grad, leaf.grad, rtol=1e-5, atol=1e-6)


def test_gradient_is_q_minus_p(backend):
    logits, target, _ = sample_inputs((2, 50), backend.device, torch.float32)
    leaf = logits.requires_grad_()
    ops.label_smoothed_cross_entropy(leaf, target, 0.1, PAD)[0].sum().backward()
    p = torch.full_like(logits, 0.1 / 49).scatter(1, target[:, None], 0.9)
    torch.testing.assert_close(leaf.grad, (logits.softmax(-1) - p).detach())


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
def test_inplace_writes_over_the_logits(backend, dtype):
    logits, target, grad_loss = sample_inputs((5, 300), backend.device, dtype)
    expected = run(ops.label_smoothed_cross_entropy, logits, target, grad_loss, 0.1)
    leaf = logits.clone().requires_grad_()
    product = leaf * 1
    memory = product.data_ptr()
    loss, nll = ops.label_smoothed_cross_entropy(product, target, 0.1, PAD, inplace=True)
    (grad,) = torch.autograd.grad(loss, product, grad_loss)
    assert grad.data_ptr() == memory
    assert all(torch.equal(a, b) for a, b in zip((loss, nll, grad), expected, strict=True))


def test_inplace_tells_autograd(backend):
    logits, target, _ = sample_inputs((5, 30), backend.device, torch.float32)
    product = logits.requires_grad_() * 1
    saved_by_another_node = product.square().sum()
    loss = ops.label_smoothed_cross_entropy(product, target, 0.1, PAD, inplace=True)[0].sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss + saved_by_another_node).backward()


def test_inplace_refuses_what_would_give_wrong_gradients(backend):
    logits, target, _ = sample_inputs((5, 30), backend.device, torch.float32)
    leaf = logits.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="would overwrite a leaf"):
        ops.label_smoothed_cross_entropy(leaf, target, 0.1, PAD, inplace=True)
    product = leaf * 1
    first = ops.label_smoothed_cross_entropy(product, target, 0.1, PAD, inplace=True)[0].sum()
    second = ops.label_smoothed_cross_entropy(product, target, 0.1, PAD, inplace=True)[0].sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (first + second).backward()
    product = leaf * 1
    loss = ops.label_smoothed_cross_entropy(product, target, 0.1, PAD, inplace=True)[0].sum()
    with torch.no_grad():
        product.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_double_backward_is_refused(backend):
    logits, target, _ = sample_inputs((5, 30), backend.device, torch.float32)
    leaf = logits.requires_grad_()
    loss = ops.label_smoothed_cross_entropy(leaf, target, 0.1, PAD)[0].sum()
    (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.square().sum().backward()


def test_ignored_rows_stay_zero_under_an_infinite_gradient(backend):
    logits, target, _ = sample_inputs((5, 30), backend.device, torch.float32)
    leaf = logits.requires_grad_()
    loss, _ = ops.label_smoothed_cross_entropy(leaf, target, 0.1, PAD)
    (grad,) = torch.autograd.grad(loss, leaf, torch.full_like(loss, float("inf")))
    assert (grad[target == PAD] == 0).all() and not torch.isnan(grad).any()


def test_no_classes_and_no_rows(backend):
    loss, _ = ops.label_smoothed_cross_entropy(torch.ones(0, 0), torch.ones(0, dtype=torch.int64), 0.1)
    assert loss.shape == (0,)


def test_without_gradient_nothing_is_overwritten(backend):
    logits, target, _ = sample_inputs((5, 30), backend.device, torch.float32)
    before = logits.clone()
    with_grad = ops.label_smoothed_cross_entropy(logits.clone().requires_grad_(), target, 0.1, PAD)
    plain = ops.label_smoothed_cross_entropy(logits, target, 0.1, PAD, inplace=True)
    with torch.no_grad():
        leaf = logits.clone().requires_grad_()
        no_grad = ops.label_smoothed_cross_entropy(leaf, target, 0.1, PAD, inplace=True)
    assert torch.equal(logits, before) and torch.equal(leaf.detach(), before)
    for loss, nll in (plain, no_grad):
        assert not loss.requires_grad
        assert torch.equal(loss, with_grad[0]) and torch.equal(nll, with_grad[1])


def test_second_backward_is_refused(backend):
    logits, target, _ = sample_inputs((5, 30), backend.device, torch.float32)
    loss = ops.label_smoothed_cross_entropy(logits.requires_grad_(), target, 0.1, PAD)[0].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute the loss again"):
        loss.backward()


def test_nll_is_for_reading_only(backend):
    logits, target, _ = sample_inputs((5, 30), backend.device, torch.float32)
    _, nll = ops.label_smoothed_cross_entropy(logits.requires_grad_(), target, 0.1, PAD)
    assert not nll.requires_grad


def test_loss_scale_keeps_small_fp16_gradients(backend):
    """A probability of 1e-7 is 0 or one unit in fp16; scaled by fairseq's loss scale it must keep its digits."""
    logits = torch.zeros(1, 64, device=backend.device, dtype=torch.float16)
    logits[0, 0] = 16.0
    target = torch.zeros(1, dtype=torch.int64, device=backend.device)
    scale = 128.0
    leaf = logits.requires_grad_()
    (ops.label_smoothed_cross_entropy(leaf, target, 0.0, PAD)[0].sum() * scale).backward()
    exact = logits.detach().double().softmax(-1)[0, 1:] * scale
    assert ((leaf.grad[0, 1:].double() - exact).abs() / exact).max() < 1e-2


@pytest.mark.parametrize("value", [80.0, 3e4])
def test_extreme_logits(backend, value):
    logits = torch.tensor([[value, -value, 0.0, 1.0], [-value, -value, -value, -value]], device=backend.device)
    target = torch.tensor([1, 2], device=backend.device)
    compare(logits, target, torch.ones(2, device=backend.device), 0.1)


def test_infinite_logits_behave_as_in_torch(backend):
    inf = float("inf")
    logits = torch.tensor([[1.0, -inf, 2.0, 0.5], [-inf, 1.0, -inf, -inf]], device=backend.device)
    target = torch.tensor([2, 1], device=backend.device)
    loss, _nll = ops.label_smoothed_cross_entropy(logits, target, 0.0, -100)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, target, reduction="none"))
    smoothed = ops.label_smoothed_cross_entropy(logits, target, 0.1, -100)[0]
    assert torch.isinf(smoothed).all()
    leaf = logits.clone().requires_grad_()
    ops.label_smoothed_cross_entropy(leaf, target, 0.0, -100)[0].sum().backward()
    assert torch.isfinite(leaf.grad).all()


def test_nan_logits_give_nan(backend):
    logits = torch.zeros(2, 40, device=backend.device)
    logits[0, 37] = float("nan")
    loss, nll = ops.label_smoothed_cross_entropy(logits, torch.tensor([3, 3], device=backend.device), 0.1, -100)
    assert torch.isnan(loss[0]) and torch.isnan(nll[0]) and torch.isfinite(loss[1])


def test_all_tokens_ignored(backend):
    logits = torch.randn(4, 9, device=backend.device, requires_grad=True)
    target = torch.full((4,), PAD, device=backend.device)
    loss, nll = ops.label_smoothed_cross_entropy(logits, target, 0.1, PAD)
    loss.sum().backward()
    assert loss.abs().sum() == 0 and nll.abs().sum() == 0 and logits.grad.abs().sum() == 0


def test_leading_dimensions(backend):
    logits, target, _ = sample_inputs((6, 20), backend.device, torch.float32)
    flat = ops.label_smoothed_cross_entropy(logits, target, 0.1, PAD)
    shaped = ops.label_smoothed_cross_entropy(logits.view(2, 3, 20), target.view(2, 3), 0.1, PAD)
    assert all(s.shape == (2, 3) and torch.equal(s.flatten(), f) for s, f in zip(shaped, flat, strict=True))


def test_row_beyond_two_to_the_31_elements(backend):
    """The last of 66,001 rows of 32,768 logits starts past element 2^31. The other rows are ignored, so they are never read: the
    4 GB are address space without memory."""
    if backend.name == "cuda":
        pytest.skip("the sparse mapping is CPU memory")
    if backend.name == "simt":
        pytest.skip("66,001 blocks under the harness; tests/simt checks the index arithmetic with fewer")
    rows, classes = 66_001, 32_768
    mapping = mmap.mmap(-1, rows * classes * 2, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    logits = torch.frombuffer(mapping, dtype=torch.bfloat16).view(rows, classes)
    logits[-1, 5] = 20.0
    target = torch.full((rows,), PAD)
    target[-1] = 5
    loss, _ = ops.label_smoothed_cross_entropy(logits, target, 0.0, PAD)
    exact = torch.nn.functional.cross_entropy(logits[-1:].float(), target[-1:])
    torch.testing.assert_close(loss[-1], exact)
    assert loss[:-1].abs().sum() == 0


def test_target_outside_the_vocabulary(backend):
    if backend.name == "cuda":
        pytest.skip("a device-side assertion ends the CUDA context of the whole test run")
    logits = torch.randn(3, 8, device=backend.device)
    for wrong in (8, -2):
        target = torch.tensor([0, wrong, 1], device=backend.device)
        with pytest.raises(RuntimeError, match=rf"target {wrong} at position 1 is outside the vocabulary of 8 entries"):
            ops.label_smoothed_cross_entropy(logits, target, 0.1, PAD)


def test_errors_name_what_was_expected(backend):
    logits = torch.randn(3, 8, device=backend.device)
    with pytest.raises(RuntimeError, match=r"target must have logits' leading shape \(3,\), got \(4,\)"):
        ops.label_smoothed_cross_entropy(logits, torch.zeros(4, dtype=torch.int64, device=backend.device), 0.1)
    with pytest.raises(RuntimeError, match="label_smoothed_cross_entropy: target must be Long, got Int"):
        ops.label_smoothed_cross_entropy(logits, torch.zeros(3, dtype=torch.int32, device=backend.device), 0.1)
    with pytest.raises(ValueError, match=r"epsilon must lie in \[0, 1\], got 1.1"):
        ops.label_smoothed_cross_entropy(logits, torch.zeros(3, dtype=torch.int64, device=backend.device), 1.1)


def test_oracle_gradcheck():
    logits, target, _ = sample_inputs((4, 6), "cpu", torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: reference.label_smoothed_cross_entropy(x, target, 0.1, PAD)[0], logits.requires_grad_()
    )


@needs_library
def test_opcheck():
    logits, target, grad_loss = sample_inputs((4, 12), "cpu", torch.float32)
    forward = torch.ops.ls.label_smoothed_cross_entropy_forward.default
    torch.library.opcheck(forward, (logits, target, None, 0.1, PAD, 1.0))
    torch.library.opcheck(forward, (logits, target, torch.empty_like(logits), 0.1, PAD, 1.0))
    torch.library.opcheck(
        torch.ops.ls.label_smoothed_cross_entropy_backward.default, (torch.rand_like(logits), grad_loss, 1.0)
    )
