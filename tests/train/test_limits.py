"""Options out of their range, contradictions and missing packages: refused before a run starts; what has a meaning is not."""

import importlib.util
import re
from argparse import Namespace

import pytest
from fairseq import options
from fairseq.dataclass import initialize
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import open_dict

from ls_plugin import limits
from ls_plugin.errors import UnsupportedError, UsageError

PARSERS = {
    "train": options.get_training_parser,
    "validate": options.get_validation_parser,
    "generate": options.get_generation_parser,
    "interactive": options.get_interactive_generation_parser,
}
TRAIN = ["data", "--arch", "ls_transformer_tiny", "--optimizer", "ls_adam", "--max-tokens", "100"]
TRAIN += ["--criterion", "ls_label_smoothed_cross_entropy"]


def parse(*flags, command="train"):
    start = TRAIN if command == "train" else ["data", "--path", "x.pt", "--task", "translation"]
    return options.parse_args_and_arch(PARSERS[command](), [*start, *flags])


def refusal(*flags, command="train"):
    with pytest.raises(UsageError) as caught:
        parse(*flags, command=command)
    message = str(caught.value)
    assert "\n" not in message
    return message


# One flag of every range and both of its sides.
@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("--dropout", "1.5", "must lie in [0, 1]"),
        ("--dropout", "-0.1", "must lie in [0, 1]"),
        ("--attention-dropout", "nan", "must lie in [0, 1]"),
        ("--encoder-layerdrop", "2", "must lie in [0, 1]"),
        ("--label-smoothing", "2", "must lie in [0, 1]"),
        ("--adam-betas", "0.9", "must be two numbers in [0, 1)"),
        ("--adam-betas", "(0.9, 1.0)", "must be two numbers in [0, 1)"),
        ("--adam-betas", "(0.9, nan)", "must be two numbers in [0, 1)"),
        ("--adam-eps", "-1", "must be at least 0"),
        ("--adam-eps", "inf", "must be at least 0"),
        ("--weight-decay", "nan", "must be at least 0"),
        ("--max-tokens", "0", "must be at least 1"),
        ("--max-tokens-valid", "0", "must be at least 1"),
        ("--batch-size", "-1", "must be at least 1"),
        ("--required-batch-size-multiple", "0", "must be at least 1"),
        ("--update-freq", "0", "must be at least 1"),
        ("--update-freq", "2,0", "must be at least 1"),
        ("--lr", "-0.1", "must be at least 0"),
        ("--ema-decay", "-1", "must lie in [0, 1]"),
        ("--clip-norm", "nan", "must be a number"),
        ("--stop-time-hours", "nan", "must be a number"),
        ("--log-interval", "0", "must be at least 1"),
        ("--validate-interval", "0", "must be at least 1"),
        ("--save-interval", "0", "must be at least 1"),
        ("--keep-interval-updates-pattern", "0", "must be at least 1, or -1 for off"),
        ("--max-update", "-1", "must be at least 0"),
        ("--max-epoch", "-1", "must be at least 0"),
        ("--seed", "-5", "must lie in [0, 4000000000]"),
        ("--seed", "4294967295", "must lie in [0, 4000000000]"),
        ("--num-workers", "-1", "must be at least 0"),
        ("--data-buffer-size", "-1", "must be at least 0"),
        ("--distributed-world-size", "0", "must be at least 1"),
        ("--distributed-port", "70000", "must lie in [-1, 65535]"),
        ("--fp16-scale-window", "0", "must be at least 1"),
        ("--fp16-init-scale", "0", "must be greater than 0"),
        ("--encoder-attention-heads", "0", "must be at least 1"),
        ("--encoder-layers", "-1", "must be at least 0"),
        ("--max-source-positions", "0", "must be at least 1"),
        ("--ema-decay", "1.5", "must lie in [0, 1]"),
    ],
)
def test_training_refuses_what_has_no_meaning(flag, value, expected):
    message = refusal(flag, value)
    assert message.startswith(f"{flag} ") and expected in message
    assert message.count(";") == 1  # one fault, and its remedy


