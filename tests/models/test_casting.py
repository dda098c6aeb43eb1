"""Whole models in 16 bits and where torch casts: half models (apex.amp's O2, --fp16, --bf16), torch.autocast, apex.amp's O1.

The yardstick is stock under the same: our error against an fp32 model is at most as large as stock's, and some.
"""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion as StockCriterion
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ls_plugin import ops
from ls_plugin.criterions import LabelSmoothedCrossEntropyCriterion
from ls_plugin.ops import product
from ls_plugin.ops.checks import product_dtype
from tests.models.families import FAMILIES, PAD, batch, build_twins, task
from tests.ops.accuracy import needs_library

ERROR_FACTOR = 2.0  # of the distance from fp32, as a whole, that stock has
# By the lists of apex's amp: what casts to half, what to fp32, what to the wider of its arguments.
_PRODUCTS = ("mm", "matmul", "bmm", "addmm", "baddbmm")
TO_HALF = {F: ("linear",), torch: _PRODUCTS, torch.Tensor: (*_PRODUCTS, "__matmul__")}
TO_FLOAT = {
    F: ("layer_norm", "softmax", "log_softmax", "gelu", "nll_loss", "cross_entropy"),
    torch: ("exp", "log", "pow", "sum", "softmax", "log_softmax", "norm", "cumsum"),
    torch.Tensor: ("exp", "log", "pow", "sum", "softmax", "log_softmax", "norm", "cumsum", "__pow__"),
}
TO_WIDEST = {
    torch: ("add", "sub", "mul", "div", "cat", "stack"),
    torch.Tensor: ("__add__", "__radd__", "__mul__", "add", "mul"),
}


def _cast(value, dtype):
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _dtypes(value):
    if isinstance(value, torch.Tensor):
        return {value.dtype} if value.is_floating_point() else set()
    return set().union(*map(_dtypes, value)) if isinstance(value, (list, tuple)) else set()


def _casting(function, dtype):
    """dtype None: the widest of the arguments."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        found = _dtypes([*args, *kwargs.values()])
        to = dtype or functools.reduce(torch.promote_types, found, torch.float16)
        if len(found) > 1 or (found and found != {to}):
            args, kwargs = _cast(args, to), {key: _cast(value, to) for key, value in kwargs.items()}
        return function(*args, **kwargs)

    return wrapper


@contextlib.contextmanager
def apex_o1():
    """Functions of torch rebound to ones that cast, as apex.amp's O1 leaves them."""
    with pytest.MonkeyPatch.context() as patch:
        for table, dtype in ((TO_HALF, torch.float16), (TO_FLOAT, torch.float32), (TO_WIDEST, None)):
            for owner, names in table.items():
                for name in names:
                    patch.setattr(owner, name, _casting(getattr(owner, name), dtype))
        yield


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


# name -> (what the model is made, under what it runs)
CASTS = {
    "fp16 model": (torch.float16, contextlib.nullcontext),
    "bf16 model": (torch.bfloat16, contextlib.nullcontext),
    "autocast": (torch.float32, autocast),
    "apex O1": (torch.float32, apex_o1),
}


def losses_and_gradients(model, criterion_class, family, dtype, context):
    """The loss of one batch, and the gradients of all parameters by name, in fp32."""
    model = model.to(dtype)
    inputs = batch(family)
    rows = inputs.get("prev_output_tokens", inputs["src_tokens"])
    sample = {"net_input": inputs, "target": rows, "ntokens": int((rows != PAD).sum())}
    criterion = criterion_class(task(), False, 0.1)
    with context():
        loss, _, _ = criterion(model, sample)
        (loss * 8.0).backward()  # as with a loss scale
    return loss.float(), {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}


