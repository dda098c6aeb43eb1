"""What setup_env.sh says where something is missing, seen through a PATH that holds only what the test puts there."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.limits import LIMIT_S
from tests.recipes.conftest import ROOT

SITE_PACKAGES = Path(sysconfig.get_path("purelib"))

TOOLS = [
    "awk",
    "bash",
    "cat",
    "df",
    "dirname",
    "env",
    "find",
    "flock",
    "grep",
    "head",
    "id",
    "mkdir",
    "mktemp",
    "rm",
    "sed",
    "sha256sum",
    "sleep",
    "sort",
    "tail",
    "touch",
    "tr",
    "uname",
    "xargs",
]


class Machine:
    """A clone of the scripts and a PATH of our making."""

    def __init__(self, folder):
        self.root, self.bin = folder / "clone", folder / "bin"
        (self.root / "recipes").mkdir(parents=True)
        (self.root / "kernels").mkdir()
        self.bin.mkdir()
        for name in ("recipes/setup_env.sh", "recipes/constraints.txt", "pyproject.toml", "setup.py"):
            shutil.copy(ROOT / name, self.root / name)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))

    def put(self, name, script):
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(0o755)

    def put_python(self, name="python3.11", cases=""):
        """This Python under a name; ``cases`` are patterns of a shell case over its arguments, tried first."""
        self.put(name, f'case "$*" in\n{cases}*) exec "{sys.executable}" "$@" ;;\nesac\n')

    def run(self, **environment):
        """Returns (exit status, what it said)."""
        clean = {"PATH": str(self.bin), "HOME": os.environ.get("HOME", "/"), "LS_TORCH": "cpu", **environment}
        done = subprocess.run(
            [str(self.bin / "bash"), str(self.root / "recipes" / "setup_env.sh")],
            env=clean, cwd="/", capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stdout + done.stderr
        return done.returncode, done.stderr


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_no_python(machine):
    machine.put("apt-get", "exit 0\n")
    status, said = machine.run()
    assert status == 1
    assert "Python 3.10, 3.11 or 3.12 is needed, found: no Python at all" in said
    assert "apt-get install -y python3.11 python3.11-venv python3.11-dev" in said


def test_only_an_old_python(machine):
    machine.put("python3", 'case "$*" in --version) echo Python 3.8.18 ;; *) exit 1 ;; esac\n')
    machine.put("dnf", "exit 0\n")
    status, said = machine.run()
    assert status == 1
    assert "found: Python 3.8.18" in said and "dnf install -y python3.11 python3.11-devel" in said


def test_a_named_python_must_fit(machine):
    machine.put("python3.13", "echo Python 3.13.0; exit 1\n")
    status, said = machine.run(LS_PYTHON="python3.13")
    assert status == 1
    assert "LS_PYTHON=python3.13 must be Python 3.10, 3.11 or 3.12, got: Python 3.13.0" in said
    status, said = machine.run(LS_PYTHON="/nowhere/python")
    assert status == 1 and "LS_PYTHON=/nowhere/python must be" in said


def test_a_shim_that_does_not_run_is_passed_over(machine):
    machine.put("python3.11", "echo 'pyenv: python3.11: command not found' >&2; exit 127\n")
    machine.put_python("python3", cases="*ensurepip*) exit 1 ;;\n")
    _, said = machine.run()
    assert "lacks its venv module" in said  # so it went on with python3


def test_no_venv_module(machine):
    machine.put_python(cases="*ensurepip*) exit 1 ;;\n")
    machine.put("apt-get", "exit 0\n")
    status, said = machine.run()
    assert status == 1
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    assert f"apt-get install -y {version}-venv" in said


def test_no_python_headers(machine):
    machine.put_python(cases="*Python.h*) echo False ;;\n")
    machine.put("apt-get", "exit 0\n")
    status, said = machine.run()
    assert status == 1
    assert "lacks its headers (Python.h)" in said and "-dev" in said


def test_a_full_disk(machine):
    machine.put_python()
    machine.put("df", "echo Filesystem 1024-blocks Used Available; echo /dev/vda 9 9 512000\n")
    status, said = machine.run()
    assert status == 1
    assert "3000 MiB of free disk are needed" in said and "got 500 MiB" in said


def test_an_unknown_torch_build(machine):
    machine.put_python()
    status, said = machine.run(LS_TORCH="rocm")
    assert status == 1 and "LS_TORCH must be cpu or cuda, got rocm" in said


def test_a_failing_pip_shows_its_words_and_the_log(machine):
    machine.put_python()
    status, said = machine.run(PIP_NO_INDEX="1", PIP_CONFIG_FILE="/dev/null")
    assert status == 1
    assert "installing pip" in said and "No matching distribution found" in said
    assert str(machine.root / ".venv" / "setup.log") in said
    assert not (machine.root / ".venv" / ".ls_unfinished").exists()  # pip failed by itself: nothing to repair


def test_a_long_step_says_how_far_it_is(machine):
    """By the last line of its log, as soon as half a minute is over; here a tenth of a second, which pip's start takes at the least."""
    machine.put_python()
    script = machine.root / "recipes" / "setup_env.sh"
    text = script.read_text()
    assert "HEARTBEAT_S=30\n" in text
    script.write_text(text.replace("HEARTBEAT_S=30\n", "HEARTBEAT_S=0.1\n"))
    _, said = machine.run(PIP_NO_INDEX="1", PIP_CONFIG_FILE="/dev/null")
    beats = [line.partition("still at it: ")[2] for line in said.splitlines() if "still at it: " in line]
    assert beats and "-m pip install" in beats[0] and max(map(len, beats)) <= 80


