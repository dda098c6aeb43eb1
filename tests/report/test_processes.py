"""What runs trainings: nothing of them goes on when they are ended."""

import os
import sys
import time
from pathlib import Path

import pytest

from ls_plugin.report import processes


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
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
open({str(told)!r}, "w").write(f"{{child.pid}}\\n")
time.sleep(60)
"""
    with processes.process([sys.executable, "-c", script], tmp_path / "log", dict(os.environ)) as started:
        while not (told.exists() and told.read_text().endswith("\n")):
            assert started.poll() is None
            time.sleep(0.01)
        child = int(told.read_text())
        assert runs(child) and processes.descendants(started.pid) == [child]
    deadline = time.monotonic() + 10
    while runs(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not runs(child) and started.returncode != 0
