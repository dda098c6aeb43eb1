"""The formatters' word on every source file, as the pre-commit hooks have it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def tracked(*patterns: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("no git clone here, so it is not known which files are ours")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def check(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


def test_ruff():
    check([sys.executable, "-m", "ruff", "check", *tracked("*.py")])


def test_clang_format():
    sources = tracked(
        "kernels/*.cpp", "kernels/*.cu", "kernels/*.h", "kernels/*.cuh", "tests/simt/*.cpp", "tests/simt/*.h"
    )
    binary = Path(sys.executable).with_name("clang-format")
    check([str(binary), "--dry-run", "--Werror", *sources])


def test_limits_of_time_are_those_of_tests_limits():
    """A number of seconds in a test holds on the machine on which it was tried."""
    number = re.compile(r"timeout=\d|\b(?:wait|join|communicate)\(\d|(?:monotonic|perf_counter|time)\(\) \+ \d")
    found = [
        f"{name}:{n}: {line.strip()}"
        for name in tracked("tests/*.py")
        for n, line in enumerate((ROOT / name).read_text().splitlines(), 1)
        if number.search(line)
    ]
    assert not found, "give LIMIT_S of tests/limits.py instead:\n" + "\n".join(found)


def test_shell_scripts_parse():
    for script in tracked("*.sh", ".ci/run"):
        check(["bash", "-n", script])
