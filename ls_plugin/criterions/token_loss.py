"""What the plugin's criterions have in common: the loss of tokens from logits, or by blocks from the features before them."""

import math
from dataclasses import dataclass, field

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel, FairseqDecoder
from fairseq.models.transformer import TransformerModelBase
from fairseq.trainer import Trainer
from torch import Tensor

from ls_plugin import ops
from ls_plugin.criterions.projection import projection_of, reasons_against_blocks, saves_memory
from ls_plugin.errors import UnsupportedError
from ls_plugin.rebinding import wrap

# What turns logits into probabilities by a softmax, and nothing else.
_STOCK_SOFTMAX = {
    BaseFairseqModel.get_normalized_probs,
    BaseFairseqModel.get_normalized_probs_scriptable,
    FairseqDecoder.get_normalized_probs,
    FairseqDecoder.get_normalized_probs_scriptable,
    TransformerModelBase.get_normalized_probs,  # as the first, for TorchScript
}

_ACCURACY = ("total", "n_correct")  # numbers of tokens, in the order in which stock logs them
FUSED_PROJECTION_CHOICES = ChoiceEnum(["auto", "always", "never"])


@dataclass
class FusedProjectionConfig:
    """The flag that the plugin's criterions add to stock's."""

    fused_projection: FUSED_PROJECTION_CHOICES = field(
        default="auto",
        metadata={
            "help": "output projection and loss in one, by blocks of tokens, so that the logits of a whole batch are never in memory: "
            "auto (batches where that saves memory, and models that allow it), always (an error where it is impossible), never"
        },
    )


class TokenLoss:
    """Mixed into a stock criterion: its results and logging, without log-probabilities in memory.

    From logits, loss and gradient take one pass over them; while gradients are enabled the gradient is written over the logits, so the
    accuracy is counted before. By blocks (``--fused-projection``), the logits do not all exist at any time.
    """

    twin: str  # the name of the stock criterion
    eps = 0.0
    ignore_prefix_size = 0
    report_accuracy = False
    logs_nll = False
    fused_projection: str

    def forward(self, model, sample, reduce: bool = True):
        """Returns the loss (a sum, or per token with ``reduce=False``, in stock's shape), the sample size, and what fairseq logs.

        Raises:
            UnsupportedError: the model's probabilities are not a softmax over its output (adaptive softmax, pointer-generator), or
            ``--fused-projection always`` where that is impossible.
        """
        refuse_unless_softmax(model, self.twin)
        accuracy = None
        if self._goes_by_blocks(model, sample, reduce):
            loss, nll_loss = self._loss_by_blocks(model, sample, reduce)
        else:
            net_output = model(**sample["net_input"])
            if self.report_accuracy:
                accuracy = self.compute_accuracy(model, net_output, sample)
            loss, nll_loss = self.compute_loss(model, net_output, sample, reduce=reduce)

        n_sentences = sample["target"].size(0)
        sample_size = n_sentences if self.sentence_avg else sample["ntokens"]
        logging_output = {
            "loss": loss.data,
            **({"nll_loss": nll_loss.data} if self.logs_nll else {}),
            "ntokens": sample["ntokens"],
            "nsentences": n_sentences,
            "sample_size": sample_size,
        }
        if accuracy is not None:
            logging_output["n_correct"], logging_output["total"] = accuracy
        return loss, sample_size, logging_output

    def compute_loss(self, model, net_output, sample, reduce: bool = True) -> tuple[Tensor, Tensor]:
        """Loss and nll in fp32: sums over the tokens, or stock's shape and order. Overwrites the logits if a gradient is wanted."""
        logits, target = self._logits_and_target(model, net_output, sample)
        loss, nll_loss = ops.label_smoothed_cross_entropy(
            logits, target, self.eps, self.padding_idx, inplace=torch.is_grad_enabled()
        )
        if reduce:
            return loss.sum(), nll_loss.sum()
        counted = slice(self.ignore_prefix_size, None)
        return self._per_token(loss[:, counted]), self._per_token(nll_loss[:, counted])

    def compute_accuracy(self, model, net_output, sample) -> tuple[Tensor, Tensor]:
        """Numbers of correct and of counted tokens, int64 scalars."""
        logits, target = self._logits_and_target(model, net_output, sample)
        counted = target.ne(self.padding_idx)
        n_correct = logits.argmax(-1).eq(target).logical_and_(counted).sum()
        return n_correct, counted.sum()

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict]) -> None:
        """Logs what stock does; the accuracy without reading it from the device, which stock does after every update."""
        counts = {name: [log[name] for log in logging_outputs if name in log] for name in _ACCURACY}
        super().reduce_metrics([{k: v for k, v in log.items() if k not in _ACCURACY} for log in logging_outputs])
        if counts["total"]:
            for name, values in counts.items():
                metrics.log_scalar(name, sum(values), round=3)  # which makes it a number when it is shown
            metrics.log_derived("accuracy", _accuracy)

    def refuse_unfit(self, model, cfg=None) -> None:
        """Raises UnsupportedError for a model, or a configuration of fairseq, that training with this criterion cannot serve."""
        refuse_unless_softmax(model, self.twin)
        if self.fused_projection == "always":
            _refuse_blocks(reasons_against_blocks(model, self.report_accuracy, cfg))

    def _goes_by_blocks(self, model, sample, reduce: bool) -> bool:
        if self.fused_projection == "never":
            return False
        if self.fused_projection == "auto":
            projection = projection_of(model)
            if projection is None or not saves_memory(projection.weight, sample["target"].numel(), reduce):
                return False
        reasons = reasons_against_blocks(model, self.report_accuracy)
        if self.fused_projection == "always":
            _refuse_blocks(reasons)
        return not reasons

    def _loss_by_blocks(self, model, sample, reduce: bool) -> tuple[Tensor, Tensor]:
        """As :meth:`compute_loss`, from what the model would project to logits."""
        net_output = model(**sample["net_input"], features_only=True)
        features, target = net_output[0], model.get_targets(sample, net_output)
        if self.ignore_prefix_size > 0:
            features, target = features[:, self.ignore_prefix_size :], target[:, self.ignore_prefix_size :]
        weight = projection_of(model).weight
        losses = ops.linear_cross_entropy(
            features, weight, target, self.eps, self.padding_idx, reduction="sum" if reduce else "none"
        )
        return losses if reduce else tuple(map(self._per_token, losses))

    def _per_token(self, loss: Tensor) -> Tensor:
        """Losses (B, T) in the shape that stock gives them."""
        raise NotImplementedError

    def _logits_and_target(self, model, net_output, sample) -> tuple[Tensor, Tensor]:
        """Logits (B, T, V) and target (B, T), with padding in place of the ``--ignore-prefix-size`` first tokens."""
        target = model.get_targets(sample, net_output)
        if self.ignore_prefix_size > 0:
            target = target.clone()
            target[:, : self.ignore_prefix_size] = self.padding_idx
        return net_output[0], target


