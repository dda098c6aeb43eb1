"""Does ls train models as good as stock's? Both from nothing, by the same flags and seed, then BLEU of both.

    bash recipes/quality/run.sh [--epochs N] [--sentences N] [--layers N] [--width C]

Parts: the data (Bible, ja->en, by the quickstart's prepare.py); stock and ls trained at the same time, ``--threads`` each, by fairseq's own commands with the quickstart's
stop-watch; the test split translated by both best checkpoints; sacrebleu's paired bootstrap; loss curves. README.md beside this file has the flags.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
QUICKSTART = HERE.parent / "quickstart"
sys.path.insert(0, str(QUICKSTART))

import prepare  # noqa: E402
import run as quickstart  # noqa: E402

from ls_plugin.report import records  # noqa: E402

BIN = Path(sys.executable).parent
BEAM = 4
BOOTSTRAP_SAMPLES = 1000
SIGNIFICANT = 0.05
HEAD_WIDTH = 64
FREE_MIB = 1500  # the data, two checkpoints of each run in the making, logs
STOP_GRACE_S = 120
POLL_S = 3.0
SHOWN = 160  # characters of a sample
SOURCE = "ja"  # the Japanese text: the figures that are kept were measured with it
SHUFFLE_SEED = 1  # of the training verses, where only some are taken
TRAINING = {**quickstart.TRAINING, "--lr": 1e-3, "--warmup-updates": 400, "--log-interval": 100}


class QualityError(quickstart.RecipeError):
    """A part failed; the message says what and how to go on."""


def take_sentences(data: Path, folder: Path, n_sentences: int) -> int:
    """Binarizes so many training pairs, drawn at random, with the whole validation and test splits; returns how many target tokens they have."""
    pairs = [(data / "pieces" / f"train.{side}").read_text(encoding="utf-8").splitlines() for side in (SOURCE, "en")]
    chosen = list(range(len(pairs[0])))
    if n_sentences < len(chosen):
        chosen = sorted(random.Random(SHUFFLE_SEED).sample(chosen, n_sentences))
    complete = folder / "complete"
    if not complete.exists():
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "pieces").mkdir(parents=True)
        for side, lines in zip((SOURCE, "en"), pairs, strict=True):
            (folder / "pieces" / f"train.{side}").write_text("".join(lines[i] + "\n" for i in chosen), encoding="utf-8")
            for split in ("valid", "test"):
                shutil.copy(data / "pieces" / f"{split}.{side}", folder / "pieces")
        prepare.binarize(folder / "pieces", data / "dict.txt", folder / "bin", folder / "preprocess.log", SOURCE)
        complete.touch()
    return sum(len(pairs[1][i].split()) + 1 for i in chosen)


class Run:
    """One kind's training, in a process of its own."""

    def __init__(self, kind: str, folder: Path, command: list[str], environment: dict[str, str]):
        self.kind, self.log = kind, folder / "log.txt"
        self.record = folder / "record.jsonl"
        self.follower = quickstart.Follower(self.record)
        before = records.read_run(self.record).updates if self.record.exists() else []
        self.tokens_before = sum(update["tokens"] for update in before)
        with self.log.open("a", encoding="utf-8") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=folder, start_new_session=True
            )

    def told(self, tokens: int) -> tuple[float, str]:
        """The fraction of the ``tokens`` in all that are trained, and a note."""
        updates = self.follower.read()
        done = self.tokens_before + sum(update["tokens"] for update in updates)
        if not updates:
            return done / tokens, f"{self.kind}: starting"
        loss = sum(update["loss"] for update in updates[-50:]) / len(updates[-50:])
        return done / tokens, f"{self.kind}: update {updates[-1]['update']:,}, loss {loss:.3f}"

    def check(self) -> None:
        if self.process.returncode:
            raise QualityError(
                f"{self.kind} training ended with status {self.process.returncode}; the end of {self.log}:\n"
                f"{quickstart.log_tail(self.log)}"
            )


