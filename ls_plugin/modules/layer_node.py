"""A Transformer layer as one node of autograd: forward and backward written out over the raw kernels.

What autograd would keep and do for some thirty ops is decided here once: the host pays for one node, every tensor that is kept for the
backward is listed, and whatever stands between two matrix products is one kernel. The same layer composed of differentiable ops is in
``transformer_layer.py``; tests/modules/test_layer_node.py holds the two together.

A layer is a chain of sublayers (self-attention, attention over the encoder, feed-forward network). Between two of them stands the same step in
pre-norm and post-norm layers:

    sum = residual + dropout(W_out h + b_out),   y = layer_norm(sum)

with residual = the last sum (pre-norm) or the last y (post-norm). In pre-norm the norm is that of the *next* sublayer, so a layer in a stack
applies the first norm of the layer after it.

Dimensions: B batch, T target or source length, S source length, C model width, H heads, D = C / H, F feed-forward width, N = B T rows.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from ls_plugin import _library
from ls_plugin.modules.joint import joint
from ls_plugin.ops import product
from ls_plugin.ops.autograd import differentiable_once, fills_grads
from ls_plugin.ops.bias_act_dropout import ACTIVATION_CODES, SAVES_OUTPUT
from ls_plugin.ops.fused_attention import attention_backward, attention_forward
from ls_plugin.ops.rng import draw_seed, rank_offset
from ls_plugin.packing import claim_grad, claim_shared_grad


@dataclasses.dataclass(slots=True)
class Run:
    """What one pass through a layer needs besides tensors with gradients.

    ``padding_mask`` (B, T) and ``encoder_padding_mask`` (B, S) are true at padding, or None. ``p_*`` are the dropout probabilities, 0 where
    dropout is off.
    """

    sublayers: tuple
    pre_norm: bool
    eps: tuple[float | None, ...]  # of the norm after each sublayer; None where there is none
    padding_mask: Tensor | None
    encoder_padding_mask: Tensor | None
    causal: bool
    p: float
    p_attention: float
    p_activation: float
    needs_weights: bool = False  # of the attention over the encoder
    seed: Tensor | None = None
    offset: int = 0

    def draw(self, device: torch.device) -> None:
        """One seed for the whole layer. The low half of the offset tells its masks apart."""
        if self.p > 0.0 or self.p_attention > 0.0 or self.p_activation > 0.0:
            self.seed = draw_seed(device)
        self.offset = rank_offset()


class SelfAttention:
    """Projection to q, k and v in one product, attention, output projection without its bias."""

    PARAMETERS = 7  # weights of q, k, v, their biases, output weight

    def __init__(self, n_heads: int, scale: float):
        self.n_heads, self.scale = n_heads, scale

    def forward(self, run: Run, y: Tensor, _kv, params, offset: int):
        """y (B, T, C) -> the output (N, C), what the backward needs, no attention weights."""
        q_weight, k_weight, v_weight, q_bias, k_bias, v_bias, out_weight = params
        weight = joint((q_weight, k_weight, v_weight))
        n_batch, length, width = y.shape
        rows = y.view(-1, width)
        qkv = product.linear(rows, weight, joint((q_bias, k_bias, v_bias)))
        heads = _heads(qkv, n_batch, length, self.n_heads, 3)
        out, of_attention = attention_forward(
            *heads, run.padding_mask, None, run.causal, self.scale, run.p_attention, run.seed, offset
        )
        return product.linear(_rows(out), out_weight), (rows, weight, qkv, out, *of_attention), None

    def backward(self, run: Run, grad, _grad_weights, params, saved, needs, into, offset: int):
        """Gradients of y (N, C), added to ``into`` if given, of no keys, and of the parameters."""
        rows, weight, qkv, out, *of_attention = saved
        out_weight = params[6]
        n_batch, _, length, _ = out.shape
        grad_out_weight = weight_grad(grad, _rows(out), params[6:]) if needs[6] else None
        grad_out = product.mm(grad, out_weight)
        heads = _heads(qkv, n_batch, length, self.n_heads, 3)
        grad_qkv = torch.empty_like(qkv)
        attention_backward(
            _heads(grad_out, n_batch, length, self.n_heads, 1)[0],
            *heads,
            of_attention,
            run.padding_mask,
            None,
            run.causal,
            self.scale,
            run.p_attention,
            run.seed,
            offset,
            _heads(grad_qkv, n_batch, length, self.n_heads, 3),
        )
        grad_weights = joint_weight_grads(grad_qkv, rows, params[0:3], needs[0:3])
        grad_biases = joint_bias_grads(grad_qkv, params[3:6], needs[3:6])
        return _grad_input(grad_qkv, weight, into), None, (*grad_weights, *grad_biases, grad_out_weight)


class EncoderAttention:
    """Projection to q, attention over keys and values that are there, output projection without its bias."""

    PARAMETERS = 3  # weight and bias of q, output weight

    def __init__(self, n_heads: int, scale: float):
        self.n_heads, self.scale = n_heads, scale

    def forward(self, run: Run, y: Tensor, kv: Tensor, params, offset: int):
        """y (B, T, C), keys and values (B, S, 2C) -> the output (N, C), what the backward needs, attention weights (B, H, T, S) or None."""
        q_weight, q_bias, out_weight = params
        n_batch, length, width = y.shape
        rows = y.view(-1, width)
        q = product.linear(rows, q_weight, q_bias)
        (q_heads,) = _heads(q, n_batch, length, self.n_heads, 1)
        heads = q_heads, *_heads(kv, n_batch, kv.shape[1], self.n_heads, 2)
        out, of_attention = attention_forward(
            *heads, run.encoder_padding_mask, None, False, self.scale, run.p_attention, run.seed, offset
        )
        weights = None
        if run.needs_weights:
            # q takes the scale, as in stock: q k^T could leave fp16's range.
            scores = product.matmul(heads[0] * self.scale, heads[1].transpose(-1, -2))
            weights, _ = _library.kernels().attention_softmax_forward.default(
                scores, run.encoder_padding_mask, None, False, 1.0, 0.0, None, 0, False
            )
        return product.linear(_rows(out), out_weight), (rows, q, kv, out, weights, *of_attention), weights

    def backward(self, run: Run, grad, grad_weights, params, saved, needs, into, offset: int):
        """Gradients of y (N, C), added to ``into`` if given, of the keys and values (B, S, 2C), and of the parameters."""
        q_weight, _, out_weight = params
        rows, q, kv, out, weights, *of_attention = saved
        n_batch, _, length, _ = out.shape
        n_keys = kv.shape[1]
        (q_heads,) = _heads(q, n_batch, length, self.n_heads, 1)
        heads = q_heads, *_heads(kv, n_batch, n_keys, self.n_heads, 2)
        grad_q, grad_kv = torch.empty_like(q), torch.empty(kv.shape, dtype=kv.dtype, device=kv.device)
        (grad_q_heads,) = _heads(grad_q, n_batch, length, self.n_heads, 1)
        grad_heads = grad_q_heads, *_heads(grad_kv, n_batch, n_keys, self.n_heads, 2)
        grad_out_weight = None
        if grad is None:  # nothing but the attention weights was used
            grad_q.zero_()
            grad_kv.zero_()
        else:
            grad_out_weight = weight_grad(grad, _rows(out), params[2:]) if needs[2] else None
            grad_out = product.mm(grad, out_weight)
            attention_backward(
                _heads(grad_out, n_batch, length, self.n_heads, 1)[0],
                *heads,
                of_attention,
                run.encoder_padding_mask,
                None,
                False,
                self.scale,
                run.p_attention,
                run.seed,
                offset,
                grad_heads,
            )
        if grad_weights is not None:
            grad_scores = _library.kernels().attention_softmax_backward.default(
                grad_weights.contiguous(), weights, None, None, None, False, 1.0, 0.0, None, 0
            )
            grad_heads[0].add_(product.matmul(grad_scores, heads[1]), alpha=self.scale)
            grad_heads[1].add_(product.matmul(grad_scores.transpose(-1, -2), heads[0]), alpha=self.scale)
        grad_q_weight = weight_grad(grad_q, rows, params[0:1]) if needs[0] else None
        (grad_q_bias,) = joint_bias_grads(grad_q, params[1:2], needs[1:2])
        return _grad_input(grad_q, q_weight, into), grad_kv, (grad_q_weight, grad_q_bias, grad_out_weight)


class FeedForward:
    """W2 dropout(activation(W1 y + b1)), without the bias of W2."""

    PARAMETERS = 3  # weight and bias of the first product, weight of the second

    def __init__(self, activation: str):
        self.is_linear = activation == "linear"
        self.code = None if self.is_linear else ACTIVATION_CODES[activation]
        self.saves_output = self.is_linear or self.code in SAVES_OUTPUT

    def forward(self, run: Run, y: Tensor, _kv, params, offset: int):
        """y (B, T, C) -> the output (N, C), what the backward needs, no attention weights."""
        weight1, bias1, weight2 = params
        rows = y.view(-1, y.shape[-1])
        h = product.linear(rows, weight1)
        kernels = _library.kernels()
        if self.is_linear:
            a = kernels.bias_dropout_residual_forward.default(h, bias1, None, run.p_activation, run.seed, offset)
        else:
            a = kernels.bias_act_dropout_forward.default(h, bias1, self.code, run.p_activation, run.seed, offset)
        return product.linear(a, weight2), (rows, None if self.saves_output else h, a), None

    def backward(self, run: Run, grad, _grad_weights, params, saved, needs, into, offset: int):
        """Gradients of y (N, C), added to ``into`` if given, of no keys, and of the parameters."""
        weight1, bias1, weight2 = params
        rows, h, a = saved
        grad_weight2 = weight_grad(grad, a, params[2:]) if needs[2] else None
        grad_a = product.mm(grad, weight2)
        kernels = _library.kernels()
        if self.is_linear:
            grad_h, grad_bias1 = kernels.bias_dropout_residual_backward.default(
                grad_a, run.p_activation, run.seed, offset, True, needs[1]
            )
        else:
            saved_for_act, bias = (a, None) if self.saves_output else (h, bias1)
            grad_h, grad_bias1 = kernels.bias_act_dropout_backward.default(
                grad_a, saved_for_act, bias, self.code, run.p_activation, run.seed, offset, needs[1]
            )
        grad_weight1 = weight_grad(grad_h, rows, params[0:1]) if needs[0] else None
        return (
            _grad_input(grad_h, weight1, into),
            None,
            (grad_weight1, grad_bias1 if needs[1] else None, grad_weight2),
        )


class LayerNode(torch.autograd.Function):
    """A layer's forward and backward.

    Inputs: run, x (B, T, C), y (B, T, C), kv (B, S, 2C) or None, then for every sublayer its parameters, its output bias, and weight and bias of
    the norm after it (None, None where there is none). x is the residual stream (None in post-norm), y what the first sublayer reads.
    Outputs: the new x (None in post-norm), the new y (None without a last norm), attention weights (B, H, T, S) or None.
    """

    @staticmethod
    def forward(ctx, run, x, y, kv, *params):
        with torch._C._AutoDispatchBelowAutograd():
            return _forward(ctx, run, x, y, kv, params)

    @staticmethod
    def backward(ctx, grad_x, grad_y, grad_weights):
        if torch.is_grad_enabled():
            return _refused_if_used(ctx, grad_x, grad_y, grad_weights)
        return _backward_below_autograd(ctx, grad_x, grad_y, grad_weights)


# Past the Python half of apply(), which looks for tensors of torch.func's transforms (callers keep away from those): 30 of 480 us of a layer.
apply_layer_node = super(torch.autograd.Function, LayerNode).apply


def _forward(ctx, run, x, y, kv, params):
    kernels = _library.kernels()
    run.draw(y.device)
    shape = y.shape
    saved, counts, weights = [], [], None
    at = 0
    for i, (sublayer, eps) in enumerate(zip(run.sublayers, run.eps, strict=True)):
        end = at + sublayer.PARAMETERS
        out, kept, new_weights = sublayer.forward(run, y, kv, params[at:end], run.offset + 2 * i)
        weights = weights if new_weights is None else new_weights
        out_bias, norm_weight, norm_bias = params[end : end + 3]
        residual = x if run.pre_norm else y
        out = out.view(shape)
        offset = run.offset + 2 * i + 1
        if eps is None:
            x, y = kernels.bias_dropout_residual_forward.default(out, out_bias, residual, run.p, run.seed, offset), None
            saved += kept
            counts.append(len(kept))
        else:
            x, y, mean, rstd = kernels.residual_layer_norm_forward.default(
                out, out_bias, residual, norm_weight, norm_bias, run.p, run.seed, offset, eps
            )
            saved += (*kept, x, mean, rstd)
            counts.append(len(kept))
        at = end + 3
    ctx.run, ctx.counts, ctx.shape = run, counts, shape
    ctx.save_for_backward(*params, *saved)
    ctx.set_materialize_grads(False)
    return x if run.pre_norm else None, y, weights


def _backward(ctx, tensors, grad_x, grad_y, grad_weights):
    run, shape = ctx.run, ctx.shape
    n_params = len(ctx.needs_input_grad) - 4
    params, saved = tensors[:n_params], tensors[n_params:]
    needs = ctx.needs_input_grad[4:]
    grads: list = [None] * n_params
    grad_kv = None
    grad_x = None if grad_x is None else grad_x.contiguous()
    grad_y = None if grad_y is None else grad_y.contiguous()
    at, kept_end = n_params, len(saved)
    for i in reversed(range(len(run.sublayers))):
        sublayer, eps, count = run.sublayers[i], run.eps[i], ctx.counts[i]
        begin = at - 3 - sublayer.PARAMETERS
        norm_weight = params[at - 2]
        statistics = saved[kept_end - 3 : kept_end] if eps is not None else None
        kept_end -= 3 if eps is not None else 0
        grad_out, grad_residual, grads[at - 3 : at] = _residual_backward(
            run, grad_x, grad_y, statistics, norm_weight, run.offset + 2 * i + 1, needs[at - 3 : at]
        )
        kept = saved[kept_end - count : kept_end]
        kept_end -= count
        of_weights = grad_weights if isinstance(sublayer, EncoderAttention) else None
        if grad_out is None and of_weights is None:
            grad_x = grad_y = None
        else:
            into = None if run.pre_norm or grad_residual is None else grad_residual.view(-1, shape[-1])
            grad_in, new_grad_kv, grads[begin : at - 3] = sublayer.backward(
                run,
                None if grad_out is None else grad_out.view(-1, shape[-1]),
                of_weights,
                params[begin : at - 3],
                kept,
                needs[begin : at - 3],
                into,
                run.offset + 2 * i,
            )
            grad_kv = grad_kv if new_grad_kv is None else new_grad_kv
            grad_x, grad_y = grad_residual if run.pre_norm else None, grad_in.view(shape)
        at = begin
    return None, grad_x, grad_y, grad_kv, *grads


def _residual_backward(run, grad_sum, grad_y, statistics, norm_weight, offset, needs):
    """Gradients of a sublayer's output, of the residual, and of (output bias, norm weight, norm bias); None where nothing arrives."""
    needs_bias, needs_weight, needs_norm_bias = needs
    kernels = _library.kernels()
    if grad_y is not None:
        total, mean, rstd = statistics
        grad_out, grad_residual, grad_bias, grad_weight, grad_norm_bias = kernels.residual_layer_norm_backward.default(
            grad_sum, grad_y, total, norm_weight, mean, rstd, run.p, run.seed, offset, True, True, *needs
        )
        return (
            # Without dropout the gradient of the output is that of the residual, and is written once.
            grad_out if run.p > 0.0 else grad_residual,
            grad_residual,
            (
                grad_bias if needs_bias else None,
                grad_weight if needs_weight else None,
                grad_norm_bias if needs_norm_bias else None,
            ),
        )
    if grad_sum is None:
        return None, None, (None, None, None)
    grad_out, grad_bias = grad_sum, None
    if run.p > 0.0 or needs_bias:
        dropped, grad_bias = kernels.bias_dropout_residual_backward.default(
            grad_sum, run.p, run.seed, offset, run.p > 0.0, needs_bias
        )
        grad_out = dropped if run.p > 0.0 else grad_sum
    return grad_out, grad_sum, (grad_bias if needs_bias else None, None, None)


