"""Finds and loads the compiled library, and says why where it cannot.

The library (``libls_kernels.so``) is built at install from ``kernels/`` against libtorch's stable ABI, so one file serves
every Python and every torch from 2.10 on. It registers the ops ``torch.ops.ls.*``. Without it, or on a device it was not built
for, every op runs its reference in plain PyTorch: same results, several times slower.
"""

import ctypes
import dataclasses
import functools
import os
import warnings
from pathlib import Path

import torch

LIBRARY_NAME = "libls_kernels.so"
MIN_TORCH = (2, 10)
KERNEL_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))


@dataclasses.dataclass(frozen=True)
class LibraryStatus:
    """What is known of the compiled library in this process."""

    loaded: bool
    path: str | None = None
    reason: str = ""  # why it is not loaded, with the remedy
    cuda: bool = False  # built with CUDA kernels
    isa: str = ""  # CPU instruction set in use: "avx512", "avx2" or "plain"
    archs: str = ""  # CUDA architectures built, as LS_CUDA_ARCH names them


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _load() -> LibraryStatus:
    path = Path(__file__).with_name(LIBRARY_NAME)
    if os.environ.get("LS_REFERENCE") == "1":
        return LibraryStatus(False, str(path), "LS_REFERENCE=1 asks for the reference ops; unset it to use the kernels")
    if _torch_version() < MIN_TORCH:
        return LibraryStatus(
            False,
            str(path),
            f"torch {torch.__version__} is older than {MIN_TORCH[0]}.{MIN_TORCH[1]}; "
            f"pip install 'torch>={MIN_TORCH[0]}.{MIN_TORCH[1]}'",
        )
    if not path.exists():
        return LibraryStatus(
            False,
            None,
            f"{LIBRARY_NAME} was not built (no C++ compiler at install?); install g++ and run "
            "'pip install --force-reinstall --no-deps .' in the clone ('pip install -e .' for an editable one)",
        )
    try:
        torch.ops.load_library(str(path))
        handle = ctypes.CDLL(str(path))
        for name in ("ls_cpu_isa", "ls_cuda_archs"):
            getattr(handle, name).restype = ctypes.c_char_p
        isa, archs = handle.ls_cpu_isa().decode(), handle.ls_cuda_archs().decode()
    except (OSError, RuntimeError, AttributeError) as error:
        return LibraryStatus(False, str(path), f"{path} does not load ({error}); build it again with 'pip install .'")
    if isa.startswith("error: "):
        raise RuntimeError(isa.removeprefix("error: "))
    return LibraryStatus(True, str(path), "", bool(archs), isa, archs)


_status = _load()
_namespace = "ls"
# "meta" has no kernel: the fake implementation gives shapes.
_devices = {"cpu", "meta"} | ({"cuda"} if _status.cuda else set())


def status() -> LibraryStatus:
    """The state of the compiled library, fixed at import."""
    return _status


def kernels():
    """The namespace of compiled ops, ``torch.ops.ls``."""
    return getattr(torch.ops, _namespace)


def use_namespace(namespace: str) -> None:
    """Sends every op to another registered build of the kernels (the tests run the CUDA sources on the CPU this way)."""
    global _namespace
    _namespace = namespace


def has_kernel(x: torch.Tensor) -> bool:
    """Whether the compiled kernels serve this tensor's device and dtype; the reference does otherwise."""
    if not _status.loaded or x.dtype not in KERNEL_DTYPES:
        return False
    if x.device.type in _devices:
        return True
    _warn_missing_device(x.device.type)
    return False


@functools.cache
def _warn_missing_device(device_type: str) -> None:
    warnings.warn(
        f"ls_plugin: the compiled library has no kernels for {device_type} (built for {', '.join(sorted(_devices - {'meta'}))}), so "
        "the reference ops in plain PyTorch run there: same results, several times slower. "
        "With the CUDA toolkit installed, LS_CUDA=1 pip install . builds them.",
        stacklevel=3,
    )


def warn_if_not_loaded() -> None:
    """One warning at import when no compiled library serves this process, with the reason and the price."""
    if not _status.loaded:
        warnings.warn(
            f"ls_plugin: no compiled kernels: {_status.reason}. The reference ops in plain PyTorch run instead: "
            "same results, but training is no faster than stock fairseq.",
            stacklevel=3,
        )
