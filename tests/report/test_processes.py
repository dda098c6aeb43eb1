"""What runs trainings: nothing of them goes on when they are ended."""

import os
import sys
from pathlib import Path

import pytest

from ls_plugin.report import processes
from tests.limits import LIMIT_S, wait_until


def runs(pid: int) -> bool:
    """Not gone, and no zombie, which in a container nobody may collect."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_what_a_process_has_started_ends_with_it(tmp_path):
    """Also what leads a session of its own, as torchrun's workers do, which a signal to the process group does not reach."""
    told = tmp_path / "pid"
    script = f"""
import subprocess, time
child = subprocess.Popen(["sleep", "{LIMIT_S}"], start_new_session=True)
open({str(told)!r}, "w").write(f"{{child.pid}}\\n")
time.sleep({LIMIT_S})
"""
    with processes.process([sys.executable, "-c", script], tmp_path / "log", dict(os.environ)) as started:
        wait_until(lambda: told.exists() and told.read_text().endswith("\n"), started)
        child = int(told.read_text())
        assert runs(child) and processes.descendants(started.pid) == [child]
    wait_until(lambda: not runs(child))
    assert started.returncode != 0
