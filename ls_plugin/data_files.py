"""Broken data found as it is opened, by name: a file of ``fairseq-preprocess`` that is cut off, or made with another dictionary.

fairseq reads indexes and tokens where they are needed, so that a cut-off file ends a run in its middle, or is read as whatever the memory
held before. :func:`install` wraps the opening of a data set, which for all subsets of a run comes before its first update, and that of a
dictionary.
"""

import contextlib
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
from fairseq.data import Dictionary, indexed_dataset
from fairseq.data.indexed_dataset import IndexedDataset, MMapIndexedDataset, data_file_path, index_file_path

from ls_plugin.errors import DataError
from ls_plugin.rebinding import wrap

_AGAIN = "copy it again, or write it again with fairseq-preprocess"
_UNREADABLE = (AssertionError, EOFError, KeyError, MemoryError, OverflowError, ValueError, struct.error)
_CHUNK = 1 << 24  # tokens that are looked at together
_MMAP_HEADER_BYTES, _HEADER_BYTES = 26, 48
# What reads an index, and no token.
_INDEX = {"mmap": lambda path: MMapIndexedDataset.Index(index_file_path(path)), "cached": IndexedDataset}


def check_further_folders(data: str, subset: str) -> None:
    """Checks the indexes of the training data in all folders but the first, which fairseq opens one at each epoch.

    Args:
        data: folders, joined by colons.
        subset: ``--train-subset``.
    Raises:
        DataError: a file is empty, cut off, or of another format.
    """
    for folder in data.split(os.pathsep)[1:]:
        for file in sorted(Path(folder).glob(f"{subset}*.idx")):
            path = str(file.with_suffix(""))
            _refuse_empty(path, "mmap")
            impl = indexed_dataset.infer_dataset_impl(path)
            if impl in _INDEX:
                with _named(path, impl):
                    index = _INDEX[impl](path)
                _check_sizes(path, index)


def install() -> None:
    """Checks what is opened from now on.  Calling it again changes nothing."""
    wrap(indexed_dataset, "make_dataset", _make_dataset)
    wrap(Dictionary, "add_from_file", _add_from_file)
    wrap(MMapIndexedDataset, "__del__", _delete)
    wrap(MMapIndexedDataset.Index, "__del__", _delete)


def _make_dataset(stock, path: str, impl: str, fix_lua_indexing: bool = False, dictionary: Dictionary | None = None):
    """fairseq's data set, or None where there is no such file.

    Raises:
        DataError: a file is empty, cut off, of another format, or holds token ids that the dictionary does not have.
    """
    _refuse_empty(path, impl)
    with _named(path, impl):
        dataset = stock(path, impl, fix_lua_indexing, dictionary)
    is_mmap = isinstance(dataset, MMapIndexedDataset)
    if is_mmap or isinstance(dataset, IndexedDataset):
        index = dataset._index if is_mmap else dataset
        _check_sizes(path, index)
        if dictionary is not None:
            # The older format adds 1 to each id.
            _check_tokens(data_file_path(path), index.dtype, len(dictionary), int(fix_lua_indexing and not is_mmap))
    return dataset