@pytest.mark.parametrize("command", ["generate", "interactive"])
@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("--beam", "0", "must be at least 1"),
        ("--nbest", "0", "must be at least 1"),
        ("--lenpen", "inf", "must be finite"),
        ("--lenpen", "nan", "must be finite"),
        ("--unkpen", "nan", "must be a number"),
        ("--temperature", "0", "must be greater than 0"),
        ("--max-len-a", "nan", "must be finite"),
        ("--sampling-topp", "1.5", "must lie in [0, 1], or -1 for off"),
        ("--num-shards", "0", "must be at least 1"),
        ("--shard-id", "1", "must be less than --num-shards 1"),
        ("--optimizer-overrides", "{", "must be a dict as Python writes it"),
    ],
)
def test_generation_refuses_what_has_no_meaning(command, flag, value, expected):
    assert f"{flag} " in (message := refusal(flag, value, command=command)) and expected in message


def test_every_fault_is_named_at_once():
    message = refusal("--dropout", "2", "--seed", "-1", "--fp16", "--profile", "--update-freq", "0")
    assert all(flag in message for flag in ("--dropout 2.0", "--seed -1", "--update-freq 0"))


@pytest.mark.parametrize(
    "flags",
    [
        ["--dropout", "0"],
        ["--dropout", "1"],
        ["--label-smoothing", "0"],
        ["--clip-norm", "0"],
        ["--clip-norm", "-1"],
        ["--clip-norm", "inf"],
        ["--lr", "0"],
        ["--max-update", "0", "--max-epoch", "0"],
        ["--patience", "-1", "--keep-last-epochs", "-1", "--keep-best-checkpoints", "0"],
        ["--save-interval-updates", "0", "--validate-interval-updates", "-1", "--empty-cache-freq", "0"],
        ["--num-workers", "0", "--data-buffer-size", "0", "--heartbeat-timeout", "-1"],
        ["--adam-betas", "(0.0, 0.98)", "--adam-eps", "0"],
        ["--encoder-layers", "0"],
        ["--stop-min-lr", "-1", "--stop-time-hours", "-1"],
        ["--lr-scheduler", "cosine", "--lr-period-updates", "-1", "--warmup-init-lr", "-1", "--warmup-updates", "0"],
        [
            "--tokenizer",
            "moses",
            "--source-lang",
            "de",
            "--target-lang",
            "en",
        ],  # is stored, and read by nobody who trains
    ],
    ids=" ".join,
)
def test_training_keeps_what_fairseq_reads_as_off(flags):
    parse(*flags)


@pytest.mark.parametrize(
    "flags",
    [
        ["--lenpen", "-1", "--unkpen", "inf", "--max-len-b", "0", "--max-len-a", "1.2"],
        ["--sampling", "--sampling-topk", "-1", "--sampling-topp", "-1", "--temperature", "0.5"],
        ["--diverse-beam-groups", "-1", "--no-repeat-ngram-size", "0", "--prefix-size", "0"],
        ["--nbest", "9", "--beam", "5", "--min-len", "0", "--seed", "0"],
    ],
    ids=" ".join,
)
def test_generation_keeps_what_fairseq_reads_as_off(flags):
    parse(*flags, command="generate")


def test_buckets_of_batches_need_the_number_of_tokens():
    """fairseq asserts it once the data is loaded."""
    flags = ["--batch-size", "8", "--num-batch-buckets"]
    start = [*TRAIN[:5], *TRAIN[7:], *flags]
    assert "--max-tokens" not in start
    with pytest.raises(UsageError, match="--num-batch-buckets: must come with --max-tokens"):
        options.parse_args_and_arch(options.get_training_parser(), [*start, "3"])
    options.parse_args_and_arch(options.get_training_parser(), [*start, "0"])
    assert parse(*flags, "3").num_batch_buckets == 3


def test_ranges_of_one_scheduler_hold_for_it_alone():
    assert "--warmup-updates 0: must be at least 1" in refusal(
        "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "0"
    )
    parse("--lr-scheduler", "fixed", "--warmup-updates", "0")
    assert "--total-num-update: required" in refusal("--lr-scheduler", "polynomial_decay")
    args = parse("--lr-scheduler", "polynomial_decay", "--max-update", "20")
    assert args.total_num_update == 20  # as fairseq's documentation has it; its parser leaves None


