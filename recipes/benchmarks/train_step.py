"""One training step of a translation Transformer, stock fairseq beside ls: ops dispatched, host time, activation memory. On a CPU.

Both sides are built by fairseq (task, model, criterion, optimizer and Trainer from a command line), post-norm unless --pre-norm, embeddings shared,
dropout 0.1 at all three places, with padded batches from fairseq's own collater. A step is what Trainer.train_step does with one batch,
in the phases of ls_plugin/report/step.py.

ops      One step under a TorchDispatchMode, which sees what autograd leaves over: forward and backward alike. A view returns memory of an input and
         writes nothing, an allocation gives memory that nothing has been written to; every other op is a kernel. Per layer: the difference between
         the model and one with a layer less.
time     At a size where arithmetic is nothing. Stock and ls take turns, medians. Once the phases above alone, once the whole Trainer.train_step,
         with its seeding, checks and statistics, which are the same for both. Processor time leaves out when the machine did something else.
memory   Of a second batch whose gradients accumulate (as with --update-freq 2), so that the gradients' memory is there before on both sides.
           kept    bytes that are alive when the forward has ended and were not before: every output of an op is followed until its storage is freed
           saved   of these, what the autograd graph holds: distinct storages in its nodes, parameters and inputs excepted
           peak    most bytes alive at once in forward and backward, above the same floor; temporary memory inside of ops is not seen
           RSS     the same as the kernel counts it: growth of the peak resident set of a fresh process, whose malloc gives freed memory back at once

Usage: python recipes/benchmarks/train_step.py [ops] [time] [memory] [--layers N] [--rounds N] [--sizes S B] [--pre-norm] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.append(str(HERE.parents[1]))  # the clone's ls_plugin, unless one is installed
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)  # fairseq's remarks about optional packages, and its log of each trainer

import torch  # noqa: E402
from fairseq.data.language_pair_dataset import collate  # noqa: E402
from fairseq.trainer import Trainer  # noqa: E402
from live_bytes import LiveBytes  # noqa: E402
from torch import Tensor  # noqa: E402

from ls_plugin.arguments import Listed  # noqa: E402
from ls_plugin.report import op_timing as timing  # noqa: E402
from ls_plugin.report import tables  # noqa: E402
from ls_plugin.report.dispatched import OpCounter, storages  # noqa: E402
from ls_plugin.report.machine import machine as machine_of  # noqa: E402
from ls_plugin.report.step import CLIP_NORM, PHASES, build_trainer, step  # noqa: E402

KINDS = {
    "stock": ["--arch", "transformer", "--criterion", "label_smoothed_cross_entropy", "--optimizer", "adam"],
    "ls": ["--arch", "ls_transformer", "--criterion", "ls_label_smoothed_cross_entropy", "--optimizer", "ls_adam"],
}
GOALS = {"ops": 1 / 3, "time": 1 / 4, "memory": 0.65}  # ls over stock, at most
WARM_UP_ROUNDS = 5
RSS_MARK = "rss_bytes"


@dataclasses.dataclass(frozen=True)
class Size:
    """Layers on each side, widths C and F, heads H, vocabulary V; a batch is B sentences of up to T tokens on both sides."""

    layers: int
    c: int
    f: int
    h: int
    v: int
    batch: int
    length: int

    def __str__(self) -> str:
        return (
            f"{self.layers}+{self.layers} layers, C {self.c}, F {self.f}, H {self.h}, V {self.v:,}, "
            f"{self.batch} x {self.length} = {self.batch * self.length:,} tokens"
        )


SIZES = {
    "T": Size(layers=6, c=64, f=256, h=4, v=200, batch=4, length=8),
    "S": Size(layers=3, c=256, f=1024, h=4, v=8000, batch=32, length=32),
    "B": Size(layers=6, c=512, f=2048, h=8, v=8000, batch=64, length=32),
}


# ---- Both sides, and their steps ----


def build(kind: str, size: Size, encoder_layers: int, decoder_layers: int, pre_norm: bool) -> Trainer:
    """fairseq's trainer as a command line sets it up, with the model in it."""
    arguments = ["--task", "dummy_mt", "--dict-size", str(size.v - 4), "--src-len", "1000", "--tgt-len", "1000"]
    arguments += ["--share-all-embeddings", "--label-smoothing", "0.1", "--lr", "1e-4", "--clip-norm", str(CLIP_NORM)]
    arguments += ["--dropout", "0.1", "--attention-dropout", "0.1", "--activation-dropout", "0.1"]
    arguments += ["--cpu", "--max-tokens", "4096", "--seed", "1", *KINDS[kind]]
    for side, n_layers in (("encoder", encoder_layers), ("decoder", decoder_layers)):
        arguments += [f"--{side}-layers", str(n_layers), f"--{side}-embed-dim", str(size.c)]
        arguments += [f"--{side}-ffn-embed-dim", str(size.f), f"--{side}-attention-heads", str(size.h)]
        arguments += [f"--{side}-normalize-before"] if pre_norm else []
    return build_trainer(arguments)


