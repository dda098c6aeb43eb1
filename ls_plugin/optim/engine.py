"""The contiguous-buffer engine: parameters and gradients of a group in two buffers, so that an update is one launch.

``p.data`` is a view of the parameter buffer, at an offset fixed for the life of the engine; freezing a parameter later changes
nothing for the others. ``p.grad`` is a view of the gradient buffer, or None as long as the parameter has got no gradient: what
is None, is untouched by the step, as in stock fairseq. ``zero_grad`` sets None and writes nothing. The first gradient after it is written
into its place by the layers (``packing.claim_grad``); what autograd allocated elsewhere is copied there, large ones at once, the many small
ones together before the step. Later gradients accumulate.

A gradient that somebody keeps over ``zero_grad`` keeps its value, as with torch's optimizers, and nothing is copied where nobody keeps one.
A kept ``p.grad`` itself shows in its count of references, and gets memory of its own. Other tensors over the same memory
(``p.grad.detach()``, a view, a slice) show in the storage's count of users, but not which they are: they keep the buffer, and the engine takes
a new one. That count is not asked where ranks exchange gradients, since communication holds slices of the buffer for a time.
"""

import dataclasses
import itertools
import sys
import weakref
from collections.abc import Hashable, Iterable, Iterator

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ls_plugin import packing

_LARGE = 1 << 16  # elements of a gradient that is not left where autograd put it until the step
ALIGNMENT_BYTES = 64  # of every parameter or pack of them: a cache line, and a multiple of any vector load

# The hook of each parameter that an engine owns. Kept here, not on the parameter, so that modules can still be pickled.
_hooks = WeakTensorKeyDictionary()


@dataclasses.dataclass(frozen=True)
class Run:
    """Neighbouring parameters that one launch can update: elements [start, stop) of the buffers, ``indices`` into ``params``."""

    start: int
    stop: int
    indices: range


