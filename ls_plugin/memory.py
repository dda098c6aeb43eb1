"""Memory of training on the CPU: what a step frees stays mapped, and the next step finds it there.

glibc hands large blocks back to the kernel as they are freed, and every step then takes page faults anew, 4 KiB of zeros at a time, inside
of whatever writes there first. By itself glibc learns to keep blocks of up to 32 MiB. The logits of a large batch and the gradient of a large
vocabulary's embedding are larger: 6+6 layers, C 512, V 8,000, 2,048 tokens took 14,000 faults in a step.
"""

import ctypes
import functools
import os
import sys

from fairseq.trainer import Trainer

from ls_plugin.names import PREFIX
from ls_plugin.rebinding import wrap

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT_BYTES = 1 << 30  # blocks up to this size, and as much free memory at the end of the heap
_MOST_OF_OLD_GLIBC = 1 << 25  # what glibc before 2.35 takes as M_MMAP_THRESHOLD on 64 bits


def install() -> None:
    """Has fairseq's trainer call :func:`keep_freed_memory` where it trains on a CPU with names of ours. Again changes nothing."""
    wrap(Trainer, "__init__", _init_trainer)


def _init_trainer(stock, self, cfg, *args, **kwargs) -> None:
    stock(self, cfg, *args, **kwargs)
    names = (getattr(part, "_name", None) or "" for part in (cfg.model, cfg.criterion, cfg.optimizer))
    if self.device.type == "cpu" and any(name.startswith(PREFIX) for name in names):
        keep_freed_memory()


@functools.cache
def keep_freed_memory() -> bool:
    """Whether glibc's malloc now keeps what is freed for the next who asks, for the life of the process.

    It is left alone where it is not what allocates (another libc, a preloaded allocator), and where the user has tuned it himself.
    """
    tuned = any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
    if tuned or not sys.platform.startswith("linux"):
        return False
    try:
        libc, process = ctypes.CDLL("libc.so.6"), ctypes.CDLL(None)
        in_use = _address(libc.malloc) == _address(process.malloc)
        mallopt = libc.mallopt
    except (OSError, AttributeError):  # musl
        return False
    return in_use and bool(
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        and (mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES) or mallopt(_M_MMAP_THRESHOLD, _MOST_OF_OLD_GLIBC))
    )


def _address(function) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value
