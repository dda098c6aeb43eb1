"""What one stretch of code launches: the ops under autograd on any device, the kernels on a GPU. Imports torch alone, for the stop-watch of stock."""

from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def tensors_in(values) -> Iterator[Tensor]:
    """All tensors in nested lists, tuples and dicts; several times as fast as torch's own, which knows every kind of container."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


def storages(values) -> dict[int, torch.UntypedStorage]:
    """The storages of all tensors in nested containers, by address of their C++ object."""
    return {storage._cdata: storage for tensor in tensors_in(values) for storage in (tensor.untyped_storage(),)}


def category(func, args, kwargs, result) -> str:
    """What an op that autograd leaves over does: "kernel", "view" (memory of an input, nothing written) or "allocation"."""
    if func._schema.is_mutable:
        return "kernel"
    if "empty" in func._schema.name:
        return "allocation"
    outputs = storages(result)
    return "view" if outputs and outputs.keys() <= storages((args, kwargs)).keys() else "kernel"


class OpCounter(TorchDispatchMode):
    """Counts ops by name, apart for "kernel", "view" and "allocation"."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, Counter] = {}
        self.clear()

    def clear(self) -> None:
        self.counts = {category: Counter() for category in ("kernel", "view", "allocation")}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.counts[category(func, args, kwargs, result)][str(func)] += 1
        return result


def count_kernels(function: Callable[[], object]) -> int:
    """Calls the function; how many kernels it has launched: on a GPU as its profiler sees them, copies and fills of memory left out; on a CPU
    the ops that are neither views nor allocations."""
    if not torch.cuda.is_initialized():
        with OpCounter() as counter:
            function()
        return counter.counts["kernel"].total()
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    on_gpu = (event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    return sum(not event.name.lower().startswith(("memcpy", "memset")) for event in on_gpu)
