"""``ls_label_smoothed_cross_entropy``: fairseq's criterion on the fused ops, with every option of it."""

from dataclasses import dataclass

from fairseq.criterions import label_smoothed_cross_entropy as stock
from fairseq.criterions import register_criterion
from torch import Tensor

from ls_plugin.criterions.token_loss import FusedProjectionConfig, TokenLoss


@dataclass
class LabelSmoothedCrossEntropyCriterionConfig(FusedProjectionConfig, stock.LabelSmoothedCrossEntropyCriterionConfig):
    pass


# The class name is stock's on purpose: resuming compares it with the one that the checkpoint stores, and training may move between
# the two criterions in either direction.
@register_criterion("ls_label_smoothed_cross_entropy", dataclass=LabelSmoothedCrossEntropyCriterionConfig)
class LabelSmoothedCrossEntropyCriterion(TokenLoss, stock.LabelSmoothedCrossEntropyCriterion):
    """See :class:`ls_plugin.criterions.token_loss.TokenLoss`."""

    twin = "label_smoothed_cross_entropy"
    logs_nll = True

    def __init__(
        self,
        task,
        sentence_avg,
        label_smoothing,
        ignore_prefix_size=0,
        report_accuracy=False,
        fused_projection="auto",
    ):
        super().__init__(task, sentence_avg, label_smoothing, ignore_prefix_size, report_accuracy)
        self.fused_projection = str(fused_projection)

    def _per_token(self, loss: Tensor) -> Tensor:
        return loss.reshape(-1, 1)
