"""The plugin's criterions, registered with fairseq on import."""

from ls_plugin.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion, install

install()

__all__ = ["LabelSmoothedCrossEntropyCriterion"]
