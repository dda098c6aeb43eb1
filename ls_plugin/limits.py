"""What fairseq's options may be set to, checked before a run starts: the one table of ranges, and of packages that options need.

Only what has no meaning is refused. A value that fairseq reads as "off" (0, or -1) stays allowed, and so does all that it accepts and honours.
:func:`install` checks every command line that fairseq parses, and the configuration with which training starts (Hydra's has no parser).
"""

import ast
import importlib.util
import json
import math
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from fairseq import options
from fairseq.data import data_utils, encoders
from fairseq.dataclass import initialize
from omegaconf import DictConfig, OmegaConf

from ls_plugin import data_files
from ls_plugin.errors import UsageError
from ls_plugin.names import PREFIX
from ls_plugin.optim import trainer
from ls_plugin.rebinding import wrap


class Range(NamedTuple):
    """Numbers from ``low`` to ``high``; infinity only where ``high`` is infinite and ``finite`` false. NaN is in no range."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False  # low itself is outside
    below: bool = False  # high itself is outside
    finite: bool = True
    off: tuple = ()  # further values, which turn the option off

    def holds(self, value: float) -> bool:
        if value in self.off:
            return True
        if math.isnan(value) or (self.finite and math.isinf(value)):
            return False
        low = value > self.low if self.above else value >= self.low
        return low and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        off = "".join(f", or {value} for off" for value in self.off)
        if self.high < math.inf:
            return f"must lie in {'(' if self.above else '['}{self.low:g}, {self.high:.12g}{')' if self.below else ']'}{off}"
        if self.low > -math.inf:
            return f"must be {'greater than' if self.above else 'at least'} {self.low:g}{off}"
        return "must be finite" if self.finite else "must be a number"


_PROBABILITY = Range(0, 1)
_DECAY = Range(0, 1, below=True)
_POSITIVE = Range(0, above=True)
_COUNT = Range(1)
_ANY = Range(finite=False)  # of every other float: NaN alone is refused

# The table: a range, and the options that it holds for, in the spelling of fairseq's configuration.
_RANGES = {
    name: allowed
    for allowed, names in {
        # 0 divides by zero, or makes batches without end; a negative one means nothing.
        _COUNT: """
            log_interval all_gather_list_size model_parallel_size distributed_world_size distributed_num_procs nprocs_per_node
            localsgd_frequency fp16_scale_window amp_scale_window max_tokens batch_size max_tokens_valid batch_size_valid
            required_batch_size_multiple required_seq_len_multiple validate_interval num_shards update_freq save_interval
            checkpoint_shard_count beam nbest iter_decode_with_beam softmax_batch max_source_positions max_target_positions
            tokens_per_sample mask_multiple_length max_positions lr_deacy_period encoder_embed_dim decoder_embed_dim
            encoder_ffn_embed_dim decoder_ffn_embed_dim encoder_attention_heads decoder_attention_heads decoder_input_dim
            decoder_output_dim""",
        # 0 is a number of its own, or turns the option off.
        Range(0): """
            num_workers data_buffer_size max_valid_steps shard_id max_epoch max_update min_loss_scale threshold_loss_scale
            amp_batch_retries distributed_rank device_id bucket_cap_mb beam_mt iter_decode_max_iter context_window
            rdrop_alpha adam_eps weight_decay warmup_updates warmup_steps hold_steps decay_steps lr
            min_lr end_learning_rate total_num_update lr_patience lr_threshold encoder_layers decoder_layers insert poisson_lambda
            mask_stdev""",
        _POSITIVE: "fp16_init_scale amp_init_scale temperature lr_shrink lr_decay t_mult max_lr",
        _PROBABILITY: """
            label_smoothing dropout attention_dropout activation_dropout relu_dropout encoder_layerdrop decoder_layerdrop
            adaptive_softmax_dropout pooler_dropout ema_decay fp16_scale_tolerance mask_prob leave_unmasked_prob random_token_prob
            mask mask_random permute rotate""",
        Range(0, 1, off=(-1,)): "sampling_topp permute_sentences",
        _DECAY: "adam_betas momentum slowmo_momentum",
        Range(): "lenpen lenpen_mt lm_weight diverse_beam_strength diversity_rate max_len_a max_len_a_mt warmup_init_lr power",
        Range(1, off=(-1,)): "keep_interval_updates_pattern",
        Range(-1, 65535): "distributed_port",
        Range(-1, 1): "replace_length",
        # numpy's limit is 2**32 - 1, and fairseq adds the epoch.
        Range(0, 4_000_000_000): "seed",
    }.items()
    for name in names.split()
}

# fairseq fills these in from the other where they are not given.
_DERIVED = {"max_tokens_valid": "max_tokens", "batch_size_valid": "batch_size"}

# fairseq's parser leaves these as text, since their default is another option's value.
_UNTYPED = (*_DERIVED, "total_num_update")

# Ranges that hold with one choice of another option only.
_OF_CHOICE = {
    ("lr_scheduler", "inverse_sqrt"): {"warmup_updates": _COUNT},
    ("lr_scheduler", "triangular"): {"lr_period_updates": Range(2)},
    ("task", "masked_lm"): {"mask_prob": Range(0, 1, above=True, below=True)},
}

# An option, the values that need a package (none: all but "off"), the modules of which one must be there, and what to install.
_PACKAGES = (
    ("tensorboard_logdir", (), ("tensorboard", "tensorboardX"), "tensorboardX"),
    ("wandb_project", (), ("wandb",), "wandb"),
    ("aim_repo", (), ("aim",), "aim"),
    ("azureml_logging", (), ("azureml",), "azureml-core"),
    ("use_plasma_view", (), ("pyarrow.plasma",), "'pyarrow<12'"),
    ("ddp_backend", ("fully_sharded", "slowmo"), ("fairscale",), "fairscale"),
    ("tokenizer", ("moses",), ("sacremoses",), "sacremoses"),
    ("tokenizer", ("nltk",), ("nltk",), "nltk"),
    ("bpe", ("sentencepiece",), ("sentencepiece",), "sentencepiece"),
    ("bpe", ("subword_nmt",), ("subword_nmt",), "subword-nmt"),
    ("bpe", ("fastbpe",), ("fastBPE",), "fastBPE"),
    ("bpe", ("bert",), ("transformers",), "transformers"),
    ("bpe", ("hf_byte_bpe",), ("tokenizers",), "tokenizers"),
    ("scoring", ("wer",), ("editdistance",), "editdistance"),
    ("scoring", ("bert_score",), ("bert_score",), "bert-score"),
    ("scoring", ("meteor",), ("nltk",), "nltk"),
    ("eval_bleu_detok", ("moses",), ("sacremoses",), "sacremoses"),
    ("eval_bleu_detok", ("nltk",), ("nltk",), "nltk"),
)
_READ_IN_GENERATION = ("tokenizer", "bpe", "scoring")  # training stores them and does not read them


def install() -> None:
    """Checks command lines and configurations from now on.  Calling it again changes nothing."""
    wrap(options, "parse_args_and_arch", _parse_args_and_arch)
    wrap(initialize, "add_defaults", _add_defaults)
    if "fairseq_cli.train" in sys.modules:  # under fairseq's commands it has its own name for the function already
        wrap(sys.modules["fairseq_cli.train"], "add_defaults", _add_defaults)


def _parse_args_and_arch(stock, parser: ArgumentParser, input_args=None, parse_known: bool = False, **kwargs):
    try:
        parsed = stock(parser, input_args, parse_known, **kwargs)
    except ValueError as error:
        if str(error).startswith("Cannot combine --fp16 and --tpu"):  # which it reads --bf16 as
            raise UsageError(_BOTH_PRECISIONS) from None
        raise
    check(parsed[0] if parse_known else parsed)
    return parsed


def _add_defaults(stock, cfg: DictConfig) -> None:
    stock(cfg)
    check(cfg)
    trainer.refuse_unsupported(cfg)
    data = getattr(cfg.task, "data", None)
    if isinstance(data, str):
        data_files.check_further_folders(data, cfg.dataset.train_subset)


_BOTH_PRECISIONS = "--fp16, --bf16: one at a time; drop one of them"


def check(cfg: Namespace | DictConfig) -> None:
    """Checks a parsed command line, or a whole configuration.

    Raises:
        UsageError: with all that is wrong.
    """
    found: dict[str, object] = {}
    for name, value in _options(cfg):
        found.setdefault(name, value)
    generates = isinstance(cfg, Namespace) and "beam" in found
    faults = [*_out_of_range(found), *_contradictions(found), *_missing_packages(found, generates)]
    # fairseq gives the tokenizer the languages of the command line, before it has those of the data.
    languages = [found.get(f"{side}_lang", "") for side in ("source", "target")]
    if isinstance(cfg, Namespace) and found.get("tokenizer") == "moses" and None in languages:
        faults.append("--tokenizer moses: needs --source-lang and --target-lang; add both")
    if faults:
        raise UsageError("; ".join(dict.fromkeys(faults)))


def _options(cfg: Namespace | DictConfig) -> Iterator[tuple[str, object]]:
    """(name, value) of all options; of a configuration's parts (optimizer, task) also what was chosen."""
    if isinstance(cfg, Namespace):
        yield from vars(cfg).items()
        return
    parts = OmegaConf.to_container(cfg, resolve=True).items()
    # A model or task whose options are no dataclass keeps a copy of the whole command line: last, since each part is read for its own.
    for group, part in sorted(parts, key=lambda item: isinstance(item[1], Namespace)):
        if isinstance(part, Namespace):
            part = vars(part)
        if isinstance(part, Mapping):
            yield from _leaves(part)
            yield group, part.get("_name")


