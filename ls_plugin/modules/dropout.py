"""Dropout on the fused ops: alone, with the bias before it and the residual (and its layer norm) after it, or with the bias and the
activation before it."""

import torch
from fairseq.modules import FairseqDropout
from torch import Tensor, nn

from ls_plugin import ops
from ls_plugin.modules.scripting import ScriptedAsStock


class Dropout(ScriptedAsStock, FairseqDropout):
    """fairseq's dropout, ``--retain-dropout`` included; no mask is kept in memory."""

    @property
    def active(self) -> bool:
        return self.training or self.apply_during_inference

    def forward(self, x: Tensor, inplace: bool = False) -> Tensor:
        """dropout(x), (..., C); ``inplace`` is a hint of fairseq's that needs no answer."""
        if torch._C._is_tracing():
            return super().forward(x, inplace)
        return ops.bias_dropout_residual(x, None, None, self.p, training=self.active)

    def activate(self, x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        """dropout(activation(x + bias)) in one pass; x (..., F), bias (F,) or None, activation as the op names it."""
        return ops.bias_act_dropout(x, bias, activation, self.p, training=self.active)

    def add_to(self, residual: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """residual + dropout(x + bias) in one pass; x and residual (..., C), bias (C,) or None."""
        return ops.bias_dropout_residual(x, bias, residual, self.p, training=self.active)

    def add_and_normalize(
        self, norm: nn.LayerNorm, residual: Tensor, x: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """sum = residual + dropout(x + bias), and norm(sum), in one pass; x and residual (..., C), bias (C,) or None."""
        return ops.residual_layer_norm(
            x, bias, residual, norm.weight, norm.bias, self.p, norm.eps, training=self.active
        )
