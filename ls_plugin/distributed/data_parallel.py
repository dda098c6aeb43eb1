"""Data parallelism over the optimizer's contiguous gradient buffers: an all-reduce takes a slice of a buffer as it lies.

PyTorch's wrapper and fairseq's legacy one copy every gradient into buckets of their own and back. Under ``ls_adam`` gradients lie side by side
already, so a bucket here is a slice. Buckets are sent from the end of the buffers to their start, which is about the order in which the
backward pass completes them, and strictly in that order on every rank. They have a process group of their own: a rank that is late with
some of them, since it has parameters without a gradient or ran out of memory, sums its statistics with the others before it sends these.
"""

import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ls_plugin import packing


@dataclasses.dataclass
class _Bucket:
    """A slice of the gradient buffer of one engine; what PyTorch's communication hooks need of its ``GradBucket``.

    Attributes:
        indices: of the engine's parameters in it that belong to the module and are trained.
        missing: those whose gradient the backward pass has yet to complete.
        used: once it is sent, of each of ``indices`` whether it had a gradient.
        result: once it is sent, what gives the averaged slice.
    """

    engine: object
    begin: int
    end: int
    indices: list[int]
    missing: set[int] = dataclasses.field(default_factory=set)
    used: list[bool] = dataclasses.field(default_factory=list)
    result: torch.futures.Future | None = None

    def buffer(self) -> Tensor:
        return self.engine.grad[self.begin : self.end]

    def send(self, hook: Callable, group: dist.ProcessGroup) -> None:
        """Starts the all-reduce; a parameter without a gradient counts as zeros."""
        params, view = self.engine.params, self.engine.grad_view
        self.used = [params[i].grad is not None for i in self.indices]
        elsewhere = [i for i in self.indices if params[i].grad is not view(i)]
        self.engine.make_room(elsewhere)
        self.engine.adopt(i for i in elsewhere if params[i].grad is not None)
        unused = [view(i) for i, used in zip(self.indices, self.used, strict=True) if not used]
        if unused:
            torch._foreach_zero_(unused)
        self.result = hook(group, self)

    def receive(self) -> None:
        """Has whatever runs next on this device find the average in the slice."""
        average, buffer = self.result.wait(), self.buffer()
        average = average[0] if isinstance(average, (list, tuple)) else average
        if average.data_ptr() != buffer.data_ptr():
            buffer.copy_(average)
        self.result = None


