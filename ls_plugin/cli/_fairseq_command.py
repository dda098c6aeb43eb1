"""What the commands share: loading the plugin, errors in one line, exit statuses.

Exit status: 0 done, 1 failed, 2 the command line asks for something that does not exist or is not supported, 130 interrupted. A
traceback is printed for what looks like a bug, and for everything with LS_DEBUG=1.
"""

import contextlib
import difflib
import logging
import multiprocessing
import os
import re
import sys
import traceback
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from fairseq import models
from torch.multiprocessing import ProcessExitedException

import ls_plugin
from ls_plugin.arguments import is_plugin, values
from ls_plugin.errors import DataError, LightSeqError, UnsupportedError, UsageError
from ls_plugin.loading import parameters_at_fault
from ls_plugin.names import PREFIX, stock_name

PLUGIN_DIR = Path(ls_plugin.__path__[0])  # the very spelling that fairseq compares --user-dir with
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

# Other flags that give what one asks for.
_SAME = {"--arch": ("-a",), "--max-tokens": ("--batch-size", "--max-sentences")}
_NO_DATASET = "Dataset not found: "
# How those errors of fairseq begin that are about the command line or the data. Any other assertion, ValueError or bare Exception is a bug.
_INPUT_CHECKS = (
    "--batch-size cannot be larger than --buffer-size",
    "--path required for generation!",
    "--cpu-offload requires --ddp-backend",
    "--replace-unk requires a raw text dataset",
    "--sampling requires --nbest to be equal to --beam",
    "--sampling-topk requires --sampling",
    "--sampling-topp requires --sampling",
    "--share-all-embeddings ",
    "--temperature must be greater than 0",
    "AdaptiveLoss is not compatible with the PyTorch version of DistributedDataParallel",
    "Cannot load state dict with strict=True and checkpoint shards > 1",
    "Cannot use fp16 and AMP together",
    "DiverseBeamSearch requires --beam to be divisible",
    "Criterion does not match; please reset the optimizer",
    "Either --max_update or --lr-period-updates must be set",
    "FullyShardedDataParallel is not compatible with",
    "Incorrect encoding detected in ",
    "Index file doesn't match expected format",
    "Must specify batch size either with --max-tokens or --batch-size",
    "Optimizer does not match; please reset the optimizer",
    "Please specify criterion to train a model",
    "Size of sample #",
    "Source and target must contain the same number of examples",
    "The dataset is empty. ",
    "cannot specify cutoff larger than vocab size",
    "embed_dim must be divisible by num_heads",
    "max_lr must be more than lr",
    "min_len cannot be larger than max_len",
    "phase ratios must add up to 1",
    "please specify steps or phase_ratio",
    "world size is ",
)


def run(
    command: str,
    cli_main: Callable[[], None],
    required: dict[str, str] | None = None,
    make_parser: Callable[[], ArgumentParser] | None = None,
) -> None:
    """Runs one of fairseq's ``cli_main`` functions on ``sys.argv``; after an error, ends the process with its status.

    Args:
        command: name of the console script, for messages.
        cli_main: reads ``sys.argv``; its worker function should be wrapped by :func:`check_and_run`.
        required: flags without which fairseq's parser fails in the middle of its work, and an example of a value.
        make_parser: fairseq's parser without the flags of a task or model; tells whether a data directory is given.
    """
    set_up_logging()
    # Twenty lines at every start about how fairseq calls Hydra, before the line that a user looks for.
    warnings.filterwarnings("ignore", r"(?s).*(hydra|version_base)", UserWarning)
    arguments = sys.argv[1:]
    try:
        # With another --user-dir both are imported: fairseq imports that one, and the worker function, which belongs to the plugin, brings
        # the plugin along wherever it is unpickled.
        if all(map(is_plugin, values(arguments, "--user-dir"))):
            check_arch(arguments)
            arguments = [*arguments, "--user-dir", str(PLUGIN_DIR)]
        _check_required(arguments, required or {}, make_parser)
        sys.argv = [command, *arguments]
        cli_main()
    except BaseException as error:  # SystemExit and KeyboardInterrupt included: each has its status
        leave(_tell(command, error))


