"""The lecture's model of a GPU's time: what an op launches, reads, writes and computes, and how long a GPU takes for it at the least.

    time = launches x launch cost + max(bytes / bandwidth, FLOPs / rate)

Nothing overlaps, memory is read at its full bandwidth and products run at their full rate; so it is a lower bound of the kernels' time and no
measurement. A FLOP is an addition or a multiplication.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU's constants.

    bytes_per_s: of its memory, reads plus writes.  product_flops: by precision, of matrix products (tensor cores; without sparsity; fp32 without
    TF32, which is torch's default); a precision that is missing has no hardware.  vector_flops: of everything else, which is computed in fp32.
    source: which of NVIDIA's data sheets these are from.
    """

    name: str
    bytes_per_s: float
    product_flops: dict[str, float]
    vector_flops: float
    source: str
    launch_s: float = 4e-6  # the lecture's, of its 3 to 5 us; no data sheet gives one


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            "A100",
            1.555e12,
            {"fp16": 312e12, "bf16": 312e12, "fp32": 19.5e12},
            19.5e12,
            "A100 data sheet, SXM4 40 GB, as in the lecture",
        ),
        Gpu(
            "V100",
            0.9e12,
            {"fp16": 125e12, "fp32": 15.7e12},
            15.7e12,
            "V100 data sheet, SXM2; no bf16 before Ampere",
        ),
        Gpu(
            "H100",
            3.35e12,
            {"fp16": 989e12, "bf16": 989e12, "fp32": 67e12},
            67e12,
            "H100 data sheet, SXM; half of 1,979, sparse",
        ),
        Gpu(
            "H200",
            4.8e12,
            {"fp16": 989e12, "bf16": 989e12, "fp32": 67e12},
            67e12,
            "H200 data sheet, SXM; half of 1,979, sparse",
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class Op:
    """One op as the GPU meets it.

    kind: what it is counted under in tables.  bytes: read plus written, each tensor once per launch.
    """

    name: str
    kind: str
    flops: float
    bytes: float
    launches: int = 1
    on_tensor_cores: bool = False


def seconds(op: Op, gpu: Gpu, precision: str) -> float:
    """Launches and work of one op."""
    rate = gpu.product_flops[precision] if op.on_tensor_cores else gpu.vector_flops
    return op.launches * gpu.launch_s + max(op.bytes / gpu.bytes_per_s, op.flops / rate)


def total_seconds(ops: Iterable[Op], gpu: Gpu, precision: str) -> float:
    return sum(seconds(op, gpu, precision) for op in ops)