class Quality:
    """The comparison in one output folder."""

    def __init__(self, args: argparse.Namespace, display: quickstart.Display):
        self.args, self.display, self.out = args, display, args.out
        self.data = self.out / "data"
        self.subset = self.out / "subset"
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(args.threads),
            "MKL_NUM_THREADS": str(args.threads),
            "PYTHONUNBUFFERED": "1",
            "PYTHONWARNINGS": "ignore",
        }

    def folder(self, kind: str) -> Path:
        return self.out / "runs" / kind

    def settings(self) -> dict:
        import torch

        names = ("sentences", "layers", "width", "dropout", "max_tokens", "precision", "threads", "seed")
        chosen = {name: getattr(self.args, name) for name in names}
        return {**chosen, "processor": quickstart.routes.processor(), "torch": torch.__version__}

    def start(self) -> None:
        """Checks the disk, then keeps (--continue) or clears what is in the folder."""
        self.out.mkdir(parents=True, exist_ok=True)
        free_mib = shutil.disk_usage(self.out).free >> 20
        if free_mib < FREE_MIB:
            raise QualityError(f"{FREE_MIB} MiB of free disk are needed at {self.out}, got {free_mib} MiB; --out DIR")
        path, settings = self.out / "settings.json", self.settings()
        if self.args.resume:
            before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            changed = [
                f"{name} {before.get(name)} -> {settings[name]}"
                for name in settings
                if before.get(name) != settings[name]
            ]
            if changed:
                raise QualityError(
                    f"--continue must go on with the settings of an earlier run in {self.out}, changed: {', '.join(changed)}; "
                    "give the same flags, or leave --continue out to begin again"
                )
        else:
            for name in ("runs", "subset"):
                shutil.rmtree(self.out / name, ignore_errors=True)
            for name in ("result.json", "report.md", "loss_curves.png"):
                (self.out / name).unlink(missing_ok=True)
        path.write_text(json.dumps(settings, indent=1), encoding="utf-8")

    def command(self, kind: str) -> list[str]:
        args, folder = self.args, self.folder(kind)
        model = {f"--{name}": args.dropout for name in ("dropout", "attention-dropout", "activation-dropout")}
        for side in ("encoder", "decoder"):
            model |= {f"--{side}-layers": args.layers, f"--{side}-embed-dim": args.width}
            model |= {f"--{side}-ffn-embed-dim": 4 * args.width}
            model |= {f"--{side}-attention-heads": max(1, args.width // HEAD_WIDTH)}
        options = {**quickstart.KINDS[kind], **model, **TRAINING, "--max-tokens": args.max_tokens, "--seed": args.seed}
        command = [sys.executable, str(records.STOPWATCH), str(folder / "record.jsonl"), kind, "--"]
        command += [
            str(self.subset / "bin"),
            "--task",
            "translation",
            "--share-all-embeddings",
            "--no-progress-bar",
            "--cpu",
        ]
        command += ["--encoder-normalize-before", "--decoder-normalize-before", "--no-epoch-checkpoints"]
        if kind == "ls" and args.precision != "fp32":
            command.append(f"--{args.precision}")
        return command + quickstart.flags({**options, "--max-epoch": args.epochs, "--save-dir": folder / "checkpoints"})

    # ---- the parts

    def train(self, tokens_per_epoch: int) -> None:
        """Both at the same time. Ctrl-C: both finish the update in hand and save, then KeyboardInterrupt goes on up."""
        runs = []
        for kind in quickstart.KINDS:
            self.folder(kind).mkdir(parents=True, exist_ok=True)
            # Without the plugin fairseq cannot load its own checkpoints on torch >= 2.6; with --continue it loads those of this recipe.
            environment = self.environment | ({"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"} if kind == "stock" else {})
            runs.append(Run(kind, self.folder(kind), self.command(kind), environment))
        began, tokens = time.time(), tokens_per_epoch * self.args.epochs
        first: float | None = None
        try:
            with self.display.task("training") as show:
                while any(run.process.poll() is None for run in runs):
                    time.sleep(POLL_S)
                    for run in runs:
                        run.check()
                    told = [run.told(tokens) for run in runs]
                    slowest = min(fraction for fraction, _ in told)
                    first = slowest if first is None else first  # more than 0 where runs go on
                    done = slowest - first
                    left_s = (time.time() - began) / done * (1.0 - slowest) if done > 0 else 0.0
                    left = f"{left_s / 60:,.0f} min left" if done > 0 else ""
                    show(slowest, "   ".join([note for _, note in told] + [left]))
        except KeyboardInterrupt:
            self.display.say("stopping after this update (Ctrl-C again: at once)")
            for run in runs:
                run.process.send_signal(signal.SIGTERM)
            for run in runs:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.process.wait(STOP_GRACE_S)
            raise
        finally:
            for run in runs:
                if run.process.poll() is None:
                    run.process.kill()
                    run.process.wait()
        for run in runs:
            run.check()

    def translate(self) -> dict[str, list[str]]:
        """Kind -> hypotheses of the test split, both translated at the same time."""
        count = len((self.data / "text" / "test.en").read_text(encoding="utf-8").splitlines())
        processes = {}
        for kind in quickstart.KINDS:
            command = [str(BIN / "lightseq-generate"), str(self.subset / "bin"), "--gen-subset", "test", "--cpu"]
            command += ["--path", str(self.folder(kind) / "checkpoints" / "checkpoint_best.pt"), "--beam", str(BEAM)]
            command += [
                "--max-tokens",
                "4000",
                "--remove-bpe",
                "sentencepiece",
                "--max-len-a",
                "1.4",
                "--max-len-b",
                "10",
            ]
            command += ["--num-workers", "0", "--no-progress-bar"]
            with (
                (self.folder(kind) / "generate.txt").open("w") as output,
                (self.folder(kind) / "generate.log").open("w") as log,
            ):
                processes[kind] = subprocess.Popen(
                    command, stdout=output, stderr=log, env=self.environment, start_new_session=True
                )
        texts = {kind: self.folder(kind) / "generate.txt" for kind in processes}
        try:
            with self.display.task("translating") as show:
                while any(process.poll() is None for process in processes.values()):
                    time.sleep(1.0)
                    done = {kind: text.read_bytes().count(b"\nD-") for kind, text in texts.items()}
                    show(
                        min(done.values()) / count, ", ".join(f"{kind} {n:,} of {count:,}" for kind, n in done.items())
                    )
        finally:
            for process in processes.values():
                if process.poll() is None:
                    process.kill()
                    process.wait()
        for kind, process in processes.items():
            if process.returncode:
                log = self.folder(kind) / "generate.log"
                raise QualityError(
                    f"translating with {kind} ended with status {process.returncode}; the end of {log}:\n{quickstart.log_tail(log)}"
                )
        return {
            kind: quickstart.read_hypotheses(text.read_text(encoding="utf-8"), count) for kind, text in texts.items()
        }

    def run(self) -> int:
        """Runs the parts; the exit status: 0, also where BLEU differs (the report says so), or 130 after Ctrl-C."""
        self.start()
        prepare.prepare(self.data, self.display.say, source=SOURCE)
        tokens = take_sentences(self.data, self.subset, self.args.sentences)
        self.display.say(
            f"training stock and ls beside each other, {self.args.threads} threads each: {self.args.epochs} epochs of {tokens:,} tokens"
        )
        began = time.time()
        try:
            self.train(tokens)
            trained_s = time.time() - began
            hypotheses = self.translate()
        except KeyboardInterrupt:
            print(f"interrupted; to go on: bash recipes/quality/run.sh --continue, with the same flags ({self.out})")
            return 130
        references = (self.data / "text" / "test.en").read_text(encoding="utf-8").splitlines()
        runs = {kind: records.read_run(self.folder(kind) / "record.jsonl") for kind in quickstart.KINDS}
        result = {
            "settings": self.settings() | {"epochs": self.args.epochs, "tokens_per_epoch": tokens},
            "minutes": round(trained_s / 60, 1),
            "valid_loss": {kind: [loss for _, loss in run.valid] for kind, run in runs.items()},
            "updates": {kind: run.updates[-1]["update"] for kind, run in runs.items()},
            "scores": paired_bootstrap(hypotheses, references),
        }
        (self.out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        draw(runs, result, self.out / "loss_curves.png")
        text = tell(result, hypotheses, references)
        (self.out / "report.md").write_text(text, encoding="utf-8")
        print(f"\n{text}\n{self.out / 'report.md'}, {self.out / 'loss_curves.png'}")
        return 0


# ---- Scores, report, picture ----


def paired_bootstrap(hypotheses: dict[str, list[str]], references: list[str]) -> dict:
    """Metric -> kind -> score, mean and 95 % interval of the bootstrap; p of ls against stock. By sacrebleu."""
    from sacrebleu.metrics import BLEU, CHRF
    from sacrebleu.significance import PairedTest

    test = PairedTest(
        [(kind, hypotheses[kind]) for kind in quickstart.KINDS],
        {"BLEU": BLEU(references=[references]), "chrF2": CHRF(references=[references])},
        references=None,
        test_type="bs",
        n_samples=BOOTSTRAP_SAMPLES,
    )
    signatures, scores = test()
    found = {}
    for name, results in scores.items():
        if name == "System":
            continue
        found[name] = {
            kind: {
                key: None if value is None else float(value)  # some are numpy's, which json refuses
                for key, value in zip(
                    ("score", "mean", "ci", "p"), (result.score, result.mean, result.ci, result.p_value), strict=True
                )
            }
            for kind, result in zip(quickstart.KINDS, results, strict=True)
        }
        found[name]["signature"] = str(signatures[name])
    return found


def verdict(scores: dict) -> str:
    """One sentence on whether BLEU tells the two apart."""
    stock, ls = scores["BLEU"]["stock"], scores["BLEU"]["ls"]
    apart = f"BLEU {ls['score']:.2f} of ls against {stock['score']:.2f} of stock, p {ls['p']:.3f}"
    # Between equal scores sacrebleu's p is small too: no resampling differs by more than nothing.
    if ls["p"] >= SIGNIFICANT or ls["score"] == stock["score"]:
        return f"{apart}: no difference that {BOOTSTRAP_SAMPLES:,} resamplings of the test split could tell from chance"
    return f"{apart}: ls is significantly {'better' if ls['score'] > stock['score'] else 'WORSE'} (one seed each)"


def tell(result: dict, hypotheses: dict[str, list[str]], references: list[str]) -> str:
    """report.md."""
    settings, scores = result["settings"], result["scores"]
    lines = ["# Quality of ls against stock", ""]
    lines += [
        f"Bible ja->en, {settings['sentences']:,} verses, {settings['epochs']} epochs, {settings['layers']}+{settings['layers']} layers, "
        f"C {settings['width']}, dropout {settings['dropout']}, ls in {settings['precision']}, {settings['threads']} threads each, seed {settings['seed']}; "
        f"{result['updates']['stock']:,} and {result['updates']['ls']:,} updates in {result['minutes']:.0f} minutes beside each other.",
        "",
        verdict(scores) + ".",
        "",
        "| test split | stock | ls | p |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name in ("BLEU", "chrF2"):
        cells = [
            f"{s['score']:.2f} ({s['mean']:.2f} ± {s['ci']:.2f})" for s in (scores[name][k] for k in quickstart.KINDS)
        ]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} | {scores[name]['ls']['p']:.3f} |")
    lines += ["", "| validation loss after epoch | stock | ls | ls - stock |", "| --- | ---: | ---: | ---: |"]
    for epoch, (stock, ls) in enumerate(zip(*(result["valid_loss"][k] for k in quickstart.KINDS), strict=False), 1):
        lines.append(f"| {epoch} | {stock:.3f} | {ls:.3f} | {ls - stock:+.3f} |")
    lines += ["", f"`{scores['BLEU']['signature']}`", ""]
    step = max(1, len(references) // 4)
    for i in range(step // 2, len(references), step):
        lines += [f"- reference: {references[i][:SHOWN]}"]
        lines += [f"  - {kind}: {hypotheses[kind][i][:SHOWN]}" for kind in quickstart.KINDS]
    return "\n".join(lines) + "\n"


def draw(runs: dict, result: dict, path: Path) -> None:
    """Training loss (running mean) and validation loss over the updates, both kinds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    for (kind, run), color in zip(runs.items(), ("tab:orange", "tab:blue"), strict=True):
        updates = [update["update"] for update in run.updates]
        smooth = records.running_mean(run.losses, window=max(1, min(100, len(updates) // 20)))
        axis.plot(updates, smooth, color=color, linewidth=0.8, alpha=0.8, label=f"{kind}, training")
        axis.plot(*zip(*run.valid, strict=True), "o--", color=color, markersize=4, label=f"{kind}, validation")
    axis.set_xlabel("updates")
    axis.set_ylabel("label-smoothed loss, bits per token")
    axis.set_title(verdict(result["scores"]).split(":")[0], fontsize=9)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


# ---- Command ----


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.sh", description="Trains stock fairseq and ls_plugin and compares what they translate."
    )
    parser.add_argument("--epochs", type=int, default=10, help="default %(default)s")
    parser.add_argument("--sentences", type=int, default=29_938, help="training verses (default: all 29,938)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each of the two (default %(default)s)")
    parser.add_argument("--layers", type=int, default=3, help="of encoder and of decoder (default %(default)s)")
    parser.add_argument(
        "--width", type=int, default=256, help=f"C; F is four times it, a head {HEAD_WIDTH} (default %(default)s)"
    )
    parser.add_argument("--dropout", type=float, default=0.1, help="at all three places (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=1024, help="of a batch (default %(default)s)")
    parser.add_argument(
        "--precision", choices=("fp32", "bf16", "fp16"), default="fp32", help="of ls; stock trains in fp32"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--out", type=Path, default=HERE / "out", help="output folder (default: out/ beside this script)"
    )
    parser.add_argument(
        "--continue", dest="resume", action="store_true", help="train on from the last checkpoints in --out"
    )
    args = parser.parse_args(arguments)
    for name, least in (("epochs", 1), ("sentences", 100), ("threads", 1), ("layers", 1), ("max_tokens", 256)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if args.width < HEAD_WIDTH or args.width % HEAD_WIDTH:
        parser.error(f"--width must be a multiple of {HEAD_WIDTH}, got {args.width}")
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout must lie in [0, 1), got {args.dropout}")
    args.out = args.out.resolve()
    return args


def main() -> int:
    try:
        return Quality(parse_args(), quickstart.Display()).run()
    except (quickstart.RecipeError, records.RecordError) as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
