"""Freed memory that stays mapped: page faults of training on the CPU."""

import ctypes
import os
import subprocess
import sys

import pytest

from ls_plugin import memory

# Page faults of the fifth of five equal tensors of 64 MiB, each freed before the next.
COUNT = """
import resource, torch
from ls_plugin import memory
print(memory.keep_freed_memory())
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 2**26 // 4096


def has_glibc() -> bool:
    return hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


@pytest.mark.skipif(not has_glibc(), reason="another libc than glibc, which is left alone")
def test_what_is_freed_is_found_again():
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))
    }
    environment.update(OMP_NUM_THREADS="1", THP_MEM_ALLOC_ENABLE="0")
    done = subprocess.run([sys.executable, "-c", COUNT], env=environment, capture_output=True, text=True, check=True)
    kept, faults = done.stdout.split()[-2:]
    assert kept == "True"
    assert int(faults) < PAGES // 100


@pytest.mark.parametrize("name, value", [("MALLOC_TOP_PAD_", "65536"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_max=64")])
def test_what_the_user_has_tuned_is_left_alone(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    assert not memory.keep_freed_memory.__wrapped__()


@pytest.mark.parametrize("names", ["stock", "ours"])
def test_only_training_with_our_names_touches_malloc(make_trainer, names, monkeypatch):
    calls = []
    monkeypatch.setattr(memory, "keep_freed_memory", lambda: calls.append(1))
    make_trainer(names)
    assert bool(calls) == (names == "ours")
