"""Matrix products: the compiled one against the oracle, the choice between it and torch's, and 16 bits where the processor has none."""

import itertools
import json
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from ls_plugin import _library, reference, routes
from ls_plugin.errors import UsageError
from ls_plugin.ops import product

HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(params=[False, True], ids=["slow", "native"])
def has(request, monkeypatch):
    monkeypatch.setattr(product, "_has", lambda dtype: request.param)
    monkeypatch.setattr(product, "_is_ours", lambda a, b: False)
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
    y, expected = product.linear(*inputs), F.linear(*wide)
    assert y.dtype == dtype
    grad = draw(*y.shape, dtype=dtype)
    y.backward(grad)
    expected.backward(grad.float())
    eps = torch.finfo(dtype).eps
    for result, exact in ((y, expected), *((a.grad, b.grad) for a, b in zip(inputs, wide, strict=True))):
        assert result.dtype == dtype
        torch.testing.assert_close(result.float(), exact, rtol=eps, atol=4 * eps)


@pytest.mark.parametrize("dtype", HALF)
def test_products_in_place(dtype, has):
    torch.manual_seed(2)
    a, b, total = draw(5, 7, dtype=dtype), draw(7, 3, dtype=dtype), draw(5, 3, dtype=dtype)
    out = torch.empty_like(total)
    before = total.clone()
    assert product.mm(a, b, out=out) is out
    assert torch.equal(out, product.mm(a, b))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.float(), a.float() @ b.float(), rtol=eps, atol=4 * eps)
    assert product.add_mm(total, a, b) is total
    torch.testing.assert_close(total.float(), before.float() + a.float() @ b.float(), rtol=2 * eps, atol=8 * eps)


@pytest.mark.parametrize("dtype", HALF)
def test_types_that_do_not_fit_are_an_error_as_in_torch(dtype, monkeypatch):
    monkeypatch.setattr(product, "_has", lambda dtype: False)
    with pytest.raises(RuntimeError, match="dtype"):
        product.mm(torch.ones(2, 2, dtype=dtype), torch.ones(2, 2))


# Single elements, tails of tiles, panels and vectors, sums in several depths and parts, nothing to sum.
SHAPES = [
    (1, 1, 1),
    (3, 5, 7),
    (4, 0, 3),
    (5, 8, 24),
    (6, 300, 25),
    (97, 257, 49),
    (130, 520, 700),
    (7, 2100, 33),
    (33, 64, 3000),
]
needs_library = pytest.mark.skipif(not _library.status().loaded, reason="no compiled library")


def matrix(n_rows, n_cols, dtype, transposed):
    return draw(n_cols, n_rows, dtype=dtype).t() if transposed else draw(n_rows, n_cols, dtype=dtype)


@needs_library
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_against_the_oracle(shape, dtype, transposed):
    torch.manual_seed(3)
    n_rows, n_k, n_cols = shape
    a, b = matrix(n_rows, n_k, dtype, transposed[0]), matrix(n_k, n_cols, dtype, transposed[1])
    bias = draw(n_cols, dtype=dtype)
    for has_bias, add, alpha, out_dtype in (
        (False, False, 1.0, dtype),
        (True, False, 1.0, dtype),
        (False, True, 0.25, torch.float32),
        (True, True, 1.0, dtype),
    ):
        wide = draw(n_rows, n_cols + 3, dtype=out_dtype)  # rows apart
        out, beyond = wide[:, :n_cols], wide[:, n_cols:].clone()
        args = [t.double() if t is not None else None for t in (a, b, bias if has_bias else None, out if add else None)]
        expected = reference.product(*args, alpha)
        torch.ops.ls.product(a, b, bias if has_bias else None, out, alpha, add)
        eps = torch.finfo(out_dtype).eps
        if out_dtype == torch.float32:
            eps *= 32 * max(1, n_k) ** 0.5
        torch.testing.assert_close(out.double(), expected, rtol=eps, atol=eps)
        assert torch.equal(wide[:, n_cols:], beyond)


@needs_library
def test_kernel_gives_the_same_bits_with_any_number_of_threads():
    torch.manual_seed(4)
    a, b = torch.randn(201, 700), torch.randn(700, 333)
    before, results = torch.get_num_threads(), []
    try:
        for n_threads in (1, 2, 5):
            torch.set_num_threads(n_threads)
            results.append(run_kernel(a, b))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def run_kernel(a, b):
    out = a.new_empty(a.shape[0], b.shape[1])
    torch.ops.ls.product(a, b, None, out, 1.0, False)
    return out


