"""IWSLT14 German-English: a small corpus of talks. README.md beside this file has the data, the figures and times."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import corpus
from common.download import Archive
from common.recipe import SMALL_LAYERS, Flags, main
from common.translation import MARKED_UP, Members, Translation

TALKS = Archive(
    "https://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz"
)  # nobody has published its size and SHA-256
TESTS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
# The facts about a talk, on a line of its own in both languages; and the marks of its title and description, which are text.
ABOUT = re.compile(r"\s*</?(url|talkid|keywords|speaker|reviewer|translator|doc)\b")
MARKS = re.compile(r"</?(title|description)>")


class Iwslt14(Translation):
    name = "iwslt14_de_en"
    title = "IWSLT14 de-en"
    description = (
        "A small Transformer (transformer_iwslt_de_en) on IWSLT14 German-English talks, 4,096 tokens a batch, fp16."
    )
    data_mib, train_mib = 500, 5_000
    source, target = "de", "en"
    archives: ClassVar[dict[Archive, Members]] = {
        TALKS: {
            "train": (("de-en/train.tags.de-en.de", "de-en/train.tags.de-en.en"),),
            "test": tuple(
                (f"de-en/IWSLT14.{test}.de-en.de.xml", f"de-en/IWSLT14.{test}.de-en.en.xml") for test in TESTS
            ),
        }
    }
    pieces = 10_000
    n_test = 6750
    valid_every = 23
    lower_case = True
    length_penalty = 1.0
    names: ClassVar[Flags] = {
        "--arch": "transformer_iwslt_de_en",
        "--criterion": "label_smoothed_cross_entropy",
        "--optimizer": "adam",
    }
    flags: ClassVar[Flags] = {
        "--task": "translation",
        "--share-all-embeddings": True,
        "--label-smoothing": 0.1,
        "--dropout": 0.3,
        "--adam-betas": "(0.9, 0.98)",
        "--clip-norm": 0.0,
        "--weight-decay": 0.0001,
        "--lr": 5e-4,
        "--lr-scheduler": "inverse_sqrt",
        "--warmup-updates": 4000,
        "--max-tokens": 4096,
    }
    schedule: ClassVar[Flags] = {
        "--max-update": 50_000,
        "--save-interval-updates": 1000,
        "--keep-interval-updates": 10,
        "--no-epoch-checkpoints": True,
    }
    small: ClassVar[Flags] = SMALL_LAYERS | {"--max-tokens": 1024, "--dropout": 0.1}

    def sentences(self, path: Path) -> Iterator[str]:
        if path.name.endswith(MARKED_UP):
            return super().sentences(path)
        return (MARKS.sub("", line) for line in corpus.read_lines(path) if not ABOUT.match(line))


if __name__ == "__main__":
    sys.exit(main(Iwslt14))