def test_one_precision():
    for flags in (["--fp16", "--bf16"], ["--memory-efficient-fp16", "--memory-efficient-bf16"]):
        assert refusal(*flags) == "--fp16, --bf16: one at a time; drop one of them"


def test_profile_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(limits.torch.cuda, "is_available", lambda: False)
    assert refusal("--profile").startswith("--profile: needs a CUDA GPU")
    monkeypatch.setattr(limits.torch.cuda, "is_available", lambda: True)
    parse("--profile")


@pytest.fixture
def without(monkeypatch):
    """Shuts packages out."""

    def shut_out(*packages):
        stock = importlib.util.find_spec
        found = lambda name: None if name.partition(".")[0] in packages else stock(name)  # noqa: E731
        monkeypatch.setattr(limits.importlib.util, "find_spec", found)

    return shut_out


@pytest.mark.parametrize(
    ("flags", "package", "remedy"),
    [
        (["--eval-bleu", "--eval-bleu-detok", "moses"], "sacremoses", "pip install sacremoses"),
        (["--tensorboard-logdir", "x"], "tensorboardX", "pip install tensorboardX"),
        (["--wandb-project", "x"], "wandb", "pip install wandb"),
        (["--use-plasma-view"], "pyarrow", "pip install 'pyarrow<12'"),
        (["--optimizer", "adam", "--ddp-backend", "fully_sharded"], "fairscale", "pip install fairscale"),
    ],
)
def test_a_missing_package_is_named_before_training(without, flags, package, remedy):
    without(package, "tensorboard")
    message = refusal(*flags)
    assert message.count(";") == 1
    assert f"needs the package {package}, which is not installed; {remedy}, or drop the flag" in message


def test_a_package_counts_where_it_is_read_only(without, monkeypatch):
    without("sacremoses")
    assert "sacremoses" in refusal("--tokenizer", "moses", command="generate")
    parse("--eval-bleu-detok", "moses")  # without --eval-bleu
    monkeypatch.setattr(limits.importlib.util, "find_spec", lambda name: name == "tensorboardX")
    parse("--tensorboard-logdir", "x")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("beam 4", "--eval-bleu-args beam 4: must be a JSON object"),
        ("[4]", "--eval-bleu-args [4]: must be a JSON object"),
        ('{"beam": 0}', "--eval-bleu-args: --beam 0: must be at least 1"),
        ('{"beam": "4"}', '--eval-bleu-args: --beam "4": must be a number; write it without quotes'),
        ('{"beam": 4, "lenpen": NaN}', "--eval-bleu-args: --lenpen nan: must be finite"),
    ],
)
def test_generation_of_eval_bleu(text, expected):
    assert expected in refusal("--eval-bleu", "--eval-bleu-args", text)
    parse("--eval-bleu", "--eval-bleu-args", '{"beam": 4, "max_len_a": 1.2}')


def test_a_detokenizer_that_is_none():
    assert "--eval-bleu-detok nosuch: must be one of moses, nltk, space" in refusal(
        "--eval-bleu", "--eval-bleu-detok", "nosuch"
    )
    parse("--eval-bleu", "--eval-bleu-detok", "space")


@pytest.mark.parametrize("text", ["{", "x", "[1]"])
def test_overrides_that_are_no_dict(text):
    assert f"--model-overrides {text}: must be a dict" in refusal("--model-overrides", text, command="generate")
    parse("--model-overrides", "{'dropout': 0.1}", command="generate")


def test_one_language_must_be_the_datas(tmp_path):
    """With one of two languages fairseq takes both from the data: --source-lang en would train from German."""
    (tmp_path / "train.de-en.de.idx").touch()
    rest = [str(tmp_path), *TRAIN[1:]]
    for flags in (["-s", "en"], ["-t", "de"], ["-s", "fr"]):
        with pytest.raises(UsageError, match="the data are de-en; give both --source-lang and --target-lang"):
            options.parse_args_and_arch(options.get_training_parser(), [*rest, *flags])
    for flags in ([], ["-s", "de"], ["-t", "en"], ["-s", "en", "-t", "de"]):
        options.parse_args_and_arch(options.get_training_parser(), [*rest, *flags])


