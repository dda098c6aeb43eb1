"""Checkpoints that load on today's torch, are never half written, and that stock fairseq can read.

:func:`install` rebinds a handful of names in ``fairseq.checkpoint_utils``; nothing installed is edited.

- Loading: torch >= 2.6 admits only tensors and known classes. The classes that fairseq stores are made known, one by one; the protection
  stays on, and a checkpoint that cannot be read is an error that says why, never a silent start from scratch.
- Saving: a file is written beside its final name, flushed to disk and renamed, so an interrupt, a crash or a full disk leaves the
  checkpoint that was there. fairseq's copies (``checkpoint_best.pt``, ``checkpoint_last.pt``) too.
- Names: the checkpoint stores the stock names of architecture, criterion and optimizer and only flags that stock has, so fairseq reads it
  without the plugin, and beside them the ``ls_`` names and flags, which come back when the plugin loads it.
"""

import argparse
import codecs
import collections
import contextlib
import contextvars
import copy
import errno
import logging
import os
import pickle
import shutil
import typing
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import omegaconf
import torch
from fairseq import checkpoint_utils
from fairseq.criterions import CRITERION_DATACLASS_REGISTRY
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.logging import meters
from fairseq.models import ARCH_MODEL_REGISTRY
from omegaconf import OmegaConf, open_dict

from ls_plugin import safe_eval
from ls_plugin.compat import Overlay
from ls_plugin.errors import CheckpointError, UsageError
from ls_plugin.names import PREFIX, stock_name
from ls_plugin.rebinding import wrap

logger = logging.getLogger(__name__)

_NAMES_KEY = "ls_plugin"  # where a checkpoint keeps the ls_ names
_FIELDS_KEY = "ls_plugin_fields"  # and the flags that stock does not have
# What torch's readers and fairseq's upgrade of old states raise on damaged or foreign files, found by damaging files.
_LOADING_ERRORS = (
    pickle.UnpicklingError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    UnicodeDecodeError,
)
DEFAULT_RESTORE_FILE = "checkpoint_last.pt"  # looked for in --save-dir, and allowed to be missing
_OLD_HISTORY = {"optimizer_history", "best_loss"}  # one of which every checkpoint of fairseq has had
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def install() -> None:
    """Makes fairseq load and save checkpoints through this module.  Calling it again changes nothing."""
    torch.serialization.add_safe_globals(_safe_globals())
    wrap(checkpoint_utils, "load_checkpoint", _load_checkpoint)
    wrap(checkpoint_utils, "load_checkpoint_to_cpu", _load_checkpoint_to_cpu)
    wrap(checkpoint_utils, "_upgrade_state_dict", _upgrade_state_dict)
    wrap(checkpoint_utils, "load_ema_from_checkpoint", _load_ema_from_checkpoint)
    wrap(checkpoint_utils, "torch_persistent_save", _torch_persistent_save)
    checkpoint_utils.PathManager = AtomicPathManager
    if not isinstance(checkpoint_utils.torch, Overlay):
        checkpoint_utils.torch = Overlay(torch, {"load": _load_with_namespace})


# --- loading


def _safe_globals() -> list:
    """The classes that checkpoints of fairseq hold besides tensors, found by listing what its runs wrote.

    Configurations: Namespace, and omegaconf's containers in files of fairseq 0.10. Metrics and scores: numpy arrays and scalars (evaluation
    with BLEU logs them), and the meters in files before fairseq 0.9. Between ranks: fairseq sends a checkpoint with placeholders for its tensors.
    """
    multiarray = np._core.multiarray if hasattr(np, "_core") else np.core.multiarray
    numpy_functions = [multiarray._reconstruct, multiarray.scalar]
    # numpy 1 and 2 pickle the same functions under different module names.
    numpy_names = [(f, f"numpy.{core}.multiarray.{f.__name__}") for f in numpy_functions for core in ("core", "_core")]
    numpy_dtypes = {type(np.dtype(code)) for code in np.typecodes["All"]}
    configuration = [argparse.Namespace, omegaconf.DictConfig, omegaconf.ListConfig]
    configuration += [omegaconf.base.ContainerMetadata, omegaconf.base.Metadata]
    configuration += [
        getattr(omegaconf, f"{kind}Node") for kind in ("Any", "Boolean", "Enum", "Float", "Integer", "String")
    ]
    configuration += [
        bool,
        dict,
        float,
        int,
        list,
        str,
        collections.defaultdict,
        typing.Any,
    ]  # omegaconf notes the types of values
    meter_classes = [meters.AverageMeter, meters.StopwatchMeter, meters.TimeMeter]
    meter_classes += [(meter, f"fairseq.meters.{meter.__name__}") for meter in meter_classes]
    between_ranks = [distributed_utils._TensorPlaceholder]
    numpy_classes = [np.ndarray, np.dtype, *numpy_dtypes, *numpy_names, codecs.encode]
    return [*configuration, *numpy_classes, *meter_classes, *between_ranks]


