"""What a GPU would launch, read and write in a training step, found out without one: the real step on torch's meta device.

Tensors of the meta device have shapes and no values, so a step of any size takes no memory and little time. A TorchDispatchMode writes down each op
that autograd leaves over; views and allocations launch nothing. A meta tensor takes the ways of a GPU's but in these, which :func:`as_on_gpu` puts
right for the time of a trace:

- torch's dropout is one kernel on a GPU, and its scaled_dot_product_attention chooses a fused kernel;
- ls takes the CUDA kernels' way through attention, and knows addresses (parameters that lie side by side are one operand);
- what the host reads of the device (is there padding? is the norm finite?) is answered as in a usual step: there is padding, everything is finite, the
  norm is beyond ``--clip-norm``.

Bytes: each tensor that an op reads or writes counts once a launch, expanded ones without their copies, look-ups with the rows that they touch. Launches:
one an op, but where torch or ls launch more.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ls_plugin import _library
from ls_plugin.ops.linear_cross_entropy import linear_cross_entropy_forward
from ls_plugin.report.dispatched import category, tensors_in
from ls_plugin.report.roofline import Op

aten = torch.ops.aten

PRODUCTS, ATTENTION, NORM, ELEMENTWISE = "matrix products", "attention, softmax", "layer norm", "elementwise, dropout"
COPIES, EMBEDDING, LOSS, UPDATE = "copies, casts", "embedding", "loss", "update"
KINDS = (PRODUCTS, ATTENTION, NORM, ELEMENTWISE, COPIES, EMBEDDING, LOSS, UPDATE)

# Beginnings of names, ATen's and ls', and what they are counted under; the first that fits. The rest is elementwise.
_KIND_OF = (
    (("attention_softmax", "_softmax", "_scaled_dot_product"), ATTENTION),
    (("native_layer_norm", "layer_norm", "residual_layer_norm"), NORM),
    (("copy_", "clone", "_to_copy", "cat", "_foreach_copy_"), COPIES),
    (("embedding", "index_select", "cumsum"), EMBEDDING),
    (("_log_softmax", "label_smoothed", "linear_cross", "gather", "scatter", "nll_loss"), LOSS),
)
# FLOPs of an element, as in lecture.py; of everything else 1.
_FLOPS = {ATTENTION: 5, NORM: 8, LOSS: 5}

# Launches where they are not one: ATen's, from its CUDA sources in torch 2.
_LAUNCHES = {
    "masked_fill": 2,  # a clone first
    "scatter_add": 2,  # likewise
    "native_layer_norm_backward": 2,  # of the input; of weight and bias
    "_scaled_dot_product_efficient_attention_backward": 2,  # the row sums first
    "_scaled_dot_product_flash_attention_backward": 3,  # and a conversion last
    "embedding_dense_backward": 7,  # a fill, a radix sort in 4, its segments, the sums
}
# ls' sums over rows have a second launch, one for each group of which a gradient is wanted (kernels/cuda/column_sum.cuh).
_SUMS_OVER_ROWS = {
    "layer_norm_backward": (("needs_weight_grad", "needs_bias_grad"),),
    "residual_layer_norm_backward": (("needs_bias_grad",), ("needs_weight_grad", "needs_norm_bias_grad")),
    "bias_act_dropout_backward": (("needs_bias_grad",),),
    "bias_dropout_residual_backward": (("needs_bias_grad",),),
}
# torch's for lists of tensors: by depth, how many one launch takes; chunks of 65,536 elements, 320 a launch (MultiTensorApply.cuh).
_TENSORS_PER_LAUNCH, _CHUNK, _CHUNKS_PER_LAUNCH = 64, 65_536, 320

# Arguments that are written without having been read.
_ONLY_WRITTEN = {
    "copy_": {"self"},
    "_foreach_copy_": {"self"},
    "fill_": {"self"},
    "zero_": {"self"},
    "bernoulli_": {"self"},
    "adam_step": {"param_copy"},
    "label_smoothed_cross_entropy_forward": {"grad"},
}
# Arguments of which no more elements are touched than another argument, or the result, has.
_LOOKED_UP = {"embedding": "weight", "embedding_forward": "weight", "index_select": "self", "gather": "self"}
_SCATTERED = {"scatter_add_": ("self", "src"), "index_add_": ("self", "source")}

# The value that the host reads of a bool on the device, by the op that made it.
_ANSWERS = {"any": True, "gt": True, "eq": False, "ne": False, "grad_norm": False}


class Trace(TorchDispatchMode):
    """Writes down the kernels of the meta device as :class:`ls_plugin.report.roofline.Op`, in order.

    Attributes:
        ops: since they were last taken away.  host_reads: how often the host waits for a value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.host_reads = 0
        self._made_by: dict[int, tuple[weakref.ref, str]] = {}  # bools of one element

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            self.host_reads += 1
            return self._answer(args[0])
        if func is aten._to_copy.default and args[0].is_meta and _goes_to_host(kwargs):
            return args[0]  # to the "device" that fairseq takes where there is no GPU
        if name == "linear_cross_entropy_forward":  # a sequence of other ops
            with self:
                return linear_cross_entropy_forward(torch.ops.ls, *args)
        if func._can_decompose() and func is not torch.ops.prim.device.default:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if (
            any(t.is_meta for t in tensors_in((args, kwargs, result)))
            and category(func, args, kwargs, result) == "kernel"
        ):
            self.ops.append(_describe(func, name, args, kwargs, result))
            for t in tensors_in(result):
                if t.dtype == torch.bool and t.numel() == 1:
                    self._made_by[id(t)] = weakref.ref(t), name
        return result

    def _answer(self, value: Tensor):
        maker, name = self._made_by.get(id(value), (None, None))
        if maker is None or maker() is not value or name not in _ANSWERS:
            raise RuntimeError(
                f"trace: the host reads a value of the device that no rule answers: {value.dtype} of {name}"
            )
        return _ANSWERS[name]


