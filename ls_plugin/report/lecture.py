"""The figures of the lecture (Lei Li, Large Language Model Systems, lecture 10: Kernel Fusion and LightSeq), computed by this package's own model.

Each is made of lists of ops as the lecture describes them; the conventions that it leaves open are stated where they are used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ls_plugin.report.roofline import GPUS, Gpu, Op, total_seconds

_FP16, _FP32, _MASK = 2, 4, 1  # bytes of an element; a dropout mask is of bools
# FLOPs of an element, by which the lecture's 99.73 % and its 0.2 to 2 FLOP per byte come out.
_SOFTMAX_FLOPS, _LAYER_NORM_FLOPS = 5, 8


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure of the lecture beside what the model gives; ``digits`` behind the point, as many as the lecture gives."""

    name: str
    lecture: float
    model: float
    unit: str = ""
    digits: int = 0

    @property
    def difference(self) -> float:
        """Of the model from the lecture, relative."""
        return self.model / self.lecture - 1.0


def elementwise(
    name: str, n_elements: int, n_streams: int, element_bytes: int, flops: int = 1, kind: str = "elementwise"
) -> Op:
    """One kernel that reads and writes ``n_streams`` arrays of ``n_elements``."""
    return Op(name, kind, flops * n_elements, n_streams * n_elements * element_bytes)


def streams(ops: Sequence[Op], n_elements: int, element_bytes: int) -> float:
    """What ops read and write, in arrays of ``n_elements``."""
    return sum(op.bytes for op in ops) / (n_elements * element_bytes)


def equal_elements(gpu: Gpu) -> float:
    """Elements of an fp32 C = A + B whose launch takes as long as their traffic."""
    one = elementwise("add", 1, 3, _FP32)
    return gpu.launch_s / (one.bytes / gpu.bytes_per_s)


def tri_mat_add(n_elements: int) -> tuple[list[Op], list[Op]]:
    """E = (A + B) + D in fp32: two MatAdd, and one TriMatAdd."""
    two = [elementwise("C = A + B", n_elements, 3, _FP32), elementwise("E = C + D", n_elements, 3, _FP32)]
    return two, [elementwise("E = A + B + D", n_elements, 4, _FP32, flops=2)]


def bias_dropout_residual(n_tokens: int, width: int) -> tuple[list[Op], list[Op]]:
    """y = residual + mask (x + bias) in fp32, unfused and fused.

    As in the lecture's simulator the bias and the mask, fp32 as well, are read for each element: 9 arrays and 5.
    """
    n = n_tokens * width
    unfused = [
        elementwise("bias", n, 3, _FP32),  # x, bias, sum
        elementwise("dropout", n, 3, _FP32),  # sum, mask, product
        elementwise("residual", n, 3, _FP32),  # product, residual, y
    ]
    return unfused, [elementwise("bias + dropout + residual", n, 5, _FP32, flops=3)]