def _saved(ctx) -> Sequence[Tensor | None]:
    """The saved tensors. To be called where autograd works: activation checkpointing computes them anew."""
    if fills_grads(ctx):
        return ctx.saved_tensors
    # Parameters that claim_grad does not know: what the caller keeps must not lie in the optimizer's buffer.
    return [None if t is None else t.detach() for t in ctx.saved_tensors]


def _backward_below_autograd(ctx, *grads):
    tensors = _saved(ctx)
    with torch._C._AutoDispatchBelowAutograd():
        return _backward(ctx, tensors, *grads)


_refused_if_used = differentiable_once("ls_plugin layer")(_backward_below_autograd)


class JointKeysAndValues(torch.autograd.Function):
    """Keys and values of all decoder layers from the encoder's output, in one product.

    Inputs: the number of layers L, the encoder's output (B, S, E), then all weights (C, E) in the order k, v of the first layer, k, v of the
    second, …, then all biases (C,).
    Outputs: L tensors (B, S, 2C), keys beside values, which share their memory.
    """

    @staticmethod
    def forward(ctx, n_layers, encoder_out, *params):
        with torch._C._AutoDispatchBelowAutograd():
            weights, biases = params[: 2 * n_layers], params[2 * n_layers :]
            weight = joint(weights)
            n_batch, n_keys, encoder_width = encoder_out.shape
            rows = encoder_out.reshape(-1, encoder_width)
            kv = product.linear(rows, weight, joint(biases))
            ctx.save_for_backward(rows, weight, *params)
            ctx.n_layers, ctx.shape = n_layers, encoder_out.shape
            return tuple(kv.view(n_batch, n_keys, -1).chunk(n_layers, dim=-1))

    @staticmethod
    def backward(ctx, *grads):
        if torch.is_grad_enabled():
            return _keys_refused_if_used(ctx, *grads)
        return _keys_backward(ctx, *grads)


