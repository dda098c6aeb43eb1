"""Every op with every tensor argument spoilt in turn: it works, as with the same values laid out plainly, or says in one line what it expected."""

import pytest
import torch
from torch import Tensor

from ls_plugin import _library, ops
from tests.ops.accuracy import needs_library

OPTIONS = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "step": 1}
OPS = {
    "layer_norm": ops.layer_norm,
    "residual_layer_norm": lambda **t: ops.residual_layer_norm(**t, p=0.1),
    "bias_dropout_residual": lambda **t: ops.bias_dropout_residual(**t, p=0.1),
    "bias_act_dropout": lambda **t: ops.bias_act_dropout(**t, activation="gelu", p=0.1),
    "embedding": lambda **t: ops.embedding(**t, padding_idx=1, p=0.1),
    "attention_softmax": lambda **t: ops.attention_softmax(**t, p=0.1),
    "fused_attention": lambda **t: ops.fused_attention(**t, p=0.1),
    "label_smoothed_cross_entropy": lambda **t: ops.label_smoothed_cross_entropy(**t, epsilon=0.1)[0],
    "linear_cross_entropy": lambda **t: ops.linear_cross_entropy(**t, epsilon=0.1)[0],
    "adam_step": lambda **t: ops.adam_step(**t, **OPTIONS),
    "grad_norm": lambda grads, scale: ops.grad_norm(grads if grads is None else [grads, torch.ones(3)], scale, 1.0),
}
IN_PLACE = {"adam_step"}
OPTIONAL = {
    "weight": ("layer_norm", "residual_layer_norm"),
    "bias": tuple(OPS),
    "norm_bias": tuple(OPS),
    "residual": tuple(OPS),
    "positions": tuple(OPS),
    "key_padding_mask": tuple(OPS),
    "param_copy": tuple(OPS),
    "grad_scale": tuple(OPS),
    "overflow": tuple(OPS),
    "scale": tuple(OPS),
}


def tensors(op: str, n: int = 2, t: int = 3, s: int = 5, c: int = 4) -> dict[str, Tensor]:
    """Arguments of an op: n sentences or heads, t tokens or queries, s keys or classes, width c."""
    generator = torch.Generator().manual_seed(9)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    tokens = torch.randint(max(s, 1), (n, t), generator=generator) if s else torch.full((n, t), -100)
    mask = torch.zeros(n, s, dtype=torch.bool)
    mask[:, 1:2] = True
    return {
        "layer_norm": lambda: {"x": normal(n, t, c), "weight": normal(c), "bias": normal(c)},
        "residual_layer_norm": lambda: {
            "x": normal(n, t, c),
            "bias": normal(c),
            "residual": normal(n, t, c),
            "weight": normal(c),
            "norm_bias": normal(c),
        },
        "bias_dropout_residual": lambda: {"x": normal(n, t, c), "bias": normal(c), "residual": normal(n, t, c)},
        "bias_act_dropout": lambda: {"x": normal(n, t, c), "bias": normal(c)},
        "embedding": lambda: {
            "tokens": tokens[:, :t] if s else tokens[:0],
            "weight": normal(max(s, 2), c),
            "positions": normal(t + 2, c),
        },
        "attention_softmax": lambda: {
            "scores": normal(n, 2, t, s),
            "key_padding_mask": mask,
            "bias": normal(t, s),
        },
        "fused_attention": lambda: {
            "q": normal(n, 2, t, c),
            "k": normal(n, 2, s, c),
            "v": normal(n, 2, s, c),
            "key_padding_mask": mask,
            "bias": normal(t, s),
        },
        "label_smoothed_cross_entropy": lambda: {"logits": normal(n, t, s), "target": tokens},
        "linear_cross_entropy": lambda: {"x": normal(n, t, c), "weight": normal(s, c), "target": tokens},
        "adam_step": lambda: {
            "param": normal(n * c),
            "grad": normal(n * c),
            "exp_avg": normal(n * c),
            "exp_avg_sq": normal(n * c).abs(),
            "param_copy": normal(n * c).half(),
            "grad_scale": torch.tensor(0.5),
            "overflow": torch.tensor(False),
        },
        "grad_norm": lambda: {"grads": normal(n, c), "scale": torch.tensor(0.5)},
    }[op]()


CASES = [(op, name) for op in OPS for name in tensors(op)]


def run(op: str, arguments: dict[str, Tensor | None]) -> list[Tensor]:
    """Outputs, and gradients of what is floating; what adam_step changes."""
    leaves = {}
    for name, t in arguments.items():
        if isinstance(t, Tensor) and t.is_floating_point() and op not in (*IN_PLACE, "grad_norm"):
            leaves[name] = t.detach().requires_grad_(not (op == "fused_attention" and name == "bias"))
    torch.manual_seed(1)
    outputs = OPS[op](**{**arguments, **leaves})
    if op in IN_PLACE:
        return [t for t in arguments.values() if t is not None]
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    if not wanted:
        return outputs
    generator = torch.Generator().manual_seed(2)
    grads = [torch.randn(o.shape, generator=generator).to(o) for o in outputs]
    return [*outputs, *torch.autograd.grad(outputs, wanted, grads, allow_unused=True)]


