"""The checkpoint that a run goes on from, where a save was cut short before it reached ``checkpoint_last.pt``.

fairseq writes a checkpoint under the first of its names (``checkpoint_1_300.pt``, ``checkpoint2.pt``, ``checkpoint_best.pt``) and then copies it
to the others, ``checkpoint_last.pt`` at the end. A kill, or a full disk, in between leaves a whole checkpoint with more updates than
``checkpoint_last.pt``, or, at the first save, without one: fairseq then repeats updates, or starts from scratch.

A file of the save folder is progress of this run if

- it has more updates than ``checkpoint_last.pt``, and was written and took its name after it. (A longer run before this one, or a run that somebody set back
  by copying an older file over ``checkpoint_last.pt``, leaves files that are older.)
- it was saved with this run's architecture, parameters, task, languages and seed, and, for --finetune-from-model and --continue-once, by a run
  that began with the same file.

Which file was chosen, and which was passed over as another run's, is logged. ``--restore-file`` is taken as given.
"""

import copy
import logging
import os
import re
from argparse import Namespace
from pathlib import Path

import torch
from fairseq import checkpoint_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager

from ls_plugin.checkpoint import DEFAULT_RESTORE_FILE, check_flags, load_raw
from ls_plugin.errors import CheckpointError
from ls_plugin.names import stock_name
from ls_plugin.rebinding import wrap

logger = logging.getLogger(__name__)

_NAMES = r"(checkpoint(?:\d+|_\d+_\d+|_best|\.best_.+))"  # fairseq's, before the suffix of a shard
_N_SENT = 20  # candidates that a rank sends to the others
# What a run keeps from start to start: the part of the configuration, the field, its flag.
_KEPT = (
    ("task", "_name", "--task"),
    ("task", "source_lang", "--source-lang"),
    ("task", "target_lang", "--target-lang"),
    ("common", "seed", "--seed"),
)
_STARTS = (("finetune_from_model", "--finetune-from-model"), ("continue_once", "--continue-once"))


def install() -> None:
    """Wraps ``load_checkpoint``.  Calling it again changes nothing."""
    wrap(checkpoint_utils, "load_checkpoint", _load_checkpoint)


def _load_checkpoint(stock, cfg, trainer, **kwargs):
    check_flags(cfg)
    if cfg.restore_file == DEFAULT_RESTORE_FILE:
        name = _choose(cfg, trainer, str(trainer.checkpoint_suffix or ""))
        if name is not None:
            cfg = copy.copy(cfg)
            cfg.restore_file, cfg.finetune_from_model = os.path.join(cfg.save_dir, name), None
    return stock(cfg, trainer, **kwargs)


def _choose(cfg, trainer, suffix: str) -> str | None:
    """The file of the save folder to go on from, without ``suffix``, the same on every rank; None for fairseq's choice."""
    reads = bool(suffix) or trainer.data_parallel_rank == 0
    found = _candidates(cfg, trainer, suffix) if reads else []
    if distributed_utils.get_data_parallel_world_size() > 1:
        of_ranks = [set(map(tuple, found)) for found in distributed_utils.all_gather_list(found)]
        # With a suffix every rank has a shard of its own, and all must have one.
        found = sorted(set.intersection(*of_ranks) if suffix else of_ranks[0], reverse=True)
    if not found:
        return None
    n_updates, name = found[0]
    last, path = (os.path.join(cfg.save_dir, suffixed(file, suffix)) for file in (DEFAULT_RESTORE_FILE, name))
    if trainer.data_parallel_rank == 0:
        logger.warning(
            "%s %s: going on from %s (%d updates), the newest whole checkpoint of this run; to start from scratch, choose another --save-dir",
            last,
            "is older" if os.path.exists(last) else "is missing",
            path,
            n_updates,
        )
    if reads and not cfg.no_save:
        _complete_best(path, os.path.join(cfg.save_dir, suffixed("checkpoint_best.pt", suffix)))
    return name


def suffixed(name: str, suffix: str) -> str:
    return f"{name.removesuffix('.pt')}{suffix}.pt"


