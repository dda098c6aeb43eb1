"""Small calls of every differentiable op, one file per op, for the tests that ask the same of all of them: torch.compile and autocast
(test_compile.py), equal bits (test_determinism.py), what is kept for the backward (test_saved_bytes.py)."""

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class OpCase:
    """One call.

    Args:
        name: the op's stem, and what is special about this call.
        function: leaves, on any device -> output or outputs, all of which get a gradient.  Dropout may be on: the seed is fixed by the tests.
        shapes: of the leaves, fp32, normally distributed, all of which get a gradient.
        saved_bytes: what the docstring promises to keep for the backward, given the leaves and the outputs: every byte of every tensor
            that is kept, leaves and outputs among them.
        autocast_dtype: of the outputs under bf16 autocast when the first leaf comes out of a matrix product.
        masks: boolean tensors that the caller gives and the op may keep.
    """

    name: str
    function: Callable[..., Tensor | tuple[Tensor, ...]]
    shapes: tuple[tuple[int, ...], ...]
    saved_bytes: Callable[[list[Tensor], tuple[Tensor, ...]], int]
    autocast_dtype: torch.dtype = torch.float32
    masks: tuple[Tensor, ...] = ()

    def leaves(self, requires_grad: bool = True) -> list[Tensor]:
        generator = torch.Generator().manual_seed(6)
        return [torch.randn(shape, generator=generator).requires_grad_(requires_grad) for shape in self.shapes]

    def outputs(self, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        outputs = self.function(*leaves)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def run(self, leaves: list[Tensor]) -> list[Tensor]:
        """Outputs and the gradients of the leaves."""
        outputs = self.outputs(leaves)
        generator = torch.Generator().manual_seed(8)
        grads = [torch.randn(out.shape, generator=generator).to(out) for out in outputs]
        return [*outputs, *torch.autograd.grad(outputs, leaves, grads)]


def n_bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


SEED_BYTES = 8

STEMS = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem != "__init__")


def all_cases() -> list[OpCase]:
    return [case for stem in STEMS for case in importlib.import_module(f"tests.ops.cases.{stem}").CASES]
