"""Fine-tunes a stock BART with ls_bart. README.md beside this file has the data, the figures and times."""

import argparse
import sys
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.download import digest
from common.errors import RecipeError
from common.recipe import ENVIRONMENTS, SMALL_LAYERS, TINY_LAYERS, Flags, main, words
from common.translation import Translation

PASSAGE_VERSES = 4
MAX_PIECES = 1000  # BART's positions are 1,024
TINY_PASSAGES = {"train": 150, "valid": 10, "test": 10}
# Of the checkpoint's arguments: what makes its shape.
SHAPE = tuple(
    f"{side}_{name}"
    for side in ("encoder", "decoder")
    for name in ("layers", "embed_dim", "ffn_embed_dim", "attention_heads")
)


class Bart(Translation):
    name = "bart_finetune"
    title = "BART fine-tuning"
    description = "Fine-tunes a stock BART on pairs of texts by label-smoothed loss, as fairseq does for summaries."
    needs_gpu = False
    data_mib, train_mib = 300, 30_000
    source, target = "source", "target"
    pieces = 8_000
    tiny_pieces = 500
    kind_of_pieces, coverage = "unigram", 0.9995
    length_penalty = 1.0
    generation: ClassVar[Flags] = {
        "--source-lang": "source",
        "--target-lang": "target",
        "--truncate-source": True,
        "--max-len-a": 0,
        "--max-len-b": 200,
    }

    @staticmethod
    def keeps(source: int, target: int) -> bool:
        return max(source, target) <= MAX_PIECES

    names: ClassVar[Flags] = {
        "--arch": "bart_base",
        "--criterion": "label_smoothed_cross_entropy",
        "--optimizer": "adam",
    }
    flags: ClassVar[Flags] = {
        "--task": "translation",
        "--source-lang": "source",
        "--target-lang": "target",
        "--truncate-source": True,
        "--layernorm-embedding": True,
        "--share-all-embeddings": True,
        "--share-decoder-input-output-embed": True,
        "--required-batch-size-multiple": 1,
        "--skip-invalid-size-inputs-valid-test": True,
        "--label-smoothing": 0.1,
        "--dropout": 0.1,
        "--attention-dropout": 0.1,
        "--weight-decay": 0.01,
        "--adam-betas": "(0.9, 0.999)",
        "--adam-eps": 1e-8,
        "--clip-norm": 0.1,
        "--lr": 3e-5,
        "--lr-scheduler": "polynomial_decay",
        "--total-num-update": 20_000,
        "--warmup-updates": 500,
        "--max-tokens": 2048,
    }
    schedule: ClassVar[Flags] = {
        "--max-update": 20_000,
        "--save-interval-updates": 1000,
        "--keep-interval-updates": 5,
        "--no-epoch-checkpoints": True,
    }
    small: ClassVar[Flags] = {"--max-tokens": 1024}
    tiny: ClassVar[Flags] = {
        "--max-tokens": 512,
        "--lr": 1e-3,
        "--warmup-updates": 2,
        "--dropout": 0.0,
        "--attention-dropout": 0.0,
    }
    # What makes the checkpoint where none is given.
    pretraining: ClassVar[Flags] = {
        "--task": "denoising",
        "--arch": "bart_base",
        "--criterion": "cross_entropy",
        "--optimizer": "adam",
        "--layernorm-embedding": True,
        "--share-all-embeddings": True,
        "--share-decoder-input-output-embed": True,
        "--mask": 0.3,
        "--mask-length": "span-poisson",
        "--replace-length": 1,
        "--tokens-per-sample": 256,
        "--sample-break-mode": "none",
        "--lr": 5e-4,
        "--lr-scheduler": "inverse_sqrt",
        "--warmup-updates": 100,
        "--clip-norm": 0.1,
        "--max-tokens": 1024,
        "--disable-validation": True,
        "--no-epoch-checkpoints": True,
        "--log-format": "json",
        "--log-interval": 10,
    }

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--restore",
            type=Path,
            metavar="FILE",
            help="a stock BART checkpoint, e.g. bart.base/model.pt; needs --binarized",
        )
        parser.add_argument(
            "--binarized",
            type=Path,
            metavar="DIR",
            help="what fairseq-preprocess made with that checkpoint's dictionary, from .source and .target",
        )
        parser.add_argument(
            "--pretrain-updates",
            type=int,
            default=300,
            metavar="N",
            help="of the small stock BART that is made without --restore (default %(default)s)",
        )

    # ---- the checkpoint

    @property
    def checkpoint(self) -> Path:
        return self.args.restore.resolve() if self.args.restore else self.out / "pretrain" / "checkpoint_last.pt"

    def check_given(self) -> None:
        restore, binarized = self.args.restore, self.args.binarized
        if (restore is None) != (binarized is None):
            raise RecipeError(
                "--restore FILE and --binarized DIR go together, since the data must be made with the checkpoint's dictionary; give both or none"
            )
        if restore is not None and not restore.is_file():
            raise RecipeError(f"--restore must be a checkpoint file, got {restore}")
        if binarized is not None and not (binarized / "dict.source.txt").is_file():
            raise RecipeError(
                f"--binarized must be a folder of fairseq-preprocess with --source-lang source --target-lang target, found no dict.source.txt in {binarized}"
            )

    def shape(self) -> Flags:
        """--arch and the sizes of the given checkpoint, or those of the one that is made here."""
        if not self.args.restore:
            layers = TINY_LAYERS if self.args.dry_run else SMALL_LAYERS
            return {"--arch": "bart_base", **layers}
        from ls_plugin import checkpoint
        from ls_plugin.names import stock_name

        state = checkpoint.load_raw(str(self.args.restore))
        saved = state["cfg"]["model"] if state.get("cfg") else state["args"]
        saved = saved if isinstance(saved, dict) else vars(saved)
        arch = stock_name(saved.get("arch") or saved["_name"])
        return {"--arch": arch, **{f"--{name.replace('_', '-')}": saved[name] for name in SHAPE}}

    def training(self, kind: str = "stock", schedule: Flags | None = None) -> list[str]:
        shape = self.shape()
        self.names = self.names | {"--arch": shape.pop("--arch")}
        self.flags = self.flags | shape | {"--finetune-from-model": self.checkpoint}
        return super().training(kind, schedule)

    def pretrain(self) -> None:
        """Makes a small stock BART by denoising, with fairseq-train."""
        folder, n = self.checkpoint.parent, 4 if self.args.dry_run else self.args.pretrain_updates
        if (folder / "done").exists():
            return
        self.say(f"no --restore: pretraining a small stock BART for {n} updates of denoising in {folder}")
        flags = self.pretraining | self.shape() | {"--max-update": n, "--save-dir": folder, "--seed": self.args.seed}
        flags |= self.device()
        command = [sys.executable, "-m", "fairseq_cli.train", str(self.data / "denoising"), *words(flags)]
        self.follow("pretraining", command, folder.with_suffix(".log"), n, ENVIRONMENTS["stock"])
        (folder / "done").touch()

    # ---- data

    def inputs(self) -> dict:
        self.check_given()
        return {**super().inputs(), "recipe.py": digest(Path(__file__)), "binarized": str(self.args.binarized)}

    def prepare(self) -> dict:
        manifest = super().prepare()
        if not self.args.restore and not self.args.data_only:
            self.pretrain()
        return manifest

    def write_splits(self, text: Path) -> dict:
        """Passages of the English Bible, and the first verse of each; whole books are held out."""
        from quickstart.prepare import read_verses, split_verses

        counts = {}
        for split, pairs in split_verses(read_verses("ja"))[0].items():
            verses = [english for _, english in pairs]
            starts = range(0, len(verses) - PASSAGE_VERSES, PASSAGE_VERSES)
            starts = starts[: TINY_PASSAGES[split]] if self.args.dry_run else starts
            counts[split] = len(starts)
            (text / f"{split}.source").write_text(
                "".join(" ".join(verses[i : i + PASSAGE_VERSES]) + "\n" for i in starts), encoding="utf-8"
            )
            (text / f"{split}.target").write_text("".join(verses[i] + "\n" for i in starts), encoding="utf-8")
        return counts

    def finish_data(self, folder: Path) -> None:
        """The passages alone, to pretrain with."""
        self.binarize(
            folder, folder / "denoising", ["--only-source", f"--trainpref={folder / 'pieces' / 'train.source'}"]
        )

    def make_data(self, folder: Path) -> dict:
        if not self.args.binarized:
            return super().make_data(folder)
        (folder / "bin").symlink_to(self.args.binarized.resolve(), target_is_directory=True)
        return {"binarized": str(self.args.binarized)}


if __name__ == "__main__":
    sys.exit(main(Bart))
