"""Faults of fairseq 0.12 itself, fixed while the plugin is loaded; nothing installed is edited.

Each is what fairseq's documentation promises and its code does not do:

- Batches: the last one of an epoch is dropped unless its size is a multiple of 8 (``batching.py``).
- ``--no-repeat-ngram-size``: the last tokens of a hypothesis are looked for at the padded end of its buffer, so nothing is banned.
- Hydra: a component whose configuration extends another's cannot be named by ``_name`` beside that one once it is registered, so the second
  job of a sweep fails. And what a job remembers reaches the next one of the sweep: the best validation, the patience that is left, and the
  writers for tensorboard.
- Tasks that read ``args``, which fairseq has renamed ``cfg``: ``masked_lm --mask-whole-words``, ``translation_from_pretrained_bart`` (mBART).
- ``--mask-whole-words``, ``--mask-length word`` and ``span-poisson``: the task knows the name of ``--bpe`` at most, and none of its flags.
- ``--replace-unk``: no alignment is made for it, the one of ``--print-alignment`` is read in another form, and the flag without a file opens ``@@ ``.
- ``--constraints`` without constraints, as in fairseq-generate, which reads none: refused by name.
- ``masked_lm``: batches without one masked token log a loss of 0 / 0, and the mean over the epoch is NaN.
- ``sentence_prediction`` with BART: a sentence that ``--shorten-method`` cuts has no end, where the model reads its features.
"""

import math
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import is_dataclass

import torch
from fairseq import checkpoint_utils, tokenizer, utils
from fairseq.criterions.masked_lm import MaskedLmLoss
from fairseq.data import BaseWrapperDataset, data_utils, encoders
from fairseq.dataclass import utils as dataclass_utils
from fairseq.logging import metrics, progress_bar
from fairseq.models.bart import BARTModel
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.search import LexicallyConstrainedBeamSearch
from fairseq.sequence_generator import SequenceGeneratorWithAlignment
from fairseq.tasks import sentence_prediction
from fairseq.tasks.denoising import DenoisingTask
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.tasks.masked_lm import MaskedLMTask
from fairseq.tasks.multilingual_denoising import MultilingualDenoisingTask
from fairseq.tasks.sentence_prediction import SentencePredictionTask
from fairseq.trainer import Trainer
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from ls_plugin.batching import batch_by_size
from ls_plugin.errors import UnsupportedError
from ls_plugin.rebinding import replace, wrap

# The configuration of --bpe, while a task makes a dataset.
_bpe_of_run: ContextVar = ContextVar("_bpe_of_run", default=None)
# The words of the lines that fairseq-interactive translates: a list for each sentence of the batch in hand.
_source_words: ContextVar = ContextVar("_source_words", default=None)
# Whether shortened sentences keep their end, while a task makes a dataset.
_keeps_end: ContextVar = ContextVar("_keeps_end", default=False)
_NO_DICTIONARY = "@@ "  # what fairseq takes for --replace-unk without a value


def install() -> None:
    """Rebinds the functions at fault.  Calling it again changes nothing."""
    wrap(data_utils, "batch_by_size", batch_by_size)
    wrap(dataclass_utils, "merge_with_parent", _merge_with_parent)
    wrap(Trainer, "__init__", _start_afresh)
    replace(MaskedLmLoss, "reduce_metrics", staticmethod(_masked_lm_metrics))
    wrap(FairseqTask, "__init__", _init_with_args)
    for task in (MaskedLMTask, DenoisingTask, MultilingualDenoisingTask):
        wrap(task, "load_dataset", _load_dataset_with_bpe)
    wrap(encoders, "build_bpe", _build_bpe)
    wrap(utils, "load_align_dict", _load_align_dict)
    wrap(utils, "replace_unk", _replace_unk)
    wrap(utils, "post_process_prediction", _post_process_prediction)
    wrap(FairseqTask, "build_generator", _build_generator)
    wrap(SequenceGeneratorWithAlignment, "generate", _generate_with_alignment)
    if "fairseq_cli.interactive" in sys.modules:
        install_interactive()
    wrap(LexicallyConstrainedBeamSearch, "init_constraints", _init_constraints)
    wrap(SentencePredictionTask, "load_dataset", _load_sentences)
    wrap(sentence_prediction, "maybe_shorten_dataset", _shorten)
    wrap(BARTModel, "forward", _bart_forward)
    replace(NGramRepeatBlock, "_no_repeat_ngram", _no_repeat_ngram)


def install_interactive() -> None:
    """The same for fairseq-interactive, whose import sets up logging: where it is imported anyway."""
    from fairseq_cli import interactive

    wrap(interactive, "make_batches", _make_batches)


# --- n-grams