def test_a_triangle_rises_from_lr():
    rising = ["--lr-scheduler", "triangular", "--lr-period-updates", "10", "--lr", "1e-3", "--max-lr"]
    assert "--max-lr 0.0001: must be greater than --lr 0.001" in refusal(*rising, "1e-4")
    parse(*rising, "1e-2")


def test_moses_needs_the_languages():
    assert "--tokenizer moses: needs --source-lang and --target-lang" in refusal("--tokenizer", "moses")
    parse("--tokenizer", "moses", "--source-lang", "de", "--target-lang", "en")


def test_heads_must_divide_the_width_in_our_architectures():
    assert "--encoder-attention-heads 3: must divide --encoder-embed-dim 64" in refusal(
        "--encoder-attention-heads", "3"
    )
    parse("--arch", "transformer_tiny", "--encoder-attention-heads", "3")


def test_masking():
    common = ["--task", "masked_lm", "--arch", "roberta_base"]
    assert "--mask-prob 0.0: must lie in (0, 1)" in refusal(*common, "--mask-prob", "0")
    assert "must add up to at most 1" in refusal(*common, "--random-token-prob", "0.6", "--leave-unmasked-prob", "0.6")


def configuration(*flags):
    return convert_namespace_to_omegaconf(parse(*flags))


def test_configurations_without_a_command_line():
    """What fairseq-hydra-train gives to the training, in which its main reads the defaults first."""
    initialize.add_defaults(configuration())
    for group, name, value, expected in (
        ("optimization", "update_freq", [0], "--update-freq 0"),
        ("optimization", "lr", [], "--lr: must name at least one number"),
        ("common", "seed", -5, "--seed -5"),
        ("optimizer", "adam_betas", [0.9, 2.0], "--adam-betas [0.9, 2.0]"),
        ("criterion", "label_smoothing", 2.0, "--label-smoothing 2.0"),
    ):
        cfg = configuration()
        with open_dict(cfg):
            cfg[group][name] = value
        with pytest.raises(UsageError, match=re.escape(expected)):
            initialize.add_defaults(cfg)
    cfg = configuration()
    cfg.common.fp16 = cfg.common.bf16 = True
    with pytest.raises(UsageError, match="one at a time"):
        initialize.add_defaults(cfg)


def test_what_ls_adam_refuses_comes_before_the_missing_package(without):
    without("fairscale")
    with pytest.raises(UnsupportedError, match="--ddp-backend fully_sharded is unsupported"):
        initialize.add_defaults(configuration("--ddp-backend", "fully_sharded"))


def test_the_table_names_options_that_exist():
    """In a parser or a configuration of fairseq; a misspelt row would hold for nothing."""
    known = {"slowmo_momentum", "t_mult"}
    tasks = ("translation", "language_modeling", "masked_lm", "denoising", "sentence_prediction")
    runs = [["--task", task] for task in tasks] + [["--task", "masked_lm", "--arch", "roberta"], ["--optimizer", "nag"]]
    schedulers = (
        "cosine",
        "inverse_sqrt",
        "polynomial_decay",
        "reduce_lr_on_plateau",
        "step",
        "tri_stage",
        "triangular",
    )
    runs += [["--lr-scheduler", scheduler] for scheduler in schedulers]
    runs += [
        ["--arch", "transformer_lm"],
        ["--arch", "bart_base"],
        ["--criterion", "label_smoothed_cross_entropy_with_rdrop"],
    ]
    for flags in runs:
        further = ["--max-lr", "1"] if "triangular" in flags else []
        args, _ = options.parse_args_and_arch.__wrapped__(
            PARSERS["train"](), [*TRAIN, *flags, *further], parse_known=True
        )
        known |= vars(args).keys()
    for command in ("generate", "interactive"):
        known |= vars(parse(command=command)).keys()
    known |= vars(options.parse_args_and_arch(options.get_eval_lm_parser(), ["data"])).keys()
    named = {name for names in limits._OF_CHOICE.values() for name in names} | {name for name, *_ in limits._PACKAGES}
    assert limits._RANGES.keys() | named <= known, (limits._RANGES.keys() | named) - known


def test_a_namespace_of_another_program_passes():
    limits.check(Namespace(data="x", mystery=float("inf")))
