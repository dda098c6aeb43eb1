"""Builds a shared library in which CUDA kernels run on the CPU: .cu sources, host sources and the SIMT runtime.

The .cu sources are compiled by g++ with the instrumentation of ``-fsanitize=thread`` and a few checks of
``-fsanitize=undefined``, but no sanitizer library is linked: the runtime in this folder defines their hooks.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUNTIME_SOURCES = tuple(HERE / name for name in ("runtime.cpp", "memory.cpp", "order.cpp", "hooks.cpp", "api.cpp"))

COMMON_FLAGS = ("-std=c++17", "-g", "-fPIC", "-fno-gnu-unique", "-DLS_SIMT", "-Wall")
RUNTIME_FLAGS = ("-O3", "-fvisibility=hidden", "-Wextra")
HOST_FLAGS = ("-O2",)
KERNEL_FLAGS = (
    "-O2",
    "-Wno-unknown-pragmas",  # #pragma unroll
    "-fno-optimize-sibling-calls",  # a hook called as a tail call would not know the line that it is called from
    "-fsanitize=thread,alignment,bounds,signed-integer-overflow,shift-exponent,integer-divide-by-zero",
    "--param=tsan-instrument-func-entry-exit=0",
)


def build_library(
    out_dir: str | os.PathLike[str],
    cu_sources: Iterable[str | os.PathLike[str]],
    cpp_sources: Iterable[str | os.PathLike[str]],
    include_dirs: Iterable[str | os.PathLike[str]],
    extra_flags: Sequence[str] = (),
    link_flags: Sequence[str] = (),
    *,
    runtime_flags: Sequence[str] = (),
    name: str = "ls_simt",
    n_jobs: int = 2,
) -> Path:
    """Compiles and links ``out_dir/lib<name>.so`` and returns its path.

    Only what has changed is compiled: an object is reused while its command and the contents of its source and of every
    header that it included (system headers excepted) are the same. Safe to call from several processes at once.

    Args:
        cu_sources: compiled as C++ with instrumentation; they include ``simt.h`` when ``LS_SIMT`` is defined.
        cpp_sources: host code (bindings), compiled without.
        include_dirs: searched by both, before this folder.
        extra_flags: for every compilation, the runtime's included; runtime_flags for that one alone.
        link_flags: at the end of the link command.

    Raises:
        RuntimeError: there is no g++, or a command failed; the message holds the command and what it printed.
    """
    out_dir = Path(out_dir).resolve()
    out_dir.mkdir(parents=True, exist_ok=True)
    includes = [f"-I{Path(d).resolve()}" for d in include_dirs] + [f"-I{HERE}"]
    common = [*COMMON_FLAGS, *includes, *extra_flags]
    # The order matters. An inline function that several objects define is taken from the first: the runtime must get its
    # own, uninstrumented ones, and the kernels theirs, which are instrumented.
    jobs = [(source, [*common, *RUNTIME_FLAGS, *runtime_flags]) for source in RUNTIME_SOURCES]
    jobs += [(Path(source).resolve(), ["-x", "c++", *common, *KERNEL_FLAGS]) for source in cu_sources]
    jobs += [(Path(source).resolve(), [*common, *HOST_FLAGS]) for source in cpp_sources]

    with open(out_dir / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with ThreadPoolExecutor(n_jobs) as pool:
            objects = list(pool.map(lambda job: _compile(*job, out_dir), jobs))
        library = out_dir / f"lib{name}.so"
        command = [_compiler(), "-shared", "-Wl,-Bsymbolic", *map(str, objects), *link_flags]
        manifest = library.with_suffix(".json")
        inputs = {str(o): _digest(o) for o in objects}
        if not _is_current(library, manifest, command):
            _run_to(library, command)
            _write_manifest(manifest, command, inputs)
    return library


def _compile(source: Path, flags: list[str], out_dir: Path) -> Path:
    """Gives the object file of one source, compiled if need be."""
    command = [_compiler(), *flags, "-c", str(source)]
    key = hashlib.sha256("\0".join(command).encode()).hexdigest()[:12]
    obj = out_dir / f"{source.stem}-{key}.o"
    manifest, depfile = obj.with_suffix(".json"), obj.with_suffix(".d")
    if not _is_current(obj, manifest, command):
        _run_to(obj, [*command, "-MMD", "-MF", str(depfile), "-MT", "object"])
        files = shlex.split(depfile.read_text().replace("\\\n", " "))[1:]
        depfile.unlink()
        _write_manifest(manifest, command, {f: _digest(Path(f)) for f in files})
    return obj


def _run_to(path: Path, command: list[str]) -> None:
    """Runs a command that writes ``path``, which appears only when the command has succeeded."""
    partial = path.with_suffix(".partial")
    command = [*command, "-o", str(partial)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"SIMT build: {shlex.join(command)}\n{done.stderr.strip()}")
    os.replace(partial, path)


def _is_current(path: Path, manifest: Path, command: list[str]) -> bool:
    try:
        known = json.loads(manifest.read_text())
        return (
            path.exists()
            and known["compiler"] == _compiler_version()
            and known["command"] == command
            and all(_digest(Path(f)) == digest for f, digest in known["files"].items())
        )
    except (OSError, ValueError, KeyError):  # never built, interrupted, or a header is gone
        return False


def _write_manifest(manifest: Path, command: list[str], files: dict[str, str]) -> None:
    manifest.write_text(json.dumps({"compiler": _compiler_version(), "command": command, "files": files}))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@cache
def _compiler() -> str:
    path = shutil.which("g++")
    if path is None:
        raise RuntimeError("SIMT build: g++ was not found; install it (Debian: apt-get install g++)")
    return path


@cache
def _compiler_version() -> str:
    return subprocess.run([_compiler(), "--version"], capture_output=True, text=True, check=True).stdout
