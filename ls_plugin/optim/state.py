"""The two layouts in which fairseq saves an optimizer's state, and the way from each to the other.

List: an entry per parameter, in the order of ``model.parameters()`` that require gradients and then the criterion's; saved by fp32,
``--bf16``, both ``--memory-efficient-*`` and ``--fp16-no-flatten-grads``. Flat: one entry of N elements, the parameters one after another in
the same order; saved by ``--fp16``.
"""

import copy
from collections.abc import Sequence
from itertools import chain

import torch

from ls_plugin.errors import CheckpointError

_REMEDY = "resume with --reset-optimizer"
SCALE = "_scale"  # --fp16-adam-stats keeps exp_avg in fp16, to be multiplied by exp_avg_scale


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
    entry = unscaled(entry)
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
    entries = [unscaled(state_dict["state"].get(key, {})) for key in group["params"]]
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


def unscaled(entry: dict) -> dict:
    """One parameter's state with its values in fp32 where --fp16-adam-stats keeps them in fp16 beside a scale."""
    scales = {name.removesuffix(SCALE): value for name, value in entry.items() if name.endswith(SCALE)}
    if not scales:
        return entry
    return {
        name: value.float() * scales[name] if name in scales else value
        for name, value in entry.items()
        if not name.endswith(SCALE)
    }
