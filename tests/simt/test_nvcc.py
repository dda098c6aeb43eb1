"""nvcc compiles every instance of every kernel: no register spills, and 16-byte accesses where they are meant to be.

Needs the CUDA toolkit, no GPU. A table of registers, stack and shared memory per instance goes to build/nvcc/registers.txt.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels"
OUT = ROOT / "build" / "nvcc"
OPS = sorted(path.stem for path in (KERNELS / "cuda").glob("*.cu"))
ARCHS = ["sm_80", "sm_90"]  # bf16 conversions are instructions from 80 on; 90 is what the benchmarks will run on

# printf's arguments lie on the stack; only a refused target ever touches them.
STACK_BYTES_OF_PRINTF = 32
PRINTS = re.compile(r"label_smoothed_cross_entropy_forward_kernel")


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return (shutil.which("nvcc", path=str(Path(home, "bin"))) if home else None) or shutil.which("nvcc")


pytestmark = pytest.mark.skipif(
    find_nvcc() is None, reason="nvcc was not found: install the CUDA toolkit or set CUDA_HOME to it"
)


@dataclass(frozen=True)
class Instance:
    """What ptxas says of one kernel instance, and its global memory accesses in PTX: ("ld" or "st", bytes) -> how many."""

    name: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    accesses: Counter


def compile_kernels(op: str, arch: str) -> Path:
    """Gives the folder with cubin, PTX and ptxas log of one file; compiled when its sources or the tools have changed."""
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
            pytest.fail(f"nvcc: {op}.cu for {arch}:\n{done.stderr}", pytrace=False)
        for path in folder.iterdir():  # nvcc keeps some 10 MB of other intermediate files
            if path.suffix not in (".ptx", ".cubin"):
                path.unlink()
        (folder / "ptxas.log").write_text(done.stderr)
        (folder / "done").touch()
    return folder


@cache
def nvcc_version() -> str:
    return subprocess.run([find_nvcc(), "--version"], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def instances() -> dict[tuple[str, str], list[Instance]]:
    """(op, architecture) -> its kernel instances."""
    jobs = [(op, arch) for op in OPS for arch in ARCHS]
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda job: compile_kernels(*job), jobs))
    found = {job: read_instances(folder) for job, folder in zip(jobs, folders, strict=True)}
    lines = [f"{'registers':>9} {'stack':>5} {'spill':>5} {'shared':>6}  instance"]
    for job in jobs:
        lines.append(" ".join(job))
        lines += [
            f"{i.registers:9} {i.stack_bytes:5} {i.spill_bytes:5} {i.shared_bytes:6}  {i.name}"
            for i in sorted(found[job], key=lambda i: i.name)
        ]
    (OUT / "registers.txt").write_text("\n".join(lines) + "\n")
    return found


def read_instances(folder: Path) -> list[Instance]:
    log = (folder / "ptxas.log").read_text()
    accesses = read_accesses(next(folder.glob("*.ptx")).read_text())
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
        spill_bytes = sum(int(n) for n in re.findall(r"(\d+) bytes spill", part))
        kernels.append(Instance(readable(symbol), spill_bytes=spill_bytes, accesses=accesses[symbol], **numbers))
    return kernels


def read_accesses(ptx: str) -> dict[str, Counter]:
    """Kernel symbol -> its loads from and stores to global memory by size."""
    accesses = {}
    for entry in re.split(r"\.entry\s+", ptx)[1:]:
        found = re.findall(r"\b(ld|st)\.global[\w.:]*?(?:\.v(\d))?\.[bufs](\d+)\b", entry)
        accesses[re.match(r"\w+", entry)[0]] = Counter((kind, int(n or 1) * int(bits) // 8) for kind, n, bits in found)
    return accesses


@cache
def readable(symbol: str) -> str:
    """The kernel's name and template arguments, without namespaces and parameters."""
    if shutil.which("c++filt") is None:
        return symbol
    name = subprocess.run(["c++filt", symbol], check=True, capture_output=True, text=True).stdout.strip()
    name = re.sub(r"\(anonymous namespace\)::|ls::cuda::|c10::|^void ", "", name)
    return re.sub(r"\((?:const )?(?:ls::|float const).*", "", name)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", OPS)
