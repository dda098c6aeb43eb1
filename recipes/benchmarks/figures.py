"""The figures that the READMEs give: written from the benchmarks' results, and measured again.

    python recipes/benchmarks/figures.py                              puts the tables into the READMEs
    python recipes/benchmarks/figures.py --check                      fails where a README says something else than the results (the tests ask this)
    python recipes/benchmarks/figures.py --measure [NAME ...] [--keep]  runs the commands again, in about an hour and a half, and fails where a
                                                                      figure of the READMEs is more than 15 % better than what is measured now;
                                                                      --keep: what was measured takes the place of the results

A table stands between the lines ``<!-- figures: NAME -->`` and ``<!-- end of figures -->``. Results are the JSON files under ``results``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = HERE / "results"
PAGES = (ROOT / "README.md", HERE / "README.md", HERE.parent / "quickstart" / "README.md")
MOST_BETTER = 1.15  # what a README may claim over what is measured
BEGIN, END = "<!-- figures: {} -->", "<!-- end of figures -->"

Claims = dict[str, float]  # name -> a figure of which more is better


@dataclasses.dataclass(frozen=True)
class Source:
    """A benchmark: its results, the command that makes them, which ends with the file, or the folder that the file lies in, and what is claimed of them."""

    file: str
    command: tuple[str, ...]
    claims: Callable[[dict], Claims]

    @property
    def told(self) -> str:
        """The command as a reader would type it."""
        return " ".join(("python", *self.command, f"recipes/benchmarks/results/{self.target}"))

    @property
    def target(self) -> str:
        """What the command gets: the file, or the folder of a report that the file is a part of."""
        return self.file.partition("/")[0]

    def read(self, folder: Path = RESULTS) -> dict:
        return json.loads((folder / self.file).read_text(encoding="utf-8"))


def table(header: list[str], rows: list[list[str]], left: int = 1) -> str:
    """Markdown; the first columns to the left, numbers to the right."""
    lines = [header, ["---"] * left + ["---:"] * (len(header) - left), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def machine_line(machine: dict) -> str:
    threads = f", {machine['threads']} thread{'s' if machine['threads'] > 1 else ''}" if "threads" in machine else ""
    return (
        f"{machine['processor']}, {machine['instruction_set']}, {machine['cores']} cores{threads}, Python {machine['python']}, "
        f"torch {machine['torch']}, commit {machine['commit']}."
    )


def times(ratio: float | None) -> str:
    return "void" if ratio is None else f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"


# ---- Whole training steps ----

ROW_TITLES = {
    "S": "S: 3+3 layers, C 256, V 8,000, 1,024 tokens",
    "S256": "S with 256 tokens",
    "B": "B: 6+6 layers, C 512, V 8,000, 2,048 tokens",
    "B32": "B with V 32,000",
    "LM": "language model: 6 layers, C 512, V 32,000, 2,048 tokens",
}


def training_claims(content: dict) -> Claims:
    claims = {}
    for name, row in content["rows"]["results"].items():
        for kind in ("ls fp32", "ls bf16"):
            for over in ("over_stock", "over_best"):
                ratio = row["speedup"][kind][over]["ratio"]
                if ratio is not None:
                    claims[f"{name}, {kind}, {over.replace('_', ' ')}"] = ratio
            claims[f"{name}, {kind}, floor over step"] = 1 / row["contenders"][kind]["over_floor"]
            memory = [row["contenders"][side]["peak_rss_mib"] for side in ("stock", kind)]
            claims[f"{name}, {kind}, memory of stock over ours"] = memory[0] / memory[1]
    return claims


def step_ms(row: dict, kind: str) -> float:
    """Of stock the median; of another contender what follows from it by the ratio on the same batches, so that a row's figures agree."""
    ratio = row["speedup"][kind]["over_stock"]["ratio"] if kind != "stock" else None
    return row["contenders"]["stock"]["step_ms"] / ratio if ratio else row["contenders"][kind]["step_ms"]


