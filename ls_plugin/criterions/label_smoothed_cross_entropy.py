"""``ls_label_smoothed_cross_entropy``: fairseq's criterion on the fused op, with every option of it."""

import functools

import torch
from fairseq import utils
from fairseq.criterions import label_smoothed_cross_entropy as stock
from fairseq.criterions import register_criterion
from fairseq.models import BaseFairseqModel, FairseqDecoder
from fairseq.models.transformer import TransformerModelBase
from fairseq.trainer import Trainer
from torch import Tensor

from ls_plugin import ops
from ls_plugin.errors import UnsupportedError

# What turns logits into probabilities by a softmax, and nothing else.
_STOCK_SOFTMAX = {
    BaseFairseqModel.get_normalized_probs,
    BaseFairseqModel.get_normalized_probs_scriptable,
    FairseqDecoder.get_normalized_probs,
    FairseqDecoder.get_normalized_probs_scriptable,
    TransformerModelBase.get_normalized_probs,  # as the first, for TorchScript
}


def install() -> None:
    """Makes fairseq's trainer refuse an unfit model as soon as it gets it.  Calling it again changes nothing.

    A criterion meets the model only in the first update, and an error there makes fairseq write a ``crash.pt``.
    """
    Trainer.__init__ = _checked_trainer_init


_trainer_init = Trainer.__init__


@functools.wraps(_trainer_init)
def _checked_trainer_init(self, cfg, task, model, criterion, *args, **kwargs):
    if isinstance(criterion, LabelSmoothedCrossEntropyCriterion):
        _refuse_unless_softmax(model)
    _trainer_init(self, cfg, task, model, criterion, *args, **kwargs)


# The class name is stock's on purpose: resuming compares it with the one that the checkpoint stores, and training may move between
# the two criterions in either direction.
@register_criterion("ls_label_smoothed_cross_entropy", dataclass=stock.LabelSmoothedCrossEntropyCriterionConfig)
class LabelSmoothedCrossEntropyCriterion(stock.LabelSmoothedCrossEntropyCriterion):
    """Loss, nll and their gradient in one pass over the logits; log-probabilities are never stored.

    While gradients are enabled the gradient is written over the logits, so the accuracy is counted before.
    """

    def forward(self, model, sample, reduce: bool = True):
        """Returns the loss (a sum, or per token (N, 1) with ``reduce=False``), the sample size, and what fairseq logs.

        Raises:
            UnsupportedError: the model's probabilities are not a softmax over its output (adaptive softmax, pointer-generator).
        """
        _refuse_unless_softmax(model)
        net_output = model(**sample["net_input"])
        accuracy = self.compute_accuracy(model, net_output, sample) if self.report_accuracy else None
        loss, nll_loss = self.compute_loss(model, net_output, sample, reduce=reduce)

        n_sentences = sample["target"].size(0)
        sample_size = n_sentences if self.sentence_avg else sample["ntokens"]
        logging_output = {
            "loss": loss.data,
            "nll_loss": nll_loss.data,
            "ntokens": sample["ntokens"],
            "nsentences": n_sentences,
            "sample_size": sample_size,
        }
        if accuracy is not None:
            logging_output["n_correct"], logging_output["total"] = map(utils.item, accuracy)
        return loss, sample_size, logging_output

    def compute_loss(self, model, net_output, sample, reduce: bool = True) -> tuple[Tensor, Tensor]:
        """Loss and nll in fp32: sums over the tokens, or (N, 1) in stock's order. Overwrites the logits if a gradient is wanted."""
        logits, target = self._logits_and_target(model, net_output, sample)
        loss, nll_loss = ops.label_smoothed_cross_entropy(
            logits, target, self.eps, self.padding_idx, inplace=torch.is_grad_enabled()
        )
        if reduce:
            return loss.sum(), nll_loss.sum()
        counted = slice(self.ignore_prefix_size, None)
        return loss[:, counted].reshape(-1, 1), nll_loss[:, counted].reshape(-1, 1)

    def compute_accuracy(self, model, net_output, sample) -> tuple[Tensor, Tensor]:
        """Numbers of correct and of counted tokens, int64 scalars."""
        logits, target = self._logits_and_target(model, net_output, sample)
        counted = target.ne(self.padding_idx)
        n_correct = logits.argmax(-1).eq(target).logical_and_(counted).sum()
        return n_correct, counted.sum()

    def _logits_and_target(self, model, net_output, sample) -> tuple[Tensor, Tensor]:
        """Logits (B, T, V) and target (B, T), with padding in place of the ``--ignore-prefix-size`` first tokens."""
        target = model.get_targets(sample, net_output)
        if self.ignore_prefix_size > 0:
            target = target.clone()
            target[:, : self.ignore_prefix_size] = self.padding_idx
        return net_output[0], target


def _refuse_unless_softmax(model) -> None:
    """Checks that the model's log-probabilities are log-softmax of ``net_output[0]``, which is what the op computes."""
    decoder = getattr(model, "decoder", None)
    if getattr(decoder, "adaptive_softmax", None) is not None:
        raise UnsupportedError(
            "--criterion ls_label_smoothed_cross_entropy: --adaptive-softmax-cutoff is unsupported, since the model gives no logits "
            "over the whole vocabulary. Use --criterion adaptive_loss"
        )
    for module in (decoder, model):
        for name in ("get_normalized_probs", "get_normalized_probs_scriptable"):
            # The bound method, not the class's function: a wrapper for distributed training passes on what the model has.
            if getattr(getattr(module, name, None), "__func__", None) not in _STOCK_SOFTMAX:
                raise UnsupportedError(
                    "--criterion ls_label_smoothed_cross_entropy: model and decoder must have fairseq's own softmax, got "
                    f"{type(model if module is None else module).__name__}. Use --criterion label_smoothed_cross_entropy"
                )