def _keys_backward(ctx, *grads):
    rows, weight, *params = _saved(ctx)
    with torch._C._AutoDispatchBelowAutograd():
        grad = torch.cat(grads, dim=-1).view(rows.shape[0], -1)
        n_weights, needs = 2 * ctx.n_layers, ctx.needs_input_grad[2:]
        grad_rows = product.mm(grad, weight).view(ctx.shape) if ctx.needs_input_grad[1] else None
        grad_weights = joint_weight_grads(grad, rows, params[:n_weights], needs[:n_weights])
        grad_biases = joint_bias_grads(grad, params[n_weights:], needs[n_weights:])
        return None, grad_rows, *grad_weights, *grad_biases


_keys_refused_if_used = differentiable_once("ls_plugin keys and values")(_keys_backward)


class Projection(torch.autograd.Function):
    """x W^T to the logits: x (..., C), weight (V, C) -> (..., V). The weight's gradient goes where an embedding that shares it adds its own."""

    @staticmethod
    def forward(ctx, x, weight):
        with torch._C._AutoDispatchBelowAutograd():
            ctx.save_for_backward(x, weight)
            return product.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            return _projection_refused_if_used(ctx, grad)
        return _projection_backward(ctx, grad)


def _projection_backward(ctx, grad):
    x, weight = _saved(ctx)
    needs_x_grad, needs_weight_grad = ctx.needs_input_grad
    with torch._C._AutoDispatchBelowAutograd():
        rows, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        grad_x = product.mm(grad, weight).view(x.shape) if needs_x_grad else None
        if not needs_weight_grad:
            return grad_x, None
        home, is_first = claim_shared_grad(weight)
        return grad_x, product.mm(grad.t(), rows, out=home if is_first else None)


