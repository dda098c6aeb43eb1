"""``ls_cross_entropy``: fairseq's criterion for language models on the fused ops; label smoothing of 0."""

from dataclasses import dataclass

from fairseq.criterions import cross_entropy as stock
from fairseq.criterions import register_criterion
from torch import Tensor

from ls_plugin.criterions.token_loss import FusedProjectionConfig, TokenLoss


@dataclass
class CrossEntropyCriterionConfig(FusedProjectionConfig, stock.CrossEntropyCriterionConfig):
    pass


# The class name is stock's on purpose, as in label_smoothed_cross_entropy.py.
@register_criterion("ls_cross_entropy", dataclass=CrossEntropyCriterionConfig)
class CrossEntropyCriterion(TokenLoss, stock.CrossEntropyCriterion):
    """See :class:`ls_plugin.criterions.token_loss.TokenLoss`."""

    twin = "cross_entropy"

    def __init__(self, task, sentence_avg, fused_projection="auto"):
        super().__init__(task, sentence_avg)
        self.fused_projection = str(fused_projection)

    def _per_token(self, loss: Tensor) -> Tensor:
        return loss.reshape(-1)
