"""The plugin's models and their architectures, registered with fairseq on import."""

from ls_plugin.models import unsupported
from ls_plugin.models.bart import LightSeqBARTModel
from ls_plugin.models.roberta import LightSeqRobertaModel
from ls_plugin.models.transformer import LightSeqTransformerModel
from ls_plugin.models.transformer_lm import LightSeqTransformerLanguageModel

unsupported.install()

__all__ = [
    "LightSeqBARTModel",
    "LightSeqRobertaModel",
    "LightSeqTransformerLanguageModel",
    "LightSeqTransformerModel",
]