def _load_checkpoint(stock, cfg, trainer, **kwargs):
    """Resuming: refuses what fairseq would pass over with "No existing checkpoint found", and starts from scratch only without a file.

    Raises:
        UsageError: flags that contradict each other.
        CheckpointError: the file that the flags, or the save folder, name cannot be read, or does not fit this run.
    """
    check_flags(cfg)
    _check_metric(cfg, trainer)
    if cfg.restore_file == DEFAULT_RESTORE_FILE and trainer.data_parallel_rank == 0:
        _remove_unfinished(cfg.save_dir)
    path, otherwise = _file_to_resume(cfg, trainer.checkpoint_suffix or "")
    _check_all_ranks_find(path, cfg.save_dir)
    if path is not None and _is_absent(path):
        if path == cfg.finetune_from_model:
            _check_readable(path, f"to start from scratch, {otherwise}")
        flag = "--restore-file" if otherwise == "drop --restore-file" else "--continue-once"
        logger.warning("%s %s: no such file; training starts from scratch", flag, path)
    elif path is not None and not PathManager.path_requires_pathmanager(path):
        _check_readable(path, f"to start from scratch, {otherwise}")
    token = _weights_are_enough.set(path is not None and path == cfg.finetune_from_model)
    try:
        return stock(cfg, trainer, **kwargs)
    except RuntimeError as error:
        if "dataloader mismatch" not in str(error):
            raise
        raise CheckpointError(
            f"checkpoint {path}: was saved after more batches of its epoch than there are now; give the data and the batch size of the run "
            "that saved it, on as many devices, or --reset-dataloader to start the epoch again"
        ) from error
    finally:
        _weights_are_enough.reset(token)


def _is_absent(path: str) -> bool:
    """Whether there is nothing of that name, not even a link that leads nowhere."""
    return not os.path.lexists(path) and not PathManager.exists(path)


def _check_all_ranks_find(path: str | None, save_dir: str) -> None:
    """Raises CheckpointError where only some ranks see the file to resume from; those would wait for the others for ever."""
    if distributed_utils.get_data_parallel_world_size() == 1:
        return
    found = distributed_utils.all_gather_list(path is not None and PathManager.exists(path))
    if any(found) and not all(found):
        missing = [rank for rank, is_found in enumerate(found) if not is_found]
        raise CheckpointError(
            f"checkpoint {path or save_dir}: must be seen by every rank, but is not by {missing} (of {len(found)}); put --save-dir on a file system "
            "that all machines share, or copy the file there"
        )


def check_flags(cfg) -> None:
    """Raises UsageError where fairseq raises ValueError: the contradictions of --finetune-from-model."""
    if cfg.finetune_from_model is None:
        return
    resets = ("reset_optimizer", "reset_lr_scheduler", "reset_meters", "reset_dataloader")
    others = [f"--{name.replace('_', '-')}" for name in resets if getattr(cfg, name, False)]
    if others:
        raise UsageError(
            f"--finetune-from-model: cannot be set together with {', '.join(others)}; drop these, since it resets all four by itself"
        )
    if cfg.restore_file != DEFAULT_RESTORE_FILE:
        raise UsageError(
            f"--finetune-from-model: cannot be set together with --restore-file {cfg.restore_file}; drop one of them"
        )


