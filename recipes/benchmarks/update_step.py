"""What follows the backward in a training step: stock fairseq's optimizers beside ls_adam, on a CPU. Table, JSON and picture.

Parameters have the shapes of a Transformer's, one fp32, bf16 or fp16 model of them for each contender, built as fairseq's Trainer builds it:

    fp32   the registry's optimizer               bf16   FP16Optimizer, without flat parameters, as --bf16 has it
    fp16   FP16Optimizer, flat, as --fp16 has it; and stock once more with --fp16-no-flatten-grads

Phases, in the order of Trainer.train_step; work that is deferred counts in the phase that does it:

    scale  multiply_grads(1 / sample size)        step   step: unscale, update, weights to 16 bits
    clip   clip_grad_norm: norm, overflow, clip   zero   zero_grad

Gradients are there before each round as a backward leaves them: for ls in their places in the buffer, but for those of layer norms, which autograd
allocates. Contenders take turns; medians over the rounds. Shares of the bandwidth are of ls: the bytes that its passes must move (norm: gradients;
update: gradients, moments and weights or master read, moments and weights written), over the time of all phases. Two yardsticks, both a copy of 256 MB,
reads plus writes: copy_ is torch's, and memmove is libc's, one call for each thread, whose stores bypass the caches. In place (a pass that overwrites what
it has read, as an update does) costs no hidden read of the target.

State: bytes per parameter of weights, gradients, masters and moments, from the storages that model and optimizer hold before the step.

Usage: python recipes/benchmarks/update_step.py [--sizes 10M 70M] [--modes fp32 bf16 fp16] [--threads 1 2] [--rounds N] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.append(str(HERE.parents[1]))  # the clone's ls_plugin, unless one is installed
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)  # fairseq's remarks about optional packages

import torch  # noqa: E402
from fairseq import optim  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from ls_plugin import packing  # noqa: E402 (its import registers ls_ names, too)
from ls_plugin.arguments import Listed  # noqa: E402
from ls_plugin.report import op_timing as timing  # noqa: E402
from ls_plugin.report import tables  # noqa: E402
from ls_plugin.report.dispatched import storages  # noqa: E402
from ls_plugin.report.machine import machine as machine_of  # noqa: E402

PHASES = ("scale", "clip", "step", "zero")
WARM_UP_ROUNDS = 2
CLIP_NORM = 1.0
MODES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# A parameter of an update in place: the moments read and written, the weight or its master likewise, the gradient read, a copy written.
BYTES = {
    "fp32": {"clip": 4, "step": 16 + 8 + 4},
    "bf16": {"clip": 2, "step": 16 + 8 + 2},
    "fp16": {"clip": 2, "step": 16 + 8 + 2 + 2},
}
GOALS = {"speed": 3.0, "share": 0.6, "bf16 state": 14.0}
SIZES = {"10M": (6, 192, 768, 20_000), "70M": (6, 512, 2048, 50_000), "tiny": (1, 32, 64, 300)}  # layers, C, F, V


def parameter_shapes(layers: int, c: int, f: int, v: int) -> list[tuple[tuple[int, ...], bool]]:
    """(shape, is of a layer norm) of each parameter of a Transformer with as many layers on both sides, post-norm, one embedding for all."""
    attention = [((c, c), False), ((c,), False)] * 4
    norm = [((c,), True)] * 2
    feed_forward = [((f, c), False), ((f,), False), ((c, f), False), ((c,), False)]
    encoder_layer = [*attention, *norm, *feed_forward, *norm]
    decoder_layer = [*attention, *norm, *attention, *norm, *feed_forward, *norm]
    return [((v, c), False), *encoder_layer * layers, *decoder_layer * layers]


class Contender:
    """Parameters of these shapes, and fairseq's optimizer over them as a run with this ``--optimizer`` has it."""

    def __init__(
        self, shapes: list[tuple[tuple[int, ...], bool]], mode: str, optimizer: str, flat: bool = True
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        dtype = MODES[mode]
        self.params = [
            nn.Parameter(torch.randn(shape, generator=generator).mul_(0.05).to(dtype)) for shape, _ in shapes
        ]
        # Where autograd allocates gradients; ls layers write most of theirs into the optimizer's buffer.
        in_place = [optimizer == "ls_adam" and not is_norm for _, is_norm in shapes]
        self.grads = [None if placed else torch.empty_like(p) for p, placed in zip(self.params, in_place, strict=True)]
        self.optimizer = self._build(mode, optimizer, flat)
        self.optimizer.zero_grad()

    def _build(self, mode: str, name: str, flat: bool) -> optim.FairseqOptimizer:
        options = {"_name": name, "adam_betas": "(0.9, 0.98)", "adam_eps": 1e-8, "weight_decay": 1e-4, "tpu": False}
        options |= {"use_old_adam": False, "fp16_adam_stats": False, "lr": [5e-4]}
        optimizer = OmegaConf.create(options)
        if mode == "fp32":
            return optim.build_optimizer(optimizer, self.params)
        common = {"bf16": mode == "bf16", "fp16": mode == "fp16", "fp16_no_flatten_grads": not flat}
        common |= {"memory_efficient_fp16": False, "memory_efficient_bf16": False}
        common |= {"fp16_init_scale": 128, "fp16_scale_window": 1 << 20, "fp16_scale_tolerance": 0.0}
        common |= {"threshold_loss_scale": None, "min_loss_scale": 1e-4}
        cfg = SimpleNamespace(optimizer=optimizer, common=SimpleNamespace(**common))
        return optim.FP16Optimizer.build_optimizer(cfg, self.params)

    def set_gradients(self, values: Sequence[Tensor]) -> None:
        """Gradients of these values, as a backward leaves them."""
        for p, own, value in zip(self.params, self.grads, values, strict=True):
            place = packing.claim_grad([p]) if own is None else own
            p.grad = place.copy_(value)
        if hasattr(self.optimizer, "_needs_sync"):
            self.optimizer._needs_sync = True  # as backward() of stock's wrapper

    def phases(self) -> dict[str, Callable[[], object]]:
        """What is timed, in order."""
        return {
            "scale": lambda: self.optimizer.multiply_grads(1.0 / 1000.0),
            "clip": lambda: self.optimizer.clip_grad_norm(CLIP_NORM),
            "step": self.optimizer.step,
            "zero": self.optimizer.zero_grad,
        }

    def state_bytes(self) -> float:
        """Bytes per parameter of all tensors that parameters and optimizer hold."""
        found: dict[int, torch.UntypedStorage] = storages([[p, p.grad] for p in self.params])
        seen: set[int] = set()
        todo: list = [self.optimizer]
        while todo:
            item = todo.pop()
            if id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, Tensor):
                found.update(storages([item, item.grad if item.is_leaf else None]))
            elif isinstance(item, dict):
                todo += [*item.keys(), *item.values()]
            elif isinstance(item, (list, tuple)):
                todo += item
            elif type(item).__module__.split(".")[0] in ("fairseq", "ls_plugin"):
                todo += vars(item).values()
        return sum(storage.nbytes() for storage in found.values()) / sum(p.numel() for p in self.params)


