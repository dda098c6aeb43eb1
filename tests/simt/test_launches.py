"""``lightseq-report estimate`` charges the kernels' launches, which the harness counts."""

import pytest
import torch

from ls_plugin.report.trace import _launches

ROWS, COLUMNS = 6, 32


def calls():
    """Each op with arguments, once for every number of launches that it may have."""
    x, bias = torch.randn(ROWS, COLUMNS), torch.randn(COLUMNS)
    row = torch.rand(ROWS) + 0.5
    for sums in (False, True):
        yield "layer_norm_backward", (x, x, bias, row, row, sums, False)
        yield "residual_layer_norm_backward", (x, x, x, bias, row, row, 0.0, None, 0, True, True, sums, True, sums)
        yield "residual_layer_norm_backward", (x, x, x, bias, row, row, 0.0, None, 0, True, True, sums, False, False)
        yield "bias_act_dropout_backward", (x, x, None, 0, 0.0, None, 0, sums)
        yield "bias_dropout_residual_backward", (x, 0.0, None, 0, True, sums)
    yield "layer_norm_forward", (x, bias, bias, 1e-5)
    yield "residual_layer_norm_forward", (x, bias, x, bias, bias, 0.0, None, 0, 1e-5)
    yield "attention_softmax_forward", (x.view(1, 1, ROWS, COLUMNS), None, None, False, 1.0, 0.0, None, 0, True)
    yield "label_smoothed_cross_entropy_forward", (x, torch.zeros(ROWS, dtype=torch.int64), x.clone(), 0.1, 1, 1.0)
    yield "grad_norm", ([x, bias], None, 1.0)
    yield "adam_step", (x, x, x.clone(), x.abs(), None, None, None, None, 1e-3, 0.9, 0.999, 1e-8, 0.0, 1, False)


@pytest.mark.parametrize(
    "name, arguments", [pytest.param(*call, id=f"{call[0]}-{i}") for i, call in enumerate(calls())]
)
def test_launches_are_the_kernels(simt, name, arguments):
    op = getattr(torch.ops.ls_simt, name).default
    simt.reset_stats()
    op(*arguments)
    given = dict(zip((a.name for a in op._schema.arguments), arguments, strict=True))
    assert _launches(name, given) == simt.stats().launches