@needs_library
def test_kernel_passes_on_what_is_not_finite():
    a, b = torch.randn(9, 40), torch.randn(40, 50)
    a[3, 7], b[5, 11] = float("nan"), float("inf")
    out = run_kernel(a, b)
    nan, inf = torch.zeros(9, 50, dtype=torch.bool), torch.zeros(9, 50, dtype=torch.bool)
    nan[3] = True
    inf[:, 11] = True
    assert torch.equal(out.isnan(), nan) and torch.equal(out.isinf(), inf & ~nan)


@needs_library
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"b": torch.randn(4, 5)}, "b must have shape"),
        ({"out": torch.randn(2, 4)}, "out must have shape"),
        ({"out": torch.randn(5, 2).t()}, "stride 1"),
        ({"b": torch.randn(3, 5).double()}, "b must be Float"),
        ({"bias": torch.randn(4)}, "bias must have shape"),
    ],
)
def test_kernel_refuses_what_does_not_fit(change, words):
    args = {"a": torch.randn(2, 3), "b": torch.randn(3, 5), "bias": None, "out": torch.randn(2, 5)} | change
    with pytest.raises(RuntimeError, match=words):
        torch.ops.ls.product(*args.values(), 1.0, False)


@needs_library
@torch.no_grad()
def test_linear_where_more_than_numbers_is_wanted(monkeypatch):
    monkeypatch.setattr(product, "_LEAST_WORTH", 0)
    monkeypatch.setattr(product, "_ROUTES", {})  # the kernel would know no tangents, no batches and no casts
    x, weight, tangent = torch.randn(3, 4), torch.randn(5, 4), torch.randn(3, 4)
    with torch.autograd.forward_ad.dual_level():
        y = product.linear(torch.autograd.forward_ad.make_dual(x, tangent), weight)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(y).tangent, F.linear(tangent, weight))
    batches = torch.func.vmap(lambda x: product.linear(x, weight))(torch.stack((x, tangent)))
    torch.testing.assert_close(batches[1], F.linear(tangent, weight))
    with torch.autocast("cpu", torch.bfloat16):
        assert product.linear(x, weight).dtype == torch.bfloat16


@needs_library
@torch.no_grad()
def test_small_maps_are_torchs(monkeypatch):
    monkeypatch.setattr(product, "_ROUTES", {})
    x, weight = torch.randn(5, 256), torch.randn(512, 256)
    assert torch.equal(product.linear(x, weight), F.linear(x, weight))
    with pytest.raises(KeyError):
        product.linear(torch.randn(64, 256), weight)


@needs_library
def test_kernel_under_fake_tensors(monkeypatch):
    monkeypatch.setattr(product, "_LEAST_WORTH", 0)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), torch.no_grad():
        assert product.linear(torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)).shape == (2, 3, 5)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Nothing chosen so far, and a file of its own for what will be."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("LS_PRODUCTS", raising=False)
    monkeypatch.setattr(routes, "_chosen", {})
    return routes.cache_file()


