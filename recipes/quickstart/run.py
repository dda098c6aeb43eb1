"""The quickstart: real data, stock fairseq and ls_plugin in turn, a trained model, translations, a report.

    bash recipes/quickstart/run.sh [--minutes M]

Parts: the data (``prepare.py``); (a) stock and ls train the same updates in turn, each in a fresh process; (b) ls trains on
from there until the time is up; (c) the test split is translated and scored. Everything runs through fairseq's own
commands and their lightseq- twins. README.md beside this file has the flags and the figures to expect.
"""

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

if __name__ == "__main__":
    logging.disable(logging.INFO)  # fairseq's remarks about optional packages, as it is imported

import prepare  # it puts recipes/ on the path
import report
from common.errors import RecipeError
from common.translation import read_hypotheses
from trainings import KINDS, MODEL, TRAINING

from ls_plugin import routes
from ls_plugin.report import tables
from ls_plugin.report.processes import Display, Follower, environment, flags, log_tail, process
from ls_plugin.report.records import STOPWATCH

HERE = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
BEAM = 4
FREE_MIB = 1000  # the data, two checkpoints in the making, logs
STOP_GRACE_S = 60  # for the update in hand and its checkpoint


class QuickstartError(RecipeError):
    """A part failed; the message says what and how to go on."""


