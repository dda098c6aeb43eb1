"""What figures depend on: the machine, and what is installed there."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

from ls_plugin import _library, _versions, routes

ROOT = Path(__file__).resolve().parents[2]


def machine(device: torch.device) -> dict[str, str | int]:
    """What figures on this device depend on; threads: those that torch has here."""

    def output_of(*command: str) -> str:
        try:
            done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
            return done.stdout.strip().splitlines()[0]
        except (OSError, subprocess.CalledProcessError, IndexError):
            return "unknown"

    def fairseq() -> str:
        for name in ("fairseq-fixed", "fairseq"):
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return "none"

    gpu = {}
    if device.type == "cuda":
        driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        gpu = {"driver": driver, "cuda": torch.version.cuda or "none"}
    return {
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else routes.processor(),
        **gpu,
        "cores": os.cpu_count() or 0,
        "threads": torch.get_num_threads(),
        "instruction_set": _library.status().isa,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fairseq": fairseq(),
        "ls_plugin": _versions.VERSION,
        "compiler": output_of("c++", "--version"),
        # An installed package may lie in somebody else's repository.
        "commit": output_of("git", "describe", "--always", "--dirty")
        if (ROOT / ".git").exists()
        else "none: installed",
    }
