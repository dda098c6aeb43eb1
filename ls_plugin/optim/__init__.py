"""The plugin's optimizers, registered with fairseq on import."""

from ls_plugin.optim import resume, trainer
from ls_plugin.optim.adam import ContiguousAdam, FairseqAdam
from ls_plugin.optim.engine import ContiguousBuffer, GradientScale

__all__ = ["ContiguousAdam", "ContiguousBuffer", "FairseqAdam", "GradientScale"]

resume.install()
trainer.install()
