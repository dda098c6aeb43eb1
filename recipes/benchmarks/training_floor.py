"""The least time that a training step can take on this machine: its matrix products at the measured peak rate, its bytes at copy bandwidth.

Products, from the shapes of the batches that were trained, with their padding; the projection to the vocabulary only of real tokens, and of causal scores
only the half that is used. Forward and twice as much backward. Bytes that must move besides what the products read and write, which their rate includes:

    update      per parameter: the gradient read for the norm; gradient, weight and both moments read, weight and moments written, in 16 bits a copy, too
    residual    bias + dropout + residual + layer norm, one op: 2 tensors of N x C read and 2 written; backward 3 read, 2 written
    activation  bias + activation + dropout: 1 of N x F read, 1 written; backward 2 read, 1 written
    attention   q, k, v read, the context written, scores in cache; backward these and their gradients
    embedding   rows read, their sum written; backward its gradient read, rows of the weight's gradient read and written
    loss        logits read, their gradient written over them
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

PRODUCT_SIZE = 2048
PRODUCT_TRIES = 9
SCALAR_GFLOP_PER_S = 10.0
RESIDUAL_PASSES, ACTIVATION_PASSES, ATTENTION_PASSES, EMBEDDING_PASSES, LOSS_PASSES = 4 + 5, 2 + 3, 4 + 8, 2 + 3, 2
# As update_step.py counts them.
UPDATE_BYTES = {"fp32": 4 + 28, "bf16": 2 + 26}
ELEMENT_BYTES = {"fp32": 4, "bf16": 2}


@dataclasses.dataclass(frozen=True)
class Model:
    """Layers of the encoder (0: a language model) and of the decoder, widths C and F, vocabulary V."""

    encoder_layers: int
    decoder_layers: int
    c: int
    f: int
    v: int


@dataclasses.dataclass(frozen=True)
class Rates:
    """What the machine reaches: GFLOP/s of large square products by the fastest route, GB/s of a large copy, reads plus writes."""

    gflop_per_s: dict[str, float]  # by precision
    gb_per_s: float


def product_flops(model: Model, batch: dict) -> float:
    """Of the forward and backward of one batch, as timed_train.py records its shape."""
    n_sentences, n_target = batch["target"]
    _, n_source = batch.get("source", (0, 0))
    targets, sources = n_sentences * n_target, n_sentences * n_source
    c, f = model.c, model.f
    encoder_layer = 2 * sources * (4 * c * c + 2 * c * f) + 4 * sources * n_source * c
    decoder_layer = 2 * targets * (4 * c * c + 2 * c * f) + 2 * targets * (n_target + 1) * c
    if n_source:
        decoder_layer += 2 * (targets + sources) * 2 * c * c + 4 * targets * n_source * c
    projection = 2 * batch["tokens"] * c * model.v
    return 3.0 * (model.encoder_layers * encoder_layer + model.decoder_layers * decoder_layer + projection)


def moved_bytes(model: Model, batch: dict, n_params: int, precision: str) -> dict[str, float]:
    """By name, of a whole step with this one batch."""
    n_sentences, n_target = batch["target"]
    _, n_source = batch.get("source", (0, 0))
    targets, sources = n_sentences * n_target, n_sentences * n_source
    size = ELEMENT_BYTES[precision]
    norms = sources * (2 * model.encoder_layers + bool(n_source))
    norms += targets * ((3 if n_source else 2) * model.decoder_layers + 1)
    attentions = sources * model.encoder_layers + targets * model.decoder_layers
    # The keys and values of the source, half of what an attention reads and writes, are of the source's length.
    attentions += (targets + sources) / 2 * model.decoder_layers if n_source else 0
    return {
        "update": float(UPDATE_BYTES[precision] * n_params),
        "residual": float(size * RESIDUAL_PASSES * norms * model.c),
        "activation": float(
            size * ACTIVATION_PASSES * (sources * model.encoder_layers + targets * model.decoder_layers) * model.f
        ),
        "attention": float(size * ATTENTION_PASSES * attentions * model.c),
        "embedding": float(size * EMBEDDING_PASSES * (sources + targets) * model.c),
        "loss": float(size * LOSS_PASSES * batch["tokens"] * model.v),
    }


def floor_ms(model: Model, batches: list[dict], n_params: int, precision: str, rates: Rates) -> dict[str, float]:
    """Of an update of these batches: "products", "bytes" and their sum, "all"."""
    flops = sum(product_flops(model, batch) for batch in batches)
    # The update comes once, however many batches there are.
    moved = sum(
        sum(moved_bytes(model, batch, n_params if i == 0 else 0, precision).values()) for i, batch in enumerate(batches)
    )
    products, copies = flops / rates.gflop_per_s[precision] / 1e6, moved / rates.gb_per_s / 1e6
    return {"products": products, "bytes": copies, "all": products + copies}


# ---- The machine ----


def product_rates(n: int) -> dict[str, float]:
    """Route -> GFLOP/s of an n x n x n product, the best of PRODUCT_TRIES, with the threads that torch has."""
    routes = {
        "torch.mm": torch.mm,
        "oneDNN": lambda a, b: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""),
        "ls": lambda a, b: torch.ops.ls.product(a, b, None, torch.empty_like(a), 1.0, False),
    }
    found = {}
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for name, product in routes.items():
            try:
                rate = _rate(product, n // 8, dtype)
                # bf16 in scalar loops, as torch.mm has it on some processors, would take minutes, and is no candidate.
                found[f"{name} {precision}"] = rate if rate < SCALAR_GFLOP_PER_S else _rate(product, n, dtype)
            except (
                RuntimeError,
                AttributeError,
            ):  # no oneDNN, or no bf16 in it for this processor; no compiled library
                continue
    return found


def _rate(product, n: int, dtype: torch.dtype) -> float:
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    seconds = []
    for _ in range(PRODUCT_TRIES):
        begin = time.perf_counter()
        product(a, b)
        seconds.append(time.perf_counter() - begin)
    return 2.0 * n**3 / min(seconds) / 1e9


def fma_peak(threads: int) -> float | None:
    """GFLOP/s of fp32 multiply-adds in registers (fma_peak.cpp), which no product can pass; None without a compiler that can build it."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "fma_peak"
        source = str(Path(__file__).with_name("fma_peak.cpp"))
        try:
            build = ["c++", "-O3", "-march=native", "-fopenmp", source, "-o", str(program)]
            subprocess.run(build, check=True, capture_output=True)
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            done = subprocess.run([str(program)], check=True, capture_output=True, text=True, env=environment)
        except (OSError, subprocess.CalledProcessError):
            return None
    return float(done.stdout)


def rates_of(product_rates: dict[str, float], gb_per_s: float) -> Rates:
    """The fastest route of each precision; bf16 may be computed in fp32, so its rate is fp32's at least."""
    fastest = {
        precision: max(rate for name, rate in product_rates.items() if name.endswith(precision))
        for precision in ("fp32", "bf16")
        if any(name.endswith(precision) for name in product_rates)
    }
    return Rates({"fp32": fastest["fp32"], "bf16": max(fastest.values())}, gb_per_s)


def median_floor_ms(floors: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(floor[name] for floor in floors) for name in ("products", "bytes", "all")}