def training_table(content: dict) -> str:
    rows = []
    for name, row in content["rows"]["results"].items():
        known, best = row["contenders"], row["best_stock"]
        short = "" if best == "stock" else f" ({best.removeprefix('stock+')})"
        cells = [ROW_TITLES[name], f"{step_ms(row, 'stock'):,.0f}", f"{step_ms(row, best):,.0f}{short}"]
        for kind in ("ls fp32", "ls bf16"):
            over, of_best = (row["speedup"][kind][key] for key in ("over_stock", "over_best"))
            spread = "-".join(f"{quartile:.2f}" for quartile in over["quartiles"])
            cells += [f"{step_ms(row, kind):,.0f}", f"{times(over['ratio'])} ({spread})", times(of_best["ratio"])]
            cells += [f"{known[kind]['over_floor']:.2f}"]
        cells += [" / ".join(f"{known[side]['peak_rss_mib']:,.0f}" for side in ("stock", "ls fp32"))]
        rows.append(cells)
    ours = ["ls {}", "over stock", "over best", "over floor"]
    header = ["ms a step", "stock", "best stock", *(word.format("fp32") for word in ours)]
    header += [*(word.format("bf16") for word in ours), "peak MiB, stock / ls"]
    return f"{table(header, rows)}\n\n{machine_line(content['rows']['machine'])}"


def training_summary(content: dict) -> str:
    rows = []
    for name, row in content["rows"]["results"].items():
        known, over = row["contenders"], row["speedup"]["ls fp32"]["over_stock"]
        rows.append(
            [
                ROW_TITLES[name],
                *(f"{step_ms(row, kind):,.0f}" for kind in ("stock", "ls fp32")),
                times(over["ratio"]),
                f"{known['stock']['over_floor']:.2f} / {known['ls fp32']['over_floor']:.2f}",
                f"{over['loss_difference']:+.2%}",
            ]
        )
    header = [
        "a training step, fp32, two cores of a CPU",
        "stock, ms",
        "ls, ms",
        "speed-up",
        "over the floor, stock / ls",
    ]
    return table([*header, "loss"], rows)


def quickstart_claims(content: dict) -> Claims:
    """Speed alone: at this size the process's memory is mostly Python and torch, and what is saved depends on the processor."""
    ratio = content["over_stock"]["ls"]["ratio"]
    return {} if ratio is None else {"over stock": ratio}


def quickstart_table(content: dict) -> str:
    stock, ours, gain = content["contenders"]["stock"], content["contenders"]["ls"], content["over_stock"]["ls"]
    spread = "-".join(f"{quartile:.2f}" for quartile in gain["quartiles"])
    phases = [(f"  {name}", stock["phase_ms"][name], ours["phase_ms"][name], ",.1f") for name in stock["phase_ms"]]
    figures = [
        ("tokens/s", stock["tokens_per_s"], ours["tokens_per_s"], ",.0f"),
        ("ms a step", stock["step_ms"], ours["step_ms"], ",.0f"),
        *phases,
        ("peak memory, MiB", stock["peak_rss_mib"], ours["peak_rss_mib"], ",.0f"),
        ("loss, bits a token", stock["final_loss"], ours["final_loss"], ".3f"),
    ]
    rows = [["times as fast, on the same batch", "1", f"{times(gain['ratio'])} ({spread})"]]
    rows += [[name, format(a, form), format(b, form)] for name, a, b, form in figures]
    parts = [table(["", "stock", "ls"], rows), machine_line(content["machine"])]
    if "samples" in content:
        parts.append(
            f"After {content['settings']['minutes']:g} minutes of training on ({content['trained_updates']:,} updates): BLEU {content['bleu']:.1f}, "
            f"chrF {content['chrf']:.1f}; the old text as it is: BLEU {content['unchanged_bleu']:.1f}. Samples, spread evenly over the test books:"
        )
        samples = [[text.replace("|", "\\|") for text in sample] for sample in content["samples"]]
        parts.append(table(["King James", "World English Bible", "ls"], samples, left=3))
    return "\n\n".join(parts)


