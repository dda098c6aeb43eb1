"""The plugin's models and their architectures, registered with fairseq on import."""

from ls_plugin.models.transformer import LightSeqTransformerModel

__all__ = ["LightSeqTransformerModel"]
