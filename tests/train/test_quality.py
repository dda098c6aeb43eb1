"""The quality gate in its short form: small trainings with dropout, stock and ls, three seeds each, judged by the validation loss.

A seed gives both the same weights to begin with and the same batches, so that only the dropout masks differ. The mean of ls may lie as far from
stock's as stock's seeds lie from each other. Three seeds can lie close together by chance, so there is a least bound. The long form is recipes/quality.
"""

import importlib.util
import random
import shlex
import statistics
from pathlib import Path

import fairseq_cli.train
import pytest
import sentencepiece
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import preprocess

import ls_plugin  # noqa: F401 (registers the names)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (1, 2, 3)
# Layer norm first and much dropout: there stock's seeds lie close together, and a fault of dropout shows. With layer norm last and half as much, the
# losses of translation lay 0.14 apart over six seeds.
TRAINING = shlex.split(
    "--lr 4e-3 --lr-scheduler inverse_sqrt --warmup-updates 40 --adam-betas (0.9,0.98) --clip-norm 1.0 --dropout 0.4 "
    "--attention-dropout 0.2 --activation-dropout 0.2 --max-update 200 --validate-interval 1000 --no-save --cpu --num-workers 0 "
    "--no-progress-bar --log-interval 1000 --share-decoder-input-output-embed --decoder-layers 2 --decoder-attention-heads 4 "
    "--decoder-normalize-before"
)
# Bits per token: about two standard errors of the difference of two such means.
LEAST_BOUND = {"translation": {"loss": 0.03, "nll_loss": 0.035}, "language_modeling": {"loss": 0.035}}
TASKS = {
    "translation": shlex.split(
        "--task translation --label-smoothing 0.1 --max-tokens 300 --encoder-layers 2 --encoder-attention-heads 4 --encoder-normalize-before "
        "--encoder-embed-dim 32 --encoder-ffn-embed-dim 64 --decoder-embed-dim 32 --decoder-ffn-embed-dim 64"
    ),
    "language_modeling": shlex.split(
        "--task language_modeling --sample-break-mode none --tokens-per-sample 64 --max-target-positions 100 --max-tokens 800 "
        "--decoder-embed-dim 64 --decoder-ffn-embed-dim 128"
    ),
}
NAMES = {
    "translation": {
        "stock": ["--arch", "transformer", "--criterion", "label_smoothed_cross_entropy", "--optimizer", "adam"],
        "ls": ["--arch", "ls_transformer", "--criterion", "ls_label_smoothed_cross_entropy", "--optimizer", "ls_adam"],
    },
    "language_modeling": {
        "stock": ["--arch", "transformer_lm", "--criterion", "cross_entropy", "--optimizer", "adam"],
        "ls": ["--arch", "ls_transformer_lm", "--criterion", "ls_cross_entropy", "--optimizer", "ls_adam"],
    },
}


@pytest.fixture(scope="module")
def verses(tmp_path_factory) -> Path:
    """1,500 English verses to train on and 150 to validate, in 400 pieces, as a language model's data."""
    spec = importlib.util.spec_from_file_location("prepare", ROOT / "recipes" / "quickstart" / "prepare.py")
    prepare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    books = prepare.read_verses("ja")
    lines = [english for _, english in books["Genesis"] + books["Exodus"]]
    random.Random(1).shuffle(lines)
    folder = tmp_path_factory.mktemp("verses")
    splits = {"train": lines[:1500], "valid": lines[1500:1650]}
    text = iter(splits["train"])
    model = folder / "pieces"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=text, model_prefix=str(model), vocab_size=400, num_threads=1, minloglevel=2
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=f"{model}.model")
    for split, kept in splits.items():
        pieces = processor.encode(kept, out_type=str)
        (folder / split).write_text("".join(" ".join(words) + "\n" for words in pieces), encoding="utf-8")
    flags = ["--only-source", "--trainpref", str(folder / "train"), "--validpref", str(folder / "valid")]
    flags += ["--destdir", str(folder / "bin")]
    preprocess.main(options.get_preprocessing_parser().parse_args(flags))
    return folder / "bin"


def train(data: Path, task: str, kind: str, seed: int, monkeypatch) -> dict[str, float]:
    """What fairseq-train logs for the validation split after the last update, in bits per token; in this process."""
    logged = []
    with monkeypatch.context() as patch:
        valid_stats = fairseq_cli.train.get_valid_stats

        def kept(cfg, trainer, stats, *rest):
            logged.append({name: float(stats[name]) for name in ("loss", "nll_loss") if name in stats})
            return valid_stats(cfg, trainer, stats, *rest)

        patch.setattr(fairseq_cli.train, "get_valid_stats", kept)
        arguments = [str(data), *TRAINING, *TASKS[task], *NAMES[task][kind], "--seed", str(seed)]
        args = options.parse_args_and_arch(options.get_training_parser(), arguments)
        fairseq_cli.train.main(convert_namespace_to_omegaconf(args))
    (losses,) = logged
    return losses


def judge(data: Path, task: str, monkeypatch) -> None:
    """The means of ls lie within the spread of stock's seeds, or the least bound, of stock's."""
    losses = {kind: [train(data, task, kind, seed, monkeypatch) for seed in SEEDS] for kind in ("stock", "ls")}
    for name, least in LEAST_BOUND[task].items():
        stock, ours = ([run[name] for run in losses[kind]] for kind in ("stock", "ls"))
        bound = max(least, max(stock) - min(stock))
        assert bound < 0.06 * statistics.fmean(stock), f"{name}: stock's own seeds are too far apart: {stock}"
        difference = statistics.fmean(ours) - statistics.fmean(stock)
        assert abs(difference) <= bound, f"{name}: stock {stock}, ls {ours}: {difference:+.4f} of at most {bound:.4f}"


def test_translation(commands, monkeypatch):
    """Stock's losses were 3.567 to 3.598, their mean 3.586, that of ls 3.584. Broken by hand: 3.657 where dropout did not scale what it kept."""
    judge(commands.data, "translation", monkeypatch)


@pytest.mark.longest
def test_language_model(verses, monkeypatch):
    """Stock's losses were 5.068 to 5.108, their mean 5.092, that of ls 5.088. Blind to the scale of dropout (5.067 against 5.064 for the same seed)."""
    judge(verses, "language_modeling", monkeypatch)