def inference_claims(content: dict) -> Claims:
    return {name: row["speedup"] for name, row in content["inference"]["results"].items()}


def inference_table(content: dict) -> str:
    rows = [
        [
            name,
            *(f"{row['seconds'][side]:.2f}" for side in ("stock", "ls")),
            times(row["speedup"]),
            f"{row['differing']} of {row['results']}",
        ]
        for name, row in content["inference"]["results"].items()
    ]
    made = table(["seconds", "stock", "ls", "speed-up", "results that differ"], rows)
    return f"{made}\n\n{machine_line(content['inference']['machine'])}"


# ---- The steps' parts ----


def anatomy_rows(content: dict) -> Iterator[tuple[str, str, str, float]]:
    """(what, stock, ls, ls over stock)."""
    ops = {side: content["ops"]["kinds"][side] for side in ("stock", "ls")}
    for layer in ("encoder layer", "decoder layer"):
        counts = {
            side: [of["layers"][layer][part]["kernel"] for part in ("forward", "backward")] for side, of in ops.items()
        }
        told = {side: " + ".join(map(str, count)) for side, count in counts.items()}
        yield (
            f"kernels of {'an' if layer[0] == 'e' else 'a'} {layer}, forward + backward",
            told["stock"],
            told["ls"],
            sum(counts["ls"]) / sum(counts["stock"]),
        )
    totals = {side: sum(part["kernel"] for part in of["totals"].values()) for side, of in ops.items()}
    yield (
        "kernels of the whole step, optimizer included",
        f"{totals['stock']:,}",
        f"{totals['ls']:,}",
        totals["ls"] / totals["stock"],
    )
    ms = {side: content["time"]["ms"][side]["step"] for side in ("stock", "ls")}
    size = content["time"]["size"]
    yield f"host time of a tiny step, ms ({size})", f"{ms['stock']:.1f}", f"{ms['ls']:.1f}", ms["ls"] / ms["stock"]
    for size in content["memory"].values():
        for what, title in (("saved", "kept for the backward"), ("peak", "peak of forward and backward")):
            mib = {side: size["bytes"][side][what] / 2**20 for side in ("stock", "ls")}
            yield (
                f"{title}, MiB ({size['size']})",
                f"{mib['stock']:,.0f}",
                f"{mib['ls']:,.0f}",
                mib["ls"] / mib["stock"],
            )


def anatomy_claims(content: dict) -> Claims:
    return {what: 1 / ratio for what, _, _, ratio in anatomy_rows(content)}


def anatomy_table(content: dict) -> str:
    rows = [[what, stock, ours, f"{ratio:.2f}"] for what, stock, ours, ratio in anatomy_rows(content)]
    return f"{table(['', 'stock', 'ls', 'ls over stock'], rows)}\n\n{machine_line(content['machine'])}"


def update_claims(content: dict) -> Claims:
    claims = {}
    for row in content["results"]:
        name = f"{row['mode']}, {row['size']}, {row['threads']} threads"
        claims[f"{name}, over stock"] = row["speedup"]["stock"]
        claims[f"{name}, share of copy"] = update_share(row)
        state = row["state_bytes_per_param"]
        claims[f"{name}, state of stock over ours"] = state["stock"] / state["ls"]
    return claims


def update_share(row: dict) -> float:
    """Of what the faster of torch's and libc's copy reaches."""
    return min(row["share"]["copy_"], row["share"]["memmove"])


