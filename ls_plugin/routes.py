"""Which of several equal ways a matrix product takes on this machine, found out once per kind of shape by a short measurement.

MKL (torch's own), oneDNN and the plugin's kernel differ by up to a factor of two, and not in the same order on every processor or for every
shape. What was found is kept in a file, so that later runs choose alike and give the same bits: ``$XDG_CACHE_HOME/ls_plugin/products.json``
(``~/.cache`` where that is unset), by processor, instruction set, torch, plugin and number of threads. Delete it to have them measured anew.

``LS_PRODUCTS``: auto (the default), or ls, torch, onednn: always that one where it can serve, without measuring or file. Small fp32
linear maps are torch's in any case (``ops/product.py``).
"""

import contextlib
import functools
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ls_plugin import _library
from ls_plugin.errors import UsageError

_WAYS = ("auto", "ls", "torch", "onednn")
_ROUNDS = 3
_TIE = 0.95  # a way must take less than this share of the time of a preferred one
# Of a measured product: larger ones are cut to fewer rows. 20 to 50 ms, and 16 MB of results that nobody has reckoned with.
_MOST_OPERATIONS, _MOST_RESULTS = 4e9, 1 << 22

_chosen: dict[tuple, str] = {}


def choose(a: Tensor, b: Tensor, ways: Sequence[str], run: Callable[[str, Tensor, Tensor, Tensor], None]) -> str:
    """The way for the product of a (N, K) and b (K, M).

    Args:
        ways: those that can serve, the preferred first.  run: (way, a, b, out) computes the product into out.
    """
    n_rows, n_k = a.shape
    # Like shapes share one: rows, or what a weight gradient sums over, are tokens, and differ in each batch.
    key = (
        a.dtype,
        a.stride(1) == 1,
        b.stride(1) == 1,
        n_rows.bit_length(),
        n_k.bit_length(),
        b.shape[1].bit_length(),
        torch.get_num_threads(),
    )
    way = _chosen.get(key)
    if way is None:
        way = _chosen[key] = _find(key, a, b, ways, run)
    return way


def _find(key, a, b, ways, run) -> str:
    if 0 in (*a.shape, *b.shape):
        return ways[0]  # nothing to time, and oneDNN refuses empty sums
    wanted = wanted_way()
    if wanted != "auto":
        return wanted if wanted in ways else "torch"
    name = "{}-{}{}-{}-{}-{}-{}".format(str(key[0]).removeprefix("torch."), *map(int, key[1:3]), *key[3:])
    known = _read().get(_machine(), {})
    if known.get(name) in ways:
        return known[name]
    if not all(type(t) in (Tensor, torch.nn.Parameter) for t in (a, b)):
        return ways[0]  # nothing that could be timed
    way = _fastest(a, b, ways, run)
    _write(name, way)
    return way


def _fastest(a, b, ways, run) -> str:
    """The first of the ways that no later one beats by more than a tie, by the least time of some rounds in turn."""
    with torch.no_grad():
        a, b = a.detach(), b.detach()
        n_rows = max(1, min(a.shape[0], int(_MOST_OPERATIONS / (2 * b.numel())), _MOST_RESULTS // b.shape[1]))
        a, out = a[:n_rows], a.new_empty((n_rows, b.shape[1]))
        times = dict.fromkeys(ways, math.inf)
        for n in range(_ROUNDS + 1):
            for way in ways:
                begin = time.perf_counter()
                run(way, a, b, out)
                if n > 0:
                    times[way] = min(times[way], time.perf_counter() - begin)
    best = ways[0]
    for way in ways[1:]:
        if times[way] < _TIE * times[best]:
            best = way
    return best


def wanted_way() -> str:
    """``LS_PRODUCTS``.  Raises UsageError for an unknown one."""
    wanted = os.environ.get("LS_PRODUCTS", "") or "auto"
    if wanted not in _WAYS:
        raise UsageError(f"LS_PRODUCTS must be one of {', '.join(_WAYS)}, got {wanted!r}")
    return wanted


def cache_file() -> Path:
    """Where the choices are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ls_plugin" / "products.json"


def _read() -> dict:
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # no file, a broken one, no home
        found = json.loads(cache_file().read_text(encoding="utf-8"))
        if isinstance(found, dict) and all(isinstance(ways, dict) for ways in found.values()):
            return found
    return {}


def _write(name: str, way: str) -> None:
    """Adds a choice to the file, which is replaced as a whole. What another process added at the same moment may be lost, and is measured again."""
    found = _read()
    found.setdefault(_machine(), {})[name] = way
    with contextlib.suppress(OSError, RuntimeError):  # nowhere to keep it: this process remembers
        path = cache_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            file = Path(folder) / path.name
            file.write_text(json.dumps(found, indent=1), encoding="utf-8")
            os.replace(file, path)


@functools.cache
def _machine() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        plugin = version("ls_plugin")
    except PackageNotFoundError:
        plugin = "source"
    return f"{processor()}, {_library.status().isa}, torch {torch.__version__}, ls_plugin {plugin}"


def processor() -> str:
    """The CPU's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


wanted_way()  # an unknown one is refused before anything else runs
