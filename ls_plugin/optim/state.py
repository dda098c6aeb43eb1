"""The two layouts in which fairseq saves an optimizer's state, and the way from each to the other.

List: an entry per parameter, in the order of ``model.parameters()`` that require gradients and then the criterion's; saved by fp32,
``--bf16``, both ``--memory-efficient-*`` and ``--fp16-no-flatten-grads``. Flat: one entry of N elements, the parameters one after another in
the same order; saved by ``--fp16``. :func:`install` makes every optimizer of fairseq resume from either.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch
from fairseq.optim import FairseqOptimizer
from fairseq.optim.fp16_optimizer import _FP16OptimizerMixin, _MemoryEfficientFP16OptimizerMixin
from torch import Tensor

from ls_plugin.errors import CheckpointError
from ls_plugin.rebinding import wrap

_REMEDY = "resume with --reset-optimizer"
_SCALE = "_scale"  # --fp16-adam-stats keeps exp_avg in fp16, to be multiplied by exp_avg_scale


def install() -> None:
    """Makes fairseq's optimizers take the state of either layout.  Calling it again changes nothing."""
    wrap(FairseqOptimizer, "load_state_dict", _load_list)
    wrap(_MemoryEfficientFP16OptimizerMixin, "load_state_dict", _load_list)
    wrap(_FP16OptimizerMixin, "load_state_dict", _load_flat)


def to_list(state_dict: dict, shapes: Sequence[torch.Size]) -> dict:
    """The state with an entry per parameter.

    What a flat entry holds of each element (the moments, (N,)) becomes views of it in the parameters' shapes; what it holds once
    (``step``) is every parameter's. A list passes through as it is, and so does what lies beside ``state`` and ``param_groups``.

    Args:
        shapes: of the parameters that require gradients, in order.
    Raises:
        CheckpointError: another number of parameters, or elements, than these.
    """
    if not _is_flat(state_dict, shapes):
        _check_list(state_dict, shapes)
        return state_dict
    group, entry = _the_flat_one(state_dict, shapes)
    entry = _unscaled(entry)
    sizes = [shape.numel() for shape in shapes]
    # A state that was saved before the first update has no entry.
    entries: list[dict] = [{} for _ in shapes] if entry else []
    for name, value in entry.items():
        if _is_per_element(value):
            values = [part.view(shape) for part, shape in zip(value.split(sizes), shapes, strict=True)]
        else:
            values = [copy.deepcopy(value) for _ in shapes]  # a tensor may be counted up in place
        for parameter, part in zip(entries, values, strict=True):
            parameter[name] = part
    return {
        **state_dict,
        "state": dict(enumerate(entries)),
        "param_groups": [{**group, "params": list(range(len(shapes)))}],
    }


def to_flat(state_dict: dict, shapes: Sequence[torch.Size]) -> dict:
    """The state with one entry for all parameters; a flat one passes through.

    One step stands for all: the largest. A flat run counts every update for every parameter and takes a missing gradient for zero, and so
    has come to the largest count where others had no gradient at times; moments of parameters that have no state yet are zero for the same
    reason.

    Args:
        shapes: of the parameters that require gradients, in order.
    Raises:
        CheckpointError: another number of parameters, or elements, than these; several parameter groups; a state that is not elementwise.
    """
    if _is_flat(state_dict, shapes):
        _the_flat_one(state_dict, shapes)  # checks
        return state_dict
    groups = state_dict["param_groups"]
    if len(groups) != 1:
        raise CheckpointError(
            f"optimizer state: --fp16 keeps the state of all parameters in one and must have one parameter group, got {len(groups)}; resume with "
            "--fp16-no-flatten-grads, or with --reset-optimizer"
        )
    _check_list(state_dict, shapes)
    (group,) = groups
    entries = [_unscaled(state_dict["state"].get(key, {})) for key in group["params"]]
    names = dict.fromkeys(chain.from_iterable(entries))  # in order
    flat = {name: _joined(name, [entry.get(name) for entry in entries], shapes) for name in names}
    return {**state_dict, "state": {0: flat} if flat else {}, "param_groups": [{**group, "params": [0]}]}


def _joined(name: str, values: list, shapes: Sequence[torch.Size]):
    """One value for the whole of what each parameter has of it, or None where it has no state."""
    present = [value for value in values if value is not None]
    if not any(map(_is_per_element, present)):
        return max(present, default=None)
    dtype, device = present[0].dtype, present[0].device
    parts = []
    for value, shape in zip(values, shapes, strict=True):
        if value is None:
            value = torch.zeros(shape, dtype=dtype, device=device)
        elif value.shape != shape:
            raise CheckpointError(
                f"optimizer state: {name} must have the parameter's shape {tuple(shape)} to become part of the flat state of --fp16, got "
                f"{tuple(value.shape)}; resume with --fp16-no-flatten-grads, or with --reset-optimizer"
            )
        parts.append(value.reshape(-1))
    return torch.cat(parts)