@needs_library
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_errors_are_stocks(family, cast):
    dtype, context = CASTS[cast]
    results = []
    for under, run_dtype in ((contextlib.nullcontext, torch.float32), (context, dtype)):
        stock, ours = build_twins(family)
        # roberta's softmax is in fp32 by its own formula, which our criterion leaves to stock's
        criterion = StockCriterion if family == "roberta" else LabelSmoothedCrossEntropyCriterion
        results.append(losses_and_gradients(stock, StockCriterion, family, run_dtype, under))
        results.append(losses_and_gradients(ours, criterion, family, run_dtype, under))
    (exact, exact_grads), _, (stock_loss, stock_grads), (our_loss, our_grads) = results
    # One number's errors may cancel; hence a tenth of an ulp of what it is made of.
    ulp = torch.finfo(torch.float16 if cast in ("fp16 model", "apex O1") else torch.bfloat16).eps
    allowed = ERROR_FACTOR * (stock_loss - exact).abs() + 0.1 * ulp * exact.abs()
    assert (our_loss - exact).abs() <= allowed, f"loss {our_loss}, stock {stock_loss}, fp32 {exact}"
    assert our_grads.keys() == stock_grads.keys() == exact_grads.keys()

    def error(grads):
        return sum((grads[name] - exact_grads[name]).square().sum() for name in exact_grads).sqrt()

    assert torch.isfinite(error(our_grads))
    assert error(our_grads) <= ERROR_FACTOR * error(stock_grads)


@pytest.mark.parametrize("name", ("autocast", "apex O1"))
def test_the_products_are_in_the_dtype_of_the_cast(name):
    """fp32 layers would pass for accuracy, and be slow."""
    _, context = CASTS[name]
    _, model = build_twins("transformer")
    seen = []
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _module, _inputs, output: seen.append(output.dtype))
    with context():
        assert product_dtype(torch.ones(1)) == (torch.bfloat16 if name == "autocast" else torch.float16)
        features, _ = model(**batch("transformer"), features_only=True)
        logits = model.decoder.output_layer(features)
    assert product_dtype(torch.ones(1)) is None
    assert logits.dtype == (torch.bfloat16 if name == "autocast" else torch.float16)
    assert seen and set(seen) == {logits.dtype}


@needs_library
def test_the_loss_by_blocks_under_apex():
    """Its products are written into given memory, which a cast of that memory would miss."""
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(n, 16, generator=generator) for n in (12, 40))
    target = torch.arange(12)

    def run(a, b):
        leaves = [t.clone().requires_grad_() for t in (a, b)]
        loss, _ = ops.linear_cross_entropy(*leaves, target, 0.1, 1)
        return loss, *torch.autograd.grad(loss, leaves)

    with apex_o1():
        actual = run(x, weight)
    expected = run(x.half(), weight.half())
    assert all(a.dtype == torch.float32 for a in actual)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e.float(), rtol=1e-3, atol=1e-3)


class HalfProducts(TorchDispatchMode):
    """``shapes``: the factors of matrix products of 16-bit tensors."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        factors = [arg for arg in args if torch.is_tensor(arg)]
        if func._schema.name.split("::")[1] in _PRODUCTS and factors[0].dtype != torch.float32:
            self.shapes.append([tuple(factor.shape) for factor in factors])
        return func(*args, **(kwargs or {}))


@needs_library
@pytest.mark.parametrize("family", FAMILIES)
def test_no_product_is_left_to_scalar_loops(family, monkeypatch):
    """A language model has by default two projections more, in which a bf16 step spent most of its time."""
    monkeypatch.setattr(product, "_has", lambda dtype: False)
    widths = {"decoder_input_dim": 24, "decoder_output_dim": 24} if family == "transformer_lm" else {}
    asking = {"alignment_layer": 1} if family == "transformer" else {}
    _, model = build_twins(family, **widths)
    model = model.bfloat16()
    with HalfProducts() as found:
        logits, extra = model(**batch(family), **asking)
        loss = logits.float().sum()
        if asking:
            loss = loss + extra["attn"][0].float().square().sum()
        loss.backward()
        model.eval()(**batch(family))
    assert found.shapes == []
