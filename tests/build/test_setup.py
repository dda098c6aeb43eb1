"""The build and the choice of the library, without compiling anything."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from ls_plugin import _library

ROOT = Path(__file__).resolve().parents[2]


def setup_py(arguments, environment, cwd=ROOT):
    return subprocess.run(
        [sys.executable, "setup.py", *arguments],
        env={**os.environ, **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"LS_BUILD": "yes"}, "LS_BUILD must be 0, 1 or unset, got 'yes'"),
        ({"LS_BUILD": "1", "CXX": "no-such-compiler"}, "LS_BUILD=1 but no C++ compiler was found"),
    ],
)
def test_a_wrong_wish_is_refused_by_name(environment, message):
    done = setup_py(["--version"], environment)
    assert done.returncode != 0 and message in done.stderr


KNOWN = "75 80 86 87 89 90 100 103 120"  # of the stand-in for nvcc


class Machine:
    """setup.py's functions where only what the test puts there is on the PATH: nvcc, and a torch."""

    def __init__(self, folder, monkeypatch):
        self.bin, self.torch = folder / "bin", folder / "torch"
        self.bin.mkdir()
        self.torch.mkdir()
        for name in ("LS_CUDA", "LS_CUDA_ARCH", "CUDA_HOME", "CUDA_PATH"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PATH", str(self.bin))
        self.put("nvcc", f"for n in {KNOWN}; do echo compute_$n; done")
        source = (ROOT / "setup.py").read_text().partition("\nbuilding = ")[0]  # up to where it builds
        self.setup = {"__file__": str(ROOT / "setup.py"), "__name__": "setup"}
        exec(compile(source, "setup.py", "exec"), self.setup)

    def put(self, name, script):
        (self.bin / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / name).chmod(0o755)

    def has(self, cuda=None, gpus=()):
        value = "None" if cuda is None else repr(cuda)
        (self.torch / "version.py").write_text(f"__version__ = '2.13.0'\ncuda: Optional[str] = {value}\n")
        if gpus:
            self.put("nvidia-smi", "\n".join(f"echo {gpu}" for gpu in gpus))

    def nvcc(self):
        return self.setup["find_nvcc"](self.torch)

    def archs(self):
        return ";".join(self.setup["cuda_archs"](str(self.bin / "nvcc")))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/x/pip/_vendor/pyproject_hooks/_in_process/_in_process.py", "bdist_wheel"])
    return Machine(tmp_path, monkeypatch)


def test_cuda_is_built_where_torch_has_it(machine, monkeypatch):
    """nvcc on the PATH alone is no reason: with a CPU build of torch nothing could run the kernels."""
    machine.has(cuda=None)
    nvcc, why = machine.nvcc()
    assert nvcc is None and "this torch is a CPU build; LS_CUDA=1" in why
    monkeypatch.setenv("LS_CUDA", "1")
    assert machine.nvcc()[0] == str(machine.bin / "nvcc")
    monkeypatch.delenv("LS_CUDA")
    machine.has(cuda="12.8")
    assert machine.nvcc() == (str(machine.bin / "nvcc"), "torch has CUDA 12.8")
    monkeypatch.setenv("LS_CUDA", "0")
    assert machine.nvcc()[0] is None
    monkeypatch.delenv("LS_CUDA")
    (machine.bin / "nvcc").unlink()
    nvcc, why = machine.nvcc()
    assert nvcc is None and "no nvcc was found; install the CUDA toolkit" in why
    monkeypatch.setenv("LS_CUDA", "1")
    with pytest.raises(SystemExit, match="LS_CUDA=1 but no nvcc was found"):
        machine.nvcc()


@pytest.mark.parametrize(
    ("gpus", "wish", "archs"),
    [
        ((), "", "75;80;90;100;120"),  # none is seen: one for each family
        (("9.0", "9.0"), "", "90"),
        (("8.6", "9.0"), "", "86;90"),
        (("7.0", "8.0"), "", "80"),  # no kernels for 7.0
        (("12.1",), "", "120"),  # newer than this nvcc: by the PTX of its newest
        (("9.0",), "all", "75;80;90;100;120"),
        (("9.0",), "8.0 sm_86", "80;86"),
        (("No devices were found",), "", "75;80;90;100;120"),
    ],
)
def test_architectures_are_those_of_the_gpus_here(machine, monkeypatch, gpus, wish, archs):
    machine.has(cuda="12.8", gpus=gpus)
    monkeypatch.setenv("LS_CUDA_ARCH", wish)
    assert machine.archs() == archs


@pytest.mark.parametrize("argv0", ["setup.py", "/x/site-packages/pyproject_hooks/_in_process/_in_process.py"])
def test_a_wheel_to_hand_on_serves_every_family(machine, monkeypatch, argv0):
    """python setup.py bdist_wheel, python -m build. pip makes a wheel of each install, too: that one is for this machine."""
    machine.has(cuda="12.8", gpus=("9.0",))
    assert machine.archs() == "90"
    monkeypatch.setattr(sys, "argv", [argv0, "bdist_wheel"])
    assert machine.archs() == "75;80;90;100;120"
    monkeypatch.setattr(sys, "argv", ["setup.py", "build_ext", "--inplace"])
    assert machine.archs() == "90"


def test_a_wrong_architecture_is_refused(machine, monkeypatch):
    monkeypatch.setenv("LS_CUDA_ARCH", "ampere")
    with pytest.raises(SystemExit, match=r'LS_CUDA_ARCH must be all or look like "80;90", got \'ampere\''):
        machine.archs()


def test_ci_compiles_the_cuda_sources():
    """Its torch is a CPU build, for which nothing of CUDA is compiled by default."""
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert "export LS_CUDA=${LS_CUDA:-1}" in lines


def test_source_distribution_holds_what_the_build_needs(tmp_path):
    done = setup_py(["-q", "egg_info", "-e", str(tmp_path), "sdist", "-d", str(tmp_path)], {})
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "kernels").rglob("*") if path.is_file()}
    assert sources <= names, sorted(sources - names)
    assert {"setup.py", "LICENSE", "README.md", "ls_plugin/ops/layer_norm.py"} <= names


@pytest.mark.parametrize(
    ("capability", "archs", "serves"),
    [
        ((9, 0), "80;90", True),
        ((8, 6), "80;90", True),  # runs sm_80's code
        ((8, 0), "86", False),  # newer code of the same family does not run on it
        ((7, 0), "75;80", False),
        ((12, 0), "80;90", True),  # compiled by the driver from the PTX of the last
        ((10, 3), "75;80;90;100;110;120", True),
    ],
)
def test_which_gpus_an_architecture_list_serves(capability, archs, serves):
    assert _library.cuda_arch_is_built(capability, archs) is serves


def test_reference_can_be_asked_for_and_nothing_else():
    def ask(value):
        code = "from ls_plugin import _library; print(_library.status())"
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            env={**os.environ, "LS_REFERENCE": value},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

    assert "LS_REFERENCE must be 0, 1 or unset, got 'true'" in ask("true").stderr
    assert "no compiled kernels: LS_REFERENCE=1" in ask("1").stderr
