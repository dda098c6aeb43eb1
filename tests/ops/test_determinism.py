"""The same inputs give the same bits, in every run and at any number of threads."""

import pytest
import torch

from tests.ops.cases import all_cases

CASES = all_cases()


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_same_bits(backend, deterministic, case):
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            results.append(case.run([t.detach().to(backend.device).requires_grad_() for t in case.leaves()]))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
