"""A pytest plugin: before each test the free memory that torch holds on the GPU is NaN, so that an element that no kernel wrote shows."""

import pytest
import torch

SMALL_BYTES, N_SMALL = 1 << 20, 32  # torch serves requests up to 1 MB from a pool of their own
LARGE_BYTES = 256 << 20


@pytest.fixture(autouse=True)
def poisoned_memory():
    if torch.cuda.is_available():
        blocks = [SMALL_BYTES] * N_SMALL + [LARGE_BYTES]
        # All bits set: a NaN in every floating point type, -1 in the integers. Freed at once, and handed out again as they are.
        held = [torch.full((n_bytes,), 255, dtype=torch.uint8, device="cuda") for n_bytes in blocks]
        held.clear()
    yield