# Figures that validation logs only where it is asked to: the part of the configuration, the field, its flag.
_OPTIONAL_METRICS = {
    "bleu": ("task", "eval_bleu", "--eval-bleu"),
    "accuracy": ("criterion", "report_accuracy", "--report-accuracy"),
}


def _check_metric(cfg, trainer) -> None:
    """Raises UsageError where fairseq raises a KeyError after the first epoch, before it has saved that."""
    metric = getattr(cfg, "best_checkpoint_metric", None)
    if metric not in _OPTIONAL_METRICS or trainer.cfg.dataset.disable_validation:
        return
    part, field, flag = _OPTIONAL_METRICS[metric]
    if getattr(trainer.cfg[part], field, None) is False:
        raise UsageError(
            f"--best-checkpoint-metric {metric}: needs {flag}, without which validation does not log it; add it"
        )


def _file_to_resume(cfg, suffix: str) -> tuple[str | None, str]:
    """The file that fairseq will start from and how to do without it; (None, "") if the run starts from scratch."""
    if cfg.restore_file != DEFAULT_RESTORE_FILE:
        return cfg.restore_file.replace(".pt", f"{suffix}.pt"), "drop --restore-file"
    last = os.path.join(cfg.save_dir, f"checkpoint_last{suffix}.pt")
    if not _is_absent(last):
        return last, "move it away, and the checkpoints beside it, of which the newest is resumed without it"
    for name in ("continue_once", "finetune_from_model"):  # fairseq's order
        path = getattr(cfg, name, None)
        if path is not None:
            return path, f"drop --{name.replace('_', '-')}"
    return None, ""


def _load_checkpoint_to_cpu(stock, path, arg_overrides=None, load_on_all_ranks=False):
    with _explained(path):
        state = stock(path, arg_overrides, load_on_all_ranks)
    safe_eval.remember_origin(path, state.get("cfg") or state.get("args"))
    return _with_ls_names(state)


# Whether the checkpoint being loaded is there for its weights alone (--finetune-from-model).
_weights_are_enough: contextvars.ContextVar[bool] = contextvars.ContextVar("weights_are_enough", default=False)


class _WeightsAlone(LookupError):
    """A file with weights and nothing else; the message says what it lacks."""


def _is_bare(state) -> bool:
    """Whether ``state`` is a model's weights by their names."""
    return isinstance(state, dict) and bool(state) and all(torch.is_tensor(x) for x in state.values())


def _upgrade_state_dict(stock, state):
    """Stock's brings old checkpoints up to date, and takes a file with weights alone for a very old one.

    Such a file is a bare state dict, as ``torch.save(model.state_dict(), path)`` writes it, or has it under "model".
    """
    if not isinstance(state, dict) or _OLD_HISTORY & state.keys():
        return stock(state)
    is_bare = _is_bare(state)
    weights = state if is_bare else state.get("model")
    if not isinstance(weights, dict) or not all(torch.is_tensor(x) for x in weights.values()):
        return stock(state)
    if not _weights_are_enough.get():
        got = (
            f"a bare state dict of {len(state)} tensors" if is_bare else f"{', '.join(map(repr, sorted(state)))} alone"
        )
        raise _WeightsAlone(got)
    logger.info("the file holds weights only; everything else starts from the beginning")
    start = {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}}
    return {"cfg": None, **({} if is_bare else state), "model": weights, "optimizer_history": [], "extra_state": start}


def _load_ema_from_checkpoint(stock, fpath):
    with _explained(fpath):
        return stock(fpath)


