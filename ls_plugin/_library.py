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

from ls_plugin._versions import MIN_TORCH

LIBRARY_NAME = "libls_kernels.so"
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
    wish = os.environ.get("LS_REFERENCE", "")
    if wish not in ("", "0", "1"):
        raise RuntimeError(f"LS_REFERENCE must be 0, 1 or unset, got {wish!r}")
    if wish == "1":
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
    return x.is_cpu or x.is_meta or _serves(x.device)  # meta: the fake kernels give shapes


def runs_cuda_kernels(x: torch.Tensor) -> bool:
    """Whether an op on this tensor reaches the CUDA kernels: on a GPU, or on the CPU where the tests run them there."""
    return x.device.type == "cuda" or _namespace != "ls"


@functools.cache
def _serves(device: torch.device) -> bool:
    """Whether the library has kernels for a device; where not, says so once, with the remedy."""
    if device.type != "cuda" or not _status.cuda:
        why = f"{device.type} (built for cpu{' and cuda' if _status.cuda else ''})"
        remedy = "With the CUDA toolkit installed, LS_CUDA=1 pip install . builds them."
    elif not cuda_arch_is_built(torch.cuda.get_device_capability(device), _status.archs):
        major, minor = torch.cuda.get_device_capability(device)
        why = f"compute capability {major}.{minor} (built for {_status.archs})"
        remedy = f'LS_CUDA=1 LS_CUDA_ARCH="{major}{minor}" pip install . builds them.'
    else:
        return True
    warnings.warn(
        f"ls_plugin: the compiled library has no kernels for {why}, so the reference ops in plain PyTorch run there: same results, "
        f"several times slower. {remedy}",
        stacklevel=4,
    )
    return False


def cuda_arch_is_built(capability: tuple[int, int], archs: str) -> bool:
    """Whether a GPU runs one of the architectures in the library ("80;90"): a lower one of its family, or PTX of the last."""
    built = [divmod(int(arch.rstrip("af")), 10) for arch in archs.split(";")]
    return any(major == capability[0] and minor <= capability[1] for major, minor in built) or built[-1] <= capability


def warn_if_not_loaded() -> None:
    """One warning at import when no compiled library serves this process, with the reason and the price."""
    if not _status.loaded:
        warnings.warn(
            f"ls_plugin: no compiled kernels: {_status.reason}. The reference ops in plain PyTorch run instead: "
            "same results, but training is no faster than stock fairseq.",
            stacklevel=3,
        )