def _no_repeat_ngram(self, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int):
    """Sets to -inf, in place, each token that would end an n-gram which its hypothesis already has. TorchScript compiles it.

    fairseq's CUDA extension, where it was built, does the same.

    Args:
        tokens: (rows, length of the buffer); written are ``step + 1``, of which the first is no output but what decoding begins with.
        lprobs: (rows, V).
    """
    n = self.no_repeat_ngram_size
    first = (
        1 if n == 1 else 0
    )  # the first token ends no n-gram; as an n-gram of one it would ban the end of the sentence
    written = tokens[:, first : step + 1]
    if written.size(1) < n:
        return lprobs
    ngrams = written.unfold(1, n, 1)  # (rows, n-grams, n)
    last = written[:, written.size(1) - (n - 1) :]
    repeated = (ngrams[:, :, : n - 1] == last.unsqueeze(1)).all(dim=2)
    rows = torch.arange(tokens.size(0), device=tokens.device).unsqueeze(1).expand_as(repeated)
    lprobs[rows[repeated], ngrams[:, :, n - 1][repeated]] = torch.tensor(-math.inf).to(lprobs)
    return lprobs


# --- masked language models


def _masked_lm_metrics(logging_outputs: list[dict]) -> None:
    """As fairseq's, but where nothing was masked: a loss of 0 that weighs nothing."""
    loss = sum(log.get("loss", 0) for log in logging_outputs)
    n_masked = sum(log.get("sample_size", 0) for log in logging_outputs)
    metrics.log_scalar("loss", loss / (n_masked + (n_masked == 0)) / math.log(2), n_masked, round=3)
    metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["loss"].avg))


# --- Hydra


def _merge_with_parent(stock, dc, cfg: DictConfig, *args, **kwargs):
    """Merges a component's configuration over the defaults of its dataclass, also where it has the type of a base of that dataclass.

    ``criterion=cross_entropy criterion._name=ls_cross_entropy`` gives it stock's type. Its values are merged without the type.
    """
    ours, given = (OmegaConf.get_type(config) for config in (dc, cfg))
    if ours is not given and is_dataclass(given) and issubclass(ours, given):
        untyped = OmegaConf.create(OmegaConf.to_container(cfg, resolve=False))
        untyped.__dict__["_parent"] = cfg.__dict__["_parent"]
        cfg = untyped
    return stock(dc, cfg, *args, **kwargs)


def _start_afresh(stock, self, *args, **kwargs) -> None:
    """A trainer begins a run; fairseq keeps these in functions and modules, for the whole process."""
    train = sys.modules.get("fairseq_cli.train")
    for function in (checkpoint_utils.save_checkpoint, *([train.should_stop_early] if train else [])):
        for name in ("best", "num_runs"):
            vars(function).pop(name, None)
    while progress_bar._tensorboard_writers:
        progress_bar._tensorboard_writers.popitem()[1].close()
    stock(self, *args, **kwargs)


# --- tasks


def _init_with_args(stock, self, cfg, **kwargs) -> None:
    stock(self, cfg, **kwargs)
    self.args = cfg


def _load_dataset_with_bpe(stock, self, *args, **kwargs):
    root = self.cfg._get_root() if isinstance(self.cfg, DictConfig) else {}
    token = _bpe_of_run.set(root.bpe if "bpe" in root else None)
    try:
        return stock(self, *args, **kwargs)
    finally:
        _bpe_of_run.reset(token)


def _build_bpe(stock, cfg, *args, **kwargs):
    """For a task's dataset the encoder of the run, not of the name alone that the task has, or of its own configuration."""
    of_run = _bpe_of_run.get()
    if of_run is None:
        return stock(None if isinstance(cfg, DictConfig) and "data" in cfg else cfg, *args, **kwargs)
    bpe = stock(of_run, *args, **kwargs)
    if not hasattr(bpe, "is_beginning_of_word"):
        raise UnsupportedError(
            f"--bpe {getattr(of_run, '_name', of_run)}: unsupported with --mask-whole-words, --mask-length word and span-poisson, since its tokens do not show where a "
            "word begins; take gpt2, sentencepiece, bert or hf_byte_bpe, or drop those flags"
        )
    return bpe


# --- unknown words


class _Alignment(list):
    """A hypothesis' alignment as fairseq makes it, and the source's words that it speaks of."""

    words: list[str] | None = None


def _load_align_dict(stock, replace_unk: str | None) -> dict | None:
    return stock("" if replace_unk == _NO_DICTIONARY else replace_unk)


def _build_generator(stock, self, models, args, seq_gen_cls=None, *more, **kwargs):
    replaces = getattr(args, "replace_unk", None) is not None
    if replaces and seq_gen_cls is None and not (args.print_alignment or args.score_reference):
        seq_gen_cls = SequenceGeneratorWithAlignment
    generator = stock(self, models, args, seq_gen_cls, *more, **kwargs)
    if replaces and isinstance(args, DictConfig):
        generator.ls_dataset = self.datasets.get(args._get_root().dataset.gen_subset)
    return generator


def _make_batches(stock, lines: list[str], cfg, task, max_positions, encode_fn) -> Iterator:
    if cfg.generation.print_alignment == "soft":
        raise UnsupportedError(
            "--print-alignment soft: lightseq-interactive prints hard alignments alone; use lightseq-generate"
        )
    for batch in stock(lines, cfg, task, max_positions, encode_fn):
        _source_words.set([tokenizer.tokenize_line(encode_fn(lines[i])) for i in batch.ids.tolist()])
        yield batch


