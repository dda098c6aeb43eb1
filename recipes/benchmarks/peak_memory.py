"""Peak memory of the loss step (projection, label-smoothed loss, both gradients) on a CPU, each way in a process of its own:

    blocks   ls_plugin.ops.linear_cross_entropy
    fused    a product, then ls_plugin.ops.label_smoothed_cross_entropy over its output
    stock    a product, then what fairseq's criterion computes

MiB above what the inputs take. Usage: python recipes/benchmarks/peak_memory.py [--tokens N] [--columns C] [--classes V] [--out FILE.json]
"""

import argparse
import json
import logging
import resource
import subprocess
import sys
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the clone's ls_plugin, unless one is installed

EPSILON, PAD = 0.1, 1
WAYS = ("blocks", "fused", "stock")


def loss_step(way: str, n_tokens: int, n_cols: int, n_classes: int) -> float:
    """MiB by which the process grows, at its peak, above what the inputs take."""
    warnings.simplefilter("ignore")
    logging.disable(logging.INFO)
    import torch
    from fairseq import utils
    from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss

    from ls_plugin import ops

    torch.set_num_threads(1)
    x = torch.randn(n_tokens, n_cols, requires_grad=True)
    weight = torch.randn(n_classes, n_cols, requires_grad=True)
    target = torch.randint(2, n_classes, (n_tokens,))
    small = torch.randn(64, 64, requires_grad=True)  # for what libraries allocate on first use
    ops.linear_cross_entropy(small @ small, small, torch.arange(64), EPSILON)[0].backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if way == "blocks":
        loss = ops.linear_cross_entropy(x, weight, target, EPSILON, PAD)[0]
    elif way == "fused":
        loss = ops.label_smoothed_cross_entropy(x @ weight.t(), target, EPSILON, PAD, inplace=True)[0].sum()
    else:
        lprobs = utils.log_softmax(x @ weight.t(), dim=-1)
        loss = label_smoothed_nll_loss(lprobs, target.unsqueeze(-1), EPSILON, ignore_index=PAD)[0]
    loss.backward()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    """Prints a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=512)
    parser.add_argument("--classes", type=int, default=32_000)
    parser.add_argument("--way", choices=WAYS, help="measure this one, in this process")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    args = parser.parse_args()
    if args.way:
        print(loss_step(args.way, args.tokens, args.columns, args.classes))
        return
    mib = {}
    for way in WAYS:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        mib[way] = float(done.stdout.splitlines()[-1])  # what fairseq's optional packages say comes before
        print(f"{way:<8}{mib[way]:8.0f} MiB", flush=True)
    if args.out:
        sizes = {name: getattr(args, name) for name in ("tokens", "columns", "classes")}
        args.out.write_text(json.dumps({**sizes, "mib": mib}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
