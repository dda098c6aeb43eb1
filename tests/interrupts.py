"""Interrupting a command that trains, while it does."""

import os
import signal
import subprocess
from pathlib import Path

from tests.limits import LIMIT_S, wait_until


def interrupt(command: list[str], record: Path, text: str, number: int, **environment: str) -> tuple[int, str]:
    """Runs the command, sends it the signal once the record holds the text; its status, and what it said."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
        # A shell starts background jobs with SIGINT ignored, and the tests may be one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_until(lambda: record.exists() and text in record.read_text(), process)
        process.send_signal(number)
        screen, _ = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    return process.returncode, screen