_projection_refused_if_used = differentiable_once("ls_plugin projection")(_projection_backward)


def _heads(x: Tensor, n_batch: int, length: int, n_heads: int, parts: int) -> list[Tensor]:
    """The parts of x (B T, parts * C) or (B, T, parts * C), rows evenly spaced, as (B, H, T, D) views."""
    row, width = x.stride(-2), x.shape[-1] // parts
    head_dim = width // n_heads
    size, stride, start = (n_batch, n_heads, length, head_dim), (length * row, head_dim, row, 1), x.storage_offset()
    return [x.as_strided(size, stride, start + i * width) for i in range(parts)]


def _rows(out: Tensor) -> Tensor:
    """(B, H, T, D) -> (B T, H D), a view if the dimensions lie in the order B, T, H, D."""
    n_batch, n_heads, length, head_dim = out.shape
    return out.transpose(1, 2).reshape(n_batch * length, n_heads * head_dim)


def _grad_input(grad: Tensor, weight: Tensor, into: Tensor | None) -> Tensor:
    """grad W (N, C); ``into`` takes the sum with it."""
    if into is None:
        return product.mm(grad, weight)
    return product.add_mm(into, grad, weight)


def weight_grad(grad: Tensor, rows: Tensor, params) -> Tensor:
    """grad^T x, the gradient of the parameters, which lie side by side if they are several; in its home in the gradient buffer if free."""
    return product.mm(grad.t(), rows, out=claim_grad(params))


def joint_weight_grads(grad: Tensor, rows: Tensor, params, needs) -> tuple[Tensor | None, ...]:
    """Gradients (C, E) of weights of one shape that made one product."""
    if all(needs):
        if len(params) == 1:
            return (weight_grad(grad, rows, params),)
        return weight_grad(grad, rows, params).chunk(len(params))
    if not any(needs):
        return (None,) * len(params)
    pieces = grad.chunk(len(params), dim=-1)
    return tuple(product.mm(piece.t(), rows) if needed else None for piece, needed in zip(pieces, needs, strict=True))


def joint_bias_grads(grad: Tensor, params, needs) -> tuple[Tensor | None, ...]:
    """Gradients (C,) of biases that were added together."""
    if not any(needs):
        return (None,) * len(params)
    home = claim_grad(params) if all(needs) else None
    total = torch.sum(grad, 0) if home is None else torch.sum(grad, 0, out=home)
    if len(params) == 1:
        return (total,)
    pieces = total.chunk(len(params))
    return tuple(piece if needed else None for piece, needed in zip(pieces, needs, strict=True))