class ContiguousDataParallel(nn.Module):
    """Averages the gradients of ``module`` over the ranks of a process group, in the buffers of the optimizers that own its parameters.

    ``all_reduce_grads()``, which fairseq's optimizers call before each update, completes it: ``p.grad`` is the average on every rank then,
    or None on every rank if none had a gradient (``zero_unused``: 0). Ranks may differ in which parameters get one.

    Args:
        module: on its device. Parameters and buffers of rank 0 are copied to all.
        process_group: the ranks.
        overlaps: send buckets during the backward pass, else all in ``all_reduce_grads``.
        bucket_cap_mb: MiB after which a bucket is full.
        hook: one of PyTorch's communication hooks that need only ``bucket.buffer()``, such as ``fp16_compress_hook``.
        broadcast_buffers: copy the buffers of rank 0 to all before each forward pass in training.
        zero_unused: give parameters without a gradient on any rank one of zeros, as fairseq's ``legacy_ddp`` does: the optimizer steps them then.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup,
        overlaps: bool = True,
        bucket_cap_mb: float = 25,
        hook: Callable = allreduce_hook,
        broadcast_buffers: bool = False,
        zero_unused: bool = False,
    ):
        super().__init__()
        self.module = module
        self._group = _group_of_its_own(process_group)
        self._first_rank = dist.get_global_rank(self._group, 0)
        self._overlaps = overlaps
        self._bucket_bytes = bucket_cap_mb * 2**20
        self._hook = hook
        self._broadcasts_buffers = broadcast_buffers
        self._zeroes_unused = zero_unused
        self._postpones = False
        self._buckets: list[_Bucket] = []
        self._n_sent = 0
        self._layout: list[tuple] = []
        self._handles: list = []
        self._broadcast(itertools.chain(module.parameters(), module.buffers()))

    def forward(self, *args, **kwargs):
        if self.training and torch.is_grad_enabled():
            self._refresh()
            if self._broadcasts_buffers:
                self._broadcast(self.module.buffers())
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes in it accumulate on this rank; the next one outside sends them."""
        before, self._postpones = self._postpones, True
        try:
            yield
        finally:
            self._postpones = before

    @torch.no_grad()
    def all_reduce_grads(self) -> None:
        """Sends what is left, waits for all, and makes ``p.grad`` the average.

        Raises:
            RuntimeError: no optimizer with contiguous buffers was built for the module, or another rank is gone.
        """
        self._refresh()
        if not self._buckets:
            raise RuntimeError(
                "ContiguousDataParallel: needs an optimizer with contiguous gradients (ls_adam) for the module's parameters; build one first"
            )
        while self._n_sent < len(self._buckets):
            self._send_next()
        used = [is_used or self._zeroes_unused for bucket in self._buckets for is_used in bucket.used]
        everywhere = None if self._zeroes_unused else self._reduce_used(used)
        for bucket in self._buckets:
            bucket.receive()
        if everywhere is not None:
            everywhere.wait()
        if not all(used):  # only this rank has to look at what the others had
            used = self._used.tolist()
        of_bucket = iter(used)
        for bucket in self._buckets:
            for i in bucket.indices:
                bucket.engine.params[i].grad = bucket.engine.grad_view(i) if next(of_bucket) else None
        self._reset()

    def _reduce_used(self, used: list[bool]) -> dist.Work:
        device = self._buckets[0].engine.grad.device
        if all(used):
            self._used = torch.ones(len(used), dtype=torch.int32, device=device)  # without a copy from the host
        else:
            self._used = torch.tensor(used, dtype=torch.int32, device=device)
        return dist.all_reduce(self._used, dist.ReduceOp.MAX, self._group, async_op=True)

    def _broadcast(self, tensors: Iterator[Tensor]) -> None:
        works = [dist.broadcast(x.detach(), self._first_rank, self._group, async_op=True) for x in tensors if x.numel()]
        for work in works:
            work.wait()

    # --- buckets

    def _refresh(self) -> None:
        """Lays the buckets out anew where an optimizer was built since, or parameters were frozen or unfrozen."""
        layout = [(packing.owner_of(p), p.requires_grad) for p in self.module.parameters()]
        if layout == self._layout:
            return
        if self._n_sent:
            raise RuntimeError(
                "ContiguousDataParallel: the optimizer was built, or parameters were frozen, between a backward pass and all_reduce_grads"
            )
        for handle in self._handles:
            handle.remove()
        self._layout = layout
        trained: dict = {}
        for owner, requires_grad in layout:
            if owner is not None and requires_grad:
                trained.setdefault(owner[0], []).append(owner[1])
        for engine in trained:
            engine().is_sent = True
        self._buckets = [
            bucket
            for engine, indices in reversed(trained.items())
            for bucket in _buckets(engine(), sorted(indices, reverse=True), self._bucket_bytes)
        ]
        self._handles = [
            bucket.engine.params[i].register_post_accumulate_grad_hook(_completion(weakref.ref(self), number, i))
            for number, bucket in enumerate(self._buckets if self._overlaps else ())
            for i in bucket.indices
        ]
        self._reset()

    def _reset(self) -> None:
        self._n_sent = 0
        for bucket in self._buckets:
            bucket.missing = set(bucket.indices)

    def _complete(self, number: int, index: int) -> None:
        """Notes that the backward pass has completed a gradient, and sends the buckets whose turn it is."""
        if self._postpones:
            return
        if number < self._n_sent:
            raise RuntimeError(
                "ContiguousDataParallel: a parameter got a gradient after its bucket was sent, from a second backward pass or a module that "
                "--checkpoint-activations computes again; use --ddp-backend legacy_ddp, which sends after all of them"
            )
        self._buckets[number].missing.discard(index)
        while self._n_sent < len(self._buckets) and not self._buckets[self._n_sent].missing:
            self._send_next()

    def _send_next(self) -> None:
        self._buckets[self._n_sent].send(self._hook, self._group)
        self._n_sent += 1


def _completion(wrapper: weakref.ref, number: int, index: int) -> Callable[[Tensor], None]:
    """What runs when a gradient is complete. It keeps no wrapper alive, since the parameter outlives it."""

    def complete(_: Tensor) -> None:
        owner = wrapper()
        if owner is not None:
            with torch.no_grad():
                owner._complete(number, index)

    return complete


def _group_of_its_own(group: dist.ProcessGroup) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, use_local_synchronization=len(ranks) < dist.get_world_size())


def _buckets(engine, indices: list[int], n_bytes: float) -> Iterator[_Bucket]:
    """Cuts an engine's buffer, from its end, into slices of at least ``n_bytes`` that hold the given parameters (descending) and no others."""
    members: list[int] = []
    for i, following in zip(indices, [*indices[1:], None], strict=True):
        members.append(i)
        begin, last = engine.offsets[i], members[0]
        end = engine.offsets[last] + engine.params[last].numel()
        if (end - begin) * engine.grad.element_size() >= n_bytes or following != i - 1:
            yield _Bucket(engine, begin, end, members)
            members = []
