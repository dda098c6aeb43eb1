"""The plugin's criterions, registered with fairseq on import."""

from ls_plugin.criterions.cross_entropy import CrossEntropyCriterion
from ls_plugin.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from ls_plugin.criterions.token_loss import install

install()

__all__ = ["CrossEntropyCriterion", "LabelSmoothedCrossEntropyCriterion"]
