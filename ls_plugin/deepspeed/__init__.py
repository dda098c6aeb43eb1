"""Training under DeepSpeed: ``lightseq-train DATA … --deepspeed ds_config.json``.

``config.py`` brings the JSON and fairseq's flags together and needs no DeepSpeed; ``trainer.py`` runs fairseq's training on DeepSpeed's
engine, with the optimizer of ``optimizer.py``. DeepSpeed itself is imported by the trainer only, in the processes that train.
"""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """While it is active, nothing imports DeepSpeed, for instance fairseq, which does so (2 s) to know whether it is there."""
    if "deepspeed" in sys.modules:
        yield
        return
    sys.modules["deepspeed"] = None  # what makes an import statement raise ImportError
    try:
        yield
    finally:
        del sys.modules["deepspeed"]
    cpu_adam = sys.modules.get("fairseq.optim.cpu_adam")  # imports what it needs itself when it is built
    if cpu_adam is not None and importlib.util.find_spec("deepspeed") is not None:
        cpu_adam.has_deepspeed = True
