"""nvcc compiles every instance of every kernel: no register spills, and 16-byte accesses where they are meant to be.

Needs the CUDA toolkit, no GPU. A table of registers, stack, shared memory and occupancy per instance goes to build/nvcc/registers.txt.
A new kernel gets its entry in ``LEAST_VECTOR_ACCESSES``.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from . import nvcc
from .nvcc import ARCHS, OPS, Instance

# printf's arguments lie on the stack; only a refused target ever touches them.
STACK_BYTES_OF_PRINTF = 32
PRINTS = re.compile(r"label_smoothed_cross_entropy_forward|embedding_forward|embedding_grad_weight")

pytestmark = pytest.mark.skipif(
    nvcc.find_nvcc() is None, reason="nvcc was not found: install the CUDA toolkit or set CUDA_HOME to it"
)


@pytest.fixture(scope="module")
def instances(request) -> dict[tuple[str, str], tuple[Instance, ...]]:
    """(op, architecture) -> its kernel instances; of the ops that the chosen tests (-k) ask for."""
    asked = {item.callspec.params["op"] for item in request.session.items if item.fspath == request.fspath}
    try:
        found = nvcc.all_instances(sorted(asked))
    except nvcc.CompileError as error:
        pytest.fail(str(error), pytrace=False)
    nvcc.write_register_table(found)
    return found


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", OPS)
def test_no_spills(instances, op, arch):
    kernels = instances[op, arch]
    assert kernels, f"no kernel found in the log of {op}.cu"
    faults = []
    for kernel in kernels:
        allowed_stack = STACK_BYTES_OF_PRINTF if PRINTS.search(kernel.name) else 0
        if kernel.spill_bytes > 0 or kernel.stack_bytes > allowed_stack:
            faults.append(
                f"{kernel.name}: {kernel.registers} registers, {kernel.spill_bytes} bytes spilled, {kernel.stack_bytes} of stack"
            )
    assert not faults, f"{op}.cu for {arch} spills:\n" + "\n".join(faults)


@dataclass(frozen=True)
class Template:
    """The template arguments of an instance: ``layer_norm_forward_kernel<float, 4, RowShape<32, 16>>`` has numbers [4, 32, 16]."""

    text: str

    @property
    def n_bytes(self) -> int:
        """Of an element: that of the first type."""
        return 4 if self.text.startswith("float") else 2

    @property
    def numbers(self) -> list[int]:
        return [int(n) for n in re.findall(r"\b\d+\b", self.text)]

    @property
    def is_vector(self) -> bool:
        """The first number is the elements of an access, and they are 16 bytes."""
        return bool(self.numbers) and self.numbers[0] * self.n_bytes == 16

    @property
    def per_group(self) -> int:
        """16-byte accesses for a group of eight columns, which is what one Philox draw serves."""
        return 8 * self.n_bytes // 16

    def per_lane(self, n_elem: int) -> int:
        """16-byte accesses for so many elements."""
        return n_elem * self.n_bytes // 16


# Kernel -> the 16-byte (loads, stores) that a vector instance has at least, from its template arguments. Instances that work element
# by element are not asked; a kernel that has no other kind is None.
LEAST_VECTOR_ACCESSES: dict[str, Callable[[Template], tuple[int, int]] | None] = {
    "adam_step_kernel": lambda t: (2, 2),  # the moments; param and grad may be 8 bytes
    # numbers[1] groups per thread: scores, bias; grad_probs, the saved matrix as one of two, bias
    "attention_softmax_forward_kernel": lambda t: (2 * t.numbers[1] * t.per_group, t.numbers[1] * t.per_group),
    "attention_softmax_forward_long_kernel": lambda t: (4 * t.per_group, t.per_group),
    "attention_softmax_backward_kernel": lambda t: (4 * t.numbers[1] * t.per_group, t.numbers[1] * t.per_group),
    "attention_softmax_backward_long_kernel": lambda t: (8 * t.per_group, t.per_group),
    "bias_act_dropout_forward_kernel": lambda t: (2 * t.per_group, t.per_group),  # x, bias; y
    "bias_act_dropout_backward_kernel": lambda t: (2 * t.per_group, t.per_group),  # grad_y and what was saved; grad_x
    "bias_dropout_residual_forward_kernel": lambda t: (3 * t.per_group, t.per_group),  # x, bias, residual; y
    "bias_dropout_residual_backward_kernel": lambda t: (t.per_group, t.per_group),
    "embedding_forward_kernel": lambda t: (2 * t.per_group, t.per_group),  # a row of each table; y
    "embedding_grad_weight_atomic_kernel": lambda t: (2, 0),  # atomics are no stores; fp32
    "embedding_grad_weight_sorted_kernel": lambda t: (4 * t.per_group, t.per_group),  # rows in flight; the sum
    "embedding_token_at_kernel": None,
    "embedding_grad_positions_kernel": lambda t: (4 * t.per_group, t.per_group),
    "finish_column_sums_kernel": None,
    "grad_norm_finish_kernel": None,
    "grad_norm_squares_kernel": lambda t: (4, 0),  # unrolled by four
    "label_smoothed_cross_entropy_forward_kernel": lambda t: (
        1,
        2 if ", true, " in t.text else 0,
    ),  # zeros; the gradient
    "label_smoothed_cross_entropy_backward_kernel": lambda t: (1, 1),
    "layer_norm_forward_kernel": lambda t: (
        t.per_lane(t.numbers[2]),
        t.per_lane(t.numbers[2]),
    ),  # RowShape<lanes, per lane>
    "layer_norm_forward_long_kernel": lambda t: (2, 1),
    "layer_norm_backward_kernel": lambda t: (2 * t.per_lane(t.numbers[2]), t.per_lane(t.numbers[2])),
    "layer_norm_backward_long_kernel": lambda t: (4, 1),
    "layer_norm_grad_params_kernel": lambda t: (2 * t.per_group, 0),
    # x, residual; sum, y: RowShape<lanes, per lane, run>
    "residual_layer_norm_forward_kernel": lambda t: (2 * t.per_lane(t.numbers[2]), 2 * t.per_lane(t.numbers[2])),
    "residual_layer_norm_forward_long_kernel": lambda t: (3 * t.per_group, 2 * t.per_group),
    # sum, grad_y, grad_sum; grad_residual, grad_x
    "residual_layer_norm_backward_kernel": lambda t: (3 * t.per_lane(t.numbers[2]), 2 * t.per_lane(t.numbers[2])),
    "residual_layer_norm_backward_long_kernel": lambda t: (2 + 3 * t.per_group, 2 * t.per_group),
}
# Kernels whose vector instances are not told by the first number among their arguments.
ALWAYS_VECTORS = {"adam_step_kernel", "grad_norm_squares_kernel"}


def vector_instances(kernels: tuple[Instance, ...]) -> list[tuple[Instance, tuple[int, int]]]:
    """The instances that must move 16 bytes at a time, with their least (loads, stores)."""
    chosen, unknown = [], set()
    for kernel in kernels:
        name, _, arguments = kernel.name.partition("<")
        if name not in LEAST_VECTOR_ACCESSES:
            unknown.add(name)
            continue
        least, template = LEAST_VECTOR_ACCESSES[name], Template(arguments.replace("BFloat16", "Bf"))
        if least is not None and (template.is_vector or name in ALWAYS_VECTORS):
            chosen.append((kernel, least(template)))
    assert not unknown, (
        f"no entry for {', '.join(sorted(unknown))}: say in LEAST_VECTOR_ACCESSES of tests/simt/test_nvcc.py how many 16-byte "
        "loads and stores its vector instances have at least (None: it has no vector instance)"
    )
    return chosen


named = pytest.mark.skipif(
    shutil.which("c++filt") is None, reason="c++filt was not found: it names the instances (binutils)"
)


@named
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", OPS)
def test_vector_instances_move_16_bytes(instances, op, arch):
    """In PTX, whose vector accesses ptxas keeps: ld.global.v4.b32 is LDG.E.128 in SASS."""
    chosen, faults = vector_instances(instances[op, arch]), []
    for kernel, least in chosen:
        loads, stores = kernel.accesses["ld", 16], kernel.accesses["st", 16]
        if loads < least[0] or stores < least[1]:
            faults.append(f"{kernel.name}: {loads} loads and {stores} stores of 16 bytes, expected at least {least}")
    assert chosen, f"no vector instance found in {op}.cu"
    assert not faults, f"{op}.cu for {arch}:\n" + "\n".join(faults)


@named
@pytest.mark.skipif(
    nvcc.find_nvdisasm() is None,
    reason="nvdisasm was not found: it shows the machine code (CUDA toolkit, or pip install nvidia-cuda-nvdisasm)",
)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", OPS)
def test_machine_code_moves_16_bytes(instances, op, arch):
    faults = []
    for kernel, least in vector_instances(instances[op, arch]):
        loads, stores = kernel.machine["ld", 16], kernel.machine["st", 16]
        if (loads == 0 and least[0] > 0) or (stores == 0 and least[1] > 0):
            faults.append(f"{kernel.name}: {loads} LDG.E.128, {stores} STG.E.128, expected at least {least}")
    # An array that is indexed at run time, or a spill.
    faults += [
        f"{k.name}: {k.machine['local', 0]} reads of local memory" for k in instances[op, arch] if k.machine["local", 0]
    ]
    assert not faults, f"{op}.cu for {arch}:\n" + "\n".join(faults)
