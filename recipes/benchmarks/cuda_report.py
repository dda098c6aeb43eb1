"""What can be said of the CUDA kernels without a GPU: python recipes/benchmarks/cuda_report.py [OP...] [--out FILE.md]

First table, from nvcc: for each op and architecture the kernel instances, the most registers, shared memory, stack and spills of any, the
16-byte accesses to global memory in the machine code (LDG.E.128, STG.E.128; in PTX where there is no nvdisasm) beside all others, and the
warps that can be resident, as a share of a multiprocessor's, by registers, threads and static shared memory. Per instance:
build/nvcc/registers.txt.

Second table, from the SIMT harness: the bytes that a benchmark case moves in bf16, each counted once per launch as memory behind a perfect
cache sees it, beside those that the op must move; partial sums of two-stage reductions apart (tests/simt/floors.py).
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
warnings.simplefilter("ignore")
logging.disable(logging.INFO)

from ls_plugin.arguments import Listed  # noqa: E402
from ls_plugin.report import op_timing, tables  # noqa: E402
from tests.simt import floors, nvcc  # noqa: E402

# ---- From nvcc ----


def instance_rows(ops: list[str]) -> list[list[str]]:
    """Raises nvcc.CompileError."""
    found = nvcc.all_instances(ops)
    nvcc.write_register_table(found)
    rows = []
    for (op, arch), kernels in found.items():
        counts = [k.machine if k.machine is not None else k.accesses for k in kernels]
        wide, other = (
            " + ".join(
                str(
                    sum(
                        n
                        for c in counts
                        for (kind, n_bytes), n in c.items()
                        if kind == which and (n_bytes == 16) == is_wide
                    )
                )
                for which in ("ld", "st")
            )
            for is_wide in (True, False)
        )
        vectors = sum(1 for c in counts if c["ld", 16] or c["st", 16])
        occupancies = [k.occupancy for k in kernels if k.occupancy is not None]
        most = [
            str(max(getattr(k, name) for k in kernels))
            for name in ("registers", "shared_bytes", "stack_bytes", "spill_bytes")
        ]
        occupancy = (
            " to ".join(dict.fromkeys(f"{o:.0%}" for o in (min(occupancies), max(occupancies)))) if occupancies else "-"
        )
        rows.append([op, arch, f"{len(kernels)} ({vectors})", *most, wide, other, occupancy])
    return rows


# ---- From the SIMT harness ----


def byte_rows(ops: list[str]) -> list[list[str]]:
    rows = []
    for op in ops:
        print(f"counting {op}", file=sys.stderr, flush=True)
        counts = floors.count(op)
        rows += [
            [
                c.op,
                c.shape,
                c.direction,
                f"{c.floor:,}",
                f"{c.moved - c.partials:,}",
                f"{c.of_floor:.1%}",
                f"{c.partials:,}",
            ]
            for c in counts
        ] or [[op, "not bound by memory", *["-"] * 5]]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "ops", action=Listed, nargs="*", metavar="OP", help=f"which ops (default: all): {', '.join(nvcc.OPS)}"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "cuda_report.md", help="default build/cuda_report.md"
    )
    args = parser.parse_args()
    op_timing.check_names(parser, "op", args.ops, nvcc.OPS)
    ops = args.ops or nvcc.OPS
    parts, shown = [], []
    if nvcc.find_nvcc() is None:
        parts.append(
            "nvcc was not found (install the CUDA toolkit or set CUDA_HOME to it), so there is nothing of registers here."
        )
    else:
        source = (
            "machine code" if nvcc.find_nvdisasm() else "PTX; nvdisasm was not found (pip install nvidia-cuda-nvdisasm)"
        )
        print("compiling with nvcc, two at a time", file=sys.stderr, flush=True)
        header = [
            "op",
            "arch",
            "instances (vector)",
            "registers",
            "shared",
            "stack",
            "spilled",
            "16-byte loads + stores",
        ]
        header += ["others", "resident warps"]
        rows = instance_rows(ops)
        shown.append((header, rows))
        parts.append(
            f"{nvcc.nvcc_version().splitlines()[-2]}; accesses counted in {source}\n\n{tables.markdown(header, rows)}"
        )
    header = ["op", "shape, bf16", "direction", "floor, bytes", "counted", "of floor", "partial sums"]
    rows = byte_rows(ops)
    shown.append((header, rows))
    parts.append(tables.markdown(header, rows))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("\n\n".join(parts) + "\n")
    for header, rows in shown:
        tables.show("", header, rows)
    print(args.out, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
