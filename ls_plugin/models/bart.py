"""``ls_bart``: fairseq's BART and mBART on the fused layers; classification heads are stock."""

from fairseq.models.bart import BARTModel

from ls_plugin.models.transformer import EncoderDecoderTwin
from ls_plugin.models.twins import register_twins


@register_twins("bart")
class LightSeqBARTModel(EncoderDecoderTwin, BARTModel):
    """``--arch ls_bart_large`` and the ``ls_`` twin of every architecture of fairseq's ``bart``, mBART's included."""
