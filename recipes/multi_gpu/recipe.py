"""Several processes: torchrun and DeepSpeed. README.md beside this file has the data, the figures and times."""

import argparse
import importlib.util
import re
import sys
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import sample
from common.download import digest
from common.errors import RecipeError
from common.recipe import ENVIRONMENTS, SMALL_LAYERS, TRAIN_MODULES, Flags, main
from common.translation import SAMPLE_PAIRS, Translation

HERE = Path(__file__).resolve().parent


BF16_TOLERANCE = 2e-3  # relative: the two add the gradients of 16 bits in another order


def alike(first: list[float], second: list[float], is_bf16: bool) -> bool:
    """Whether two trainings logged the same losses; in bf16 up to its rounding."""
    tolerance = BF16_TOLERANCE if is_bf16 else 0.0
    return len(first) == len(second) > 0 and all(
        abs(a - b) <= tolerance * a for a, b in zip(first, second, strict=True)
    )


class MultiGpu(Translation):
    name = "multi_gpu"
    title = "Several processes"
    description = "Transformer base on the Bible, Japanese-English, in several processes by torchrun: one for each GPU, or two on a CPU; with DeepSpeed where asked for."
    needs_gpu = False
    data_mib, train_mib = 300, 10_000
    source, target = "ja", "en"
    pieces = 8_000
    tiny_pieces = 110
    kind_of_pieces, coverage = "unigram", 0.9995
    names: ClassVar[Flags] = {
        "--arch": "transformer_wmt_en_de",
        "--criterion": "label_smoothed_cross_entropy",
        "--optimizer": "adam",
    }
    flags: ClassVar[Flags] = {
        "--task": "translation",
        "--share-all-embeddings": True,
        "--label-smoothing": 0.1,
        "--adam-betas": "(0.9, 0.98)",
        "--clip-norm": 1.0,
        "--lr": 7e-4,
        "--lr-scheduler": "inverse_sqrt",
        "--warmup-updates": 1000,
        "--max-tokens": 4096,
    }
    schedule: ClassVar[Flags] = {
        "--max-update": 10_000,
        "--save-interval-updates": 500,
        "--keep-interval-updates": 10,
        "--no-epoch-checkpoints": True,
    }
    small: ClassVar[Flags] = SMALL_LAYERS | {"--max-tokens": 512}
    tiny: ClassVar[Flags] = Translation.tiny | {"--max-tokens": 256}

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--nproc", type=int, metavar="N", help="processes (default: one for each GPU, two on a CPU)"
        )
        parser.add_argument(
            "--deepspeed",
            type=Path,
            metavar="FILE",
            help="--train ls under DeepSpeed: a configuration such as recipes/multi_gpu/zero2.json",
        )

    def inputs(self) -> dict:
        args = self.args
        if args.nproc is not None and args.nproc < 1:
            raise RecipeError(f"--nproc must be at least 1, got {args.nproc}")
        if args.deepspeed and not (args.train or args.evaluate):
            raise RecipeError(
                "--deepspeed: goes with --train ls and --evaluate ls alone, since stock fairseq has no such flag"
            )
        return {**super().inputs(), "recipe.py": digest(Path(__file__))}

    @property
    def nproc(self) -> int:
        import torch

        return self.args.nproc or (2 if self.on_cpu else torch.cuda.device_count())

    @property
    def threads_each(self) -> int:
        return max(1, self.args.threads // self.nproc)

    def report_options(self) -> Flags:
        return {"--nproc": self.nproc, "--threads": self.threads_each}

    def write_splits(self, text: Path) -> dict:
        from quickstart.prepare import read_verses, split_verses, write_text

        if self.args.dry_run:
            splits = {split: sample.pairs(n, seed=len(split)) for split, n in SAMPLE_PAIRS.items()}
        else:
            splits = split_verses(read_verses(self.source))[0]
        text.rmdir()
        write_text(splits, text, self.source)
        return {split: len(pairs) for split, pairs in splits.items()}

    # ---- several processes

    def save_dir(self, kind: str) -> Path:
        folder = super().save_dir(kind)
        return folder.with_name(f"{kind}_{self.args.deepspeed.stem}") if self.args.deepspeed else folder

    def command(self, kind: str) -> tuple[list[str], dict[str, str]]:
        """torchrun, and what the processes need in their environment."""
        environment = dict(ENVIRONMENTS[kind])
        if self.args.deepspeed:
            if kind == "stock":
                raise RecipeError("--deepspeed: stock fairseq has no such flag; give it with --train ls")
            if importlib.util.find_spec("deepspeed") is None:
                raise RecipeError(
                    "--deepspeed needs DeepSpeed: DS_BUILD_OPS=0 .venv/bin/pip install --no-build-isolation 'ls_plugin[deepspeed]'"
                )
            if not self.args.deepspeed.is_file():
                raise RecipeError(
                    f"--deepspeed must be a JSON file such as recipes/multi_gpu/zero2.json, got {self.args.deepspeed}"
                )
        if kind == "stock" and self.on_cpu and self.nproc > 1:
            raise RecipeError(
                "--train stock: stock fairseq cannot train in several processes on a CPU under torchrun; --train ls, or --nproc 1"
            )
        if self.on_cpu:
            environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(self.threads_each)}
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(self.nproc),
            "-m",
            TRAIN_MODULES[kind],
        ]
        return launch, environment

    def further(self) -> list[str]:
        return ["--deepspeed", str(self.args.deepspeed.resolve())] if self.args.deepspeed else []

    def dry_run(self) -> int:
        """Also under DeepSpeed, where it is installed: by the same losses, since an update is the same there."""
        status = super().dry_run()
        if importlib.util.find_spec("deepspeed") is None:
            self.say("DeepSpeed is not installed: that part was left out")
            return status
        first = self.losses("ls")
        self.args.deepspeed = HERE / "zero2.json"
        self.train("ls")
        second = self.losses("ls")
        self.say(f"losses under torchrun alone and under ZeRO stage 2: {first} and {second}")
        if not alike(first, second, self.args.precision == "bf16"):
            raise RecipeError(
                "DeepSpeed must train as torchrun alone does, to every digit that fairseq logs (bf16: 0.2 %)"
            )
        return status

    def losses(self, kind: str) -> list[float]:
        log = self.save_dir(kind).with_suffix(".log").read_text(encoding="utf-8")
        return [float(loss) for loss in re.findall(r'train_inner \| \{.*?"loss": "([\d.]+)"', log)]


if __name__ == "__main__":
    sys.exit(main(MultiGpu))
