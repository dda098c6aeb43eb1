"""WMT14 English-German, Transformer big: what LightSeq trains. Data, figures and times: README.md."""

import sys
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.download import Archive
from common.recipe import SMALL_LAYERS, Flags, main
from common.translation import Members, Translation

EUROPARL = Archive(
    "https://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz",
    657_632_379,
    "0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",
)
COMMON_CRAWL = Archive(
    "https://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz",
    918_311_367,
    "c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",
)
NEWS_COMMENTARY = Archive(
    "https://www.statmt.org/wmt14/training-parallel-nc-v9.tgz",
    80_418_416,
    "cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485",
)
NEWS_TESTS = Archive(  # of all years up to 2018
    "https://data.statmt.org/wmt19/translation-task/dev.tgz",
    38_654_961,
    "7a7deccf82ebb05ba508dba5eb21356492224e8f630ec4f992132b029b4b25e7",
)


class Wmt14(Translation):
    name = "wmt14_en_de"
    title = "WMT14 en-de, Transformer big"
    description = "Transformer big (transformer_wmt_en_de_big_t2t) on WMT14 English-German, 8,192 tokens a batch, fp16."
    data_mib, train_mib = 12_000, 60_000
    source, target = "en", "de"
    archives: ClassVar[dict[Archive, Members]] = {
        EUROPARL: {"train": (("training/europarl-v7.de-en.en", "training/europarl-v7.de-en.de"),)},
        COMMON_CRAWL: {"train": (("commoncrawl.de-en.en", "commoncrawl.de-en.de"),)},
        NEWS_COMMENTARY: {"train": (("training/news-commentary-v9.de-en.en", "training/news-commentary-v9.de-en.de"),)},
        NEWS_TESTS: {
            "valid": (("dev/newstest2013.en", "dev/newstest2013.de"),),
            # The two directions have the same sentences.
            "test": (("dev/newstest2014-deen-ref.en.sgm", "dev/newstest2014-deen-src.de.sgm"),),
        },
    }
    published: ClassVar[dict[int, float]] = {
        512: 3.08,
        1024: 2.55,
        2048: 2.07,
        4096: 1.75,
        8192: 1.58,
        15_000: 1.53,
    }  # 6+6 layers
    pieces = 32_000
    n_test = 3003
    names: ClassVar[Flags] = {
        "--arch": "transformer_wmt_en_de_big_t2t",
        "--criterion": "label_smoothed_cross_entropy",
        "--optimizer": "adam",
    }
    flags: ClassVar[Flags] = {
        "--task": "translation",
        "--share-all-embeddings": True,
        "--label-smoothing": 0.1,
        "--adam-betas": "(0.9, 0.98)",
        "--clip-norm": 0.0,
        "--weight-decay": 0.0001,
        "--lr": 5e-4,
        "--lr-scheduler": "inverse_sqrt",
        "--warmup-updates": 4000,
        "--max-tokens": 8192,
    }
    schedule: ClassVar[Flags] = {
        "--max-update": 100_000,
        "--save-interval-updates": 1500,
        "--keep-interval-updates": 10,
        "--no-epoch-checkpoints": True,
    }
    small: ClassVar[Flags] = SMALL_LAYERS | {"--max-tokens": 1024}


if __name__ == "__main__":
    sys.exit(main(Wmt14))
