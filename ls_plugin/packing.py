"""Parameters that lie side by side in memory, so that one matrix product serves several projections.

q, k and v of a self-attention read the same input, and so do the keys and values that all decoder layers take from the encoder. Each
keeps the Parameter, the name and the shape that stock fairseq gives it; where their memory is one block, ``packed`` gives it as one
weight, without a copy. Code that lays parameters out again asks ``units`` what must stay together.

What is known about a parameter is kept here by its identity, not on it: ``model.half()`` and ``model.to()`` keep the Parameter, and
modules can still be copied and pickled.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

_packs = WeakTensorKeyDictionary()  # parameter -> TensorWeakRef of each member of its pack, in order
_blocks = WeakTensorKeyDictionary()  # parameter -> StorageWeakRef of the block into which `packed` moved it
# id of the first parameter -> (weak reference to it, where the parameters lay, the view of all): finding a view takes 2 us, making it
# 11. A view keeps its memory, so nothing else can come to lie in its place; what was replaced by model.half() goes at the next call.
_views: dict[int, tuple[weakref.ref, list[tuple], Tensor]] = {}

# id of a parameter -> (weak reference to it, weak reference to the engine that owns it, its index there)
_owners: dict[int, tuple[weakref.ref, weakref.ref, int]] = {}

# parameter -> the run of autograd's engine, and a weak reference to the gradient that the first of its users gave to it
_shared = WeakTensorKeyDictionary()


def declare(params: Sequence[nn.Parameter]) -> None:
    """Notes that these parameters, in this order, shall be one block of memory.  Nothing moves yet.

    A parameter belongs to one pack at most: packs that share a member with this one are forgotten. So they are where a parameter stands
    twice among ``params``, for which no such block exists, and no new one is noted.

    Raises:
        ValueError: shapes that differ beyond the first dimension.
    """
    _check_shapes(params)
    for p in params:
        for member in _pack_of(p):
            _packs.pop(member, None)
    if _are_distinct(params):
        members = tuple(TensorWeakRef(p) for p in params)
        for p in params:
            _packs[p] = members


def packed(params: Sequence[nn.Parameter]) -> Tensor | None:
    """The parameters as one tensor over their own memory, or None where they have no such memory.

    Parameters that each own their memory alone are moved into a block first (``p.data`` becomes a view of it, values and autograd's
    state stay), so this is meant to be called in every forward. It is None where somebody else laid them out otherwise, such as the flat
    buffer of an optimizer, of DeepSpeed or of FSDP, where processes share them, or where other tensors share their memory; the caller
    concatenates then.

    Returns:
        (sum of shape[0], *shape[1:]), contiguous, detached.
    Raises:
        ValueError: shapes that differ beyond the first dimension.
    """
    if torch.compiler.is_compiling():  # knows no addresses
        return None
    try:
        places = _places(params)
    except RuntimeError:  # no address: tensors of torch.func's transforms
        return None
    key = id(params[0])
    known = _views.get(key)
    if known is not None and known[1] == places:
        return known[2]
    _check_shapes(params)
    view = _adjacent(params)
    if view is None and _may_move_together(params):
        _move_together(params)
        view, places = _adjacent(params), _places(params)
    if view is None:
        _views.pop(key, None)
    else:
        _views[key] = (weakref.ref(params[0], lambda _: _views.pop(key, None)), places, view)
    return view


def units(params: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters in groups whose members must stay side by side, in order.

    A declared pack whose members are all among ``params``, in one dtype on one device, is a group at the place of the first of them that
    comes; every other parameter is a group of its own.
    """
    given, placed, groups = {id(p) for p in params}, set(), []
    for p in params:
        if id(p) in placed:
            continue
        pack = _pack_of(p)
        whole = pack and all(id(member) in given for member in pack) and _are_of_one_kind(pack)
        groups.append(pack if whole else [p])
        placed.update(map(id, groups[-1]))
    return groups


def set_owner(params: Sequence[nn.Parameter], owner) -> None:
    """Notes whose gradient buffer the parameters have a place in, by index: ``owner.claim_grad(first, n)`` answers for n neighbours."""
    owner = weakref.ref(owner)
    for i, p in enumerate(params):
        key = id(p)
        _owners[key] = (weakref.ref(p, lambda _, key=key: _owners.pop(key, None)), owner, i)


def owner_of(p: nn.Parameter) -> tuple[weakref.ref, int] | None:
    """Which engine has a place for the gradient of ``p``, and at which index; None where no engine that is alive has one."""
    entry = _owners.get(id(p))
    if entry is None or entry[0]() is not p or entry[1]() is None:
        return None
    return entry[1:]