def load_raw(path: str) -> dict:
    """What a checkpoint of fairseq's holds, with its tensors on the CPU; neither brought up to date nor renamed.

    Raises:
        CheckpointError: it cannot be read, is damaged, or holds no model.
    """
    with _explained(path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        if _is_bare(state):
            raise _WeightsAlone(f"a bare state dict of {len(state)} tensors")
        state["model"].items()
    return state


def _check_readable(path: str, otherwise: str = "") -> None:
    """Raises CheckpointError unless ``path`` is a file with something in it that this process may read."""
    otherwise = f"; {otherwise}" if otherwise else ""
    if not os.path.exists(path):
        dangling = " (a dangling link)" if os.path.islink(path) else ""
        raise CheckpointError(f"checkpoint {path}: must be a file, but does not exist{dangling}{otherwise}")
    if not os.path.isfile(path):
        raise CheckpointError(
            f"checkpoint {path}: must be a file, got a {'directory' if os.path.isdir(path) else 'special file'}{otherwise}"
        )
    if not os.access(path, os.R_OK):
        raise CheckpointError(f"checkpoint {path}: permission to read is missing{otherwise}")
    if os.path.getsize(path) == 0:
        raise CheckpointError(
            f"checkpoint {path}: must hold a saved state, got an empty file (0 bytes); take an earlier checkpoint{otherwise}"
        )


@contextlib.contextmanager
def _explained(path):
    """Turns what loading may raise into a CheckpointError that names the file, the cause and the remedy."""
    if not PathManager.path_requires_pathmanager(path):
        _check_readable(path)
        _check_sums(path)
    try:
        yield
    except _WeightsAlone as error:
        raise CheckpointError(
            f"checkpoint {path}: must hold 'model', 'cfg', 'optimizer_history' and 'extra_state', got {error}; to begin a training run with "
            "these weights, give it as --finetune-from-model with the flags of its model; what that run saves can be resumed and translated with"
        ) from error
    except _LOADING_ERRORS as error:
        foreign = _foreign_classes(path)
        if foreign:
            raise CheckpointError(
                f"checkpoint {path}: must hold tensors and the classes that fairseq stores, got {', '.join(foreign)}; loading it could run "
                "foreign code, so it is refused. If you trust where it comes from, save it again without that class, or allow the class with "
                "torch.serialization.add_safe_globals in a --user-dir module"
            ) from error
        raise CheckpointError(_damaged(path, _cause(error))) from error


def _damaged(path: str, cause: str) -> str:
    size = os.path.getsize(path) if os.path.exists(path) else 0
    return (
        f"checkpoint {path}: must be a whole fairseq checkpoint, got {size:,} bytes that do not load ({cause}); was it cut off by a full "
        "disk or an interrupted copy, or saved by another program? Take an earlier checkpoint"
    )


def _cause(error: Exception) -> str:
    """What an exception of torch's loader means, without its advice to switch the protection off."""
    if isinstance(error, KeyError):
        return f"it has no entry {error}"
    if isinstance(error, (pickle.UnpicklingError, EOFError, UnicodeDecodeError)):
        return "its contents are no pickle of tensors"
    return str(error).split(". ")[0].splitlines()[0] or type(error).__name__


def _check_sums(path: str) -> None:
    """Raises CheckpointError if a record differs from its checksum, which torch stores and does not compare.

    About a second per GiB.  The first record is left to torch: if that differs, either loading fails, or checksums were off when saving.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            first, damaged = archive.namelist()[:1], archive.testzip()
    except zipfile.BadZipFile:
        return  # truncated, or in the format before torch 1.6; loading tells
    if damaged and damaged not in first:
        raise CheckpointError(_damaged(path, f"record {damaged} differs from its checksum"))


def _foreign_classes(path) -> list[str]:
    """Names of what a checkpoint would import beyond the allow-list; empty if there is nothing, or the file cannot be read that far."""
    try:
        return torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # a damaged file may fail in any way; the caller reports it as damaged
        return []


def _remove_unfinished(save_dir: str) -> None:
    """Removes what a save that was killed left behind."""
    for leftover in Path(save_dir).glob("*.pt.tmp"):
        logger.info("removing %s, left by a save that did not finish", leftover)
        leftover.unlink(missing_ok=True)


# --- saving


class AtomicPathManager(PathManager):
    """fairseq's file access, whose copies appear whole or not at all."""

    @staticmethod
    def copy(src_path: str, dst_path: str, overwrite: bool = False) -> bool:
        if PathManager.path_requires_pathmanager(src_path) or PathManager.path_requires_pathmanager(dst_path):
            return PathManager.copy(src_path, dst_path, overwrite)
        n_bytes = os.path.getsize(src_path)
        with open(src_path, "rb") as source, _atomic_write(dst_path, lambda: n_bytes) as target:
            shutil.copyfileobj(source, target, 1 << 24)
        return True


def _torch_persistent_save(stock, obj, filename, async_write: bool = False):
    """Writes a checkpoint atomically.  Raises CheckpointError when it cannot be written, with the needed and the free space."""
    obj = _owning_their_memory(_without_numpy(_with_stock_names(obj)))
    if async_write or PathManager.path_requires_pathmanager(filename):
        return stock(obj, filename, async_write)
    with _atomic_write(filename, lambda: _n_bytes(obj)) as f:
        torch.save(obj, f)


@contextlib.contextmanager
def _atomic_write(path: str, needed_bytes):
    """A binary file that takes the name ``path`` when the block ends well, and vanishes when it does not, whatever the reason.

    Args:
        needed_bytes: called for the message if there is no room.
    """
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
        _sync_directory(path)
    except BaseException as error:  # an interrupt too
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        failure = _failure_behind(error)
        if isinstance(failure, KeyboardInterrupt) and failure is not error:
            raise KeyboardInterrupt from error
        if not isinstance(failure, OSError):
            raise
        reason = failure.strerror or str(failure)
        if failure.errno in _DISK_FULL:
            free = shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free
            reason += f", needed {needed_bytes() / 2**20:,.1f} MiB, {free / 2**20:,.1f} MiB are free"
        raise CheckpointError(
            f"checkpoint {path}: cannot be written: {reason}. Earlier checkpoints are intact; make room or choose another --save-dir, and "
            "start the same command again to resume"
        ) from error


def _failure_behind(error: BaseException | None) -> OSError | KeyboardInterrupt | None:
    """The system's error or the interrupt that ``error`` is or came from; torch's writer puts a RuntimeError of its own on top of both."""
    while error is not None and not isinstance(error, OSError | KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


def _sync_directory(path: str) -> None:
    """Makes a rename last through a power cut."""
    directory = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def map_leaves(f, obj):
    """``obj`` with ``f`` applied to what its dicts, lists and tuples hold."""
    if isinstance(obj, dict):
        mapped = copy.copy(obj)  # a Counter stays one, a defaultdict keeps its factory
        for key, value in obj.items():
            mapped[key] = map_leaves(f, value)
        return mapped
    if type(obj) in (list, tuple):
        return type(obj)(map_leaves(f, value) for value in obj)
    return f(obj)


def map_tensors(f, obj):
    """``obj`` with ``f`` applied to the tensors in its dicts, lists and tuples."""
    return map_leaves(lambda leaf: f(leaf) if torch.is_tensor(leaf) else leaf, obj)


def _without_numpy(obj):
    """Numbers and tensors for numpy's, which evaluation with BLEU logs: torch's weights_only, and so stock fairseq, refuses them."""

    def convert(leaf):
        if isinstance(leaf, np.generic) or (isinstance(leaf, np.ndarray) and leaf.ndim == 0):
            return leaf.item()
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc":
            return torch.from_numpy(leaf.copy())
        return leaf

    return map_leaves(convert, obj)


def _owning_their_memory(obj):
    """Copies tensors that are part of a larger storage: a parameter is a view of the optimizer's buffer, which would be saved with it.

    Tensors that are the same memory (tied embeddings) stay so, and are stored once.
    """
    copies: dict = {}

    def own(x):
        if x.layout != torch.strided or x.untyped_storage().nbytes() == x.numel() * x.element_size():
            return x
        place = (x.data_ptr(), x.dtype, x.shape, x.stride())
        if place not in copies:
            copies[place] = x.clone()
        return copies[place]

    return map_tensors(own, obj)


def _n_bytes(obj) -> int:
    """Bytes of the distinct tensors in ``obj``."""
    sizes: dict = {}
    map_tensors(lambda x: sizes.update({x.data_ptr(): x.numel() * x.element_size()}), obj)
    return sum(sizes.values())


# --- names


def _with_stock_names(state):
    """A state to save, with the stock names and flags in its configuration and the ``ls_`` ones beside it."""
    cfg = state.get("cfg") if isinstance(state, dict) else None
    if not isinstance(cfg, dict):
        return state
    flags_of_model = isinstance(cfg.get("model"), argparse.Namespace | collections.OrderedDict)
    if isinstance(cfg.get("model"), argparse.Namespace):
        cfg = {**cfg, "model": vars(cfg["model"])}
    names, own_fields = {}, {}
    for part in ("model", "criterion", "optimizer"):
        fields = cfg.get(part) or {}
        if str(fields.get("_name")).startswith(PREFIX):
            names[part] = fields["_name"]
            stock = _renamed(cfg[part], stock_name(names[part]))
            dataclass = CRITERION_DATACLASS_REGISTRY.get(stock["_name"]) if part == "criterion" else None
            if dataclass:  # fairseq builds it from these fields, and refuses others
                known = dataclass.__dataclass_fields__
                own_fields[part] = {name: value for name, value in stock.items() if name not in known}
                stock = {name: value for name, value in stock.items() if name in known}
            cfg = {**cfg, part: stock}
    if flags_of_model:
        cfg = {**cfg, "model": _as_attributes(cfg["model"])}
    state = {**state, "cfg": cfg}
    return {**state, _NAMES_KEY: names, _FIELDS_KEY: own_fields} if names else state


def _as_attributes(fields: dict) -> collections.OrderedDict:
    """Flags of a model that argparse configures, in the one class that has attributes and that torch's ``weights_only`` admits by itself.

    fairseq and CTranslate2 read such flags as attributes, as they are in the Namespace of a running program.
    """
    flags = collections.OrderedDict(fields)
    flags.__dict__.update(fields)
    return flags


def _load_with_namespace(*args, **kwargs):
    """torch.load for fairseq, which changes flags (``--model-overrides``) only where they are a Namespace."""
    state = torch.load(*args, **kwargs)
    cfg = state.get("cfg") if isinstance(state, dict) else None
    if isinstance(cfg, dict) and isinstance(cfg.get("model"), collections.OrderedDict):
        cfg["model"] = argparse.Namespace(**cfg["model"])
    return state


def _renamed(part: dict, name: str) -> dict:
    """A copy of one part of a configuration under another name; models configured by argparse carry it as ``arch`` too."""
    return {**part, "_name": name, **({"arch": name} if "arch" in part else {})}


_models_as_twins: contextvars.ContextVar[bool] = contextvars.ContextVar("models_as_twins", default=False)


@contextlib.contextmanager
def models_as_twins() -> Iterator[None]:
    """While it is active, a checkpoint of a stock model that has an ``ls_`` twin is loaded as one of the twin."""
    token = _models_as_twins.set(True)
    try:
        yield
    finally:
        _models_as_twins.reset(token)


def _with_ls_names(state: dict) -> dict:
    """A loaded state with the ``ls_`` names and flags back in its configuration, so that the plugin's model runs it."""
    cfg, names = state.get("cfg"), dict(state.get(_NAMES_KEY, {}))
    if _models_as_twins.get():
        old_args = state.get("args")  # where fairseq before 0.10.2 kept the configuration
        if old_args is not None:
            old_args.arch = _twin_name(old_args.arch)
        if cfg is not None:
            names["model"] = _twin_name(_name_of(cfg.model))
    for part, name in names.items():
        current = cfg[part]
        if _name_of(current) != stock_name(name):
            continue  # --model-overrides asks for another
        if isinstance(current, argparse.Namespace):
            vars(current).update(_renamed(vars(current), name))
        else:
            with open_dict(cfg):
                for field, value in {"_name": name, **state.get(_FIELDS_KEY, {}).get(part, {})}.items():
                    OmegaConf.update(cfg, f"{part}.{field}", value)
    return state


def _name_of(part) -> str | None:
    """The name in one part of a configuration; files of fairseq 0.10 may name a model by its ``arch`` alone."""
    return getattr(part, "_name", None) or getattr(part, "arch", None)


def _twin_name(name: str | None) -> str | None:
    twin = f"{PREFIX}{name}"
    return twin if twin in ARCH_MODEL_REGISTRY else name