class ContiguousBuffer:
    """Owns the memory of parameters that share a device and a dtype.

    Args:
        params: leaf tensors of any shapes.  Their ``data``, and ``grad`` where present, move into the buffers.
    Attributes:
        params: in the order of the buffers, which is the given one but for packs (``ls_plugin.packing``): their members follow one
            another without gaps.
        param, grad: (n,) in the parameters' dtype; gaps left by alignment stay zero.
        offsets: first element of each parameter, ascending.
        is_sent: ranks exchange slices of ``grad``; set by who does.
    """

    is_sent = False

    def __init__(self, params: list[Tensor]):
        alignment = ALIGNMENT_BYTES // params[0].element_size()
        self.params, self.offsets, n_elem = [], [], 0
        for unit in packing.units(params):
            for p in unit:
                self.params.append(p)
                self.offsets.append(n_elem)
                n_elem += p.numel()
            n_elem = -(-n_elem // alignment) * alignment
        self.n_elem = n_elem
        # The allocation is longer than any parameter: one that fills its storage alone may be moved by packing.
        self.param = params[0].data.new_zeros(n_elem + alignment)[:n_elem]
        self._allocate_grad()
        for i, p in enumerate(self.params):
            home = self.view(self.param, i)
            home.copy_(p.data)
            p.data = home
        self._versions = [p._version for p in self.params]
        self._addresses = [p.data_ptr() for p in self.params]
        self._claimed = bytearray(len(self.params))  # which places of gradients were given away
        packing.set_owner(self.params, self)
        self.adopt(self.foreign_grads())
        self._install_hooks()

    def _allocate_grad(self) -> None:
        self.grad = torch.zeros_like(self.param)
        self._grad_views = [self._make_grad_view(i) for i in range(len(self.params))]
        self._grad_addresses = [home.data_ptr() for home in self._grad_views]
        self._places: dict = {}  # (first, n) -> the place of n neighbours, or None
        # How often the memory and each view of it are referred to while nobody keeps a gradient.
        self._grad_storage = self.grad.untyped_storage()
        self._n_users = torch._C._storage_Use_Count(self._grad_storage._cdata)
        self._n_references = max(map(sys.getrefcount, self._grad_views))

    def _make_grad_view(self, index: int) -> Tensor:
        return self.view(self.grad, index).data  # with a version of its own, by which autograd notices changes

    def view(self, buffer: Tensor, index: int) -> Tensor:
        """The part of an (n,) buffer that belongs to parameter ``index``, in that parameter's shape."""
        p = self.params[index]
        return buffer[self.offsets[index] : self.offsets[index] + p.numel()].view(p.shape)

    def grad_view(self, index: int) -> Tensor:
        """The place of a parameter's gradient: the very tensor that ``p.grad`` is once it is adopted."""
        return self._grad_views[index]

    def _install_hooks(self) -> None:
        # A hook must not keep its engine alive: fairseq builds the optimizer again after it loads a checkpoint, and drops this one.
        engine = weakref.ref(self)

        def adopt(index: int) -> None:
            owner = engine()
            # A place that was given away before may be kept. This is found out when the backward pass is over.
            if owner is not None and (not owner._claimed[index] or owner._is_at_home(index)):
                owner.adopt((index,))

        for i, p in enumerate(self.params):
            if p in _hooks:
                _hooks.pop(p).remove()
            if p.numel() >= _LARGE and p.requires_grad:
                _hooks[p] = p.register_post_accumulate_grad_hook(lambda _, i=i: adopt(i))

    def claim_grad(self, first: int, n: int) -> Tensor | None:
        """The place of the gradients of n neighbours, as one tensor, or None if they are not adjacent or it was given away already."""
        if 1 in self._claimed[first : first + n]:
            return None
        if (first, n) not in self._places:
            self._places[first, n] = self._place(first, n)
        place = self._places[first, n]
        if place is None:
            return None
        self._claimed[first : first + n] = b"\1" * n
        return place.detach()  # autograd takes over only what nobody else holds

    def _place(self, first: int, n: int) -> Tensor | None:
        members = self.params[first : first + n]
        begin, end = self.offsets[first], self.offsets[first + n - 1] + members[-1].numel()
        if end - begin != sum(p.numel() for p in members):
            return None
        self._n_users += 1
        return self.grad[begin:end].view(sum(p.shape[0] for p in members), *members[0].shape[1:])

    def foreign_grads(self) -> list[int]:
        """The parameters whose gradients autograd, distributed wrappers or somebody else put elsewhere, or made anew in their place."""
        homes = self._grad_views
        return [i for i, p in enumerate(self.params) if (grad := p.grad) is not homes[i] and grad is not None]

    def adopt(self, indices: Iterable[int]) -> None:
        """Brings the gradients of these parameters, wherever they lie, into the buffer, and makes ``p.grad`` the view again.

        What is in their places is overwritten: see :meth:`make_room` for places that were given away since ``zero_grad``.
        """
        foreign, homes = [], []
        for i in indices:
            p, home = self.params[i], self._grad_views[i]
            grad = p.grad
            if grad.is_sparse:
                raise RuntimeError(
                    f"ls_adam: gradients must be dense, got a sparse one of shape {tuple(grad.shape)}; build the embedding with sparse=False"
                )
            is_at_home = self._is_at_home(i)
            p.grad = home
            self._claimed[i] = 1
            if not is_at_home:
                foreign.append(grad.detach())
                homes.append(home)
            elif grad is not home and sys.getrefcount(grad) > 2:  # this frame's, and the call's
                grad.data = grad.clone()
        if foreign:
            torch._foreach_copy_(homes, foreign)

    def _is_at_home(self, index: int) -> bool:
        grad = self.params[index].grad
        return grad.data_ptr() == self._grad_addresses[index] and grad.is_contiguous()

    def zero_grad(self) -> None:
        self._claimed = bytearray(len(self.params))
        for p in self.params:
            p.grad = None
        if max(map(sys.getrefcount, self._grad_views)) > self._n_references:
            self._part_from_kept(range(len(self.params)))
        if not self.is_sent and torch._C._storage_Use_Count(self._grad_storage._cdata) > self._n_users:
            self._allocate_grad()

    def make_room(self, indices: Iterable[int]) -> None:
        """Before :meth:`adopt` of gradients that somebody put elsewhere after their places had been given away, which may be kept.

        Also before the places of parameters without a gradient are written to. While gradients are computed only where ranks exchange them.
        """
        indices = [i for i in indices if self._claimed[i] and (self.params[i].grad is None or not self._is_at_home(i))]
        if not indices:
            return
        self._part_from_kept(indices)
        live = [i for i, p in enumerate(self.params) if p.grad is not None and self._is_at_home(i)]
        n_users = self._n_users + sum(self.params[i].grad is not self._grad_views[i] for i in live)
        if not self.is_sent and torch._C._storage_Use_Count(self._grad_storage._cdata) > n_users:
            grads = [self.params[i].grad for i in live]
            self._allocate_grad()
            for i, grad in zip(live, grads, strict=True):
                self._grad_views[i].copy_(grad)
                self.params[i].grad = self._grad_views[i]

    def _part_from_kept(self, indices: Iterable[int]) -> None:
        """Gives each of these views that somebody holds memory of its own, with its values, and makes another for the engine."""
        for i in indices:
            home = self._grad_views[i]
            if sys.getrefcount(home) > self._n_references + 1:  # this frame's
                home.data = home.clone()
                self._grad_views[i] = self._make_grad_view(i)

    def rewritten(self) -> list[int]:
        """The parameters that somebody wrote to since the last call, other than through ``p.data``, which leaves no trace."""
        versions = [p._version for p in self.params]
        if versions == self._versions:
            return []
        changed = [i for i, (new, old) in enumerate(zip(versions, self._versions, strict=True)) if new != old]
        self._versions = versions
        return changed

    def check_views(self) -> None:
        """Raises RuntimeError if a parameter's memory was replaced, for then an update would miss the model."""
        addresses = [p.data_ptr() for p in self.params]
        if addresses == self._addresses:
            return
        for p, address, expected in zip(self.params, addresses, self._addresses, strict=True):
            if p.numel() and address != expected:
                raise RuntimeError(
                    f"ls_adam: a parameter of shape {tuple(p.shape)} must live in the optimizer's buffer, but its memory was replaced "
                    "(model.to(), .half() or .data = after the optimizer was built?); build the optimizer after such changes"
                )

    def runs(self, keys: Iterable[Hashable] = itertools.repeat(True)) -> Iterator[Run]:
        """Maximal runs of neighbours that have a gradient, and the same key where ``keys`` (one per parameter, none None) are given."""
        marks = [None if p.grad is None else key for p, key in zip(self.params, keys, strict=False)]
        first = 0
        for mark, members in itertools.groupby(marks):
            end = first + len(list(members))
            if mark is not None:
                stop = self.offsets[end] if end < len(marks) else self.n_elem
                yield Run(self.offsets[first], stop, range(first, end))
            first = end

    def grads(self) -> list[Tensor]:
        """The pieces of the gradient buffer that are set."""
        return [self.grad[run.start : run.stop] for run in self.runs()]


class GradientScale:
    """A factor on all gradients that is still to be applied: sample size, loss scale and clip coefficient in one number.

    The true gradient is ``factor / loss_scale * p.grad``; the update multiplies inside its own pass. The factor stays on the device, so
    that nothing waits for it.

    Attributes:
        factor: what was asked for since the gradients were reset.
        loss_scale: by how much the loss was multiplied before the backward pass. It stays until it is set anew.
    """

    def __init__(self):
        self.loss_scale = 1.0
        self.clear()

    def clear(self) -> None:
        self.factor: float | Tensor = 1.0

    @property
    def is_one(self) -> bool:
        """Whether the factor is 1, known without asking the device."""
        return not torch.is_tensor(self.factor) and self.factor == 1.0

    def multiply(self, c: float | Tensor) -> None:
        """c: a number, or a scalar tensor on any device."""
        if torch.is_tensor(self.factor) and torch.is_tensor(c):
            c = c.to(self.factor.device)
        self.factor = self.factor * c

    def total(self, device: torch.device) -> Tensor | None:
        """``factor / loss_scale``: fp32 scalar on ``device``, or None for 1."""
        return _as_scalar(self.factor / self.loss_scale, device)

    def apply_to(self, buffers: list[ContiguousBuffer]) -> None:
        """Multiplies the gradients that are set by the factor, which is 1 afterwards."""
        if not self.is_one:
            for buffer in buffers:
                scale = _as_scalar(self.factor, buffer.grad.device)
                for grad in buffer.grads():
                    grad.mul_(scale)
        self.clear()


def _as_scalar(factor: float | Tensor, device: torch.device) -> Tensor | None:
    """fp32 scalar on ``device``, or None for a number that is 1; nothing is copied from the host's memory, for which a GPU would wait."""
    if torch.is_tensor(factor):
        return factor.detach().to(device=device, dtype=torch.float32).reshape(())
    return None if factor == 1.0 else torch.full((), factor, dtype=torch.float32, device=device)


class Overflow:
    """Whether the gradients' norm is not finite: a bool scalar on the device, and on its way to the host if it will be read there.

    The copy starts at once, so that who reads it waits for the norm and not for the update, which was launched after it.
    """

    def __init__(self, flag: Tensor, is_read: bool):
        self._flag = self._host = flag
        self._arrived = None
        if is_read and flag.is_cuda:
            self._host = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._host.copy_(flag, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(flag.device))

    def on(self, device: torch.device) -> Tensor:
        return self._flag.to(device)

    def read(self) -> bool:
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._host)