def _generate_with_alignment(stock, self, models, sample: dict, **kwargs) -> list[list[dict]]:
    finalized = stock(self, models, sample, **kwargs)
    words = _source_words.get()
    text = getattr(getattr(getattr(self, "ls_dataset", None), "src", None), "get_original_text", None)
    if (
        "id" in sample and text is not None
    ):  # fairseq-generate, which may merge the pieces of a word before it replaces any
        words = [tokenizer.tokenize_line(text(i)) for i in sample["id"].tolist()]
    for i, hypotheses in enumerate(finalized):
        for hypothesis in hypotheses:
            hypothesis["alignment"] = _Alignment(hypothesis["alignment"])
            hypothesis["alignment"].words = words[i] if words else None
    return finalized


def _post_process_prediction(
    stock, hypo_tokens, src_str, alignment, align_dict, tgt_dict, remove_bpe=None, extra_symbols_to_ignore=None
):
    """Replaces unknown words before pieces are merged to words, since the alignment counts pieces."""
    if align_dict is None:
        return stock(hypo_tokens, src_str, alignment, align_dict, tgt_dict, remove_bpe, extra_symbols_to_ignore)
    pieces = tgt_dict.string(hypo_tokens, None, extra_symbols_to_ignore=extra_symbols_to_ignore)
    replaced = utils.replace_unk(pieces, src_str, alignment, align_dict, tgt_dict.unk_string())
    hypo_str = data_utils.post_process(replaced, remove_bpe)
    return tgt_dict.encode_line(hypo_str, add_if_not_exist=True), hypo_str, alignment


def _replace_unk(stock, hypo_str: str, src_str: str, alignment, align_dict: dict, unk: str) -> str:
    """Gives each unknown word the source's word that it attends to most, or what ``align_dict`` has for that.

    Args:
        alignment: pairs (source, target), or for each target the weights of all source tokens, the last of which is the end, as strings.
    """
    if alignment is None or torch.is_tensor(alignment):
        raise UnsupportedError(
            "--replace-unk: must have an alignment, which this task, or --score-reference, makes none of; drop the flag"
        )
    sources = getattr(alignment, "words", None) or tokenizer.tokenize_line(src_str)
    aligned = {}
    for i, entry in enumerate(alignment):
        if isinstance(entry, tuple):
            aligned[entry[1]] = entry[0]
        else:
            aligned[i] = max(range(len(entry) - 1), key=lambda j: float(entry[j]), default=len(sources))
    words = tokenizer.tokenize_line(hypo_str)
    for i, word in enumerate(words):
        if word == unk and aligned.get(i, len(sources)) < len(sources):
            source = sources[aligned[i]]
            words[i] = align_dict.get(source, source)
    return " ".join(words)


# --- constraints


def _init_constraints(stock, self, batch_constraints: Tensor | None, beam_size: int) -> None:
    if batch_constraints is None:
        raise UnsupportedError(
            "--constraints: must come with constraints, got none; lightseq-interactive reads them behind the sentence (sentence, tab, constraint, tab, "
            "constraint), lightseq-generate cannot: drop the flag"
        )
    stock(self, batch_constraints, beam_size)


# --- sentences for BART


class _WithEnd(BaseWrapperDataset):
    """Sentences that were shortened, each with its own last token, the end of the sentence, at the end."""

    def __init__(self, shortened, whole):
        super().__init__(shortened)
        self.whole = whole

    def __getitem__(self, index: int) -> Tensor:
        shortened, whole = self.dataset[index], self.whole[index]
        return torch.cat([shortened[:-1], whole[-1:]]) if 0 < len(shortened) < len(whole) else shortened

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.dataset.set_epoch(epoch)


def _load_sentences(stock, self, *args, **kwargs):
    token = _keeps_end.set(self.cfg.add_prev_output_tokens)  # encoder-decoder models; RoBERTa reads the first token
    try:
        return stock(self, *args, **kwargs)
    finally:
        _keeps_end.reset(token)


def _shorten(stock, dataset, *args, **kwargs):
    shortened = stock(dataset, *args, **kwargs)
    return _WithEnd(shortened, dataset) if _keeps_end.get() and shortened is not dataset else shortened


def _bart_forward(
    stock,
    self,
    src_tokens,
    src_lengths,
    prev_output_tokens,
    features_only=False,
    classification_head_name=None,
    **kwargs,
):
    """A sentence's features are those of its last end of sentence; fairseq needs equal numbers of these in all sentences of a batch."""
    if classification_head_name is None:
        return stock(self, src_tokens, src_lengths, prev_output_tokens, features_only, **kwargs)
    x, extra = stock(self, src_tokens, src_lengths, prev_output_tokens, features_only=True, **kwargs)
    ends = src_tokens.eq(self.eos)
    ends = torch.where(ends.any(dim=1, keepdim=True), ends, src_tokens.ne(self.encoder.padding_idx))
    last = (ends * torch.arange(ends.size(1), device=ends.device)).argmax(dim=1)
    features = x[torch.arange(x.size(0), device=x.device), last]
    return self.classification_heads[classification_head_name](features), extra