def update_table(content: dict) -> str:
    together: dict[tuple[str, str], list[dict]] = {}
    for row in content["results"]:
        together.setdefault((row["mode"], row["size"]), []).append(row)
    rows = []
    for (mode, size), of in together.items():
        state = of[0]["state_bytes_per_param"]
        rows.append(
            [
                mode,
                size,
                " / ".join(times(row["speedup"]["stock"]) for row in of),
                " / ".join(f"{update_share(row):.0%}" for row in of),
                f"{state['stock']:.0f} / {state['ls']:.0f}",
            ]
        )
    threads = " / ".join(str(row["threads"]) for row in next(iter(together.values())))
    header = [
        "",
        "parameters",
        f"over stock, {threads} threads",
        "share of copy",
        "state, bytes per parameter, stock / ls",
    ]
    return f"{table(header, rows, left=2)}\n\n{machine_line(content['machine'])}"


# ---- Ops ----


def op_name(row: dict) -> str:
    return f"{row['op']}, {row['shape']}, {row['dtype']}"


def op_claims(content: dict) -> Claims:
    claims = {}
    for row in content["results"]:
        for over in ("eager", "best"):
            if row["speedup"].get(over):
                claims[f"{op_name(row)}, over {over}"] = row["speedup"][over]["total"]
        for part, share in zip(("forward", "backward"), row["share"], strict=True):
            if share is not None:
                claims[f"{op_name(row)}, {part}, share of copy"] = share
    return claims


def op_table(content: dict) -> str:
    def total(timing: dict | None) -> str:
        if not timing or timing["forward_ms"] is None:
            return "-"
        ms = timing["forward_ms"] + (timing["backward_ms"] or 0.0)
        return f"{ms:.2f}" if ms < 100 else f"{ms:,.0f}"

    rows = []
    for row in content["results"]:
        gain = row["speedup"]
        rows.append(
            [
                f"`{row['op']}`",
                row["shape"],
                *(total(row["times"].get(side)) for side in ("eager", "compiled", "ls")),
                *(times(gain[over]["total"]) if gain.get(over) else "-" for over in ("eager", "best")),
                " / ".join("-" if share is None else f"{share:.0%}" for share in row["share"]),
            ]
        )
    header = ["op", "shape", "eager, ms", "compile, ms", "ls, ms", "over eager", "over the better"]
    made = table([*header, "share of copy, forward / backward"], rows, left=2)
    return f"{made}\n\n{machine_line(content['machine'])}"


def memory_claims(content: dict) -> Claims:
    mib = content["mib"]
    return {f"{other} over blocks": mib[other] / mib["blocks"] for other in mib if other != "blocks"}


def memory_table(content: dict) -> str:
    words = {
        "stock": "a product, then fairseq's criterion",
        "fused": "a product, then `label_smoothed_cross_entropy`",
        "blocks": "`linear_cross_entropy`",
    }
    rows = [[words[way], f"{content['mib'][way]:,.0f}"] for way in ("stock", "fused", "blocks")]
    header = (
        f"peak of the loss step at {content['tokens']:,} tokens, C {content['columns']}, V {content['classes']:,}, MiB"
    )
    return table([header, ""], rows)


TRAINING = ("recipes/benchmarks/training.py", "--baselines", "medium+fused_adam")
SOURCES = {
    "training": Source("training_cpu.json", (*TRAINING, "--out"), training_claims),
    "inference": Source(
        "training_cpu.json", ("recipes/benchmarks/training.py", "--inference", "--out"), inference_claims
    ),
    "train_step": Source("train_step_cpu_1_thread.json", ("recipes/benchmarks/train_step.py", "--out"), anatomy_claims),
    "update_step": Source("update_step_cpu.json", ("recipes/benchmarks/update_step.py", "--out"), update_claims),
    "ops": Source(
        "kernels_cpu/kernels.json",
        ("-m", "ls_plugin.cli.report", "kernels", "--dtypes", "fp32", "--seconds", "0.25", "--threads", "2", "--out"),
        op_claims,
    ),
    "quickstart": Source("quickstart/report.json", ("recipes/quickstart/run.py", "--out"), quickstart_claims),
    "loss_memory": Source("peak_memory.json", ("recipes/benchmarks/peak_memory.py", "--out"), memory_claims),
}
# Name of a table in a README -> the benchmark, and what makes the table of its results.
TABLES: dict[str, tuple[str, Callable[[dict], str]]] = {
    "summary": ("training", training_summary),
    "training": ("training", training_table),
    "inference": ("inference", inference_table),
    "train_step": ("train_step", anatomy_table),
    "update_step": ("update_step", update_table),
    "ops": ("ops", op_table),
    "loss_memory": ("loss_memory", memory_table),
    "quickstart": ("quickstart", quickstart_table),
}


