"""Seeds of dropout."""

import torch
from torch import Tensor


def draw_seed(device: torch.device | None = None) -> Tensor:
    """An int64 (1,) seed from torch's default CPU generator, for a mask on any device.

    ``torch.manual_seed`` then reproduces a run, on a GPU as on a CPU and with the same masks; what saves and restores that generator
    (fairseq's resume, activation checkpointing) carries the masks along; and a GPU is never waited for.

    Raises:
        RuntimeError: while a CUDA graph is captured for ``device``: replays would repeat one mask for ever.
    """
    if (
        device is not None
        and device.type == "cuda"
        and not torch.compiler.is_compiling()
        and torch.cuda.is_current_stream_capturing()
    ):
        raise RuntimeError(
            "ls_plugin: dropout (p > 0) is unsupported while a CUDA graph is captured, since each replay would repeat one mask; "
            "capture with p = 0"
        )
    return torch.randint(torch.iinfo(torch.int64).max, (1,), dtype=torch.int64)


def rank_offset() -> int:
    """The distributed rank in the high half of a Philox offset: fairseq seeds all ranks alike, and masks must differ."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() << 32
    return 0
