"""Benchmarks of the fused ops against what stock fairseq executes. Use run.sh, which sets up the environment first."""

import argparse
import dataclasses
import importlib
import json
import logging
import sys
import warnings
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
warnings.simplefilter("ignore")
logging.disable(logging.INFO)  # fairseq's remarks about optional packages

import harness  # noqa: E402

STEMS = sorted(path.stem for path in (HERE / "ops").glob("*.py") if path.stem != "__init__")
HEADER = f"{'op':<30}{'shape':<24}{'stock ms':>10}{'ls ms':>9}{'speed-up':>10}{'spread':>14}{'GB/s':>8}{'of copy':>9}"


def row(result: harness.Result) -> str:
    """One line of the table."""
    return (
        f"{result.op:<30}{result.shape:<24}{result.stock_ms:>10.2f}{result.ls_ms:>9.2f}{result.speedup:>9.1f}x"
        f"{f'{result.stock_spread:.0%} / {result.ls_spread:.0%}':>14}{result.gb_per_s:>8.1f}{result.copy_share:>9.0%}"
    )


def main() -> None:
    """Measures every case of the chosen ops, prints the table, and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ops", nargs="*", help=f"which ops (default: all): {', '.join(STEMS)}")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    args = parser.parse_args()
    unknown = sorted(set(args.ops) - set(STEMS))
    if unknown:
        parser.error(f"unknown op {', '.join(unknown)}; choose from {', '.join(STEMS)}")
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    torch.manual_seed(0)

    machine = harness.machine(device)
    copy = harness.copy_bandwidth(device)
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(
        f"copy bandwidth {copy:.1f} GB/s, reads plus writes; fp32, forward and backward, medians of alternating runs\n"
    )
    print(HEADER)
    results = []
    for stem in args.ops or STEMS:
        for case in importlib.import_module(f"ops.{stem}").cases(device):
            results.append(harness.measure(case, copy, device))
            print(row(results[-1]), flush=True)
    if args.out:
        report = {"machine": machine, "copy_gb_per_s": copy, "results": [dataclasses.asdict(r) for r in results]}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