def encoder_layer(n_sentences: int, length: int, width: int, n_heads: int) -> tuple[list[Op], list[Op]]:
    """A post-norm encoder layer's forward in fp16, F = 4C: one kernel for each of the lecture's 24 operations, and fused as LightSeq does.

    Biases and norm weights stay in the cache. A dropout writes its mask, one byte an element. The attention mask is an array of the scores' size
    that the op of its own reads, and that the fused softmax, which knows the lengths, does not.
    """
    n, c, f = n_sentences * length, width, 4 * width
    scores = n_sentences * n_heads * length * length

    def product(name: str, rows: int, inner: int, columns: int, count: int = 1) -> Op:
        n_bytes = _FP16 * count * (rows * inner + inner * columns + rows * columns)
        return Op(name, "product", 2.0 * count * rows * inner * columns, n_bytes, on_tensor_cores=True)

    def each(name: str, n_elements: int, n_streams: int = 2, flops: int = 1, masks: int = 0) -> Op:
        return Op(name, "elementwise", flops * n_elements, (n_streams * _FP16 + masks * _MASK) * n_elements)

    def norm() -> Op:
        return each("layer norm", n * c, flops=_LAYER_NORM_FLOPS)

    heads = n_sentences * n_heads
    qkv = product("q, k, v", n, c, 3 * c)
    qk = product("q k^T", length, c // n_heads, length, heads)
    av = product("times v", length, length, c // n_heads, heads)
    out, first, second = product("output", n, c, c), product("first of FFN", n, c, f), product("second of FFN", n, f, c)
    merge, drop_scores = each("merge heads", n * c, flops=0), each("attention dropout", scores, masks=1)
    unfused = [
        qkv,
        each("bias of q, k, v", 3 * n * c),
        each("split heads", 3 * n * c, flops=0),
        qk,
        each("scale", scores),
        each("mask", scores, n_streams=3),
        each("softmax", scores, flops=_SOFTMAX_FLOPS),
        drop_scores,
        av,
        merge,
        out,
        each("bias", n * c),
        each("dropout", n * c, masks=1),
        each("residual", n * c, n_streams=3),
        norm(),
        first,
        each("bias", n * f),
        each("relu", n * f),
        each("dropout", n * f, masks=1),
        second,
        each("bias", n * c),
        each("dropout", n * c, masks=1),
        each("residual", n * c, n_streams=3),
        norm(),
    ]
    join = each("bias + dropout + residual", n * c, n_streams=3, flops=3, masks=1)
    fused = [
        qkv,
        each("bias + split heads", 3 * n * c),
        qk,
        each("scale + mask + softmax", scores, flops=2 + _SOFTMAX_FLOPS),
        drop_scores,
        av,
        merge,
        out,
        join,
        norm(),
        first,
        each("bias + relu + dropout", n * f, flops=3, masks=1),
        second,
        join,
        norm(),
    ]
    return unfused, fused


def figures() -> list[Figure]:
    """Every figure of the lecture that this model claims to give."""
    gpu = GPUS["A100"]

    def faster(lists: tuple[list[Op], list[Op]], precision: str) -> float:
        unfused, fused = (total_seconds(ops, gpu, precision) for ops in lists)
        return unfused / fused

    n_add = 1_000_000
    two, one = tri_mat_add(n_add)
    training, decoding = bias_dropout_residual(8 * 512, 1024), bias_dropout_residual(1, 4096)
    traffic = [sum(op.bytes for op in ops) for ops in training]
    layer = encoder_layer(8, 256, 1024, 16)
    unfused, _ = layer
    products = [op for op in unfused if op.on_tensor_cores]
    of_flops = sum(op.flops for op in products) / sum(op.flops for op in unfused)
    of_time = total_seconds(products, gpu, "fp16") / total_seconds(unfused, gpu, "fp16")
    return [
        Figure("elements of C = A + B where launch and traffic are equal", 518_333, equal_elements(gpu)),
        Figure("two MatAdd: array streams", 6, streams(two, n_add, _FP32)),
        Figure("TriMatAdd: array streams", 4, streams(one, n_add, _FP32)),
        Figure("bias + dropout + residual: traffic, unfused over fused", 1.8, traffic[0] / traffic[1], "x", 1),
        Figure("the same: time at 8 x 512 tokens, C 1,024", 1.9, faster(training, "fp32"), "x", 1),
        Figure("the same: time at 1 token, C 4,096", 3.0, faster(decoding, "fp32"), "x", 1),
        Figure("encoder layer, 8 x 256 tokens, C 1,024, 16 heads, fp16: ops", 24, len(unfused)),
        Figure("the same: products' share of FLOPs", 99.73, 100 * of_flops, " %", 2),
        Figure("the same: products' share of time", 39.9, 100 * of_time, " %", 1),
        Figure("the same: time, unfused over fused", 1.44, faster(layer, "fp16"), "x", 2),
    ]