def _leaves(part: Mapping, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in part.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}_")
        else:
            yield f"{prefix}{name}", value


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _out_of_range(found: Mapping[str, object], where: str = "") -> Iterator[str]:
    """One fault for each value outside its range."""
    ranges = dict(_RANGES)
    for (name, choice), further in _OF_CHOICE.items():
        if found.get(name) == choice:
            ranges.update(further)
    for name, value in found.items():
        if name == "adam_betas":
            yield from _betas(value, where)
            continue
        if name in _DERIVED and value == found.get(_DERIVED[name]):
            continue
        if isinstance(value, list | tuple) and not value and name in ("lr", "update_freq"):
            yield f"{where}{_flag(name)}: must name at least one number, as in {_flag(name)} 1"
        for number in value if isinstance(value, list | tuple) else (value,):
            if name in _UNTYPED:
                number = _number(number)
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            allowed = ranges.get(name, _ANY)
            if not allowed.holds(number):
                yield f"{where}{_flag(name)} {number}: {allowed}; give such a number, or drop the flag for its default"


def _number(text: object) -> object:
    """The number that a text says; NaN where it says none, and anything else as it is."""
    if not isinstance(text, str):
        return text
    try:
        return float(text) if set(text) & set(".einEIN") else int(text)
    except ValueError:
        return math.nan


