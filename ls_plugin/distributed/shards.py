"""Resuming in the middle of an epoch with another number of ranks.

Rank r of n reads every n-th batch from the r-th on, and a checkpoint says how many batches each rank has read; fairseq would skip as many
with another n too: data is left out, or read twice, or there is not so much. The number of ranks is saved beside it here.
"""

from fairseq.data.iterators import EpochBatchIterator

from ls_plugin.rebinding import wrap


def install() -> None:
    wrap(EpochBatchIterator, "state_dict", _state_dict)
    wrap(EpochBatchIterator, "load_state_dict", _load_state_dict)


def _state_dict(stock, self) -> dict:
    return {**stock(self), "num_shards": self.num_shards}


def _load_state_dict(stock, self, state: dict) -> None:
    n_read = state.get("iterations_in_epoch", 0) * state.get("num_shards", self.num_shards)
    # Rounded down: at most num_shards - 1 batches are read again.
    stock(self, {**state, "iterations_in_epoch": n_read // self.num_shards})
