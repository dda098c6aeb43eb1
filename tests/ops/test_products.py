"""Products of 16-bit tensors where the processor has none: in fp32, rounded once."""

import pytest
import torch
import torch.nn.functional as F

from ls_plugin.ops import products

HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(params=[False, True], ids=["slow", "native"])
def has(request, monkeypatch):
    monkeypatch.setattr(products, "_has", lambda dtype: request.param)
    return request.param


def draw(*shape, dtype):
    return torch.randn(*shape).to(dtype)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_and_its_gradients(dtype, bias, has):
    torch.manual_seed(1)
    shapes = [(2, 5, 7), (6, 7), *([(6,)] if bias else [])]
    inputs = [draw(*shape, dtype=dtype).requires_grad_() for shape in shapes]
    wide = [t.detach().float().requires_grad_() for t in inputs]
    y, expected = products.linear(*inputs), F.linear(*wide)
    assert y.dtype == dtype
    grad = draw(*y.shape, dtype=dtype)
    y.backward(grad)
    expected.backward(grad.float())
    eps = torch.finfo(dtype).eps
    for result, reference in ((y, expected), *((a.grad, b.grad) for a, b in zip(inputs, wide, strict=True))):
        assert result.dtype == dtype
        torch.testing.assert_close(result.float(), reference, rtol=eps, atol=4 * eps)


@pytest.mark.parametrize("dtype", HALF)
def test_products_in_place(dtype, has):
    torch.manual_seed(2)
    a, b, total = draw(5, 7, dtype=dtype), draw(7, 3, dtype=dtype), draw(5, 3, dtype=dtype)
    out = torch.empty_like(total)
    before = total.clone()
    assert products.mm(a, b, out=out) is out
    assert torch.equal(out, products.mm(a, b))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.float(), a.float() @ b.float(), rtol=eps, atol=4 * eps)
    assert products.add_mm(total, a, b) is total
    torch.testing.assert_close(total.float(), before.float() + a.float() @ b.float(), rtol=2 * eps, atol=8 * eps)


def test_fp32_is_left_to_torch():
    a, b = torch.randn(5, 7), torch.randn(3, 7)
    assert torch.equal(products.linear(a, b), F.linear(a, b))
    assert products.widened(a, b) == (a, b)


@pytest.mark.parametrize("dtype", HALF)
def test_types_that_do_not_fit_are_an_error_as_in_torch(dtype, monkeypatch):
    monkeypatch.setattr(products, "_has", lambda dtype: False)
    with pytest.raises(RuntimeError, match="dtype"):
        products.mm(torch.ones(2, 2, dtype=dtype), torch.ones(2, 2))