def contenders(shapes: list, mode: str) -> dict[str, Contender]:
    """By name; the first is the one that a run with these flags has by default."""
    made = {"stock": Contender(shapes, mode, "adam")}
    if mode == "fp16":
        made["stock, not flat"] = Contender(shapes, mode, "adam", flat=False)
    return {**made, "ls": Contender(shapes, mode, "ls_adam")}


def timed_round(contender: Contender, gradients: Sequence[Tensor]) -> dict[str, float]:
    """Seconds of each phase of one step."""
    contender.set_gradients(gradients)
    seconds = {}
    for name, function in contender.phases().items():
        begin = time.perf_counter()
        function()
        seconds[name] = time.perf_counter() - begin
    return seconds


def timed_rounds(
    entrants: dict[str, Contender], gradients: Sequence[Tensor], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Contender -> phase -> seconds of each round; contenders in turn."""
    seconds: dict = {name: {phase: [] for phase in PHASES} for name in entrants}
    for _ in range(rounds):
        for name, contender in entrants.items():
            for phase, value in timed_round(contender, gradients).items():
                seconds[name][phase].append(value)
    return seconds


def measure(mode: str, size: str, threads: Sequence[int], rounds: int, bandwidths: dict) -> list[dict]:
    """One result for each number of threads."""
    shapes = parameter_shapes(*SIZES[size])
    n_params = sum(torch.Size(shape).numel() for shape, _ in shapes)
    generator = torch.Generator().manual_seed(2)
    gradients = [(torch.randn(shape, generator=generator) * 0.01).to(MODES[mode]) for shape, _ in shapes]
    entrants = contenders(shapes, mode)
    for _ in range(WARM_UP_ROUNDS):
        timed_rounds(entrants, gradients, 1)
    state = {}
    for name, contender in entrants.items():
        contender.set_gradients(gradients)
        state[name] = contender.state_bytes()
        contender.optimizer.zero_grad()
    results = []
    gc.collect()
    gc.disable()
    try:
        for n in threads:
            torch.set_num_threads(n)
            seconds = timed_rounds(entrants, gradients, rounds)
            results.append(summary(mode, size, n, n_params, seconds, state, bandwidths[n]))
    finally:
        gc.enable()
    return results


def summary(mode: str, size: str, threads: int, n_params: int, seconds: dict, state: dict, bandwidth: dict) -> dict:
    """Medians, ratios and shares."""
    ms = {
        name: {phase: statistics.median(values) * 1e3 for phase, values in phases.items()}
        for name, phases in seconds.items()
    }
    for name, phases in seconds.items():
        ms[name]["all"] = statistics.median(map(sum, zip(*phases.values(), strict=True))) * 1e3
    n_bytes = {phase: per_param * n_params for phase, per_param in BYTES[mode].items()}
    gb_per_s = sum(n_bytes.values()) / ms["ls"]["all"] / 1e6
    return {
        "mode": mode,
        "size": size,
        "threads": threads,
        "n_params": n_params,
        "ms": ms,
        "speedup": {name: of["all"] / ms["ls"]["all"] for name, of in ms.items() if name != "ls"},
        "bytes_per_param": BYTES[mode],
        "gb_per_s": gb_per_s,
        "share": {name: gb_per_s / rate for name, rate in bandwidth.items()},
        "state_bytes_per_param": state,
    }


# ---- Table and picture ----


def make_table(results: list[dict]) -> tables.Table:
    header = ["", *PHASES, "all", "over ls", "state", "GB/s", "copy_", "memmove", "in place"]
    made = tables.Table("Update step: ms; bytes of state per parameter; shares of three bandwidths", header)
    for result in results:
        made.add_row(f"{result['mode']}, {result['n_params']:,} parameters, threads {result['threads']}")
        for name, ms in result["ms"].items():
            cells = [f"{ms[phase]:.2f}" for phase in (*PHASES, "all")]
            ratio = result["speedup"].get(name)
            cells += ["" if ratio is None else f"{ratio:.2f}x", f"{result['state_bytes_per_param'][name]:.2f}"]
            if name == "ls":
                cells += [f"{result['gb_per_s']:.1f}", *(f"{result['share'][y]:.0%}" for y in YARDSTICKS)]
            made.add_row(f"  {name}", *cells)
    return made


YARDSTICKS = ("copy_", "memmove", "in_place")


def of_copy(result: dict) -> float:
    """The share of the bandwidth of the faster copy."""
    return min(result["share"]["copy_"], result["share"]["memmove"])


def goals(results: list[dict]) -> list[str]:
    """A line for each goal, met or missed."""
    speed = min(result["speedup"]["stock"] for result in results)
    share = min(map(of_copy, results))
    lines = [
        f"least speed-up over stock {speed:.2f}x, goal {GOALS['speed']:.0f}x: {'met' if speed >= GOALS['speed'] else 'missed'}",
        f"least share of the faster copy {share:.0%}, goal {GOALS['share']:.0%}: {'met' if share >= GOALS['share'] else 'missed'}",
    ]
    bf16 = [result["state_bytes_per_param"]["ls"] for result in results if result["mode"] == "bf16"]
    if bf16:
        goal = GOALS["bf16 state"]
        # What the alignment of each parameter to a cache line, and scalars, add.
        met = max(bf16) <= goal * 1.005
        lines.append(f"bf16 state {max(bf16):.2f} bytes per parameter, goal {goal:.0f}: {'met' if met else 'missed'}")
    return lines


def draw(results: list[dict], title: str, path: Path) -> None:
    """Stacked bars of the phases, one panel for each mode and size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys((r["mode"], r["size"]) for r in results))
    figure, axes = pyplot.subplots(
        1, len(kinds), figsize=(2 + 2.6 * len(kinds), 4), squeeze=False, layout="constrained"
    )
    colors = dict(zip(PHASES, ("tab:gray", "tab:blue", "tab:orange", "tab:green"), strict=True))
    for axis, kind in zip(axes[0], kinds, strict=True):
        bars = [(r, name) for r in results if (r["mode"], r["size"]) == kind for name in r["ms"]]
        base = [0.0] * len(bars)
        for phase in PHASES:
            heights = [r["ms"][name][phase] for r, name in bars]
            axis.bar(range(len(bars)), heights, bottom=base, color=colors[phase], label=phase)
            base = [low + height for low, height in zip(base, heights, strict=True)]
        for i, (r, name) in enumerate(bars):
            told = f"{r['speedup'][name]:.1f}x" if name in r["speedup"] else f"{of_copy(r):.0%}"
            axis.text(i, base[i], told, ha="center", va="bottom", fontsize=7)
        labels = [f"{name}, {r['threads']} thr." for r, name in bars]
        axis.set_xticks(range(len(bars)), labels, fontsize=7, rotation=60, ha="right")
        axis.set_title(f"{kind[0]}, {kind[1]}", fontsize=9)
        axis.margins(y=0.1)
    axes[0][0].set_ylabel("ms")
    axes[0][0].legend(fontsize=7)
    figure.suptitle(f"{title}\nabove stock: over ls; above ls: share of the faster copy's bandwidth", fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


# ---- Command ----


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", action=Listed, choices=SIZES, default=["10M", "70M"], help="default: 10M 70M")
    parser.add_argument("--modes", action=Listed, choices=MODES, default=list(MODES), help="default: all three")
    parser.add_argument("--threads", action=Listed, type=int, default=[1, 2], help="CPU threads (default 1 2)")
    parser.add_argument("--rounds", type=int, default=11, help="timed steps of each contender (default 11)")
    parser.add_argument("--out", type=Path, help="write the results here as JSON, and beside it the picture")
    args = parser.parse_args()
    for name in ("threads", "rounds"):
        least = min(args.threads) if name == "threads" else args.rounds
        if least < 1:
            parser.error(f"--{name} must be at least 1, got {least}")
    timing.check_out(parser, args.out)
    return args


def main() -> int:
    """Measures the chosen modes and sizes; prints the table, writes JSON and picture."""
    args = parse_arguments()
    from rich.console import Console

    timing.keep_freed_memory()
    console = Console(width=tables.width(), highlight=False)
    machine = machine_of(torch.device("cpu"))
    del machine["threads"]
    bandwidths = {}
    for n in args.threads:
        torch.set_num_threads(n)
        bandwidths[n] = dataclasses.asdict(timing.measure_bandwidth(torch.device("cpu")))
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()), markup=False)
    for n, bandwidth in bandwidths.items():
        rates = ", ".join(f"{name} {rate:.1f}" for name, rate in bandwidth.items())
        console.print(f"GB/s, reads plus writes, {n} thread{'s' * (n > 1)}: {rates}", markup=False)
    results: list[dict] = []
    for mode in args.modes:
        for size in args.sizes:
            with console.status(f"measuring {mode}, {size}"):
                results += measure(mode, size, args.threads, args.rounds, bandwidths)
    print(make_table(results))
    print("\n".join(goals(results)))
    if args.out:
        content = {"machine": machine, "bandwidth": bandwidths, "rounds": args.rounds, "results": results}
        args.out.write_text(json.dumps(content, indent=1) + "\n")
        picture = args.out.with_suffix(".png")
        draw(results, f"{machine['processor']}, torch {machine['torch']}, {machine['commit']}", picture)
        print(f"{args.out}, {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