def claim_grad(params: Sequence[nn.Parameter]) -> Tensor | None:
    """The place of the parameters' gradients in the buffer of the engine that owns them, for a backward to write them there.

    What was written is handed to autograd as it is, which makes it ``p.grad`` without a copy. A place is given once until the gradients are
    reset, and only while the parameters have none, so gradients that accumulate, or come from several nodes, never meet in it.

    Returns:
        (sum of shape[0], *shape[1:]), contiguous, contents undefined; None where the parameters have no such place together, or it is taken.
    """
    owner = first = None
    for i, p in enumerate(params):
        entry = _owners.get(id(p))
        if entry is None or p.grad is not None or entry[0]() is not p:
            return None
        if i == 0:
            owner, first = entry[1], entry[2]
        elif entry[1] is not owner or entry[2] != first + i:
            return None
    owner = owner()
    return None if owner is None else owner.claim_grad(first, len(params))


def claim_shared_grad(p: nn.Parameter) -> tuple[Tensor | None, bool]:
    """:func:`claim_grad` of one parameter that several nodes of a graph use, and whether the caller is the first, who writes there.

    Who comes later in the same backward may add to what the first has written, and gives autograd nothing: autograd sums into new memory
    when a second gradient arrives, and the place is gone then, so it is asked whether autograd still holds the first one's tensor alone.

    Returns:
        The place and True: contents undefined. The place and False: add to it. None and False: return a gradient as usual.
    """
    home = claim_grad((p,))
    if home is not None:
        _shared[p] = torch._C._current_graph_task_id(), TensorWeakRef(home)
        return home, True
    task, written = _shared.get(p, (None, None))
    # What an earlier run wrote may be alive, too: a hook may have kept it.
    is_of_this_run = task == torch._C._current_graph_task_id() and p.grad is None
    return written() if is_of_this_run else None, False


def _pack_of(p: Tensor) -> list[Tensor]:
    """The members of the pack to which ``p`` belongs; none where it belongs to none, or a member is gone."""
    members = [member() for member in _packs.get(p, ())]
    return [] if any(member is None for member in members) else members


def _places(params: Sequence[Tensor]) -> list[tuple]:
    return [(p.data_ptr(), p.numel(), p.stride()) for p in params]


def _adjacent(params: Sequence[Tensor]) -> Tensor | None:
    """The view of all, if they lie side by side in one storage."""
    first, place = params[0], params[0].data_ptr()
    if place == 0:  # empty, meta or fake
        return None
    for p in params:
        if p.data_ptr() != place or not p.is_contiguous() or p.dtype != first.dtype or p.shape[1:] != first.shape[1:]:
            return None
        place += p.nbytes
    storage = first.untyped_storage()
    if place > storage.data_ptr() + storage.nbytes():  # allocations of their own that happen to follow one another
        return None
    with torch.inference_mode(False):
        return first.detach().as_strided((sum(p.shape[0] for p in params), *first.shape[1:]), first.stride())


def _may_move_together(params: Sequence[nn.Parameter]) -> bool:
    return all(_may_move(p, params) for p in params) and _are_of_one_kind(params) and _are_distinct(params)


def _move_together(params: Sequence[nn.Parameter]) -> None:
    # A block made under inference_mode could never be trained.
    with torch.inference_mode(False), torch.no_grad():
        first = params[0]
        rows = [p.shape[0] for p in params]
        block = torch.empty((sum(rows), *first.shape[1:]), dtype=first.dtype, device=first.device)
        for p, home in zip(params, block.split(rows), strict=True):
            home.copy_(p)
            p.data = home
            _blocks[p] = StorageWeakRef(block.untyped_storage())
    if not any(_pack_of(p) for p in params):
        # Copies of a model, and load_state_dict(assign=True), make Parameters that nobody has declared.
        declare(params)


def _may_move(p: Tensor, params: Sequence[nn.Parameter]) -> bool:
    """Whether nobody notices when the memory of ``p`` is elsewhere: it fills its storage alone, or it lies in a block of an older pack."""
    if not p.is_leaf or p.data_ptr() == 0:
        return False
    storage = p.untyped_storage()
    if p.device.type == "cpu" and storage.is_shared():  # on a GPU it says so of any memory
        return False
    block = _blocks.get(p)
    if block is not None and block.cdata == storage._cdata:
        # Only for what is declared, or two callers would take a parameter away from each other for ever.
        pack = _pack_of(p)
        return [id(member) for member in pack] == [id(member) for member in params]
    # Two references are those of p and of `storage`. Who holds more, a state dict or a parameter tied by .data, expects to see p change.
    return storage.nbytes() == p.nbytes and torch._C._storage_Use_Count(storage._cdata) == 2


def _are_distinct(params: Sequence[Tensor]) -> bool:
    return len({id(p) for p in params}) == len(params)


def _are_of_one_kind(params: Sequence[Tensor]) -> bool:
    return all(p.dtype == params[0].dtype and p.device == params[0].device for p in params)


def _check_shapes(params: Sequence[Tensor]) -> None:
    if any(p.dim() == 0 or p.shape[1:] != params[0].shape[1:] for p in params):
        shapes = ", ".join(str(tuple(p.shape)) for p in params)
        raise ValueError(
            f"packing: parameters of one block must agree in all but the first dimension, got shapes {shapes}"
        )