def _goes_to_host(kwargs: dict) -> bool:
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"


def _describe(func, name: str, args, kwargs, result) -> Op:
    base = name.rstrip("_")
    packet = getattr(aten, base, None) if func.namespace == "aten" else None
    given = dict(zip(_arguments(func), args, strict=False)) | kwargs
    if packet in flop_registry:
        kind = ATTENTION if "attention" in base else PRODUCTS
        flops, on_tensor_cores = flop_registry[packet](*args, **kwargs, out_val=result), True
    else:
        kind = next((kind for beginnings, kind in _KIND_OF if name.startswith(beginnings)), ELEMENTWISE)
        largest = max(map(_elements, tensors_in((args, kwargs, result))), default=0)
        flops, on_tensor_cores = _FLOPS.get(kind, 1) * largest, False
    n_bytes, launches = _bytes(func, name, given, result), _launches(name, given)
    return Op(f"{func.namespace}::{name}", kind, float(flops), n_bytes, launches, on_tensor_cores)


def _launches(name: str, given: dict) -> int:
    if name == "grad_norm":
        return len(given["grads"]) + 1
    if name == "embedding_backward":  # zeros, the sums; 16 bits sort the tokens in 4; learned positions take 2
        return 2 + 4 * (given["grad_y"].dtype != torch.float32) + 2 * given["needs_positions_grad"]
    if name in _SUMS_OVER_ROWS:
        return 1 + sum(any(given[flag] for flag in group) for group in _SUMS_OVER_ROWS[name])
    if name.startswith("_foreach"):
        tensors = given["self"]
        chunks = sum(-(-t.numel() // _CHUNK) for t in tensors)
        return max(math.ceil(len(tensors) / _TENSORS_PER_LAUNCH), math.ceil(chunks / _CHUNKS_PER_LAUNCH))
    return _LAUNCHES.get(name, 1)


def _elements(t: Tensor) -> int:
    """Elements that lie in memory: an expanded dimension is one."""
    return math.prod(size for size, stride in zip(t.shape, t.stride(), strict=True) if stride != 0)


def _size(t: Tensor) -> int:
    return _elements(t) * t.element_size()


@functools.cache
def _arguments(func) -> dict[str, tuple[bool, bool]]:
    """Of each argument in the op's schema whether it is written, and whether it is one of those (``out=``) that are not read."""
    arguments = {}
    for a in func._schema.arguments:
        is_written = a.alias_info is not None and a.alias_info.is_write
        arguments[a.name] = is_written, is_written and a.kwarg_only
    return arguments


def _bytes(func, name: str, given: dict, result) -> float:
    """Read plus written."""
    results = list(tensors_in(result))
    total, seen, changed = 0, set(), set()
    for argument, (is_written, only_written) in _arguments(func).items():
        if (name, argument) == ("adam_step", "grad"):
            is_written = given["zero_grad"]
        only_written = only_written or argument in _ONLY_WRITTEN.get(name, ())
        for t in tensors_in(given.get(argument)):
            size = _size(t)
            if _LOOKED_UP.get(name) == argument:
                size = min(size, sum(map(_size, results)))
            elif name in _SCATTERED and _SCATTERED[name][0] == argument:
                size = min(size, _size(given[_SCATTERED[name][1]]))
            place = (t.untyped_storage()._cdata, t.storage_offset(), t.shape)
            if place not in seen and not only_written:
                total += size
            if is_written:
                total += size
                changed.add(place[0])
            seen.add(place)
    return float(total + sum(_size(t) for t in results if t.untyped_storage()._cdata not in changed))


# ---- A GPU's ways ----


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """As ATen chooses on a GPU."""
    if train and 0.0 < p < 1.0 and x.numel() > 0:
        return torch.native_dropout(x, p, train)[0]
    return x * 0.0 if train and p == 1.0 else x


def _fused_attention(
    q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
) -> Tensor:
    """As ATen chooses on a GPU: flash attention takes 16 bits and no mask, the memory-efficient kernel the rest."""
    if attn_mask is None and q.dtype in (torch.float16, torch.bfloat16):
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    needs_lse = torch.is_grad_enabled() and q.requires_grad
    return aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, needs_lse, dropout_p, is_causal, scale=scale
    )[0]


def _address(storage: torch.UntypedStorage) -> int:
    """Another one for every storage, 16 TiB apart."""
    return storage._cdata << 44


def _tensor_address(t: Tensor) -> int:
    return _address(t.untyped_storage()) + t.storage_offset() * t.element_size()


@contextlib.contextmanager
def as_on_gpu(fused_attention: bool = True) -> Iterator[None]:
    """For the time of the block, meta tensors go the ways of a GPU's.

    Args:
        fused_attention: torch's own attention is one kernel, as since torch 2.0; else its products, softmax and dropout, as before.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("dropout", _dropout, "AutogradMeta")
    if fused_attention:
        library.impl("scaled_dot_product_attention", _fused_attention, "AutogradMeta")
    with (
        mock.patch.object(_library, "runs_cuda_kernels", lambda x: True),
        mock.patch.object(Tensor, "data_ptr", _tensor_address),
        mock.patch.object(torch.UntypedStorage, "data_ptr", _address),
    ):
        try:
            yield
        finally:
            library._destroy()