def assert_same(actual: list, expected: list) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if a is not None:
            torch.testing.assert_close(a, e)


def assert_refused(op: str, name: str, arguments: dict, what: str) -> None:
    with pytest.raises((RuntimeError, ValueError, TypeError)) as error:
        run(op, arguments)
    message = str(error.value).splitlines()[0]
    assert message.startswith(f"{op}: ") and name in message, f"{what}: {message}"


def every_second(t: Tensor) -> Tensor:
    """The same values, every other element of what memory holds in the last dimension."""
    return t.new_empty((*t.shape[:-1], 2 * t.shape[-1]))[..., ::2].copy_(t)


def backwards_in_memory(t: Tensor) -> Tensor:
    """The same values, dimensions in the opposite order."""
    order = tuple(reversed(range(t.dim())))
    return t.permute(order).contiguous().permute(order)


@needs_library
@pytest.mark.parametrize(("op", "name"), CASES)
def test_layouts(op, name):
    """Any strides give what contiguous memory gives; buffers that are overwritten are refused."""
    for change in (every_second, backwards_in_memory):
        t = tensors(op)[name]
        if t.dim() == 0:
            continue
        changed = change(t.clone())
        if not changed.is_contiguous() and (op in IN_PLACE or op == "grad_norm"):
            assert_refused(op, name, {**tensors(op), name: changed}, change.__name__)
            continue
        assert_same(run(op, {**tensors(op), name: changed}), run(op, {**tensors(op), name: t}))
    if op in IN_PLACE or op == "grad_norm":
        return
    expanded = tensors(op)[name][:1].expand(tensors(op)[name].shape)  # stride 0
    assert_same(run(op, {**tensors(op), name: expanded}), run(op, {**tensors(op), name: expanded.contiguous()}))


@needs_library
@pytest.mark.parametrize(("op", "name"), CASES)
def test_none(op, name):
    arguments = {**tensors(op), name: None}
    if op in OPTIONAL.get(name, ()):
        run(op, arguments)
    else:
        assert_refused(op, name, arguments, "None")
    if op in OPTIONAL["bias"]:
        with pytest.raises((TypeError, ValueError), match=f"^{op}: "):
            run(op, dict.fromkeys(arguments))


@needs_library
@pytest.mark.parametrize(("op", "name"), CASES)
def test_dtypes(op, name):
    t = tensors(op)[name]
    for dtype in (torch.complex64, torch.int32) if t.is_floating_point() else (torch.float32, torch.int32):
        with pytest.raises((RuntimeError, TypeError)) as error:
            run(op, {**tensors(op), name: t.to(dtype)})
        assert str(error.value).startswith(f"{op}: "), f"{dtype}: {error.value}"


@needs_library
@pytest.mark.parametrize(("op", "name"), CASES)
def test_ranks(op, name):
    """One dimension more, one less, none."""
    t = tensors(op)[name]
    for changed in (t[None].expand(2, *t.shape).contiguous(), t[0] if t.dim() else None, t.flatten()[0]):
        if changed is None or changed.shape == t.shape:
            continue
        try:
            run(op, {**tensors(op), name: changed})
        except (RuntimeError, ValueError) as error:
            assert str(error).startswith(f"{op}: "), f"{tuple(changed.shape)}: {error}"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("size", ["n", "t", "s", "c"])
def test_empty(op, size):
    """A size of 0 everywhere at once gives empty outputs or zeros, and gradients of zero."""
    for extra in ({}, {"n": 0}):
        arguments = tensors(op, **{**extra, size: 0})
        if op == "label_smoothed_cross_entropy" and size == "s":
            arguments["target"] = torch.full_like(arguments["target"], -100)
        results = run(op, arguments)
        assert all(torch.isfinite(t).all() for t in results if t is not None and t.is_floating_point())


@needs_library
@pytest.mark.parametrize("op", OPS)
def test_empty_in_every_layout(op):
    for name, t in tensors(op, n=0).items():
        if t.dim() > 0 and t.numel() == 0 and op not in IN_PLACE:
            run(op, {**tensors(op, n=0), name: t.new_empty((*t.shape[:-1], 2 * t.shape[-1]))[..., ::2]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernels", "reference"])
@pytest.mark.parametrize(("op", "name"), CASES)
def test_one_tensor_on_meta_is_refused(op, name, dtype):
    """The result would be what memory held."""
    arguments = {n: t.to(dtype) if t.dtype == torch.float32 else t for n, t in tensors(op).items()}
    if op == "adam_step" and dtype == torch.float64:
        del arguments["param_copy"]
        if name == "param_copy":
            return
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(RuntimeError, match=r"must lie on the device of|is not on the expected device"):
        run(op, arguments)


@pytest.mark.parametrize("op", OPS)
def test_all_on_meta_gives_shapes(op):
    if op == "grad_norm" or (op == "adam_step" and not _library.status().loaded):
        return
    results = run(op, {name: t.to("meta") for name, t in tensors(op).items()})
    expected = run(op, tensors(op))
    assert [r if r is None else (r.shape, r.dtype) for r in results] == [
        e if e is None else (e.shape, e.dtype) for e in expected
    ]