def ways_that_take(monkeypatch, **seconds):
    """Ways of a given speed, by a clock that passes only in them, and what was called."""
    calls, now = [], [0.0]
    monkeypatch.setattr(routes, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def run(way, a, b, out):
        calls.append(way)
        now[0] += seconds[way]

    return tuple(seconds), run, calls


@needs_library
@pytest.mark.parametrize("fast", ["ls", "onednn", "torch"])
def test_every_way_is_computed_alike_and_the_fastest_is_kept(fast, measured, monkeypatch):
    a, b, bias, total = torch.randn(40, 300), torch.randn(300, 50), torch.randn(50), torch.randn(40, 50)
    expected = reference.product(a, b, bias)
    ways, run, calls = ways_that_take(
        monkeypatch, **{way: 0.0 if way == fast else 0.005 for way in ("ls", "onednn", "torch")}
    )
    assert routes.choose(a, b, ways, run) == fast
    n_calls = len(calls)
    assert set(calls) == set(ways)
    # Decided: for like shapes, for this process and the next one.
    assert routes.choose(a[:33], b, ways, run) == fast
    monkeypatch.setattr(routes, "_chosen", {})
    assert routes.choose(a, b, ways, run) == fast
    assert len(calls) == n_calls
    assert [*json.loads(measured.read_text()).values()] == [{"float32-11-6-9-6-" + str(torch.get_num_threads()): fast}]
    close = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(product.mm(a, b, bias=bias), expected, **close)
    torch.testing.assert_close(product.add_mm(total.clone(), a, b), total + a @ b, **close)
    torch.testing.assert_close(product.mm(a, b, alpha=0.5), 0.5 * (a @ b), **close)
    for add, alpha in itertools.product((False, True), (1.0, 0.5)):
        expected = reference.product(a, b, bias, total if add else None, alpha)
        torch.testing.assert_close(product.mm(a, b, total.clone(), bias, add, alpha), expected, **close)


@pytest.mark.parametrize("way", ["ls", "onednn", "torch"])
@pytest.mark.parametrize("shape", [(0, 4, 3), (4, 0, 3), (4, 3, 0)], ids=str)
def test_nothing_to_multiply(way, shape, measured, monkeypatch):
    monkeypatch.setenv("LS_PRODUCTS", way)
    n_rows, n_k, n_cols = shape
    assert torch.equal(product.mm(torch.ones(n_rows, n_k), torch.ones(n_k, n_cols)), torch.zeros(n_rows, n_cols))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"x": 1}', "null"])
def test_a_broken_file_of_choices_is_replaced(content, measured, monkeypatch):
    measured.parent.mkdir()
    measured.write_text(content)
    ways, run, _ = ways_that_take(monkeypatch, ls=0.0, torch=0.005)
    assert routes.choose(torch.randn(8, 8), torch.randn(8, 8), ways, run) == "ls"
    assert "ls" in str(json.loads(measured.read_text()))


def test_choices_without_a_place_to_keep_them(measured, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    ways, run, calls = ways_that_take(monkeypatch, ls=0.005, torch=0.0)
    assert_remembers_torch(ways, run, calls)


def test_a_file_that_cannot_be_replaced_leaves_nothing_beside_it(measured, monkeypatch):
    measured.mkdir(parents=True)
    ways, run, calls = ways_that_take(monkeypatch, ls=0.005, torch=0.0)
    assert_remembers_torch(ways, run, calls)
    assert [*measured.parent.iterdir()] == [measured]


def assert_remembers_torch(ways, run, calls):
    for _ in range(2):
        assert routes.choose(torch.randn(8, 8), torch.randn(8, 8), ways, run) == "torch"
    assert calls.count("torch") == calls.count("ls") == routes._ROUNDS + 1


def test_a_way_that_is_asked_for_is_taken_without_measuring(measured, monkeypatch):
    ways, run, calls = ways_that_take(monkeypatch, ls=0.0, torch=0.0)
    a = torch.randn(8, 8)
    for wanted, taken in (("torch", "torch"), ("ls", "ls"), ("onednn", "torch")):
        monkeypatch.setenv("LS_PRODUCTS", wanted)
        monkeypatch.setattr(routes, "_chosen", {})
        assert routes.choose(a, a, ways, run) == taken
    monkeypatch.setenv("LS_PRODUCTS", "mkl")
    with pytest.raises(UsageError, match="LS_PRODUCTS must be one of auto, ls, torch, onednn, got 'mkl'"):
        routes.wanted_way()
    assert not calls and not measured.exists()


def test_less_exact_products_that_were_asked_for_are_torchs(monkeypatch):
    a = torch.randn(8, 8)
    monkeypatch.setattr(product, "_ROUTES", {})
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(product.mm(a, a), a @ a)
    finally:
        torch.set_float32_matmul_precision("highest")
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # by the newer interface
    try:
        torch.testing.assert_close(product.mm(a, a), a @ a, rtol=0, atol=0)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert torch.get_float32_matmul_precision() == "highest"


@torch.no_grad()
def test_traced_products_are_torchs(monkeypatch):
    monkeypatch.setattr(product, "_LEAST_WORTH", 0)
    linear, x = torch.nn.Linear(4, 3), torch.randn(2, 5, 4)
    linear.forward = lambda x: product.linear(x, linear.weight, linear.bias)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(linear, (x,), check_trace=False)
    torch.testing.assert_close(traced(x), F.linear(x, linear.weight, linear.bias))