def _betas(value: object, where: str) -> Iterator[str]:
    try:
        betas = ast.literal_eval(value) if isinstance(value, str) else value
        given = [float(beta) for beta in betas]
    except (ValueError, SyntaxError, TypeError):
        given = []
    if len(given) != 2 or not all(map(_DECAY.holds, given)):
        yield f"{where}--adam-betas {value}: must be two numbers in [0, 1); write --adam-betas '(0.9, 0.98)'"


def _contradictions(found: Mapping[str, object]) -> Iterator[str]:
    if found.get("fp16") and found.get("bf16"):
        yield _BOTH_PRECISIONS
    if found.get("profile") and not torch.cuda.is_available():
        yield "--profile: needs a CUDA GPU, and torch sees none; drop the flag, or profile with torch.profiler"
    n_shards, shard = found.get("num_shards"), found.get("shard_id")
    if isinstance(n_shards, int) and isinstance(shard, int) and shard >= n_shards > 0:
        yield f"--shard-id {shard}: must be less than --num-shards {n_shards}; they count from 0"
    if (found.get("num_batch_buckets") or 0) > 0 and found.get("batch_size") and not found.get("max_tokens"):
        yield "--num-batch-buckets: must come with --max-tokens, from which fairseq takes the size of each bucket's batches; add it"
    if found.get("task") == "masked_lm":
        shares = [found.get(name) or 0.0 for name in ("random_token_prob", "leave_unmasked_prob")]
        if sum(shares) > 1:
            yield f"--random-token-prob {shares[0]}, --leave-unmasked-prob {shares[1]}: must add up to at most 1; lower one of them"
    lasts = found.get("total_num_update") or found.get("max_update", math.inf)
    if found.get("lr_scheduler") == "polynomial_decay" and not lasts:
        yield "--total-num-update: required by --lr-scheduler polynomial_decay, as in --total-num-update 100000; or give --max-update"
    top, lr = found.get("max_lr"), found.get("lr")
    if found.get("lr_scheduler") == "triangular" and isinstance(top, int | float) and lr and top <= lr[0]:
        yield f"--max-lr {top}: must be greater than --lr {lr[0]}, from which it rises; change one of them"
    if found.get("task") == "translation":
        yield from _one_language(found)
    for name in ("model_overrides", "optimizer_overrides"):
        text = found.get(name)
        if isinstance(text, str) and not isinstance(_literal(text), dict):
            yield f"{_flag(name)} {text}: must be a dict as Python writes it, as in {_flag(name)} \"{{'dropout': 0.1}}\""
    if str(found.get("arch") or found.get("model")).startswith(PREFIX):  # in others the heads may be of something else
        yield from _heads(found)
    if found.get("eval_bleu"):
        yield from _eval_bleu(found)