@contextlib.contextmanager
def _named(path: str, impl: str):
    """Names the file in what fairseq raises when it opens one."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise DataError(f"data {path}: must be UTF-8, got {error}; convert it, or write it again") from error
    except _UNREADABLE as error:
        raise DataError(
            f"data {index_file_path(path)}: must be the index of {impl} data, but cannot be read ({error or type(error).__name__}); "
            f"{_AGAIN}, and drop --dataset-impl unless it names the format of the files"
        ) from error


def _refuse_empty(path: str, impl: str) -> None:
    for name in (path,) if impl == "raw" else (index_file_path(path), data_file_path(path)):
        if os.path.isfile(name) and os.path.getsize(name) == 0:
            raise DataError(f"data {name}: must hold sentences, but the file is empty; {_AGAIN}")


def _check_sizes(path: str, index) -> None:
    """Raises DataError where index and tokens are not as long as the index says.

    Args:
        index: of a MMapIndexedDataset, or an IndexedDataset, which is its own.
    """
    n = len(index)
    if isinstance(index, MMapIndexedDataset.Index):
        index_bytes, starts = _MMAP_HEADER_BYTES + 12 * n, index._pointers
        token_bytes = int((starts + index.sizes.astype(np.int64) * index._dtype_size).max(initial=0))
    else:
        index_bytes, starts = _HEADER_BYTES + 8 * (2 * (n + 1) + index.s), index.data_offsets
        token_bytes = int(starts.max()) * index.element_size
    _check_size(index_file_path(path), index_bytes, f"for the {n} sentences of its header")
    if min(starts.min(initial=0), index.sizes.min(initial=0)) < 0:
        raise DataError(f"data {index_file_path(path)}: must hold lengths and offsets, got negative ones; {_AGAIN}")
    _check_size(data_file_path(path), token_bytes, f"for the {n} sentences of {index_file_path(path)}")


def _check_size(path: str, expected: int, why: str) -> None:
    found = os.path.getsize(path)
    if found != expected:
        what = (
            "is cut off" if found < expected else "belongs to another index" if path.endswith(".bin") else "is too long"
        )
        raise DataError(f"data {path}: must have {expected} bytes {why}, got {found}, so it {what}; {_AGAIN}")


def _check_tokens(name: str, dtype, n_entries: int, offset: int) -> None:
    """Raises DataError for token ids outside the dictionary: one pass over the file, which fairseq makes too.

    Args:
        offset: what the format adds to each id.
    """
    if os.path.getsize(name) == 0:
        return
    tokens = np.memmap(name, dtype=dtype, mode="r")
    for start in range(0, len(tokens), _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        low, high = int(chunk.min()) - offset, int(chunk.max()) - offset
        if low < 0 or high >= n_entries:
            raise DataError(
                f"data {name}: token ids must lie in [0, {n_entries}), the entries of the dictionary, got {low if low < 0 else high}; "
                "it was written with another dictionary: write it again with this one (--srcdict, --tgtdict), or copy the dictionary "
                "that belongs to it"
            )


def _delete(stock, self) -> None:
    """Without the lines about an ignored AttributeError, where the files could not be opened."""
    with contextlib.suppress(AttributeError):
        stock(self)


def _add_from_file(stock, self, f) -> None:
    """Raises DataError with the file's name and the row for a dictionary that cannot be read."""
    if not isinstance(f, str):
        stock(self, f)
        return
    try:
        stock(self, f)
    except FileNotFoundError:
        raise
    except (RuntimeError, ValueError) as error:
        message = str(error)
        if message.startswith("Duplicate word"):
            word = message.partition("'")[2].partition("'. ")[0]
            row = _last_row(f, lambda line: line.rsplit(" ", 1)[0] == word)
            raise DataError(
                f"dictionary {f}: {row}each word must stand there once, got {word!r} twice (<s>, <pad>, </s> and <unk> are "
                "there without a row); delete the row, or end it with #fairseq:overwrite"
            ) from None
        if message.startswith("Incorrect dictionary format"):
            row = _last_row(f, lambda line: not re.fullmatch(r".+ [-+]?\d+( #fairseq:overwrite)?", line))
            raise DataError(
                f"dictionary {f}: {row}each row must be a word, a blank and its count, got {message.partition(': ')[2]}; "
                "correct the row, or copy the file again"
            ) from None
        raise


def _last_row(path: str, is_it: Callable[[str], object]) -> str:
    """Where the row stands in the file, as the beginning of a message."""
    with open(path, encoding="utf-8") as lines:
        numbers = [number for number, line in enumerate(lines, 1) if is_it(line.rstrip())]
    return f"row {numbers[-1]}: " if numbers else ""
