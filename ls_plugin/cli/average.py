"""``lightseq-average``: the mean of several checkpoints' weights as a checkpoint, as ``scripts/average_checkpoints.py`` of fairseq's repository.

No installed fairseq contains that script. Sums are in fp32 at least, one checkpoint is in memory beside the sum, and nothing in a file is
executed.
"""

import argparse
import logging
import os
import re
from collections.abc import Sequence

import torch
from fairseq import checkpoint_utils

from ls_plugin import checkpoint
from ls_plugin.cli._fairseq_command import run_own
from ls_plugin.errors import CheckpointError, UsageError
from ls_plugin.loading import check_finite

logger = logging.getLogger(__name__)

_EPOCH, _UPDATE = r"checkpoint(\d+)\.pt", r"checkpoint_\d+_(\d+)\.pt"  # fairseq's names, and what they are counted by
# What belongs to one of the checkpoints, and to no mean of them.
_LEFT_OUT = ("last_optimizer_state",)
_EXTRA_LEFT_OUT = ("ema", "ema_fp32_params")


def average(paths: Sequence[str]) -> dict:
    """The state of the first checkpoint with the mean of all weights, and without optimizer state and EMA.

    Weights that are one tensor in all files (tied embeddings) stay one. 16-bit weights come out in fp32, integers are divided downwards.

    Raises:
        CheckpointError: a file cannot be read, holds other parameters than the first, or weights that are not finite.
    """
    average = _load(paths[0])
    sums = {name: _wide(x) for name, x in average["model"].items()}
    shapes = {name: x.shape for name, x in sums.items()}
    leaders = _leaders(average["model"])
    for path in paths[1:]:
        model = _load(path)["model"]
        _check_same(path, {name: x.shape for name, x in model.items()}, paths[0], shapes)
        if leaders != _leaders(model):
            leaders = {name: name for name in sums}
        for name, x in model.items():
            sums[name] += _wide(x)
    means = {name: x / len(paths) if x.is_floating_point() else x // len(paths) for name, x in sums.items()}
    average["model"] = {name: means[leaders[name]] for name in means}
    for entry in _LEFT_OUT:
        average.pop(entry, None)
    for entry in _EXTRA_LEFT_OUT:
        average.get("extra_state", {}).pop(entry, None)
    return average


def _load(path: str) -> dict:
    state = checkpoint.load_raw(path)
    check_finite(path, state["model"].items())
    return state


def _wide(x: torch.Tensor) -> torch.Tensor:
    """A copy that sums can be taken in."""
    return x.to(torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else torch.int64, copy=True)


def _leaders(model: dict) -> dict[str, str]:
    """Of each parameter the first one that is the same memory."""
    first: dict = {}
    return {name: first.setdefault((x.data_ptr(), x.shape, x.stride()), name) for name, x in model.items()}


def _check_same(path: str, shapes: dict, first_path: str, first_shapes: dict) -> None:
    if shapes == first_shapes:
        return
    differences = [
        f"{name} {_shape(shapes, name)} instead of {_shape(first_shapes, name)}"
        for name in {**first_shapes, **shapes}
        if shapes.get(name) != first_shapes.get(name)
    ]
    raise CheckpointError(
        f"checkpoint {path}: must hold the parameters of {first_path}, got {', '.join(differences[:3])}"
        f"{f' and {len(differences) - 3} more' if len(differences) > 3 else ''}; average checkpoints of one run"
    )


def _shape(shapes: dict, name: str) -> str:
    return str(tuple(shapes[name])) if name in shapes else "nothing"


def newest(directory: str, pattern: str, n: int, upper_bound: int | None = None) -> list[str]:
    """The ``n`` checkpoints of a save folder with the highest numbers up to ``upper_bound``, the highest first.

    Raises:
        CheckpointError: there are fewer.
    """
    if not os.path.isdir(directory):
        raise CheckpointError(
            f"--inputs: must be a run's --save-dir where checkpoints are to be counted, got {directory}"
        )
    numbers = {name: int(match[1]) for name in os.listdir(directory) if (match := re.fullmatch(pattern, name))}
    known = sorted((number, name) for name, number in numbers.items() if upper_bound is None or number <= upper_bound)
    if len(known) < n:
        below = "" if upper_bound is None else f" up to --checkpoint-upper-bound {upper_bound}"
        raise CheckpointError(
            f"--inputs {directory}: must hold {n} checkpoints named like {_example(pattern)}{below}, got {len(known)}; ask for fewer, or "
            f"have the run keep more (--keep-last-epochs, --keep-interval-updates)"
        )
    return [os.path.join(directory, name) for _, name in reversed(known[-n:])]


def _example(pattern: str) -> str:
    return "checkpoint7.pt" if pattern == _EPOCH else "checkpoint_3_5000.pt"


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return int(text)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightseq-average",
        description="Averages the weights of checkpoints. The mean mostly generates better than the last one alone.",
    )
    parser.add_argument("--inputs", required=True, nargs="+", metavar="PATH", help="checkpoints, or a run's --save-dir")
    parser.add_argument("--output", required=True, metavar="FILE", help="checkpoint to write")
    counted = parser.add_mutually_exclusive_group()
    counted.add_argument("--num-epoch-checkpoints", type=_positive, metavar="N", help="the last N epochs in --inputs")
    counted.add_argument(
        "--num-update-checkpoints", type=_positive, metavar="N", help="the last N that --save-interval-updates wrote"
    )
    parser.add_argument(
        "--checkpoint-upper-bound", type=int, metavar="NUMBER", help="the highest epoch, or update, to be counted"
    )
    return parser


def _paths(words: Sequence[str]) -> list[str]:
    """The inputs, joined by blanks, commas, or both; a comma may be part of a name as well."""
    return [path for word in words for path in ([word] if os.path.exists(word) else word.split(",")) if path]


def _run() -> None:
    args = parser().parse_args()
    n = args.num_epoch_checkpoints or args.num_update_checkpoints
    paths = _paths(args.inputs)
    if n is not None:
        if len(paths) != 1:
            raise UsageError(f"--inputs: must be one folder with --num-*-checkpoints, got {len(paths)} paths")
        pattern = _EPOCH if args.num_epoch_checkpoints else _UPDATE
        paths = newest(paths[0], pattern, n, args.checkpoint_upper_bound)
    elif args.checkpoint_upper_bound is not None:
        raise UsageError(
            "--checkpoint-upper-bound: needs --num-epoch-checkpoints or --num-update-checkpoints; add one, or drop it"
        )
    elif folders := [path for path in paths if os.path.isdir(path)]:
        raise UsageError(
            f"--inputs {folders[0]}: is a directory, which needs --num-epoch-checkpoints N (its last N epochs) or "
            "--num-update-checkpoints N (the last N of --save-interval-updates); add one, or name checkpoint files"
        )
    logger.info("averaging %s", ", ".join(paths))
    checkpoint_utils.torch_persistent_save(average(paths), args.output)
    logger.info("wrote %s", args.output)


def main() -> None:
    run_own("lightseq-average", _run)


if __name__ == "__main__":
    main()