def run_own(command: str, main: Callable[[], None]) -> None:
    """Runs a command that is not fairseq's; after an error, ends the process with its status."""
    set_up_logging()
    try:
        main()
    except BaseException as error:
        leave(_tell(command, error))


def leave(status: int) -> NoReturn:
    """Ends the process with ``status``.

    After an error at once, without Python's shutdown, which would wait for the batches that are being read ahead.
    """
    if status == 0:
        sys.exit(0)
    for worker in (
        multiprocessing.active_children()
    ):  # the shutdown would end the data loader's workers, which hold the terminal open
        worker.terminate()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader is gone
            stream.flush()
    os._exit(status)


def set_up_logging() -> None:
    """fairseq's log format on standard output; fairseq sets it only when nothing was logged before, and importing it logs.

    Ranks other than the first log warnings only, as fairseq has them do.
    """
    level = "WARNING" if _rank() else os.environ.get("LOGLEVEL", "INFO").upper()
    logging.basicConfig(
        format="%(asctime)s | %(levelname)s | %(name)s | %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        level=level,
        stream=sys.stdout,
        force=True,
    )


def check_data(data: str) -> None:
    """Raises DataError if one of the task's data directories, joined by colons, does not exist."""
    for path in data.split(os.pathsep):
        if path and not os.path.isdir(path):
            raise DataError(
                f"data: must be a directory written by fairseq-preprocess, got {path!r}, which {_what_is(path)}"
            )


def _what_is(path: str) -> str:
    return "is a file" if os.path.exists(path) else "does not exist"


def _check_required(
    arguments: list[str], required: dict[str, str], make_parser: Callable[[], ArgumentParser] | None
) -> None:
    """Raises UsageError with all of ``required`` that is missing, and with the data directory, unless the command line asks for help."""
    if {"-h", "--help"} & set(arguments):
        return
    missing = {flag: example for flag, example in required.items() if not values(arguments, flag, *_SAME.get(flag, ()))}
    if not missing:
        return
    faults = [f"{flag}: required, as in {flag} {example}" for flag, example in missing.items()]
    # What is left may be a value of a flag that this parser does not know, so only nothing at all means that there is no data.
    if make_parser and all(left.startswith("-") for left in make_parser().parse_known_args(arguments)[1]):
        faults.insert(0, "data: required, a directory written by fairseq-preprocess")
    raise UsageError("; ".join(faults))


def check_arch(arguments: list[str], stock_only: bool = False) -> None:
    """Raises UnsupportedError for an unknown ``--arch``, with the nearest names; argparse would list all of some 200.

    Args:
        stock_only: name architectures without ``ls_``.
    """
    for arch in values(arguments, "--arch", *_SAME["--arch"]):
        if arch not in models.ARCH_MODEL_REGISTRY:
            ours = [name for name in models.ARCH_MODEL_REGISTRY if name.startswith(PREFIX)]
            near = difflib.get_close_matches(arch, [*ours, *map(stock_name, ours)], n=4, cutoff=0.5)
            near = near or models.ARCH_MODEL_INV_REGISTRY["ls_transformer"]
            near = list(dict.fromkeys(map(stock_name, near))) if stock_only else near
            raise UnsupportedError(f"--arch {arch}: unknown; did you mean {', '.join(near)}?")