def _one_language(found: Mapping[str, object]) -> Iterator[str]:
    """One language without the other: fairseq then takes both from the data, and not the one that was given."""
    given = {side: found[f"{side}_lang"] for side in ("source", "target") if found.get(f"{side}_lang")}
    folder = str(found.get("data") or "").split(os.pathsep)[0]
    if len(given) != 1 or not os.path.isdir(folder):
        return
    ((side, language),) = given.items()
    pair = data_utils.infer_language_pair(folder)
    if all(pair) and pair[side == "target"] != language:
        yield f"--{side}-lang {language}: the data are {'-'.join(pair)}; give both --source-lang and --target-lang"


def _literal(text: str) -> object:
    """The value that a Python literal says; None where ``text`` is none."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _heads(found: Mapping[str, object]) -> Iterator[str]:
    for side in ("encoder", "decoder"):
        heads, width = found.get(f"{side}_attention_heads"), found.get(f"{side}_embed_dim")
        if isinstance(heads, int) and isinstance(width, int) and heads > 0 and width % heads:
            yield f"--{side}-attention-heads {heads}: must divide --{side}-embed-dim {width}; change one of them"


def _eval_bleu(found: Mapping[str, object]) -> Iterator[str]:
    """The generation that --eval-bleu asks for: its options are JSON."""
    detok = found.get("eval_bleu_detok")
    if detok and detok not in encoders.TOKENIZER_REGISTRY:
        yield f"--eval-bleu-detok {detok}: must be one of {', '.join(sorted(encoders.TOKENIZER_REGISTRY))}"
    for name in ("eval_bleu_args", "eval_bleu_detok_args"):
        text = found.get(name)
        try:
            given = json.loads(text or "{}")
        except (ValueError, TypeError):
            given = None
        if not isinstance(given, dict):
            yield f"{_flag(name)} {text}: must be a JSON object, as in {_flag(name)} '{{\"beam\": 4}}'"
        elif name == "eval_bleu_args":
            where = f"{_flag(name)}: "
            yield from _out_of_range(given, where)
            for option, value in given.items():
                if option in _RANGES and not isinstance(value, int | float | None):
                    yield f"{where}{_flag(option)} {json.dumps(value)}: must be a number; write it without quotes"


def _missing_packages(found: Mapping[str, object], generates: bool) -> Iterator[str]:
    for name, values, modules, install in _PACKAGES:
        value = found.get(name)
        if value in (None, False, "", "???") or (values and value not in values):
            continue
        if name in _READ_IN_GENERATION and not generates:
            continue
        if name == "eval_bleu_detok" and not found.get("eval_bleu"):
            continue
        if name == "ddp_backend" and found.get("optimizer") == trainer.NAME:
            continue  # which refuses it in any case
        if not any(map(_is_installed, modules)):
            given = _flag(name) if value is True else f"{_flag(name)} {value}"
            yield f"{given}: needs the package {modules[-1].partition('.')[0]}, which is not installed; pip install {install}, or drop the flag"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its parent package is missing, or its import is blocked
        return False
