"""Shape checks of the fake kernels and of the reference path, in the words of the bindings (``kernels/ops/binding.h``)."""

import functools
import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def check(condition: bool, message: Callable[[], str]) -> None:
    """Raises RuntimeError with the message unless the condition holds; works on symbolic sizes."""
    torch._check(condition, message)


def not_a_tensor(op: str, name: str, value) -> TypeError:
    """The error of an argument that must be a tensor and is none."""
    return TypeError(f"{op}: {name} must be a tensor, got {'None' if value is None else type(value).__name__}")


def check_devices(op: str, **tensors) -> None:
    """All tensors, and those of a list, lie on the device of the first; a seed may lie on the CPU.

    Raises:
        RuntimeError: one does not.
    """
    first_name = device = None
    for name, value in tensors.items():
        for t in value if isinstance(value, list | tuple) else (value,):
            if not isinstance(t, Tensor) or (name == "seed" and t.device.type == "cpu"):
                continue
            if device is None:
                first_name, device = name, t.device
            elif t.device != device:
                raise RuntimeError(
                    f"{op}: {name} must lie on the device of {first_name}, {device}, got {t.device}; "
                    "move it with .to(), or give it values if it is left on meta"
                )


def register_fake(name: str, fake: Callable) -> None:
    """``torch.library.register_fake``, with :func:`check_devices` before it.

    torch calls the fake kernel, and no other, as soon as one tensor lies on meta. So this is where one meta tensor among others is refused,
    and a call whose tensors all lie elsewhere pays nothing for it.
    """
    op = name.split("::")[1].removesuffix("_forward")
    parameters = inspect.signature(fake).parameters

    @functools.wraps(fake)
    def checked(*args, **kwargs):
        check_devices(op, **dict(zip(parameters, args, strict=False)), **kwargs)
        return fake(*args, **kwargs)

    torch.library.register_fake(name, checked)


def check_probability(op: str, p: float) -> None:
    """Raises ValueError unless p is a probability."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{op}: p must lie in [0, 1], got {p}")


def check_row_vector(op: str, name: str, parameter: Tensor | None, x: Tensor) -> None:
    """``parameter`` is None or (C,), with C the last size of ``x``."""
    columns = x.shape[-1]
    check(
        parameter is None or (parameter.dim() == 1 and parameter.shape[0] == columns),
        lambda: f"{op}: {name} must have shape (C,) = ({columns},), got {tuple(parameter.shape)}",
    )


def check_same_shape(op: str, name: str, t: Tensor | None, x_name: str, x: Tensor) -> None:
    """``t`` is None or has the shape of ``x``."""
    check(
        t is None or t.shape == x.shape,
        lambda: f"{op}: {name} must have the shape of {x_name}, {tuple(x.shape)}, got {tuple(t.shape)}",
    )


def check_matrix(op: str, name: str, x: Tensor) -> None:
    """``x`` is (..., C)."""
    check(x.dim() >= 1, lambda: f"{op}: {name} must have at least one dimension, (..., C), got a scalar")
    check_floating(op, name, x)


def check_floating(op: str, name: str, x: Tensor) -> None:
    check(x.is_floating_point(), lambda: f"{op}: {name} must be floating, got {x.dtype}")


def check_vocabulary(op: str, target: Tensor, n_classes: int, ignore_index: int) -> None:
    """Each target is in [0, n_classes) or ignore_index; asked where it costs no wait for a device."""
    if target.device.type != "cpu":
        return
    outside = ((target < 0) | (target >= n_classes)) & (target != ignore_index)
    if outside.any():
        position = int(outside.nonzero()[0])
        raise RuntimeError(
            f"{op}: target {int(target[position])} at position {position} is outside the vocabulary of {n_classes} "
            "entries; was the data preprocessed with another dictionary?"
        )


def to_common_dtype(op: str, name: str, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The tensors in the dtype that torch would compute them in: under autocast a bf16 product meets an fp32 residual, and the sum is
    fp32. Tensors of one dtype come back as they are.

    Raises:
        TypeError: the first, which is called ``name``, is no tensor.  RuntimeError: dtypes differ, and one is not floating.
    """
    if not isinstance(tensors[0], Tensor):
        raise not_a_tensor(op, name, tensors[0])
    first = tensors[0].dtype
    for t in tensors:
        if t is not None and t.dtype is not first:
            break
    else:
        return tensors
    for t in tensors:
        if t is not None and not t.is_floating_point():
            raise RuntimeError(f"{op}: tensors must be floating, got {t.dtype} beside {name} of {first}")
    dtype = functools.reduce(torch.promote_types, [t.dtype for t in tensors if t is not None])
    return tuple(None if t is None else t.to(dtype) for t in tensors)


def product_dtype(like: Tensor) -> torch.dtype | None:
    """The dtype to which matrix products on ``like``'s device cast their operands; None where they cast none.

    Known from autocast, and from apex.amp's O1, which replaces torch's functions by ones that cast.
    """
    device = like.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    if torch.compiler.is_compiling() or F.linear is torch._C._nn.linear:
        return None
    one = torch.ones(1, 1, device=like.device)
    dtype = F.linear(one, one).dtype
    return None if dtype == one.dtype else dtype


def expand_bias(op: str, bias: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The bias of attention scores as a view of their shape (B, H, T, S) and dtype with stride 1 over the keys. Autograd sums its gradient
    to bias' own shape."""
    shape = tuple(shape)
    fits = bias.dim() <= len(shape) and all(
        size in (1, full) for size, full in zip(reversed(bias.shape), reversed(shape), strict=False)
    )
    if not (fits and bias.is_floating_point()):
        raise RuntimeError(
            f"{op}: bias must be floating and broadcastable to {shape}, got {tuple(bias.shape)} of {bias.dtype}"
        )
    bias = bias.to(dtype)
    if bias.dim() == 0 or bias.shape[-1] != shape[-1]:
        bias = bias.expand(*bias.shape[:-1], shape[-1])
    if bias.stride(-1) != 1:
        bias = bias.clone(
            memory_format=torch.contiguous_format
        )  # contiguous() leaves an empty tensor's strides as they are
    return bias.expand(shape)


def refuse_double_backward(op: str) -> Callable:
    """An autograd formula that says that ``op`` cannot be differentiated, where silence would give wrong second derivatives."""

    def backward(ctx, *grads):
        raise RuntimeError(f"{op}: the fused op is differentiable once; use ls_plugin.reference for second derivatives")

    return backward