def filled(page: str) -> str:
    """The page with its tables from the results.

    Raises:
        KeyError: an unknown table.
    """

    def block(found: re.Match) -> str:
        source, make = TABLES[found[1]]
        command = f"`{SOURCES[source].told}`"
        return "\n".join((BEGIN.format(found[1]), command + "\n", make(SOURCES[source].read()), END))

    pattern = BEGIN.format(r"(\w+)") + r"\n.*?" + END
    return re.sub(pattern, block, page, flags=re.DOTALL)


def too_good(claimed: Claims, measured: Claims) -> list[str]:
    """A line for each claim that is missing from what was measured, or more than MOST_BETTER times of it."""
    lines = []
    for name, value in claimed.items():
        now = measured.get(name)
        if now is None:
            lines.append(f"{name}: {value:.2f} claimed, nothing measured")
        elif not value <= MOST_BETTER * now:
            lines.append(f"{name}: {value:.2f} claimed, {now:.2f} measured")
    return lines


def measure(names: list[str], keep: bool) -> int:
    """Runs the benchmarks and compares; the number of claims that do not hold."""
    n_wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            source = SOURCES[name]
            file = Path(folder) / source.file
            if (
                keep and not file.exists() and (RESULTS / source.file).exists()
            ):  # what other benchmarks have put into the same file stays
                file.parent.mkdir(exist_ok=True)
                shutil.copy(RESULTS / source.file, file)
            print(f"{name}: {source.told}", flush=True)
            subprocess.run([sys.executable, *source.command, str(Path(folder) / source.target)], cwd=ROOT, check=True)
            claimed, measured = (source.claims(source.read(where)) for where in (RESULTS, Path(folder)))
            wrong = too_good(claimed, measured)
            n_wrong += len(wrong)
            print(f"{name}: {len(claimed)} figures, {len(wrong)} of them more than 15 % above what is measured now")
            print("".join(f"  {line}\n" for line in wrong), end="", flush=True)
            if keep:  # a folder holds data and checkpoints, too
                (RESULTS / source.file).parent.mkdir(exist_ok=True)
                for made in file.parent.iterdir():
                    if made.suffix in (".json", ".png", ".svg"):
                        shutil.copy(made, (RESULTS / source.file).with_name(made.name))
    return n_wrong


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 where a figure does not hold or a README differs from the results."""
    sys.path.append(str(ROOT))  # the clone's ls_plugin, unless one is installed
    from ls_plugin.arguments import Listed

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, compare the READMEs with the results")
    parser.add_argument(
        "--measure", action=Listed, nargs="*", metavar="NAME", choices=list(SOURCES), help=f"of {', '.join(SOURCES)}"
    )
    parser.add_argument("--keep", action="store_true", help="with --measure: keep what was measured as the results")
    args = parser.parse_args(arguments)
    if args.keep and args.measure is None:
        parser.error("--keep goes with --measure")
    status = 0
    if args.measure is not None:
        status = int(measure(args.measure or list(SOURCES), args.keep) > 0)
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        wanted = filled(text)
        if wanted == text:
            continue
        if args.check:
            print(
                f"{page.relative_to(ROOT)} does not say what the results say; run python recipes/benchmarks/figures.py"
            )
            status = 1
        else:
            page.write_text(wanted, encoding="utf-8")
            print(f"{page.relative_to(ROOT)}: tables written")
    return status


if __name__ == "__main__":
    sys.exit(main())