class Quickstart:
    """One quickstart in one output folder."""

    def __init__(self, args: argparse.Namespace, display: Display):
        self.args = args
        self.display = display
        self.out: Path = args.out
        self.data = self.out / "data"
        self.checkpoints = self.out / "checkpoints"
        self.environment = environment(args.threads)

    # ---- settings

    def settings(self) -> dict:
        """Written to settings.json: what the figures depend on."""
        import torch

        cuda = self.args.device == "cuda"
        return {
            "text": f"{report.SOURCE}-{prepare.TARGET}",
            "device": self.args.device,
            "device_name": torch.cuda.get_device_name() if cuda else f"CPU ({routes.processor()})",
            "precision": "fp16" if cuda else "fp32",
            "threads": self.args.threads,
            "seed": self.args.seed,
            "updates": self.args.updates,
            "rounds": self.args.rounds,
            "minutes": self.args.minutes,
            "python": sys.version.split()[0],
            "torch": torch.__version__,
        }

    def start(self) -> None:
        """Checks the disk, then keeps or clears what an earlier quickstart left in the folder."""
        self.out.mkdir(parents=True, exist_ok=True)
        free_mib = shutil.disk_usage(self.out).free >> 20
        if free_mib < FREE_MIB:
            raise QuickstartError(
                f"{FREE_MIB} MiB of free disk are needed at {self.out}, got {free_mib} MiB; free some, or --out DIR"
            )
        path, settings = self.out / "settings.json", self.settings()
        if self.args.resume:
            if not path.exists():
                raise QuickstartError(
                    f"--continue needs an earlier quickstart in {self.out}, found none; run it without --continue"
                )
            before = json.loads(path.read_text(encoding="utf-8"))
            changed = [name for name in settings if name != "minutes" and before.get(name) != settings[name]]
            if changed:
                detail = ", ".join(f"{name} {before.get(name)} -> {settings[name]}" for name in changed)
                raise QuickstartError(
                    f"--continue must go on with the same settings, changed: {detail}; run it without --continue"
                )
        else:
            for folder in (self.out / "runs", self.checkpoints):
                shutil.rmtree(folder, ignore_errors=True)
            for name in (
                "translation.json",
                "generate.txt",
                "report.html",
                "report.md",
                "report.json",
                "quickstart.png",
            ):
                (self.out / name).unlink(missing_ok=True)
        path.write_text(json.dumps(settings, indent=1), encoding="utf-8")

    # ---- training

    def train(
        self, kind: str, name: str, options: list[str], show, target: int | None = None, deadline: float | None = None
    ):
        """Runs one training in a fresh process and follows its record until it ends.

        On Ctrl-C the process is asked to stop; it finishes the update in hand and saves. Then KeyboardInterrupt goes on up.
        """
        folder = self.out / "runs" / name
        folder.mkdir(parents=True, exist_ok=True)
        record, log = folder / "record.jsonl", folder / "log.txt"
        # One GPU also where there are several: fairseq would start a process for each, out of the stop-watch's reach.
        device = ["--fp16", "--distributed-world-size", "1"] if self.args.device == "cuda" else ["--cpu"]
        command = [sys.executable, str(STOPWATCH), str(record), kind]
        command += ["--deadline", str(deadline)] if deadline else []
        command += [
            "--",
            str(self.data / "bin"),
            "--task",
            "translation",
            "--share-all-embeddings",
            "--no-progress-bar",
        ]
        command += ["--encoder-normalize-before", "--decoder-normalize-before"]
        command += flags({**KINDS[kind], **MODEL, **TRAINING, "--seed": self.args.seed}) + device + options
        follower = Follower(record)
        began = time.time()
        with process(command, log, self.environment) as training:
            try:
                while training.poll() is None:
                    time.sleep(0.2)
                    show(*self.progress(follower, target, began, deadline))
            except KeyboardInterrupt:
                self.display.say("stopping after this update (Ctrl-C again: at once)")
                self.stop(training)
                raise
        if training.returncode != 0:
            raise QuickstartError(
                f"{kind} training ended with status {training.returncode}; the end of {log}:\n{log_tail(log)}"
            )

    def stop(self, process: subprocess.Popen) -> None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_GRACE_S)

    def progress(
        self, follower: "Follower", target: int | None, began: float, deadline: float | None
    ) -> tuple[float, str]:
        """The fraction done and the note beside the bar."""
        updates = follower.read()
        if not updates:
            return 0.0, "starting"
        recent = updates[-20:]
        rate = 1e3 * sum(u["tokens"] for u in recent) / sum(u["step_ms"] for u in recent)
        loss = sum(u["loss"] for u in recent) / len(recent)
        done = updates[-1]["update"]
        if deadline:
            fraction, left_s = (time.time() - began) / max(deadline - began, 1e-9), deadline - time.time()
        else:
            fraction = done / target
            left_s = (target - done) * sum(u["step_ms"] for u in recent) / len(recent) / 1e3
        left = f"{max(0, left_s) // 60:.0f}:{max(0, left_s) % 60:02.0f} left"
        return fraction, f"update {done:,}  loss {loss:6.3f}  {rate:7,.0f} tokens/s  {left}"

    def compare(self) -> None:
        """(a): the same updates from the same seed, in turn: stock, ls, then ls, stock, and so on.

        So neither is always the one that runs on a cooler or a quieter machine. The last ls run leaves its checkpoint.
        """
        total = self.args.updates
        for index in range(1, self.args.rounds + 1):
            for kind in report.KINDS if index % 2 else reversed(report.KINDS):
                name = f"{kind}-{index}"
                record = self.out / "runs" / name / "record.jsonl"
                keep = kind == "ls" and index == self.args.rounds
                if record.exists():
                    run = report.read_run(record)
                    if run.complete and len(run.updates) == total and (not keep or self.last_checkpoint().exists()):
                        self.display.say(f"(a) {kind} {index}/{self.args.rounds}: kept from before")
                        continue
                    shutil.rmtree(record.parent)
                options = ["--max-update", str(total), "--disable-validation"]
                if keep:
                    shutil.rmtree(self.checkpoints, ignore_errors=True)
                    options += ["--save-dir", str(self.checkpoints), "--no-epoch-checkpoints"]
                else:
                    options += ["--no-save", "--save-dir", str(record.parent / "checkpoints")]
                with self.display.task(f"(a) {kind} {index}/{self.args.rounds}") as show:
                    self.train(kind, name, options, show, target=total)
                loss = report.read_run(record).final_loss()
                self.display.say(f"(a) {kind} {index}/{self.args.rounds}: {total} updates, loss {loss:.3f}")

    def last_checkpoint(self) -> Path:
        return self.checkpoints / "checkpoint_last.pt"

    def train_on(self) -> None:
        """(b): ls goes on from (a)'s checkpoint for the time budget, then validates and saves."""
        deadline = time.time() + 60 * self.args.minutes
        options = ["--save-dir", str(self.checkpoints), "--no-epoch-checkpoints"]
        with self.display.task("(b) ls") as show:
            self.train("ls", "ls-train", options, show, deadline=deadline)

    def warn_if_busy(self) -> None:
        """Threads that wait for each other suffer from every core that is taken away: a busy machine slows steps tenfold."""
        busy, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
        if busy + self.args.threads > cores + 1:
            self.display.say(
                f"note: the load here is {busy:.1f} on {cores} cores already: the timings will suffer (fewer --threads?)"
            )

    # ---- translation

    def translate(self) -> None:
        """(c): lightseq-generate on the test split, and its scores."""
        import sacrebleu

        log, raw = self.out / "generate.log", self.out / "generate.txt"
        command = [str(BIN / "lightseq-generate"), str(self.data / "bin"), "--path", str(self.last_checkpoint())]
        command += [
            "--gen-subset",
            "test",
            "--beam",
            str(BEAM),
            "--max-tokens",
            "8000",
            "--remove-bpe",
            "sentencepiece",
        ]
        # A model after minutes of training does not always know when to stop. Both sides have as many pieces.
        command += ["--max-len-a", "1.2", "--max-len-b", "10", "--seed", str(self.args.seed), "--num-workers", "0"]
        command += ["--no-progress-bar"] + (["--fp16"] if self.args.device == "cuda" else ["--cpu"])
        references = (self.data / "text" / "test.en").read_text(encoding="utf-8").splitlines()
        sources = (self.data / "text" / f"test.{report.SOURCE}").read_text(encoding="utf-8").splitlines()
        began = time.time()
        with self.display.task("(c) test") as show, raw.open("w") as output, log.open("w") as errors:
            process = subprocess.Popen(
                command, stdout=output, stderr=errors, env=self.environment, start_new_session=True
            )
            try:
                while process.poll() is None:
                    time.sleep(0.2)
                    done = raw.read_bytes().count(b"\nD-")
                    show(done / len(sources), f"{done:,} of {len(sources):,} verses")
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if process.returncode != 0:
            raise QuickstartError(
                f"lightseq-generate ended with status {process.returncode}; the end of {log}:\n{log_tail(log)}"
            )
        hypotheses = read_hypotheses(raw.read_text(encoding="utf-8"), len(sources))
        metric = sacrebleu.BLEU()
        bleu = metric.corpus_score(hypotheses, [references])
        translation = report.Translation(
            sources=sources,
            references=references,
            hypotheses=hypotheses,
            bleu=f"{bleu} {metric.get_signature()}",
            bleu_score=bleu.score,
            chrf_score=sacrebleu.corpus_chrf(hypotheses, [references]).score,
            unchanged_bleu_score=metric.corpus_score(sources, [references]).score,
            seconds=round(time.time() - began, 1),
        )
        kept = json.dumps(dataclasses.asdict(translation), ensure_ascii=False)
        (self.out / "translation.json").write_text(kept, encoding="utf-8")
        for source, reference, hypothesis in translation.samples():
            self.display.say(f"\n  kjv  {source}\n  ref  {reference}\n  ls   {hypothesis or '(empty)'}")
        self.display.say("")

    # ---- all of it

    def run(self) -> int:
        """Runs the parts; returns the exit status: 0, 1 where stock and ls did not train alike, 130 after Ctrl-C."""
        self.start()
        part, interrupted = "the data", ""
        try:
            manifest = prepare.prepare(self.data, self.display.say, source=report.SOURCE)
            verses = ", ".join(f"{count:,} {split}" for split, count in manifest["verses"].items())
            self.display.say(f"data: verses: {verses}; {self.args.threads} threads, {self.args.device}")
            self.warn_if_busy()
            self.display.say(textwrap.fill(report.EXPECTATION, tables.width()))
            part = "(a) stock and ls in turn"
            self.compare()
            part = "(b) training on"
            self.train_on()
            part = "(c) translating the test split"
            self.translate()
        except KeyboardInterrupt:
            interrupted = part
        told = report.collect(self.out)
        told.interrupted = interrupted
        report.write(told)
        print("\n" + report.summary(told))
        if interrupted:
            return 130
        return 0 if told.comparison and told.comparison.alike else 1


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.sh", description="Stock fairseq and ls_plugin in turn, then a trained model."
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=4.0,
        help="how long (b) trains (default %(default)g); (a) takes its own time before, about 2 minutes on two idle cores",
    )
    parser.add_argument("--updates", type=int, help="updates of each run in (a) (default: 60 on a CPU, 300 on a GPU)")
    parser.add_argument("--rounds", type=int, default=2, help="how often stock and ls take turns (default %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: all cores that this process may use)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: the GPU, if there is one"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, default=HERE / "out", help="output folder (default: out/ beside this script)"
    )
    parser.add_argument("--continue", dest="resume", action="store_true", help="keep what has run, go on from there")
    args = parser.parse_args(arguments)
    for name, least in (("minutes", 0.01), ("rounds", 1), ("threads", 1), ("updates", report.LEAST_UPDATES)):
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name} must be at least {least}, got {value}")
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that torch can use, found none; lightseq-doctor says why")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.threads = args.threads or len(os.sched_getaffinity(0))
    args.updates = args.updates or (300 if args.device == "cuda" else 60)
    args.out = args.out.resolve()
    return args


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's stop is a Ctrl-C
    try:
        return Quickstart(parse_args(), Display()).run()
    except (RecipeError, report.RecordError) as error:
        print(f"\nquickstart: {error}", file=sys.stderr)
    except OSError as error:
        print(
            f"\nquickstart: {error}; fix it, then go on with: bash recipes/quickstart/run.sh --continue",
            file=sys.stderr,
        )
    except KeyboardInterrupt:
        print("\nquickstart: interrupted; go on with: bash recipes/quickstart/run.sh --continue", file=sys.stderr)
        return 130
    return 1


if __name__ == "__main__":
    sys.exit(main())
