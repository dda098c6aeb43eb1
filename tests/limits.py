"""How long a test waits for what should come: one limit, so that it holds on a slow or loaded machine too.

The longest of them, the six runs of tests/train/test_deepspeed.py, takes 36 s beside another job on two cores of an AMD EPYC: here is
room for a processor that is ten times slower and three times as busy. Nothing is judged by it: what meets it hangs.
"""

import subprocess
import time
from collections.abc import Callable

LIMIT_S = 1200


def wait_until(
    condition: Callable[[], object], process: subprocess.Popen | None = None, said: Callable[[], str] = str
) -> None:
    """Waits for the condition, while the process runs.

    Raises:
        AssertionError: the process has ended without it, or the limit is over; with what ``said()`` gives.
    """
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        ended = process is not None and process.poll() is not None
        if ended and condition():  # between the two looks
            return
        assert not ended, f"ended with status {process.returncode} before what was waited for: {said()[-4000:]}"
        assert time.monotonic() < deadline, f"nothing within {LIMIT_S} s: {said()[-4000:]}"
        time.sleep(0.01)
