"""What runs trainings: a process with its log, a reader of the record that it writes, progress."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path


class Display:
    """A progress bar on a terminal, without rich one line that is written again; a plain line every half minute elsewhere (CI logs, pipes, TERM=dumb)."""

    PLAIN_EVERY_S = 30.0
    REWRITE_EVERY_S = 1.0

    def __init__(self) -> None:
        self.bar = None
        self.rewrites = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        if self.rewrites:
            with contextlib.suppress(ImportError):
                from rich import progress

                self.bar = progress.Progress(
                    progress.TextColumn("{task.description:<12}"),
                    progress.BarColumn(bar_width=24),
                    progress.TextColumn("{task.fields[note]}"),
                    transient=True,
                )

    def say(self, text: str) -> None:
        (self.bar.console.print(text, markup=False, highlight=False) if self.bar else print(text, flush=True))

    @contextlib.contextmanager
    def task(self, label: str):
        """Gives a function ``show(fraction, note)``."""
        if self.bar:
            task = self.bar.add_task(label, total=1.0, note="starting")
            with self.bar:
                yield lambda fraction, note: self.bar.update(task, completed=min(fraction, 1.0), note=note)
            self.bar.remove_task(task)
            return
        every_s = self.REWRITE_EVERY_S if self.rewrites else self.PLAIN_EVERY_S
        next_s = time.monotonic() + every_s

        def show(fraction: float, note: str) -> None:
            nonlocal next_s
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + every_s
                line = f"  {label}: {100 * min(fraction, 1.0):3.0f} %  {note}"
                if self.rewrites:
                    print("\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1], end="", flush=True)
                else:
                    print(line, flush=True)

        try:
            yield show
        finally:
            if self.rewrites:
                print("\r\x1b[K", end="", flush=True)


def flags(options: dict) -> list[str]:
    return [word for name, value in options.items() for word in (name, str(value))]


def log_tail(path: Path, lines: int = 12) -> str:
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return "\n".join("    | " + line for line in text.splitlines()[-lines:])


def environment(threads: int) -> dict[str, str]:
    """Of a process that trains with so many threads."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore::FutureWarning,ignore::DeprecationWarning,ignore::SyntaxWarning",
    }


@contextlib.contextmanager
def process(command: list[str], log: Path, env: dict[str, str], cwd: Path | None = None) -> Iterator[subprocess.Popen]:
    """The command in ``cwd``, or the log's folder, with what it says appended to the log; leaving the block ends it, and what it has started."""
    with log.open("a", encoding="utf-8") as output:
        started = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=env, cwd=cwd or log.parent, start_new_session=True
        )
        try:
            yield started
        finally:
            if started.poll() is None:
                below = descendants(started.pid)
                os.killpg(started.pid, signal.SIGKILL)
                for pid in below:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                started.wait()


def descendants(pid: int) -> list[int]:
    """What a process has started, and what these have, in sessions of their own too, as torchrun's workers are; [] where there is no /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = stat.read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found = [pid]
    for of in found:  # grows meanwhile
        found += children.get(of, [])
    return found[1:]


class Follower:
    """Reads the updates that a running training has appended to its record since the file's length at the start."""

    def __init__(self, path: Path):
        self.path = path
        self.offset = path.stat().st_size if path.exists() else 0
        self.updates: list[dict] = []

    def read(self) -> list[dict]:
        """All updates so far."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self.offset)
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self.offset += len(whole) + 1
                self.updates += [entry for entry in map(json.loads, whole.splitlines()) if "step_ms" in entry]
        return self.updates