def _is_per_element(value) -> bool:
    return torch.is_tensor(value) and value.dim() > 0


def _n_parameters(state_dict: dict) -> int:
    return sum(len(group["params"]) for group in state_dict["param_groups"])


def _the_flat_one(state_dict: dict, shapes: Sequence[torch.Size]) -> tuple[dict, dict]:
    """The parameter group and the entry of a flat state; raises CheckpointError unless the entry has as many elements as these shapes."""
    (group,) = state_dict["param_groups"]
    entry = state_dict["state"].get(group["params"][0], {})
    n_elem = sum(shape.numel() for shape in shapes)
    for name, value in entry.items():
        if _is_per_element(value) and value.numel() != n_elem:
            raise CheckpointError(
                f"optimizer state: the flat {name} of --fp16 must have {n_elem:,} elements, as the parameters that are trained, got "
                f"{value.numel():,}; were other parameters frozen when it was saved? {_REMEDY.capitalize()}"
            )
    return group, entry


def _is_flat(state_dict: dict, shapes: Sequence[torch.Size]) -> bool:
    """Whether it holds one vector for several parameters, or for one of another shape."""
    if _n_parameters(state_dict) != 1:
        return False
    vectors = all(
        value.dim() == 1 for entry in state_dict["state"].values() for value in entry.values() if _is_per_element(value)
    )
    return vectors and not (len(shapes) == 1 and len(shapes[0]) == 1)


def _check_list(state_dict: dict, shapes: Sequence[torch.Size]) -> None:
    n_saved = _n_parameters(state_dict)
    if n_saved != len(shapes):
        raise CheckpointError(
            f"optimizer state: must be of {len(shapes)} parameters, as many as are trained, got {n_saved}; were other parameters frozen when it "
            f"was saved, or is it another model's? {_REMEDY.capitalize()}"
        )
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    for key, shape in zip(keys, shapes, strict=True):
        saved = state_dict["state"].get(key, {}).get("exp_avg")
        if saved is not None and saved.shape != shape:
            raise CheckpointError(
                f"optimizer state: exp_avg must have the parameter's shape {tuple(shape)}, got {tuple(saved.shape)}; were other parameters frozen "
                f"when it was saved? {_REMEDY.capitalize()}"
            )


def _unscaled(entry: dict) -> dict:
    """One parameter's state with its values in fp32 where --fp16-adam-stats keeps them in fp16 beside a scale."""
    scales = {name.removesuffix(_SCALE): value for name, value in entry.items() if name.endswith(_SCALE)}
    if not scales:
        return entry
    return {
        name: value.float() * scales[name] if name in scales else value
        for name, value in entry.items()
        if not name.endswith(_SCALE)
    }


# --- fairseq's optimizers


def _load_list(stock, self, state_dict: dict, optimizer_overrides=None):
    return stock(self, _fitted(self, state_dict, to_list, self.params), optimizer_overrides)


def _load_flat(stock, self, state_dict: dict, optimizer_overrides=None):
    if self.has_flat_params:  # the list is the business of the optimizer within
        state_dict = _fitted(self, state_dict, to_flat, self.fp16_params)
    return stock(self, state_dict, optimizer_overrides)


def _fitted(optimizer: FairseqOptimizer, state_dict: dict, convert: Callable, params: Iterable[Tensor]) -> dict:
    """A saved state as ``optimizer`` keeps it."""
    if not {"state", "param_groups"} <= state_dict.keys():
        return state_dict  # of several optimizers, by name (--optimizer composite)
    state_dict = convert(state_dict, [p.shape for p in params])
    state = state_dict["state"]
    has_scales = any(name.endswith(_SCALE) for entry in state.values() for name in entry)
    needs_scales = getattr(optimizer.optimizer, "use_fp16_stats", False)
    if needs_scales and state and not has_scales:
        raise CheckpointError(
            "--fp16-adam-stats: the saved state must have been written with this flag, and both runs with --fp16 or both without it, since the "
            "scales of its fp16 moments cannot be made afterwards; drop the flag, or resume with --reset-optimizer"
        )
    if has_scales and not needs_scales:
        state_dict = {**state_dict, "state": {key: _unscaled(entry) for key, entry in state.items()}}
    return state_dict
