"""Training steps to be traced: an architecture as stock fairseq trains it, with apex's Adam, and as ls does."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterator, Sequence

import torch
from fairseq import models
from fairseq.trainer import Trainer
from torch import Tensor

from ls_plugin import _library, ops
from ls_plugin.cli._fairseq_command import check_arch
from ls_plugin.errors import UnsupportedError, UsageError
from ls_plugin.names import PREFIX, stock_name
from ls_plugin.report.roofline import Op
from ls_plugin.report.step import CLIP_NORM, build_trainer, step
from ls_plugin.report.trace import Trace, as_on_gpu

STOCK, APEX, LS = "stock", "stock + apex", "ls"
_TRANSLATION, _LANGUAGE_MODEL = "translation", "language model"
_FAMILIES = {"transformer": _TRANSLATION, "bart": _TRANSLATION, "transformer_lm": _LANGUAGE_MODEL}
SENTENCE_LENGTH = {_TRANSLATION: 32, _LANGUAGE_MODEL: 512}
_CRITERIONS = {_TRANSLATION: "label_smoothed_cross_entropy", _LANGUAGE_MODEL: "cross_entropy"}


@dataclasses.dataclass(frozen=True)
class Step:
    """What is asked for: ``flags`` are of fairseq-train, the same for all contenders; ``sentence_length`` None: the family's."""

    arch: str
    precision: str
    vocab: int
    sentence_length: int | None = None
    flags: tuple[str, ...] = ()
    fused_attention: bool = True

    @property
    def family(self) -> str:
        """Raises UnsupportedError for an architecture that is unknown, or that has no twin whose step can be traced."""
        check_arch(["--arch", self.arch], stock_only=True)
        model = models.ARCH_MODEL_NAME_REGISTRY[stock_name(self.arch)]
        if model not in _FAMILIES:
            why = (
                "its loss looks up as many tokens as the data has masked, which nothing tells without data"
                if model == "roberta"
                else "it has no ls_ twin"
            )
            raise UnsupportedError(f"--arch {self.arch}: {why}; choose an architecture of {', '.join(_FAMILIES)}")
        return _FAMILIES[model]

    @property
    def length(self) -> int:
        return self.sentence_length or SENTENCE_LENGTH[self.family]


@dataclasses.dataclass(frozen=True)
class Traced:
    """One contender's step with one size of batch."""

    arch: str
    contender: str
    max_tokens: int
    n_sentences: int
    length: int
    n_parameters: int
    host_reads: int
    ops: tuple[tuple[str, Op], ...]  # with the phase of each

    @property
    def launches(self) -> int:
        return sum(op.launches for _, op in self.ops)


def contenders_of(asked: Step) -> tuple[str, ...]:
    """apex's fused Adam is compared where fairseq keeps one flat buffer, in fp16."""
    return (STOCK, APEX, LS) if asked.precision == "fp16" else (STOCK, LS)


def trace_steps(asked: Step, contender: str, sizes: Sequence[int]) -> Iterator[Traced]:
    """Builds a contender once and traces a step for each ``--max-tokens``.

    Raises:
        UnsupportedError: no compiled library.
        UsageError: flags that fairseq does not know or that contradict one another, sentences longer than a batch or than the model's positions.
    """
    if not _library.status().loaded:
        raise UnsupportedError(
            f"estimate: needs the compiled ops of ls, which are not there: {_library.status().reason}"
        )
    short = [size for size in sizes if size < asked.length]
    if short:
        raise UsageError(
            f"--max-tokens {short[0]}: must hold a sentence of {asked.length} tokens; give more, or a smaller --sentence-length"
        )
    with as_on_gpu(asked.fused_attention):
        trainer = _build(asked, contender)
        longest = _max_positions(trainer)
        if asked.length > longest:
            raise UsageError(
                f"--sentence-length {asked.length}: {asked.arch} has positions for {longest} tokens; give fewer"
            )
        _trace(trainer, _batch(asked, asked.length))  # builds what is built once
        for size in sizes:
            found, host_reads = _trace(trainer, _batch(asked, size))
            yield Traced(
                stock_name(asked.arch),
                contender,
                size,
                size // asked.length,
                asked.length,
                sum(p.numel() for p in trainer.model.parameters()),
                host_reads,
                tuple(found),
            )


