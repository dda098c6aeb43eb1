"""The same inputs give the same bits, in every run and at any number of threads."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ls_plugin import ops
from tests.ops.cases import all_cases
from tests.ops.test_anatomy import STEMS

CASES = all_cases()
THREADS = (1, 2, 3, 1)
PAD = 1


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_same_bits(run: Callable[[], list[Tensor]]) -> None:
    results = []
    threads = torch.get_num_threads()
    try:
        for count in THREADS:
            torch.set_num_threads(count)
            torch.manual_seed(5)
            results.append(run())
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_same_bits(backend, deterministic, case):
    assert_same_bits(lambda: case.run([t.detach().to(backend.device).requires_grad_() for t in case.leaves()]))


# --- calls that are shared among threads: a CPU kernel gives each at least 16,384 elements

ROWS, WIDTH, TABLE, LENGTH = 301, 333, 701, 79  # 100,233 elements
X = (ROWS, WIDTH)


def _tokens(device: torch.device, shape=(7, 43)) -> Tensor:
    return torch.randint(TABLE, shape, generator=torch.Generator().manual_seed(3)).to(device)


def _target(x: Tensor) -> Tensor:
    return _tokens(x.device, (ROWS,))


def _padding(x: Tensor) -> Tensor:
    lengths = torch.tensor([LENGTH, 60, 31], device=x.device)
    return torch.arange(LENGTH, device=x.device) >= lengths[:, None]


def _adam(param: Tensor, grad: Tensor, exp_avg: Tensor) -> tuple[Tensor, ...]:
    param, exp_avg, exp_avg_sq = param.detach().clone(), exp_avg.detach().clone(), exp_avg.detach() ** 2
    rates = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.01}
    ops.adam_step(param, grad.detach(), exp_avg, exp_avg_sq, step=3, **rates)
    return param, exp_avg, exp_avg_sq


LARGE: dict[str, tuple[Callable[..., Tensor | tuple[Tensor, ...]], tuple[tuple[int, ...], ...]]] = {
    "adam": (_adam, ((100_003,),) * 3),
    "attention_softmax": (
        lambda scores: ops.attention_softmax(scores, _padding(scores), scale=0.5, p=0.3),
        ((3, 5, LENGTH, LENGTH),),
    ),
    "bias_act_dropout": (lambda x, bias: ops.bias_act_dropout(x, bias, "gelu", 0.3), (X, (WIDTH,))),
    "bias_dropout_residual": (lambda x, bias, r: ops.bias_dropout_residual(x, bias, r, 0.3), (X, (WIDTH,), X)),
    "embedding": (
        lambda weight, positions: ops.embedding(_tokens(weight.device), weight, positions, PAD, 4.0, 0.3),
        ((TABLE, WIDTH), (64, WIDTH)),
    ),
    "fused_attention": (
        lambda q, k, v: ops.fused_attention(q, k, v, _padding(q), causal=True, p=0.3),
        ((3, 5, LENGTH, 17),) * 3,
    ),
    "grad_norm": (lambda *grads: ops.grad_norm([g.detach() for g in grads], max_norm=0.5), ((100_003,), (7,), X)),
    "label_smoothed_cross_entropy": (
        lambda logits: ops.label_smoothed_cross_entropy(logits, _target(logits), 0.1, PAD)[0],
        ((ROWS, TABLE),),
    ),
    "layer_norm": (ops.layer_norm, (X, (WIDTH,), (WIDTH,))),
    "linear_cross_entropy": (
        lambda x, weight: ops.linear_cross_entropy(x, weight, _target(x), 0.1, PAD)[0],
        (X, (TABLE, WIDTH)),
    ),
    "product": (ops.product.linear, (X, (TABLE, WIDTH), (TABLE,))),
    "residual_layer_norm": (
        lambda *leaves: ops.residual_layer_norm(*leaves, 0.3),
        (X, (WIDTH,), X, (WIDTH,), (WIDTH,)),
    ),
}


def test_every_op_has_a_large_call():
    assert sorted(LARGE) == STEMS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stem", LARGE)
def test_threads_that_share_a_call_give_the_same_bits(stem, dtype, deterministic):
    function, shapes = LARGE[stem]
    generator = torch.Generator().manual_seed(6)
    leaves = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    if stem == "adam":
        leaves[2] = leaves[2].float()

    def run() -> list[Tensor]:
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if not outputs[0].requires_grad:
            return list(outputs)
        grads = [torch.randn(out.shape, generator=torch.Generator().manual_seed(8)).to(out) for out in outputs]
        return [*outputs, *torch.autograd.grad(outputs, leaves, grads)]

    assert_same_bits(run)
