"""What each op keeps between its forward and its backward, to the byte; never a mask."""

import pytest
import torch

from tests.ops.accuracy import needs_library
from tests.ops.cases import all_cases

CASES = all_cases()


@needs_library
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_saved_bytes(case):
    saved = {}

    def pack(t):
        storage = t.untyped_storage()
        saved[storage.data_ptr()] = (storage.nbytes(), t.dtype)
        return t

    leaves = case.leaves()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        outputs = case.outputs(leaves)
    # What a node keeps outside of save_for_backward, which the hooks do not see.
    nodes = [out.grad_fn for out in outputs]
    for node in nodes:
        nodes += [parent for parent, _ in node.next_functions if parent is not None]
        for value in getattr(node, "__dict__", {}).values():
            for t in value if isinstance(value, tuple) else (value,):
                if isinstance(t, torch.Tensor):
                    pack(t)
    given = {mask.untyped_storage().data_ptr() for mask in case.masks}
    made = [dtype for pointer, (_, dtype) in saved.items() if pointer not in given]
    assert not {torch.bool, torch.uint8} & set(made), "a mask was made and saved"
    assert sum(n for n, _ in saved.values()) == case.saved_bytes(leaves, outputs)
