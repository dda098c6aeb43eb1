"""What fairseq's code for several ranks asks of CUDA where there is none."""

import torch.distributed as dist
from fairseq import utils
from fairseq.distributed import utils as distributed_utils

from ls_plugin.rebinding import wrap


def install() -> None:
    wrap(distributed_utils, "all_gather_list", _all_gather_list)


def _all_gather_list(stock, data, group=None, max_size: int = 16384) -> list:
    """The ``data`` of all ranks, in order; fairseq sends them through a buffer of ``max_size`` bytes on the GPU."""
    group = distributed_utils.get_global_group() if group is None else group
    if dist.get_backend(group) != "gloo":
        return stock(data, group, max_size)
    gathered = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, utils.move_to_cpu(data), group)
    return gathered