def _tell(command: str, error: BaseException, data: str = "") -> int:
    """Prints what the user needs of an error, and returns the exit status."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else EXIT_FAILED if error.code else 0
    if isinstance(error, ProcessExitedException):
        return error.exit_code if error.exit_code and error.exit_code > 0 else EXIT_FAILED
    if os.environ.get("LS_DEBUG") == "1":
        traceback.print_exception(error)
    if _rank():
        command = f"{command} (rank {_rank()})"
    if isinstance(error, KeyboardInterrupt):
        print(f"{command}: interrupted; checkpoints that were written are whole", file=sys.stderr)
        return EXIT_INTERRUPTED
    known = _known_cause(error, data)
    if known is None:
        if os.environ.get("LS_DEBUG") != "1":
            traceback.print_exception(error)
        return EXIT_FAILED
    status, line = known
    print(f"{command}: error: {line}", file=sys.stderr)
    return status


def _known_cause(error: BaseException, data: str = "") -> tuple[int, str] | None:
    """Exit status and one line for errors of the user's input, None for what may be a bug.

    Args:
        data: the task's data directories, joined by colons; what is missing there should have come from fairseq-preprocess.
    """
    message = str(error)
    if isinstance(error, FileNotFoundError):
        dataset = message.startswith(_NO_DATASET)
        if dataset or _lies_in(error.filename, data):
            missing = message.removeprefix(_NO_DATASET) if dataset else error.filename
            advice = "was it written by fairseq-preprocess, and are --source-lang, --target-lang and the subset right?"
            return EXIT_FAILED, f"not found: {missing}; {advice}"
    if isinstance(error, FloatingPointError):  # training diverged
        return EXIT_FAILED, _one_line(message)
    if isinstance(error, FileNotFoundError) and error.filename is None and sys.argv.count(message):
        return EXIT_FAILED, f"{_given_as(message)}: no such file or directory"  # --user-dir
    if isinstance(error, AttributeError) and message.endswith("'supported_targets'"):
        advice = "take the command and the --task of its own kind"
        return EXIT_FAILED, f"--task language_modeling: must have a language model, got {message.split()[0]}; {advice}"
    if isinstance(error, OSError) and isinstance(error.filename, str) and error.strerror:
        return EXIT_FAILED, f"{_given_as(error.filename)}: {error.strerror.lower()}"
    if isinstance(error, LightSeqError | OSError):
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED, _one_line(message)
    if (isinstance(error, AssertionError | ValueError) or type(error) is Exception) and message.startswith(
        _INPUT_CHECKS
    ):
        return EXIT_FAILED, _one_line(message)
    if "Could not infer language pair" in message:
        advice = "since no file is named like train.de-en.de.idx; was the directory written by fairseq-preprocess?"
        return EXIT_FAILED, f"data: cannot infer the languages, {advice}"
    if message.startswith("Cannot load model parameters from checkpoint"):
        cause = parameters_at_fault(error.__context__) or _first_lines(error.__context__)
        return EXIT_FAILED, f"{message.split(';')[0]}: {cause}; give the flags of the model that was saved"
    return None


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _one_line(message: str) -> str:
    return re.sub(r"\s*\n\s*", " ", message)


def _given_as(path: str) -> str:
    """``path`` behind the flag of the command line that gives it, if one does."""
    arguments = sys.argv[1:]
    names = (argument.partition("=")[0] for argument in arguments if argument.startswith("-"))
    return next((f"{name} {path}" for name in names if path in values(arguments, name)), path)


def _lies_in(path: str | None, directories: str) -> bool:
    """Whether ``path`` is in one of some directories that are joined by colons."""
    parents = Path(os.path.abspath(path)).parents if path else ()
    return any(Path(os.path.abspath(directory)) in parents for directory in directories.split(os.pathsep) if directory)


def _first_lines(error: BaseException | None, n_lines: int = 3) -> str:
    return " ".join(line.strip() for line in str(error).splitlines()[:n_lines])


def check_and_run(command: str, main: Callable, cfg, kwargs: dict) -> None:
    """What runs in every process, spawned ones included: one line for an error there too, and its status for the parent."""
    set_up_logging()
    # generate hands over argparse's flat namespace, the others a configuration tree
    data = getattr(cfg if isinstance(cfg, Namespace) else cfg.task, "data", None) or ""
    try:
        check_data(data)
        main(cfg, **kwargs)
    except Exception as error:
        if _known_cause(error, data) is None:
            raise
        status = _tell(command, error, data)
        if multiprocessing.parent_process() is not None:
            leave(status)
        sys.exit(status)