def test_no_spills(instances, op, arch):
    kernels = instances[op, arch]
    assert kernels, f"no kernel found in the log of {op}.cu"
    faults = []
    for kernel in kernels:
        allowed_stack = STACK_BYTES_OF_PRINTF if PRINTS.search(kernel.name) else 0
        if kernel.spill_bytes > 0 or kernel.stack_bytes > allowed_stack:
            faults.append(
                f"{kernel.name}: {kernel.registers} registers, {kernel.spill_bytes} bytes spilled, {kernel.stack_bytes} of stack"
            )
    assert not faults, f"{op}.cu for {arch} spills:\n" + "\n".join(faults)


def least_vector_accesses(name: str) -> tuple[int, int] | None:
    """How many 16-byte loads and stores a vector instance has at least; None for one that works element by element."""
    kernel, _, arguments = name.partition("<")
    n_bytes = 4 if arguments.startswith("float") else 2
    numbers = [int(n) for n in re.findall(r"\b\d+\b", arguments.replace("BFloat16", ""))]
    width = numbers[0] if numbers else 0
    per_group = 8 * n_bytes // 16  # accesses for a group of eight columns
    if kernel == "adam_step_kernel":
        return (2, 2) if "true" in arguments else None  # the moments; param and grad may be 8 bytes
    if width * n_bytes != 16:
        return None
    row = {  # RowShape<lanes, per lane>
        "layer_norm_forward_kernel": lambda: (numbers[2] // width, numbers[2] // width),
        "layer_norm_backward_kernel": lambda: (2 * numbers[2] // width, numbers[2] // width),
    }
    fixed = {
        "bias_dropout_residual_forward_kernel": (3 * per_group, per_group),  # x, bias, residual; y
        "bias_dropout_residual_backward_kernel": (per_group, per_group),
        "layer_norm_forward_long_kernel": (2, 1),
        "layer_norm_backward_long_kernel": (4, 1),
        "layer_norm_grad_params_kernel": (2 * per_group, 0),
        "label_smoothed_cross_entropy_forward_kernel": (1, 2 if ", true, " in arguments else 0),  # zeros; the gradient
        "label_smoothed_cross_entropy_backward_kernel": (1, 1),
    }
    return row[kernel]() if kernel in row else fixed[kernel]


@pytest.mark.skipif(shutil.which("c++filt") is None, reason="c++filt was not found: it names the instances (binutils)")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", OPS)
def test_vector_instances_move_16_bytes(instances, op, arch):
    """In PTX, whose vector accesses ptxas keeps: ld.global.v4.b32 is LDG.E.128 in SASS."""
    checked, faults = 0, []
    for kernel in instances[op, arch]:
        least = None if kernel.name.startswith("finish_column_sums") else least_vector_accesses(kernel.name)
        if least is None:
            continue
        checked += 1
        loads, stores = kernel.accesses["ld", 16], kernel.accesses["st", 16]
        if loads < least[0] or stores < least[1]:
            faults.append(f"{kernel.name}: {loads} loads and {stores} stores of 16 bytes, expected at least {least}")
    assert checked > 0, f"no vector instance found in {op}.cu"
    assert not faults, f"{op}.cu for {arch}:\n" + "\n".join(faults)


@pytest.mark.skipif(shutil.which("cuobjdump") is None, reason="cuobjdump was not found: it shows the machine code")
@pytest.mark.parametrize("op", OPS)
def test_machine_code_moves_16_bytes(instances, op):
    cubin = compile_kernels(op, ARCHS[-1]) / f"{op}.cubin"
    sass = subprocess.run(["cuobjdump", "-sass", str(cubin)], check=True, capture_output=True, text=True).stdout
    assert "LDG.E.128" in sass and "STG.E.128" in sass
    assert "LDL" not in sass, "local memory is read: something was indexed at run time or spilled"