def _build(asked: Step, contender: str) -> Trainer:
    prefix = PREFIX if contender == LS else ""
    arch, length = stock_name(asked.arch), str(asked.length)
    arguments = [
        "--arch",
        prefix + arch,
        "--optimizer",
        f"{prefix}adam",
        "--criterion",
        prefix + _CRITERIONS[asked.family],
    ]
    arguments += ["--dict-size", str(asked.vocab - 4), "--lr", "1e-4", "--clip-norm", str(CLIP_NORM), "--cpu"]
    arguments += [] if asked.precision == "fp32" else [f"--{asked.precision}"]
    if asked.family == _TRANSLATION:
        arguments += ["--task", "dummy_mt", "--src-len", length, "--tgt-len", length, "--label-smoothing", "0.1"]
        arguments += ["--share-decoder-input-output-embed"]
    else:
        arguments += ["--task", "dummy_lm", "--tokens-per-sample", length]
    arguments += ["--max-tokens", length, *asked.flags]
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            trainer = build_trainer(arguments, "meta")
    except SystemExit:  # of fairseq's parser
        message = (errors.getvalue().splitlines() or ["fairseq refuses them"])[-1]
        raise UsageError(f"flags after --: {message.rpartition('error: ')[2]}") from None
    if contender == APEX:
        trainer.optimizer.fp32_optimizer._optimizer = _ApexAdam(trainer.optimizer.fp32_optimizer.params)
    return trainer


class _ApexAdam(torch.optim.Optimizer):
    """Moves what apex's FusedAdam moves, in one launch: 28 bytes an fp32 parameter, unscaled on the way, no 16-bit copy."""

    supports_memory_efficient_fp16 = supports_flat_params = supports_step_with_scale = True

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-4})
        self._moments = {
            p: (torch.zeros_like(p), torch.zeros_like(p)) for group in self.param_groups for p in group["params"]
        }

    @torch.no_grad()
    def step(self, closure=None, scale: float | Tensor = 1.0) -> None:
        scale = scale if torch.is_tensor(scale) else None
        for p, moments in self._moments.items():
            ops.adam_step(
                p,
                p.grad,
                *moments,
                lr=1e-4,
                beta1=0.9,
                beta2=0.999,
                eps=1e-8,
                weight_decay=0.0,
                step=1,
                grad_scale=scale,
            )


def _max_positions(trainer: Trainer) -> int:
    found = trainer.model.max_positions()
    return min(found) if isinstance(found, tuple) else found


def _batch(asked: Step, max_tokens: int) -> dict:
    """As many whole sentences as --max-tokens holds; equally long, so that all that is computed are tokens, but with masks, as fairseq has them."""
    n_sentences = max_tokens // asked.length

    def tokens(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device="meta")

    shape = n_sentences, asked.length
    net_input = {"src_tokens": tokens(*shape), "src_lengths": tokens(n_sentences)}
    if asked.family == _TRANSLATION:
        net_input["prev_output_tokens"] = tokens(*shape)
    return {
        "id": tokens(n_sentences),
        "nsentences": n_sentences,
        "ntokens": n_sentences * asked.length,
        "net_input": net_input,
        "target": tokens(*shape),
    }


def _trace(trainer: Trainer, sample: dict) -> tuple[list[tuple[str, Op]], int]:
    found = []
    with Trace() as traced:
        for phase in step(trainer, sample):
            found += [(phase, op) for op in traced.ops]
            traced.ops.clear()
    return found, traced.host_reads