def test_a_killed_run_is_repaired_from_scratch(machine):
    machine.put_python()
    venv = machine.root / ".venv"
    venv.mkdir()
    (venv / ".ls_unfinished").touch()
    (venv / "half-written").touch()
    status, said = machine.run(PIP_NO_INDEX="1", PIP_CONFIG_FILE="/dev/null")
    assert status == 1 and "starting .venv afresh" in said
    assert not (venv / "half-written").exists()


def test_parallel_runs_wait(machine):
    machine.put_python(cases="*ensurepip*) exit 1 ;;\n")
    script = machine.root / "recipes" / "setup_env.sh"
    with script.open() as locked:
        import fcntl

        fcntl.flock(locked, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [str(machine.bin / "bash"), str(script)],
            env={"PATH": str(machine.bin), "LS_TORCH": "cpu"}, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert "another set-up is running" in process.stderr.readline()
        fcntl.flock(locked, fcntl.LOCK_UN)
    assert "lacks its venv module" in process.communicate(timeout=LIMIT_S)[1]


def test_a_build_that_is_required_needs_a_compiler(machine):
    machine.put_python()
    status, said = machine.run(LS_BUILD="1", CXX="")
    assert status == 1 and "LS_BUILD=1 needs a C++ compiler, found none" in said


@pytest.mark.skipif(not (SITE_PACKAGES / "ls_plugin").exists(), reason="not in a .venv of setup_env.sh")
@pytest.mark.parametrize("command", ["fairseq-train", "lightseq-train"])
def test_user_dir_by_name_from_any_folder(command, tmp_path):
    """fairseq finds no such folder here, looks in site-packages, and gets on to the import: --help then knows our criterion."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name(command)), "data", "--user-dir", "ls_plugin", "--arch", "ls_transformer", "--help"],
        cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "ls_label_smoothed_cross_entropy" in done.stdout  # among the choices of --criterion


@pytest.mark.skipif(not (SITE_PACKAGES / "ls_plugin").is_file(), reason="not an editable install by setup_env.sh")
def test_pip_knows_the_file_that_fairseq_finds():
    """So that uninstalling, or installing over it, takes it away."""
    files = importlib.metadata.files("ls_plugin")
    assert "ls_plugin" in map(str, files)
