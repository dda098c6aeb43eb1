"""``lightseq-doctor``: what is installed, what is used, and how to fix what is wrong.

    lightseq-doctor [--json]
    python ls_plugin/cli/doctor.py [--json]      where the plugin itself does not import

Standard library only, and nothing of what is judged is imported here: torch and the plugin are tried in processes of their
own, so that a crash of theirs is a line of the report. Exit status: 0 when training can run, 1 when it cannot.
"""

from __future__ import annotations  # a Python that is too old must get far enough to read that

import argparse
import dataclasses
import importlib.machinery
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

PYTHON_MIN, PYTHON_MAX = (3, 10), (3, 12)
PROBE_TIMEOUT_S = 600  # the imports take some five seconds; a minute from a cold network disk
OK, WARN, BAD = "ok", "warn", "bad"  # BAD: training cannot run


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    state: str
    found: str
    remedy: str = ""


TORCH_PROBE = """
import json, torch
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__,
    "cuda_build": torch.version.cuda,
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
    "capabilities": ["%d%d" % torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())] if cuda else [],
    "threads": torch.get_num_threads(),
}))
"""
PLUGIN_PROBE = """
import dataclasses, json, warnings
warnings.simplefilter("ignore")
import ls_plugin, fairseq
from ls_plugin import _library
status = dataclasses.asdict(_library.status())
print(json.dumps({"version": ls_plugin.__version__, "at": ls_plugin.__path__[0], "fairseq": fairseq.__path__[0], **status}))
"""


