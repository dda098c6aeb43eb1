"""Builds the compiled library, ls_plugin/libls_kernels.so, with ninja; metadata is in pyproject.toml.

The library is no Python extension: it is written against libtorch's stable C interface and loaded by torch, so one build
serves every Python and every torch from 2.10 on. Only headers of torch are needed, and they are taken from the torch already
installed for this Python, also under pip's build isolation, so `pip install .` downloads no second torch.

Environment:
  LS_BUILD=0|1      0: no compiled library, the reference ops run; 1: fail when it cannot be built.
                    Unset: build it where a C++ compiler is, otherwise go on without and say so.
  LS_CUDA=0|1       without or with the CUDA kernels; unset: with them where nvcc is and torch was built with CUDA.
  LS_CUDA_ARCH      architectures, for example "80;90", or "all": one per family from sm_75 on that nvcc knows, and PTX of
                    the newest. Unset: those of the GPUs that nvidia-smi shows; all where there are none, and for a wheel
                    (setup.py bdist_wheel, python -m build; pip install and pip wheel cannot be told apart, and build for
                    this machine).
  CXX, CUDA_HOME    compiler (default c++ or g++) and toolkit.  MAX_JOBS: parallel compilations.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
KERNELS = ROOT / "kernels"
LIBRARY = "libls_kernels.so"
OPS = sorted(path.stem for path in (KERNELS / "ops").glob("*.cpp"))
MIN_TORCH = (2, 10)
TORCH_TARGET_VERSION = "0x020a000000000000"  # 2.10: nothing newer is called, so the library loads there too

# Flags of each CPU instruction set; kernels/cpu/dispatch.cpp checks for the same features at run time.
ISA_FLAGS = {
    "plain": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"],
}
CXX_FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",
]
NVCC_FLAGS = ["-std=c++17", "-O3", "-lineinfo", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
OLDEST_ARCH = 75


def find_torch() -> Path | None:
    """The directory of the torch installed for this Python. Under build isolation it cannot be imported, but it is there."""
    directories = [Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))]
    directories += [Path(entry) for entry in sys.path if entry]
    for directory in directories:
        version_file = directory / "torch" / "version.py"
        if not version_file.exists():
            continue
        version = re.search(r"__version__ = '(\d+)\.(\d+)", version_file.read_text())
        if version is None or tuple(map(int, version.groups())) < MIN_TORCH:
            found = ".".join(version.groups()) if version else "unknown"
            sys.exit(
                f"setup.py: torch {found} in {directory} is too old; pip install 'torch>={'.'.join(map(str, MIN_TORCH))}'"
            )
        return directory / "torch"
    return None


def find_cxx() -> str | None:
    """The C++ compiler, as CXX names it or as the PATH has it."""
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    for candidate in candidates:
        if shutil.which(candidate.split()[0]):
            return candidate
    return None


def torch_cuda(torch: Path) -> str | None:
    """The CUDA release that this torch was built with, as torch.version.cuda has it; None for a CPU build."""
    found = re.search(r"^cuda\b[^=]*= '([^']+)'", (torch / "version.py").read_text(), re.MULTILINE)
    return found[1] if found else None


def find_nvcc(torch: Path) -> tuple[str | None, str]:
    """(nvcc in CUDA_HOME or on the PATH, or None for no CUDA kernels; why, for the line that the build prints)."""
    wish = os.environ.get("LS_CUDA", "")
    if wish not in ("", "0", "1"):
        sys.exit(f"setup.py: LS_CUDA must be 0, 1 or unset, got {wish!r}")
    if wish == "0":
        return None, "no CUDA kernels: LS_CUDA=0"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=str(Path(home, "bin"))) if home else None
    nvcc = nvcc or shutil.which("nvcc")
    if wish == "1":
        if nvcc is None:
            sys.exit("setup.py: LS_CUDA=1 but no nvcc was found; install the CUDA toolkit or set CUDA_HOME to it")
        return nvcc, "LS_CUDA=1"
    if torch_cuda(torch) is None:
        return None, "no CUDA kernels: this torch is a CPU build; LS_CUDA=1 builds them all the same"
    if nvcc is None:
        return None, "no CUDA kernels: no nvcc was found; install the CUDA toolkit or set CUDA_HOME to it"
    return nvcc, f"torch has CUDA {torch_cuda(torch)}"


def cuda_toolkit(nvcc: str) -> tuple[Path, Path]:
    """Folders of the toolkit's headers and libraries, as nvcc itself names them: it may be a wrapper that lies elsewhere."""
    command = [nvcc, "--dryrun", "-E", "-x", "cu", os.devnull]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    include = re.search(r'INCLUDES="-I([^"]+)"', answer)
    libraries = [Path(path) for path in re.findall(r'"-L([^"]+)"', answer)]
    library = next((path for path in libraries if (path / "libcudart_static.a").exists()), None)
    if include is None or library is None:
        sys.exit(
            f"setup.py: {nvcc} names no complete toolkit (headers and libcudart_static.a); install it whole, or set LS_CUDA=0"
        )
    return Path(include.group(1)), library


