"""What a training under the stop-watch (``timed_train.py``) has left in its record."""

from __future__ import annotations

import hashlib
import json
import statistics
import struct
from dataclasses import dataclass, field, replace
from pathlib import Path

STOPWATCH = Path(__file__).with_name("timed_train.py")  # run by its path, since stock must not import the plugin
PHASES = ("forward", "backward", "sync", "clip", "update", "rest")
WARMUP_UPDATES = 10  # left out of the timings: first touch of memory, thread start, library set-up
# Dropout masks differ between the two, so losses agree only as far as two seeds of one of them would. Relative; of the mean
# over the last quarter of the updates.
LOSS_TOLERANCE = 0.02
CURVE_WINDOW = 10  # updates in the running mean of a curve, for both kinds alike


class RecordError(Exception):
    """A record cannot be used; the message names the file, what is wrong and the remedy."""


@dataclass
class Run:
    """What one training left behind. A run that was continued is one run: its times go on.

    warm_up: updates at the start that do not count for the timings.
    """

    kind: str
    updates: list[dict] = field(default_factory=list)  # as timed_train.py writes them
    valid: list[tuple[int, float]] = field(default_factory=list)  # (update, loss in bits per token)
    threads: int = 0
    device: str = ""
    n_params: int = 0
    kernels: int | None = None  # of one update
    startup_s: float = 0.0
    finished: bool = False
    interrupted: bool = False
    warm_up: int = WARMUP_UPDATES

    @property
    def complete(self) -> bool:
        """Whether it made all its updates."""
        return self.finished and not self.interrupted

    @property
    def losses(self) -> list[float]:
        return [update["loss"] for update in self.updates]

    @property
    def timed(self) -> list[dict]:
        """The updates that count for the speed: those that ran without a stop-watch inside, or all where each had one."""
        updates = self.updates[self.warm_up :]
        return [update for update in updates if update["phase_ms"] is None] or updates

    @property
    def split(self) -> list[dict]:
        """The updates that count for the phases."""
        return [update for update in self.updates[self.warm_up :] if update["phase_ms"] is not None]

    def final_loss(self) -> float:
        """Mean loss over the last quarter of the updates, in bits per token."""
        return statistics.fmean(self.losses[-max(1, len(self.losses) // 4) :])

    def first(self, n: int) -> Run:
        """The same run as if it had ended after so many updates; its memory and its validations too."""
        if n >= len(self.updates):
            return self
        updates = self.updates[:n]
        valid = [(update, loss) for update, loss in self.valid if update <= updates[-1]["update"]]
        return replace(self, updates=updates, valid=valid, finished=False)

    def loss_digest(self) -> str:
        """Eight digits that two runs share only if every loss has the same bits."""
        return hashlib.sha256(struct.pack(f"{len(self.losses)}d", *self.losses)).hexdigest()[:8]


def read_run(path: Path, warm_up: int = WARMUP_UPDATES) -> Run:
    """Reads a record; a last line cut short by a kill is left out.

    Raises:
        RecordError: no such file, or not a record.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise RecordError(f"report: {path} must be a record of timed_train.py, found none; run it again") from None
    run, offset_s = Run("", warm_up=warm_up), 0.0
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            if "start" in entry:
                run.kind, run.threads, run.device = entry["start"], entry["threads"], entry["device"]
                run.n_params, run.startup_s = entry.get("n_params", 0), entry["startup_s"]
                run.finished = False
                offset_s = run.updates[-1]["time_s"] if run.updates else 0.0
            elif "end" in entry:
                run.finished, run.interrupted = True, entry["interrupted"]
            elif "kernels" in entry:
                run.kernels = entry["kernels"]
            elif "valid_loss" in entry:
                if entry["valid_loss"] is not None:
                    run.valid.append((entry["update"], float(entry["valid_loss"])))
            else:
                # Updates after the checkpoint that a killed run was continued from are done again.
                while run.updates and run.updates[-1]["update"] >= entry["update"]:
                    run.updates.pop()
                if entry["phase_ms"] is not None and set(entry["phase_ms"]) != set(PHASES):
                    raise ValueError(f"phases must be {', '.join(PHASES)}")
                run.updates.append({**entry, "time_s": entry["time_s"] + offset_s})
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise RecordError(
                f"report: {path}, line {number}: expected a line of this version's timed_train.py, got {line[:60]!r} ({error}); "
                "delete the file and run it again"
            ) from error
    return run


def running_mean(values: list[float], window: int = CURVE_WINDOW) -> list[float]:
    """Mean over the last ``window`` values, over fewer at the start."""
    return [statistics.fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]
