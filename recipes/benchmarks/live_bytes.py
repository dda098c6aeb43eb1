"""Which memory is alive: tensors' storages followed from the op that allocates them until they are freed. On any device."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ls_plugin.report.dispatched import storages


class LiveBytes(TorchDispatchMode):
    """Follows the storages that ops allocate until they are freed: ``live`` bytes now, ``peak`` since it was last set."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.watched: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = storages((args, kwargs))
        for key, storage in storages(result).items():
            if key not in given and key not in self.watched:
                self.watch(key, storage)
        return result

    def watch(self, key: int, storage: torch.UntypedStorage) -> None:
        n_bytes = storage.nbytes()

        def freed(_) -> None:
            self.live -= n_bytes
            del self.watched[key]

        self.watched[key] = weakref.ref(storage, freed)
        self.live += n_bytes
        self.peak = max(self.peak, self.live)

    def bytes_of(self, tensors) -> int:
        """Of what it follows, the bytes that these tensors hold."""
        return sum(storage.nbytes() for key, storage in storages(tensors).items() if key in self.watched)