def _candidates(cfg, trainer, suffix: str) -> list[tuple[int, str]]:
    """(updates, name without the suffix) of whole checkpoints with more progress of this run than checkpoint_last.pt, the newest first.

    Without a suffix no more than one. Files are mapped, not read, until one of them is to be taken.
    """
    folder = Path(cfg.save_dir)
    if PathManager.path_requires_pathmanager(cfg.save_dir) or not folder.is_dir():
        return []
    last, n_last, since = folder / suffixed(DEFAULT_RESTORE_FILE, suffix), -1, None
    if os.path.lexists(last):
        since = last.lstat()
    named = [
        (path, re.fullmatch(rf"{_NAMES}{re.escape(suffix)}\.pt", path.name)) for path in folder.glob("checkpoint*.pt")
    ]
    named = [(path, match[1]) for path, match in named if match and path.is_file() and _is_since(path.lstat(), since)]
    if named and since:
        state = _look_into(last)
        if state is None:
            return []  # loading says why
        n_last = _n_updates(state)
    found = []
    for path, name in named:
        state = _look_into(path)
        if state is None:
            logger.warning("%s: passed over, since it is no whole checkpoint", path)
        elif _n_updates(state) > n_last:
            difference = _difference(state, cfg, trainer)
            if difference is None:
                found.append((_n_updates(state), f"{name}.pt", path))
            else:
                logger.warning(
                    "%s (%d updates): passed over, since it is another run's, by its %s; to go on from it, give it as --restore-file",
                    path,
                    _n_updates(state),
                    difference,
                )
    whole = []
    for n_updates, name, path in sorted(found, reverse=True)[:_N_SENT]:
        try:
            load_raw(str(path))
        except CheckpointError as error:
            logger.warning("passed over: %s", error)
            continue
        whole.append((n_updates, name))
        if not suffix:
            break
    return whole


def _is_since(file: os.stat_result, last: os.stat_result | None) -> bool:
    """Whether ``file`` was written, and took its name, after ``last``.

    Both times count: a copy of the folder (``cp -a``, rsync) gives new times of naming in an order of its own, and ``cp -p`` an old time of writing.
    """
    return last is None or (file.st_mtime_ns >= last.st_mtime_ns and file.st_ctime_ns >= last.st_ctime_ns)


def _look_into(path: Path) -> dict | None:
    """A checkpoint with its tensors mapped from the disk, not read; None if it is damaged or not one to go on from."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        known = isinstance(state["model"], dict) and state["extra_state"]["train_iterator"] and _n_updates(state) >= 0
        return state if known else None
    except Exception:  # a damaged file may fail in any way
        return None


def _n_updates(state: dict) -> int:
    return state["optimizer_history"][-1]["num_updates"]


def _difference(state: dict, cfg, trainer) -> str | None:
    """What shows that another run saved ``state``; None if nothing does."""
    saved = _fields(state.get("cfg"))
    arch = stock_name(str(_name_of(_fields(saved.get("model")))))
    if arch != stock_name(str(_name_of(_fields(trainer.cfg.model)))):
        return f"--arch {arch}"
    for part, field, flag in _KEPT:
        value, given = _fields(saved.get(part)).get(field), _fields(trainer.cfg[part]).get(field)
        if value != given and value is not None and given is not None:
            return f"{flag} {value}"
    for field, flag in _STARTS:
        given, value = getattr(cfg, field, None), _fields(saved.get("checkpoint")).get(field)
        if given is not None and (value is None or os.path.abspath(value) != os.path.abspath(given)):
            return f"{flag} {value}"
    if not trainer.is_fsdp:  # whose ranks would have to ask for the parameters together
        shapes = {name: x.shape for name, x in state["model"].items()}
        if shapes != {name: x.shape for name, x in trainer.get_model().state_dict().items()}:
            return "parameters"
    return None


def _fields(part) -> dict:
    return vars(part) if isinstance(part, Namespace) else dict(part or {})


def _name_of(fields: dict) -> str | None:
    return fields.get("_name") or fields.get("arch")


def _complete_best(path: str, best: str) -> None:
    """Makes the copy to checkpoint_best.pt that the save of ``path`` was to make, unless it was made."""
    state = _look_into(Path(path))
    extra = state["extra_state"]
    if path == best or extra.get("val_loss") is None or extra["val_loss"] != extra.get("best"):
        return
    present = _look_into(Path(best))
    if present is None or _n_updates(present) < _n_updates(state):
        try:
            checkpoint_utils.PathManager.copy(path, best, overwrite=True)
            logger.info("copied %s to %s, which the save was cut short of", path, best)
        except CheckpointError as error:
            logger.warning("%s", error)
