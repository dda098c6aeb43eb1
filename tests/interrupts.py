"""Interrupting a command that trains, while it does."""

import os
import signal
import subprocess
import time
from pathlib import Path


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
    deadline = time.monotonic() + 200
    try:
        while not (record.exists() and text in record.read_text()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        screen, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    return process.returncode, screen