def _accuracy(meters) -> float:
    """Percent of the tokens that were predicted."""
    total, n_correct = (float(meters[name].sum) for name in _ACCURACY)
    return round(n_correct * 100.0 / total, 3) if total > 0 else math.nan


def refuse_unless_softmax(model, twin: str) -> None:
    """Checks that the model's log-probabilities are log-softmax of ``net_output[0]``, which is what the ops compute."""
    decoder = getattr(model, "decoder", None)
    if getattr(decoder, "adaptive_softmax", None) is not None:
        raise UnsupportedError(
            f"--criterion ls_{twin}: --adaptive-softmax-cutoff is unsupported, since the model gives no logits over the whole "
            "vocabulary. Use --criterion adaptive_loss"
        )
    for module in (decoder, model):
        for name in ("get_normalized_probs", "get_normalized_probs_scriptable"):
            # The bound method, not the class's function: a wrapper for distributed training passes on what the model has.
            if getattr(getattr(module, name, None), "__func__", None) not in _STOCK_SOFTMAX:
                raise UnsupportedError(
                    f"--criterion ls_{twin}: model and decoder must have fairseq's own softmax, got "
                    f"{type(model if module is None else module).__name__}. Use --criterion {twin}"
                )


def _refuse_blocks(reasons: list[str]) -> None:
    if reasons:
        raise UnsupportedError(
            f"--fused-projection always: impossible here: {'; '.join(reasons)}. Use --fused-projection auto"
        )


def install() -> None:
    """Makes fairseq's trainer refuse an unfit model as soon as it gets it.  Calling it again changes nothing.

    A criterion meets the model only in the first update, and an error there makes fairseq write a ``crash.pt``.
    """
    wrap(Trainer, "__init__", _checked_trainer_init)


def _checked_trainer_init(stock, self, cfg, task, model, criterion, *args, **kwargs):
    if isinstance(criterion, TokenLoss):
        criterion.refuse_unfit(model, cfg)
    stock(self, cfg, task, model, criterion, *args, **kwargs)
