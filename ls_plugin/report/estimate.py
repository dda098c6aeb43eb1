"""The time of a training step on GPUs that are not there, stock fairseq beside ls. An estimate, no measurement:

    time = launches x launch cost + max(bytes / bandwidth, FLOPs / rate)     for each op; the model of CMU's LLM Systems, lecture 10

The ops are those of fairseq's and the plugin's own code, traced with shapes alone: forward, loss, backward, gradient norm and clip, update, 16-bit copy.
Left out: the host's time (eager PyTorch takes longer for an op than a GPU for its launch, so that small batches of stock are slower than this),
synchronisation between GPUs, products and kernels below full speed, padding. "stock + apex" is stock with apex's fused Adam (fp16 only).

    lightseq-report estimate --arch transformer_wmt_en_de_big_t2t --max-tokens 512,4096 --gpu A100,H100
    lightseq-report estimate --arch transformer_lm_gpt --max-tokens 4096 --out build/estimate -- --dropout 0.3
    lightseq-report estimate --lecture        the lecture's own figures beside what this model gives for them
    lightseq-report estimate --published      LightSeq's published training speed-ups beside what this model gives
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from ls_plugin.arguments import Listed
from ls_plugin.errors import UsageError
from ls_plugin.report import lecture, published, tables
from ls_plugin.report.roofline import GPUS, Gpu, seconds

MARK = "ESTIMATE, no measurement"
_FORMULA = "time = launches x launch cost + max(bytes / bandwidth, FLOPs / rate), op by op"
_CONSTANTS = "Constants (products and other ops in TFLOP/s; launch: the lecture's 4 us, of its 3 to 5; the rest: NVIDIA's data sheets)"
_CLIP_PHASES = ("clip", "update")  # of the optimizer
_PRECISIONS = ("fp16", "bf16", "fp32")
_DEFAULTS = {"max_tokens": ["4096"], "gpu": ["A100"], "precision": "fp16", "vocab": "32000", "stock_attention": "fused"}
_OF_STEPS = ("arch", *_DEFAULTS, "sentence_length", "flags")  # flags that --lecture and --published leave no room for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch",
        action=Listed,
        metavar="A",
        help="fairseq's architectures of translation and language models, without ls_",
    )
    parser.add_argument("--max-tokens", action=Listed, metavar="N", help="tokens of a batch (default 4096)")
    parser.add_argument("--gpu", action=Listed, metavar="G", help=f"of {', '.join(GPUS)} (default A100)")
    parser.add_argument("--precision", choices=_PRECISIONS, help="default fp16")
    parser.add_argument("--vocab", metavar="V", help="entries of the dictionary (default 32000)")
    parser.add_argument(
        "--sentence-length",
        metavar="T",
        help="tokens of each sentence, on both sides (default 32; language models 512)",
    )
    parser.add_argument(
        "--stock-attention",
        choices=("fused", "unfused"),
        help="torch's own attention as one kernel, as since torch 2.0, or as products, softmax and dropout, as before (default fused)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write report.json, report.md and estimate.png here")
    parser.add_argument(
        "--lecture", action="store_true", help="the lecture's figures beside this model's, and nothing else"
    )
    parser.add_argument(
        "--published", action="store_true", help="LightSeq's table beside this model's, and nothing else"
    )
    parser.add_argument(
        "flags", nargs="*", metavar="-- FLAGS", help="further flags of fairseq-train, for all contenders"
    )


def run(args: argparse.Namespace) -> int:
    """Raises UsageError for flags that contradict one another, or that name what is not known."""
    if args.lecture and args.published:
        raise UsageError("--lecture, --published: one at a time; give them in two calls")
    if args.arch is None and not (args.lecture or args.published):
        raise UsageError(
            "--arch: required, as in --arch transformer_wmt_en_de_big_t2t; or give --lecture or --published"
        )
    given = [name for name in _OF_STEPS if getattr(args, name)]
    if given and (args.lecture or args.published):
        flag = "flags after --" if given[0] == "flags" else f"--{given[0].replace('_', '-')}"
        raise UsageError(
            f"{flag}: has no meaning beside --lecture and --published, which say what they compute; drop one of them"
        )
    for name, value in _DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    gpus = [_gpu(name, args.precision) for name in args.gpu]
    sizes = sorted({_number("--max-tokens", size) for size in args.max_tokens})
    if args.out is not None:
        if args.lecture:
            raise UsageError("--out: nothing is written for --lecture, which prints its figures; drop one of them")
        _import_matplotlib()
        args.out.mkdir(parents=True, exist_ok=True)
    print(f"{MARK}: {_FORMULA}.")
    if args.lecture:
        gpus = [GPUS["A100"]]
    elif args.published:
        gpus = [GPUS[published.GPU]]
    tables.show(_CONSTANTS, *_gpu_table(gpus))
    if args.lecture:
        tables.show("The lecture's figures, by the same code as every other estimate here", *_lecture_table())
        return 0
    if args.published:
        return _run_published(args)
    return _run_steps(args, gpus, sizes)


# ---- Flags ----


def _number(flag: str, text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise UsageError(f"{flag}: must be a whole number of at least {least}, got {text!r}")
    return int(text)


def _gpu(name: str, precision: str) -> Gpu:
    gpu = GPUS.get(name.upper())
    if gpu is None:
        raise UsageError(f"--gpu {name}: unknown; choose from {', '.join(GPUS)}")
    if precision not in gpu.product_flops:
        raise UsageError(f"--gpu {name}: has no {precision} products in hardware; take --precision fp16, or drop it")
    return gpu


def _import_matplotlib():
    try:
        import matplotlib
    except ImportError:
        raise UsageError("--out: the picture needs matplotlib; pip install 'ls_plugin[report]'") from None
    # It says so when it lists the fonts, which it does once on each machine, and our log goes to standard output.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


# ---- Steps ----


def _run_steps(args: argparse.Namespace, gpus: list[Gpu], sizes: list[int]) -> int:
    from ls_plugin.report.contenders import Step

    vocab = _number("--vocab", args.vocab, least=8)
    length = None if args.sentence_length is None else _number("--sentence-length", args.sentence_length)
    asked = [
        Step(arch, args.precision, vocab, length, tuple(args.flags), args.stock_attention == "fused")
        for arch in args.arch
    ]
    for step in asked:
        step.family  # noqa: B018 (an unknown one is refused before any is traced)
    results = [summary for step in asked for summary in _estimate(step, sizes, gpus)]
    for gpu in gpus:
        tables.show(
            f"{gpu.name}, {args.precision}: estimated ms of a training step", *_step_table(results, gpu), keys=2
        )
    tables.show("What is launched and moved in a step", *_work_table(results), keys=3)
    if args.out is not None:
        _write(args, gpus, results)
    return 0


def _estimate(step, sizes: Sequence[int], gpus: Sequence[Gpu]) -> list[dict]:
    """A summary for each contender and size, ready for JSON."""
    from ls_plugin.report import contenders

    found = []
    log = logging.getLogger("fairseq")
    level = log.level
    log.setLevel(logging.WARNING)  # what it says of dictionaries and shared weights would stand among the tables
    try:
        for contender in contenders.contenders_of(step):
            print(f"tracing {step.arch}, {contender}", file=sys.stderr, flush=True)
            traces = contenders.trace_steps(step, contender, sizes)
            found += [summarise(traced, gpus, step.precision) for traced in traces]
    finally:
        log.setLevel(level)
    return found


def summarise(traced, gpus: Sequence[Gpu], precision: str) -> dict:
    """Totals of a traced step by kind of op, and its time on each GPU; ms, bytes, FLOPs."""
    from ls_plugin.report.trace import KINDS, UPDATE

    kinds = {kind: {"launches": 0, "flops": 0.0, "bytes": 0.0} for kind in KINDS}
    times = {
        gpu.name: {"ms": 0.0, "launch_ms": 1e3 * gpu.launch_s * traced.launches, "kinds": dict.fromkeys(KINDS, 0.0)}
        for gpu in gpus
    }
    for phase, op in traced.ops:
        kind = UPDATE if phase in _CLIP_PHASES else op.kind
        kinds[kind]["launches"] += op.launches
        kinds[kind]["flops"] += op.flops
        kinds[kind]["bytes"] += op.bytes
        for gpu in gpus:
            ms = 1e3 * seconds(op, gpu, precision)
            times[gpu.name]["ms"] += ms
            times[gpu.name]["kinds"][kind] += ms
    return {
        "arch": traced.arch,
        "contender": traced.contender,
        "max_tokens": traced.max_tokens,
        "n_sentences": traced.n_sentences,
        "sentence_length": traced.length,
        "n_parameters": traced.n_parameters,
        "launches": traced.launches,
        "host_reads": traced.host_reads,
        "flops": sum(of["flops"] for of in kinds.values()),
        "bytes": sum(of["bytes"] for of in kinds.values()),
        "kinds": kinds,
        "gpus": times,
    }


# ---- Tables ----


def _gpu_table(gpus: Sequence[Gpu]) -> tuple[list[str], list[list[str]]]:
    header = ["GPU", "launch, us", "TB/s", *(f"{p} products" for p in _PRECISIONS), "other ops", "source"]
    rows = []
    for gpu in gpus:
        rates = [f"{gpu.product_flops[p] / 1e12:g}" if p in gpu.product_flops else "-" for p in _PRECISIONS]
        rows.append(
            [
                gpu.name,
                f"{1e6 * gpu.launch_s:g}",
                f"{gpu.bytes_per_s / 1e12:g}",
                *rates,
                f"{gpu.vector_flops / 1e12:g}",
                gpu.source,
            ]
        )
    return header, rows


def _lecture_table() -> tuple[list[str], list[list[str]]]:
    rows = [
        [f.name, f"{f.lecture:,g}{f.unit}", f"{f.model:,.{f.digits}f}{f.unit}", f"{100 * f.difference:+.2f} %"]
        for f in lecture.figures()
    ]
    return ["figure", "lecture", "this model", "difference"], rows


def _by_contender(results: Sequence[dict]) -> dict[tuple[str, int], dict[str, dict]]:
    """(architecture, --max-tokens) -> contender -> summary."""
    found: dict = {}
    for r in results:
        found.setdefault((r["arch"], r["max_tokens"]), {})[r["contender"]] = r
    return found


def _ratio(of: dict, contender: str, gpu: Gpu) -> str:
    if contender not in of:
        return "-"
    return f"{of[contender]['gpus'][gpu.name]['ms'] / of['ls']['gpus'][gpu.name]['ms']:.2f}x"


def _step_table(results: Sequence[dict], gpu: Gpu) -> tuple[list[str], list[list[str]]]:
    names = list(dict.fromkeys(r["contender"] for r in results))
    others = [name for name in names if name != "ls"]
    header = ["architecture", "tokens", *names, *(f"over {name}" for name in others), "launches' share, stock / ls"]
    rows = []
    for (arch, _), of in _by_contender(results).items():
        times = {name: r["gpus"][gpu.name] for name, r in of.items()}
        shares = " / ".join(f"{100 * times[name]['launch_ms'] / times[name]['ms']:.0f} %" for name in ("stock", "ls"))
        tokens = f"{of['ls']['n_sentences'] * of['ls']['sentence_length']:,}"
        rows.append(
            [arch, tokens, *(f"{times[n]['ms']:.2f}" for n in names), *(_ratio(of, n, gpu) for n in others), shares]
        )
    return header, rows


def _work_table(results: Sequence[dict]) -> tuple[list[str], list[list[str]]]:
    header = ["architecture", "tokens", "contender", "launches", "host waits", "GB", "of them update", "TFLOP"]
    rows = []
    for r in results:
        tokens = f"{r['n_sentences'] * r['sentence_length']:,}"
        update = r["kinds"]["update"]["bytes"]
        work = [
            f"{r['launches']:,}",
            str(r["host_reads"]),
            f"{r['bytes'] / 1e9:.3g}",
            f"{update / 1e9:.3g}",
            f"{r['flops'] / 1e12:.3g}",
        ]
        rows.append([r["arch"], tokens, r["contender"], *work])
    return header, rows


# ---- LightSeq's table ----


def _run_published(args: argparse.Namespace) -> int:
    from ls_plugin.report.contenders import Step

    gpu = GPUS[published.GPU]
    results, rows = {}, []
    for layers in dict.fromkeys(row.layers for row in published.TABLE):
        of_depth = [row for row in published.TABLE if row.layers == layers]
        step = Step(
            published.ARCH,
            published.PRECISION,
            published.VOCAB,
            published.SENTENCE_LENGTH,
            of_depth[0].flags,
            fused_attention=False,
        )
        found = _by_contender(_estimate(step, [row.tokens for row in of_depth], [gpu]))
        results |= {(layers, size): of for (_, size), of in found.items()}
    for row in published.TABLE:
        of = results[row.layers, row.tokens]
        apex = "-" if row.over_apex is None else f"{row.over_apex:.2f}x"
        ms = [f"{of[name]['gpus'][gpu.name]['ms']:.1f}" for name in of]
        predicted = [_ratio(of, name, gpu) for name in of if name != "ls"]
        rows.append([row.name, f"{row.tokens:,}", *ms, predicted[0], f"{row.over_stock:.2f}x", predicted[1], apex])
    header = [
        "layers",
        "tokens",
        "stock, ms",
        "stock + apex",
        "ls",
        "over stock",
        "published",
        "over stock + apex",
        "published",
    ]
    title = (
        f"Predicted beside published: {published.ARCH}, V {published.VOCAB:,}, {published.PRECISION}, one {gpu.name}"
    )
    tables.show(title, header, rows)
    print(f"Published: {published.SOURCE}.\n")
    reasons = _reasons(results)
    print(reasons)
    if args.out is not None:
        args.precision, args.vocab, args.stock_attention = published.PRECISION, str(published.VOCAB), "unfused"
        _write_json(args, [gpu], [r for of in results.values() for r in of.values()])
        text = f"# {title}\n\n**{MARK}**: {_FORMULA}.\n\n{tables.markdown(header, rows)}\n\nPublished: {published.SOURCE}.\n\n{reasons}"
        (args.out / "report.md").write_text(text, encoding="utf-8")
        print(args.out / "report.md", file=sys.stderr)
    return 0


def _reasons(results: dict) -> str:
    """``published.REASONS`` with the traced figures of 6 + 6 layers in it."""
    from ls_plugin.report.trace import COPIES

    of = results[6, 4096]
    stock, ours = of["stock"], of["ls"]
    n_gpus, bytes_per_s = 8, 300e9
    return published.REASONS.format(
        launch_ratio=stock["launches"] / ours["launches"],
        stock_reads=stock["host_reads"],
        ls_reads=ours["host_reads"],
        parameters=round(ours["n_parameters"] / 1e6),
        sync_ms=1e3 * 2 * (n_gpus - 1) / n_gpus * 2 * ours["n_parameters"] / bytes_per_s,
        length=ours["sentence_length"],
        copies_ms=ours["gpus"][published.GPU]["kinds"][COPIES],
        ls_ms=ours["gpus"][published.GPU]["ms"],
    )


# ---- Files ----


def _write(args: argparse.Namespace, gpus: list[Gpu], results: list[dict]) -> None:
    _write_json(args, gpus, results)
    picture = args.out / "estimate.png"
    _draw(picture, args.precision, gpus, results)
    length = ", ".join(f"{arch}: {n} tokens" for arch, n in {r["arch"]: r["sentence_length"] for r in results}.items())
    parts = [
        f"# Estimated time of a training step, {args.precision}",
        f"**{MARK}**: {_FORMULA}. Left out: the host's time, synchronisation, products and kernels below full speed, padding.",
        f"A sentence ({length}) is equally long on both sides; V {args.vocab}. Flags for all: `{' '.join(args.flags) or 'none'}`.",
        f"{_CONSTANTS}:\n\n{tables.markdown(*_gpu_table(gpus))}",
        *(f"## {gpu.name}, ms\n\n{tables.markdown(*_step_table(results, gpu))}" for gpu in gpus),
        f"![time by kind of op]({picture.name})",
        f"## What is launched and moved\n\n{tables.markdown(*_work_table(results))}",
    ]
    (args.out / "report.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print(args.out / "report.md", file=sys.stderr)


def _write_json(args: argparse.Namespace, gpus: list[Gpu], results: list[dict]) -> None:
    import dataclasses
    import json

    content = {
        "estimate": MARK,
        "formula": _FORMULA,
        "precision": args.precision,
        "vocab": args.vocab,
        "stock_attention": args.stock_attention,
        "flags": args.flags,
        "gpus": [dataclasses.asdict(gpu) for gpu in gpus],
        "steps": results,
    }
    (args.out / "report.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _draw(path: Path, precision: str, gpus: Sequence[Gpu], results: Sequence[dict]) -> None:
    """A panel for each architecture and GPU: of each size the contenders' bars beside each other, kinds of ops stacked, in % of stock's time."""
    from ls_plugin.report.trace import KINDS

    pyplot = _import_matplotlib()
    groups = _by_contender(results)
    names = list(dict.fromkeys(r["contender"] for r in results))
    sizes = list(dict.fromkeys(size for _, size in groups))
    panels = [(arch, gpu) for arch in dict.fromkeys(arch for arch, _ in groups) for gpu in gpus]
    n_columns = min(2, len(panels))
    n_rows = -(-len(panels) // n_columns)
    colours = dict(zip(KINDS, pyplot.get_cmap("tab10").colors, strict=False))
    inches = (2.4 + (1.2 + 1.1 * len(sizes)) * n_columns, 0.6 + 3.4 * n_rows)
    figure, axes = pyplot.subplots(n_rows, n_columns, figsize=inches, squeeze=False, sharey=True, layout="constrained")
    width = 0.8 / len(names)
    for axis, (arch, gpu) in zip(axes.flat, panels, strict=False):
        for i, size in enumerate(sizes):
            of = groups[arch, size]
            whole = of["stock"]["gpus"][gpu.name]["ms"]
            for j, name in enumerate(names):
                time, bottom, x = of[name]["gpus"][gpu.name], 0.0, i + (j - (len(names) - 1) / 2) * width
                for kind in KINDS:
                    share = 100 * time["kinds"][kind] / whole
                    label = kind if i == j == 0 else None
                    axis.bar(x, share, 0.92 * width, bottom=bottom, color=colours[kind], label=label)
                    bottom += share
                short = name.removeprefix("stock ")
                axis.text(x, bottom + 1, f"{short}\n{time['ms']:.3g} ms", ha="center", va="bottom", fontsize=6)
        axis.set_xticks(range(len(sizes)), [f"{size:,} tokens" for size in sizes], fontsize=8)
        axis.set_ylim(0, 118)
        axis.set_title(f"{arch}, {gpu.name}, {precision}", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for row in axes:
        row[0].set_ylabel("% of stock's time")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=7, frameon=False)
    figure.suptitle(f"{MARK}: launches x launch cost + max(bytes / bandwidth, FLOPs / rate)", fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
