"""nvcc's word on the CUDA kernels, without a GPU: per instance registers, stack, spills, shared memory, occupancy, width of accesses.

Needs the CUDA toolkit's nvcc; the machine code is shown by nvdisasm (toolkit, or pip install nvidia-cuda-nvdisasm) where there is one.
``test_nvcc.py`` judges it, ``recipes/benchmarks/cuda_report.py`` makes a table of it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels"
OUT = ROOT / "build" / "nvcc"
OPS = sorted(path.stem for path in (KERNELS / "cuda").glob("*.cu"))
ARCHS = ["sm_80", "sm_90"]  # bf16 conversions are instructions from 80 on; 90 is what the benchmarks will run on

# A multiprocessor of both architectures (CUDA programming guide, "Technical specifications per compute capability").
MAX_WARPS, MAX_BLOCKS, REGISTERS = 64, 32, 65_536
REGISTERS_PER_UNIT = 256  # a warp's registers are handed out in units of this
SHARED_BYTES = {"sm_80": 164 << 10, "sm_90": 228 << 10}
SHARED_BYTES_OF_SYSTEM = 1 << 10  # of each block


class CompileError(Exception):
    """nvcc refused a file; the message is nvcc's."""


@dataclass(frozen=True)
class Instance:
    """One kernel instance. accesses: global memory in PTX, and machine in machine code (None without nvdisasm): ("ld" or "st",
    bytes) -> how many; machine has ("local", 0) too, reads of local memory. threads: the most that a block may have, 0 if unknown."""

    name: str
    arch: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    threads: int
    accesses: Counter
    machine: Counter | None

    @property
    def occupancy(self) -> float | None:
        """Share of a multiprocessor's warps that can be resident with full blocks. Dynamic shared memory is not in it."""
        if self.threads == 0 or self.registers == 0:
            return None
        warps = -(-self.threads // 32)
        registers = -(-self.registers * 32 // REGISTERS_PER_UNIT) * REGISTERS_PER_UNIT * warps
        shared = self.shared_bytes + SHARED_BYTES_OF_SYSTEM
        blocks = min(MAX_WARPS // warps, MAX_BLOCKS, REGISTERS // registers, SHARED_BYTES[self.arch] // shared)
        return blocks * warps / MAX_WARPS


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return (shutil.which("nvcc", path=str(Path(home, "bin"))) if home else None) or shutil.which("nvcc")


def find_nvdisasm() -> str | None:
    """Of the toolkit, or of a package that brings it along (nvidia-cuda-nvdisasm, triton)."""
    beside = [str(Path(nvcc).parent)] if (nvcc := find_nvcc()) else []
    site = Path(sysconfig.get_path("purelib"))
    packages = [str(path) for path in (*site.glob("nvidia/*/bin"), site / "triton/backends/nvidia/bin")]
    path = os.pathsep.join([*beside, os.environ.get("PATH", ""), *packages])
    return shutil.which("nvdisasm", path=path)


@cache
def nvcc_version() -> str:
    return subprocess.run([find_nvcc(), "--version"], check=True, capture_output=True, text=True).stdout


def compile_kernels(op: str, arch: str) -> Path:
    """Gives the folder with cubin, PTX and ptxas log of one file; compiled when its sources or the tools have changed.

    Raises:
        CompileError: nvcc failed.
    """
    nvcc = find_nvcc()
    include_dirs = [KERNELS, Path(torch.__file__).parent / "include"]
    command = [nvcc, "-std=c++17", "-O3", "--expt-relaxed-constexpr", f"-arch={arch}", "-Xptxas", "-v"]
    command += [f"-I{path}" for path in include_dirs]
    headers = sorted([*(KERNELS / "common").glob("*.h"), *(KERNELS / "cuda").glob("*.*h")])
    state = hashlib.sha256(repr((command, torch.__version__, nvcc_version())).encode())
    for path in [KERNELS / "cuda" / f"{op}.cu", *headers]:
        state.update(path.read_bytes())
    folder = OUT / f"{op}-{arch}-{state.hexdigest()[:16]}"
    if not (folder / "done").exists():
        for old in OUT.glob(f"{op}-{arch}-*"):
            shutil.rmtree(old)
        folder.mkdir(parents=True)
        command += ["-cubin", "--keep", "--keep-dir", str(folder), "-o", str(folder / f"{op}.cubin")]
        done = subprocess.run([*command, str(KERNELS / "cuda" / f"{op}.cu")], capture_output=True, text=True)
        if done.returncode != 0:
            raise CompileError(f"nvcc: {op}.cu for {arch}:\n{done.stderr}")
        for path in folder.iterdir():  # nvcc keeps some 10 MB of other intermediate files
            if path.suffix not in (".ptx", ".cubin"):
                path.unlink()
        (folder / "ptxas.log").write_text(done.stderr)
        (folder / "done").touch()
    return folder


@cache
def instances(op: str, arch: str) -> tuple[Instance, ...]:
    """The kernel instances of one file, by name. Raises CompileError."""
    return tuple(sorted(_read_instances(compile_kernels(op, arch), arch), key=lambda instance: instance.name))


def all_instances(ops: Iterable[str]) -> dict[tuple[str, str], tuple[Instance, ...]]:
    """(op, architecture) -> its kernel instances; two compilers at a time. Raises CompileError."""
    jobs = [(op, arch) for op in ops for arch in ARCHS]
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(jobs, pool.map(lambda job: instances(*job), jobs), strict=True))


def write_register_table(found: dict[tuple[str, str], tuple[Instance, ...]]) -> Path:
    """build/nvcc/registers.txt: one line for each instance."""
    lines = [f"{'registers':>9} {'stack':>5} {'spill':>5} {'shared':>6} {'threads':>7} {'occupancy':>9}  instance"]
    for job, kernels in found.items():
        lines.append(" ".join(job))
        for k in kernels:
            occupancy = "-" if k.occupancy is None else f"{k.occupancy:.0%}"
            lines.append(
                f"{k.registers:9} {k.stack_bytes:5} {k.spill_bytes:5} {k.shared_bytes:6} {k.threads:7} {occupancy:>9}  {k.name}"
            )
    path = OUT / "registers.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def _read_instances(folder: Path, arch: str) -> list[Instance]:
    log = (folder / "ptxas.log").read_text()
    ptx = next(folder.glob("*.ptx")).read_text()
    accesses, threads = _read_accesses(ptx), _read_threads(ptx)
    machine = _read_machine_code(next(folder.glob("*.cubin"))) if find_nvdisasm() else None
    kernels = []
    for part in log.split("Compiling entry function")[1:]:
        symbol = re.search(r"'(\w+)'", part)[1]
        numbers = {
            key: int(found[1]) if (found := re.search(pattern, part)) else 0
            for key, pattern in [
                ("registers", r"Used (\d+) registers"),
                ("shared_bytes", r"(\d+) bytes smem"),
                ("stack_bytes", rf"properties for {symbol}\n\s*(\d+) bytes stack"),
            ]
        }
        kernels.append(
            Instance(
                readable(symbol),
                arch,
                spill_bytes=sum(int(n) for n in re.findall(r"(\d+) bytes spill", part)),
                threads=threads.get(symbol, 0),
                accesses=accesses[symbol],
                machine=None if machine is None else machine[symbol],
                **numbers,
            )
        )
    return kernels


def _entries(ptx: str) -> dict[str, str]:
    """Kernel symbol -> its text."""
    return {re.match(r"\w+", entry)[0]: entry for entry in re.split(r"\.entry\s+", ptx)[1:]}


def _read_accesses(ptx: str) -> dict[str, Counter]:
    """Kernel symbol -> its loads from and stores to global memory by size."""
    accesses = {}
    for symbol, entry in _entries(ptx).items():
        found = re.findall(r"\b(ld|st)\.global[\w.:]*?(?:\.v(\d))?\.[bufs](\d+)\b", entry)
        accesses[symbol] = Counter((kind, int(n or 1) * int(bits) // 8) for kind, n, bits in found)
    return accesses


def _read_threads(ptx: str) -> dict[str, int]:
    """Kernel symbol -> the most threads of a block, as __launch_bounds__ has it."""
    found = {symbol: re.search(r"\.maxntid\s+(\d+)", entry) for symbol, entry in _entries(ptx).items()}
    return {symbol: int(match[1]) for symbol, match in found.items() if match}


def _read_machine_code(cubin: Path) -> dict[str, Counter]:
    """Kernel symbol -> its accesses in SASS: LDG.E.128 is a load of 16 bytes, LDG.E of 4; LDL reads local memory."""
    sass = subprocess.run([find_nvdisasm(), "-c", str(cubin)], check=True, capture_output=True, text=True).stdout
    accesses = {}
    for part in re.split(r"^\.text\.", sass, flags=re.MULTILINE)[1:]:
        found: Counter = Counter()
        for kind, modifiers in re.findall(r"\b(LDG|STG|LDL)((?:\.\w+)*)", part):
            if kind == "LDL":
                found["local", 0] += 1
                continue
            bits = re.search(r"\.(?:[US])?(8|16|64|128)\b", modifiers)
            found["ld" if kind == "LDG" else "st", int(bits[1]) // 8 if bits else 4] += 1
        accesses[re.match(r"[\w$]+", part)[0]] = found
    return accesses


@cache
def readable(symbol: str) -> str:
    """The kernel's name and template arguments, without namespaces and parameters."""
    if shutil.which("c++filt") is None:
        return symbol
    name = subprocess.run(["c++filt", symbol], check=True, capture_output=True, text=True).stdout.strip()
    name = re.sub(r"\(anonymous namespace\)::|ls::cuda::|ls::|c10::|^void ", "", name)
    depth = 0
    for i, character in enumerate(name):
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "(" and depth == 0:
            return name[:i]
    return name