def probe(code: str, python: str = sys.executable) -> dict:
    """Runs code that prints one JSON line last. Gives that, or {"error": its last words}."""
    try:
        # From an empty folder's view: -P keeps the working directory off sys.path where Python knows it (3.11).
        safe = ["-P"] if sys.version_info >= (3, 11) else []
        done = subprocess.run(
            [python, *safe, "-c", code], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {PROBE_TIMEOUT_S} s"}
    if done.returncode < 0:
        return {"error": f"killed by signal {-done.returncode}"}
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return {"error": last[-1] if last else f"exit status {done.returncode}"}


def version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python(version: Sequence[int] = sys.version_info) -> Check:
    found = ".".join(map(str, version[:3]))
    if PYTHON_MIN <= tuple(version[:2]) <= PYTHON_MAX:
        return Check("Python", OK, f"{found} ({sys.executable})")
    return Check("Python", BAD, f"{found}; 3.10, 3.11 and 3.12 work", "LS_PYTHON=python3.11 bash recipes/setup_env.sh")


def check_torch(torch: dict) -> Check:
    if "error" in torch:
        missing = version_of("torch") is None
        remedy = "bash recipes/setup_env.sh, or pip install 'torch>=2.10'"
        return Check("torch", BAD, "not installed" if missing else f"does not import: {torch['error']}", remedy)
    release = tuple(int(part) for part in torch["version"].split("+")[0].split(".")[:2])
    if release < (2, 10):
        return Check("torch", BAD, f"{torch['version']} is older than 2.10", "pip install 'torch>=2.10'")
    return Check("torch", OK, f"{torch['version']}, {torch['threads']} CPU threads")


def nvidia_gpus() -> list[str]:
    """What the driver sees, without torch."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in done.stdout.splitlines() if line.startswith("GPU ")]


def check_gpu(torch: dict, seen: list[str]) -> Check:
    """Which GPU training would use, and where the chain from card to torch is broken."""
    if torch.get("gpus"):
        names = ", ".join(f"{name} (sm_{cap})" for name, cap in zip(torch["gpus"], torch["capabilities"], strict=True))
        return Check("GPU", OK, f"{names}, CUDA {torch['cuda_build']}")
    if not seen:
        return Check("GPU", OK, "none; training runs on the CPU")
    if not torch.get("cuda_build"):
        return Check(
            "GPU", WARN, f"{len(seen)} seen, but torch is a CPU build", "LS_TORCH=cuda bash recipes/setup_env.sh"
        )
    return Check(
        "GPU",
        WARN,
        f"{len(seen)} seen, but torch (CUDA {torch['cuda_build']}) cannot use it",
        "update the NVIDIA driver; nvidia-smi shows the newest CUDA that the driver supports",
    )


def check_toolchain() -> list[Check]:
    """The compilers, needed only to build."""
    cxx = next(
        (name for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++") if name and shutil.which(name)), None
    )
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=os.path.join(home, "bin")) if home else shutil.which("nvcc")
    return [
        Check("C++ compiler", OK, shutil.which(cxx))
        if cxx
        else Check("C++ compiler", WARN, "none, so the kernels cannot be built", "apt-get install g++ (dnf: gcc-c++)"),
        Check("CUDA toolkit", OK, nvcc or "no nvcc; only needed to build the CUDA kernels"),
    ]


def check_fairseq(plugin: dict, python: Sequence[int] = sys.version_info) -> Check:
    name, wanted = ("fairseq-fixed", "0.12.3.1") if tuple(python[:2]) >= (3, 11) else ("fairseq", "0.12.2")
    other = "fairseq" if name == "fairseq-fixed" else "fairseq-fixed"
    remedy = f"pip install --no-build-isolation cython numpy {name}=={wanted}"
    found, unwanted = version_of(name), version_of(other)
    if found is None:
        had = f"; {other} {unwanted} does not work on this Python" if unwanted else ""
        return Check("fairseq", BAD, f"{name} is not installed{had}", remedy)
    if unwanted:
        remedy = f"pip uninstall {other} {name}, then {remedy}"
        return Check("fairseq", WARN, f"{name} {found} and {other} {unwanted} overwrite each other", remedy)
    if found != wanted:
        return Check("fairseq", WARN, f"{name} {found}; tested with {wanted}", remedy)
    return Check("fairseq", OK, f"{name} {found}" + (f" ({plugin['fairseq']})" if "fairseq" in plugin else ""))


def check_plugin(plugin: dict) -> list[Check]:
    """The plugin itself and its compiled library."""
    if "error" in plugin:
        missing = version_of("ls_plugin") is None
        found = "not installed" if missing else f"does not import: {plugin['error']}"
        return [Check("ls_plugin", BAD, found, "bash recipes/setup_env.sh, or pip install --no-build-isolation .")]
    checks = [Check("ls_plugin", OK, f"{plugin['version']} ({plugin['at']})")]
    if not plugin["loaded"]:
        reason, _, remedy = plugin["reason"].partition("; ")
        text = f"not in use: {reason}. The same results, at stock fairseq's speed"
        return [*checks, Check("compiled library", WARN, text, remedy or "bash recipes/setup_env.sh")]
    devices = f"CPU ({plugin['isa']})" + (f", CUDA (sm {plugin['archs']})" if plugin["cuda"] else "")
    return [*checks, Check("compiled library", OK, f"{devices}, {plugin['path']}")]


def check_library_on_gpu(torch: dict, plugin: dict) -> list[Check]:
    """A GPU that torch can use and the library cannot."""
    if not torch.get("gpus") or not plugin.get("loaded"):
        return []
    remedy = "LS_CUDA=1 bash recipes/setup_env.sh, with the CUDA toolkit installed"
    if not plugin["cuda"]:
        return [Check("CUDA kernels", WARN, "not built; on the GPU the reference ops run", remedy)]
    oldest = min(int("".join(filter(str.isdigit, arch))) for arch in plugin["archs"].split(";"))
    old = [f"sm_{capability}" for capability in torch["capabilities"] if int(capability) < oldest]
    if old:
        return [Check("CUDA kernels", WARN, f"built for sm_{oldest} and newer, not for {', '.join(old)}", remedy)]
    return [Check("CUDA kernels", OK, "serve this GPU")]


def find(name: str, path: Sequence[str] | None = None) -> importlib.machinery.ModuleSpec | None:
    """What an import of a top-level name would load, without loading it; also where the name is shut out of ``sys.modules``."""
    finders = sys.meta_path if path is None else [importlib.machinery.PathFinder]
    specs = (finder.find_spec(name, path) for finder in finders if hasattr(finder, "find_spec"))
    return next((spec for spec in specs if spec is not None), None)


def find_apex(path: Sequence[str] | None = None) -> tuple[str | None, bool]:
    """(where the package ``apex`` lies, or None; whether it is NVIDIA's, by the files that define ``apex.optimizers.FusedAdam``)."""
    spec = find("apex", path)
    if spec is None or spec.origin is None:  # a mere folder of that name: its import gives an empty package
        return None, False
    for folder in spec.submodule_search_locations or ():
        optimizers = Path(folder, "optimizers", "__init__.py")
        if optimizers.is_file() and "FusedAdam" in optimizers.read_text(errors="replace"):
            return folder, True
    return os.path.dirname(spec.origin) if spec.submodule_search_locations else spec.origin, False


def shut_out_unrelated_apex() -> None:
    """Lets imports of ``apex`` fail, as if there were none, where it is the web toolkit of that name.

    fairseq imports whatever bears the name, and survives an ImportError, but nothing else that a foreign package may do.
    """
    folder, is_nvidias = find_apex()
    if folder is not None and not is_nvidias and "apex" not in sys.modules:
        sys.modules["apex"] = None


def check_apex(path: Sequence[str] | None = None) -> Check:
    """Which apex this is, by its files: importing the unrelated package of that name would run a web toolkit's code."""
    folder, is_nvidias = find_apex(path)
    if folder is None:
        return Check("apex", OK, "not installed, and not needed")
    if not is_nvidias:
        return Check(
            "apex",
            WARN,
            f"the unrelated package of that name, not NVIDIA's ({folder}); lightseq-* commands keep it out, fairseq's own import it",
            "pip uninstall apex",
        )
    if find("amp_C", path) is None:
        return Check("apex", WARN, f"NVIDIA's, but built without its CUDA extensions ({folder})", "pip uninstall apex")
    return Check("apex", OK, f"NVIDIA's ({folder}); only stock fairseq uses it")


def check_deepspeed() -> Check:
    version = version_of("deepspeed")
    return Check("DeepSpeed", OK, version or "not installed; optional: pip install 'ls_plugin[deepspeed]'")


# Of fairseq's options: what needs a package, and the distributions of which one is enough. The first is what to install.
OPTIONAL = {
    "curves (--tensorboard-logdir)": ("tensorboardX", "tensorboard"),
    "curves on wandb.ai (--wandb-project)": ("wandb",),
    "BLEU (--eval-bleu, --scoring sacrebleu)": ("sacrebleu",),
    "Moses' words (--eval-bleu-detok moses, --tokenizer moses)": ("sacremoses",),
}


def check_optional() -> list[Check]:
    """A line for each package that some option of fairseq needs."""
    checks = []
    for purpose, names in OPTIONAL.items():
        found = [f"{name} {version_of(name)}" for name in names if version_of(name)]
        without = f"not installed; optional, for {purpose}: pip install {names[0]}"
        checks.append(Check(names[0], OK, f"{found[0]}, for {purpose}" if found else without))
    return checks


def diagnose() -> list[Check]:
    """All lines, in the order of the report."""
    torch = probe(TORCH_PROBE)
    plugin = probe(PLUGIN_PROBE)
    return [
        check_python(),
        check_torch(torch),
        check_gpu(torch, nvidia_gpus()),
        *check_toolchain(),
        check_fairseq(plugin),
        *check_plugin(plugin),
        *check_library_on_gpu(torch, plugin),
        check_apex(),
        check_deepspeed(),
        *check_optional(),
    ]


def can_train(checks: Sequence[Check]) -> bool:
    return all(check.state != BAD for check in checks)


def render(checks: Sequence[Check]) -> str:
    width = max(len(check.name) for check in checks)
    # Folded on a terminal; a file or a pipe gets whole lines, so that a remedy can be copied.
    room = shutil.get_terminal_size().columns - width - 8 if sys.stdout.isatty() else 10_000
    lines = []
    for check in checks:
        found = textwrap.wrap(check.found, max(room, 20), break_long_words=False, break_on_hyphens=False) or [""]
        lines.append(f"{check.state:<4}  {check.name:<{width}}  {found[0]}")
        lines += [f"{'':<4}  {'':<{width}}  {more}" for more in found[1:]]
        if check.remedy:
            lines.append(f"{'':<4}  {'':<{width}}  -> {check.remedy}")
    bad = [check.name for check in checks if check.state == BAD]
    lines += ["", f"training cannot run: fix {', '.join(bad)}" if bad else "training can run"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="lightseq-doctor", description="What is installed, what is used, how to fix it."
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args(arguments)
    checks = diagnose()
    if args.json:
        print(json.dumps({"can_train": can_train(checks), "checks": [dataclasses.asdict(c) for c in checks]}, indent=1))
    else:
        print(render(checks))
    sys.exit(0 if can_train(checks) else 1)


if __name__ == "__main__":
    # As a file, this folder is first on sys.path, and its train.py and validate.py are nobody's top-level modules.
    if sys.path and Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
        sys.path[0] = str(Path(__file__).resolve().parents[2])
    main()