def gpu_archs() -> list[str]:
    """Architectures of this machine's GPUs, as the driver names them; [] where there are none."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    found = {line.strip().replace(".", "") for line in answer.splitlines() if re.fullmatch(r"\d+\.\d", line.strip())}
    return sorted(found, key=int)


def is_for_other_machines() -> bool:
    """Whether what is built is a wheel to hand on. pip makes a wheel for each install as well, and uv (its script is -c)."""
    by = Path(sys.argv[0]).parts
    return "bdist_wheel" in sys.argv and "pip" not in by and "-c" not in by


def cuda_archs(nvcc: str) -> list[str]:
    """Architectures to build, as numbers without the dot: those of LS_CUDA_ARCH, of this machine's GPUs, or one per family.

    A binary for sm_80 runs on sm_86 and sm_89 as well, so the lowest of each family serves it whole.
    """
    wish = os.environ.get("LS_CUDA_ARCH", "").strip()
    if wish not in ("", "all"):
        archs = [arch.strip().replace(".", "").removeprefix("sm_") for arch in re.split(r"[;, ]+", wish)]
        if not all(re.fullmatch(r"\d{2,3}[af]?", arch) for arch in archs):
            sys.exit(f'setup.py: LS_CUDA_ARCH must be all or look like "80;90", got {wish!r}')
        return archs
    known = subprocess.run([nvcc, "--list-gpu-arch"], check=True, capture_output=True, text=True).stdout
    numbers = sorted({int(number) for number in re.findall(r"compute_(\d+)\b", known)})
    mine = [] if wish == "all" or is_for_other_machines() else gpu_archs()
    mine = [arch for arch in mine if int(arch) >= OLDEST_ARCH]
    if mine:
        # A GPU newer than nvcc gets the PTX of the newest that nvcc knows, which its driver compiles.
        return sorted({arch if int(arch) in numbers else str(numbers[-1]) for arch in mine}, key=int)
    families: dict[int, int] = {}
    for number in numbers:
        if number >= OLDEST_ARCH:
            families.setdefault(number // 10, number)
    return [str(number) for number in families.values()]


def build_is_wanted() -> bool:
    """Whether to build the library. Missing tools are fatal only under LS_BUILD=1."""
    wish = os.environ.get("LS_BUILD", "")
    if wish not in ("", "0", "1"):
        sys.exit(f"setup.py: LS_BUILD must be 0, 1 or unset, got {wish!r}")
    if wish == "0":
        return False
    if find_cxx() is not None:
        return True
    message = "no C++ compiler was found (set CXX, or install one: apt-get install g++, dnf install gcc-c++)"
    if wish == "1":
        sys.exit(f"setup.py: LS_BUILD=1 but {message}")
    print(
        f"setup.py: {message}. Installing without the compiled kernels: the reference ops run instead, with the same "
        "results, and training is no faster than stock fairseq.",
        file=sys.stderr,
    )
    return False


def remove_unwanted_library() -> None:
    """With nothing to build, one that an earlier build left in this clone would be packed, or loaded, all the same."""
    if not building:
        (ROOT / "ls_plugin" / LIBRARY).unlink(missing_ok=True)


def ninja_escape(path: Path | str) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


class BuildKernels(build_ext):
    """Writes build.ninja and runs it: incremental, parallel, with header dependencies."""

    def run(self) -> None:
        remove_unwanted_library()
        super().run()

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")[:-1], LIBRARY))

    def build_extension(self, ext: Extension) -> None:
        torch = find_torch()
        if torch is None:
            sys.exit(
                "setup.py: torch 2.10 or newer is not installed for this Python; install it first, for example "
                "'pip install torch', then run this again (or LS_BUILD=0 for no compiled library)"
            )
        # Not self.build_temp: pip gives an editable build a fresh one each time, and nothing would be incremental.
        build_dir = ROOT / "build" / f"kernels-{self.plat_name}"
        build_dir.mkdir(parents=True, exist_ok=True)
        (build_dir / "build.ninja").write_text(self.ninja_file(torch))
        command = [self.ninja(), "-C", str(build_dir)]
        if os.environ.get("MAX_JOBS"):
            command += ["-j", os.environ["MAX_JOBS"]]
        # Files done, of how many, and seconds since the start: [12/88, 31.4 s] c++ kernels/cpu/adam.cpp avx2
        environment = {"NINJA_STATUS": "[%f/%t, %e s] ", **os.environ}
        if subprocess.run(command, check=False, env=environment).returncode != 0:
            sys.exit(
                "setup.py: the compiled library did not build; the compiler's message stands above (pip: add -v to see it). LS_BUILD=0 installs without it"
            )
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        # A new file under the old name: a process that has the old one mapped keeps it.
        shutil.copy2(build_dir / LIBRARY, output.with_suffix(".tmp"))
        output.with_suffix(".tmp").replace(output)

    @staticmethod
    def ninja() -> str:
        """ninja of the build requirements, else of the PATH."""
        try:
            import ninja

            return str(Path(ninja.BIN_DIR, "ninja"))
        except ImportError:
            found = shutil.which("ninja")
            if found is None:
                sys.exit("setup.py: ninja is needed to build: pip install ninja")
            return found

    def ninja_file(self, torch: Path) -> str:
        cxx, (nvcc, why) = find_cxx(), find_nvcc(torch)
        include = ["-I", str(KERNELS), "-isystem", str(torch / "include")]
        cxx_flags = [*CXX_FLAGS, *include, f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]
        link_flags = ["-shared", "-Wl,--no-undefined", f"-L{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
        lines = ["ninja_required_version = 1.5"]
        builds: list[tuple[Path, str, list[str]]] = []  # source, rule, flags
        isas = list(ISA_FLAGS) if platform.machine() in ("x86_64", "AMD64") else ["plain"]
        # The linker keeps the first copy of an inline function that it meets. With "plain" first, a copy compiled for AVX-512
        # is never the one that another instruction set calls.
        for isa in isas:
            for op in OPS:
                builds.append((KERNELS / "cpu" / f"{op}.cpp", "cxx", [f"-DLS_ISA={isa}", *ISA_FLAGS[isa]]))
        binding_flags = []
        if nvcc is not None:
            archs = cuda_archs(nvcc)
            toolkit_include, toolkit_library = cuda_toolkit(nvcc)
            binding_flags = ["-DLS_WITH_CUDA", f'-DLS_CUDA_ARCHS="{";".join(archs)}"', "-isystem", str(toolkit_include)]
            gencode = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
            gencode.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
            lines += [
                "rule nvcc",
                f"  command = {ninja_escape(nvcc)} {shlex.join([*NVCC_FLAGS, *include, *gencode])} -MMD -MF $out.d -c $in -o $out",
                "  depfile = $out.d",
                "  deps = gcc",
                "  description = nvcc $in",
            ]
            # An op may have none: on a GPU it is then composed of others.
            builds += [(source, "nvcc", []) for op in OPS if (source := KERNELS / "cuda" / f"{op}.cu").exists()]
            link_flags += [f"-L{toolkit_library}", "-lcudart_static", "-lpthread", "-lrt"]
        bindings = [KERNELS / "schemas.cpp", KERNELS / "cpu" / "dispatch.cpp", KERNELS / "cuda" / "current_stream.cpp"]
        bindings += [KERNELS / "ops" / f"{op}.cpp" for op in OPS]
        builds += [(source, "cxx", binding_flags) for source in bindings]
        lines += [
            "rule cxx",
            f"  command = {cxx} {shlex.join(cxx_flags)} $flags -MMD -MF $out.d -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = c++ $in $isa",
            "rule link",
            f"  command = {cxx} -o $out $in {shlex.join(link_flags)}",
            "  description = link $out",
        ]
        objects = []
        for source, rule, flags in builds:
            isa = next((flag.partition("=")[2] for flag in flags if flag.startswith("-DLS_ISA=")), "")
            name = "-".join(filter(None, [source.parent.name, source.stem, isa])) + ".o"
            objects.append(name)
            lines.append(f"build {name}: {rule} {ninja_escape(source)}")
            if rule == "cxx":
                lines += [f"  flags = {shlex.join(flags)}", f"  isa = {isa}"]
        lines.append(f"build {LIBRARY}: link {' '.join(objects)}")
        cuda = f"CUDA kernels for {', '.join('sm_' + arch for arch in archs)} ({why})" if nvcc else why
        print(f"setup.py: {len(builds)} files to compile with {cxx}, those that have changed; {cuda}", flush=True)
        return "\n".join(lines) + "\n"


class BuildPython(build_py):
    """Packs the Python sources, without an older library where none is wanted."""

    def run(self) -> None:
        remove_unwanted_library()
        super().run()


class PlatformWheel(bdist_wheel):
    """A wheel for this platform and any Python 3: the library holds no Python."""

    def get_tag(self):
        python, abi, plat = super().get_tag()
        return ("py3", "none", plat) if self.distribution.has_ext_modules() else (python, abi, plat)


building = build_is_wanted()
setup(
    ext_modules=[Extension("ls_plugin.libls_kernels", sources=[])] if building else [],
    cmdclass={"build_ext": BuildKernels, "build_py": BuildPython, "bdist_wheel": PlatformWheel},
    # Only where no torch is installed yet is one fetched for the build; it is then the one that pip installs anyway.
    setup_requires=["torch>=2.10"] if building and find_torch() is None else [],
)
