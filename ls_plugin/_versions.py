"""Versions that work, checked when the plugin is imported: a late failure inside fairseq tells nobody what to do."""

import importlib.util
import sys

VERSION = "0.1.0"
MIN_PYTHON = (3, 10)
MIN_TORCH = (2, 10)
FAIRSEQ_BY_PYTHON = {
    "3.10": "fairseq==0.12.2",
    "3.11+": "fairseq-fixed==0.12.3.1",
}


def fairseq_requirement() -> str:
    """The fairseq distribution to install on this Python. No release of fairseq proper runs on 3.11 or newer."""
    return FAIRSEQ_BY_PYTHON["3.10" if sys.version_info < (3, 11) else "3.11+"]


def problems() -> list[str]:
    """Every reason why this environment cannot run the plugin, each with its remedy."""
    found = []
    if sys.version_info < MIN_PYTHON:
        found.append(f"Python {sys.version.split()[0]} is too old; use 3.10, 3.11 or 3.12")
    if importlib.util.find_spec("torch") is None:
        return [*found, "torch is not installed; pip install torch"]
    import torch

    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < MIN_TORCH:
        wanted = ".".join(map(str, MIN_TORCH))
        found.append(f"torch {torch.__version__} is too old; pip install 'torch>={wanted}'")
    if importlib.util.find_spec("fairseq") is None:
        found.append(f"fairseq is not installed; pip install --no-build-isolation {fairseq_requirement()}")
    return found


def check() -> None:
    """Raises ImportError with all reasons at once."""
    found = problems()
    if found:
        raise ImportError("ls_plugin cannot run here: " + "; ".join(found))
