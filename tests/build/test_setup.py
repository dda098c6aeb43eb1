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