def make_batch(size: Size, trainer: Trainer, seed: int) -> dict:
    """Sentences of 60 to 100 % of the full length, one at least of them full, source padded at the left, target at the right."""
    generator = torch.Generator().manual_seed(seed)
    dictionary = trainer.task.target_dictionary

    def sentences() -> list[Tensor]:
        lengths = torch.randint(-(-6 * size.length // 10), size.length + 1, (size.batch,), generator=generator)
        lengths[0] = size.length
        return [
            torch.cat((torch.randint(4, size.v, (n - 1,), generator=generator), torch.tensor([dictionary.eos()])))
            for n in lengths.tolist()
        ]

    pairs = zip(sentences(), sentences(), strict=True)
    samples = [{"id": i, "source": source, "target": target} for i, (source, target) in enumerate(pairs)]
    return collate(samples, pad_idx=dictionary.pad(), eos_idx=dictionary.eos())


# ---- Ops ----


def count_ops(kind: str, size: Size, encoder_layers: int, decoder_layers: int, pre_norm: bool) -> dict[str, dict]:
    """Phase -> category -> Counter of op names, of one step after two that build what is built once."""
    trainer = build(kind, size, encoder_layers, decoder_layers, pre_norm)
    sample = make_batch(size, trainer, seed=1)
    for _ in range(2):
        list(step(trainer, sample))
    found = {phase: {category: Counter() for category in ("kernel", "view", "allocation")} for phase in PHASES}
    with OpCounter() as counter:
        for phase in step(trainer, sample):
            for category, names in counter.counts.items():
                found[phase][category] += names
            counter.clear()
    return found


def measure_ops(args: argparse.Namespace) -> dict:
    """Kind -> totals by phase and category; kernels and views per encoder and decoder layer; the kernels by name."""
    size, n = SIZES["T"], args.layers
    found = {}
    for kind in KINDS:
        whole, less_encoder, less_decoder = (
            count_ops(kind, size, n - e, n - d, args.pre_norm) for e, d in ((0, 0), (1, 0), (0, 1))
        )
        totals = {
            phase: {category: names.total() for category, names in by_category.items()}
            for phase, by_category in whole.items()
        }
        layers = {
            side: {
                phase: {
                    category: names.total() - less[phase][category].total() for category, names in by_category.items()
                }
                for phase, by_category in whole.items()
            }
            for side, less in (("encoder layer", less_encoder), ("decoder layer", less_decoder))
        }
        names = {phase: dict(by_category["kernel"].most_common()) for phase, by_category in whole.items()}
        found[kind] = {"totals": totals, "layers": layers, "kernels": names}
    return {"layers": n, "kinds": found}


# ---- Host time ----


def measure_time(args: argparse.Namespace) -> dict:
    """Kind -> medians in ms: of each phase, of the step that they make, of its processor time, and of Trainer.train_step."""
    size = SIZES["T"]
    trainers = {kind: build(kind, size, args.layers, args.layers, args.pre_norm) for kind in KINDS}
    batches = [make_batch(size, trainers["stock"], seed) for seed in range(4)]
    samples = {kind: {name: [] for name in (*PHASES, "step", "step_cpu", "train_step")} for kind in KINDS}
    gc.collect()
    gc.disable()
    try:
        for index in range(-WARM_UP_ROUNDS, args.rounds):
            for kind, trainer in trainers.items():
                spent = dict.fromkeys(PHASES, 0.0)
                begin, begin_cpu = time.perf_counter(), time.process_time()
                last = begin
                for phase in step(trainer, batches[index % len(batches)]):
                    now = time.perf_counter()
                    spent[phase] += now - last
                    last = now
                spent["step"], spent["step_cpu"] = last - begin, time.process_time() - begin_cpu
                begin = time.perf_counter()
                trainer.train_step([batches[index % len(batches)]])
                spent["train_step"] = time.perf_counter() - begin
                if index >= 0:
                    for name, seconds in spent.items():
                        samples[kind][name].append(seconds * 1e3)
    finally:
        gc.enable()
    medians = {kind: {name: statistics.median(ms) for name, ms in of.items()} for kind, of in samples.items()}
    return {"size": str(dataclasses.replace(size, layers=args.layers)), "rounds": args.rounds, "ms": medians}


# ---- Memory ----


def saved_storages(loss: Tensor) -> dict[int, torch.UntypedStorage]:
    """What the graph behind ``loss`` holds for the backward: saved tensors of torch's nodes and of custom Functions, and tensors that the latter
    keep as attributes of their context, in nested containers or not."""
    found, seen, stack = {}, set(), [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [parent for parent, _ in node.next_functions]
        names = [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
        found |= storages([[getattr(node, name) for name in names], dict(getattr(node, "__dict__", {}))])
    return found


def accumulate(trainer: Trainer, sample: dict, at_forward_end=lambda loss: None) -> None:
    """Forward and backward; the gradients are added to those that are there."""
    loss, _, _ = trainer.criterion(trainer.model, sample)
    at_forward_end(loss)
    trainer.optimizer.backward(loss)


def measure_live(kind: str, size: Size, pre_norm: bool) -> dict[str, int]:
    """kept, saved and peak, in bytes."""
    trainer = build(kind, size, size.layers, size.layers, pre_norm)
    sample = make_batch(size, trainer, seed=1)
    parameters = list(trainer.model.parameters())
    figures = {}

    def look(loss: Tensor) -> None:
        figures["kept"] = tracker.live - floor
        outside = storages((parameters, [p.grad for p in parameters], sample)).keys()
        figures["saved"] = sum(s.nbytes() for key, s in saved_storages(loss).items() if key not in outside)

    trainer.optimizer.zero_grad()
    with LiveBytes() as tracker:
        accumulate(trainer, sample)
        # What the first batch has left alive, its gradients aside, is no floor but memory that the step holds on to.
        gc.collect()
        floor = tracker.bytes_of([p.grad for p in parameters])
        tracker.peak = tracker.live
        accumulate(trainer, sample, look)
    figures["peak"] = tracker.peak - floor
    return figures


def peak_rss() -> int | None:
    """Bytes: the peak resident set of this process so far; None where there is no Linux /proc."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return None


def rss_growth(kind: str, size: Size, pre_norm: bool) -> int | None:
    """Bytes by which the peak resident set grows in a batch; in a fresh process only."""
    trainer = build(kind, size, size.layers, size.layers, pre_norm)
    trainer.optimizer.zero_grad()
    for seed in range(2):  # gradients, and what libraries allocate on first use
        accumulate(trainer, make_batch(dataclasses.replace(size, batch=2, length=4), trainer, seed))
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    sample, before = make_batch(size, trainer, seed=1), peak_rss()
    accumulate(trainer, sample)
    after = peak_rss()
    return None if before is None else after - before


def rss_in_fresh_process(kind: str, name: str, args: argparse.Namespace) -> int | None:
    command = [sys.executable, __file__, "--rss", kind, "--sizes", name, "--threads", str(args.threads)]
    command += ["--pre-norm"] if args.pre_norm else []
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"--rss {kind} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])[RSS_MARK]


def measure_memory(args: argparse.Namespace) -> dict:
    """Size -> kind -> kept, saved, peak, RSS in bytes."""
    return {
        name: {
            "size": str(SIZES[name]),
            "bytes": {
                kind: {
                    **measure_live(kind, SIZES[name], args.pre_norm),
                    "RSS": rss_in_fresh_process(kind, name, args),
                }
                for kind in KINDS
            },
        }
        for name in args.sizes
    }


# ---- Tables ----


def make_table(title: str) -> tables.Table:
    return tables.Table(title, ["", "stock", "ls", "ls over stock", "goal"])


def add_row(table, name: str, stock, ours, goal: float | None = None, form: str = "{:,}") -> None:
    cells = ["-" if value is None else form.format(value) for value in (stock, ours)]
    ratio = ours / stock if stock and ours is not None else None
    met = "" if goal is None or ratio is None else f"{goal:.2f} {'met' if ratio <= goal else 'missed'}"
    table.add_row(name, *cells, "-" if ratio is None else f"{ratio:.3f}", met)


def ops_table(found: dict):
    table = make_table(f"Ops dispatched in one training step, {found['layers']}+{found['layers']} layers")
    stock, ours = (found["kinds"][kind] for kind in KINDS)
    both = ("forward", "backward")
    goal = GOALS["ops"]

    def add(name: str, of, phases, category: str, goal: float | None = None) -> None:
        add_row(table, name, *(sum(of(side)[p][category] for p in phases) for side in (stock, ours)), goal=goal)

    for side in ("encoder layer", "decoder layer"):
        of_layer = functools.partial(lambda kind, side: kind["layers"][side], side=side)
        for phase in both:
            add(f"{side}, {phase}: kernels", of_layer, (phase,), "kernel")
        add(f"{side}: kernels", of_layer, both, "kernel", goal)
        add(f"{side}: views", of_layer, both, "view")
        add(f"{side}: allocations", of_layer, both, "allocation")
        table.add_row()
    for phase in PHASES:
        add(f"step, {phase}: kernels", lambda kind: kind["totals"], (phase,), "kernel")
    add("step, forward and backward: kernels", lambda kind: kind["totals"], both, "kernel", goal)
    for category in ("kernel", "view", "allocation"):
        add(f"step: {category}s", lambda kind: kind["totals"], PHASES, category)
    return table


def time_table(found: dict):
    table = make_table(f"Host time of a training step, ms: {found['size']}; medians")
    labels = {"step": "step", "step_cpu": "step, processor time", "train_step": "fairseq's Trainer.train_step"}
    for name in (*PHASES, *labels):
        label = labels.get(name, f"  {name}")
        goal = GOALS["time"] if name in labels else None
        add_row(table, label, *(found["ms"][kind][name] for kind in KINDS), goal=goal, form="{:.2f}")
    return table


def memory_table(found: dict):
    table = make_table("Activation memory of a training step, MiB")
    for name, of_size in found.items():
        table.add_row(f"{name}: {of_size['size']}")
        for measure in ("kept", "saved", "peak", "RSS"):
            values = [of_size["bytes"][kind][measure] for kind in KINDS]
            in_mib = [None if value is None else value / 2**20 for value in values]
            add_row(table, f"  {measure}", *in_mib, goal=GOALS["memory"], form="{:.1f}")
    return table


PARTS = {"ops": (measure_ops, ops_table), "time": (measure_time, time_table), "memory": (measure_memory, memory_table)}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", action=Listed, nargs="*", metavar="PART", help=f"which of {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--layers", type=int, default=6, help="of encoder and of decoder, in ops and time (default 6)")
    parser.add_argument("--rounds", type=int, default=100, help="timed steps of each kind (default 100)")
    parser.add_argument("--sizes", action=Listed, choices=SIZES, default=["S", "B"], help="in memory (default S B)")
    parser.add_argument("--pre-norm", action="store_true", help="layer norm first in both stacks")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default 1)")
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    parser.add_argument("--rss", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    timing.check_names(parser, "part", args.parts, PARTS)
    for name, least in (("layers", 2), ("rounds", 1), ("threads", 1)):  # per layer: a model with a layer less
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}, got {getattr(args, name)}")
    timing.check_out(parser, args.out)
    return args


def main() -> int:
    """Measures the chosen parts; prints a table for each, and writes the JSON."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    if args.rss:
        print(json.dumps({RSS_MARK: rss_growth(args.rss, SIZES[args.sizes[0]], args.pre_norm)}))
        return 0
    from rich.console import Console

    timing.keep_freed_memory()
    console = Console(width=tables.width(), highlight=False)
    machine = machine_of(torch.device("cpu"))
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()), markup=False)
    content = {"machine": machine, "pre_norm": args.pre_norm}
    for name in args.parts or PARTS:
        measure, tabulate = PARTS[name]
        with console.status(f"measuring {name}"):
            content[name] = measure(args)
        print(tabulate(content[name]))
        if args.out:
            args.out.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
