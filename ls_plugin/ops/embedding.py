"""Fused token embedding, positions and dropout."""

import torch
from torch import Tensor

from ls_plugin import _library, host, packing, reference
from ls_plugin.ops.autograd import DifferentiableOp, fills_grads
from ls_plugin.ops.bias_dropout_residual import bias_dropout_residual
from ls_plugin.ops.checks import (
    check,
    check_devices,
    check_floating,
    check_probability,
    not_a_tensor,
    register_fake,
    to_common_dtype,
)
from ls_plugin.ops.layer_norm import layer_norm as apply_layer_norm
from ls_plugin.ops.rng import draw_seed, rank_offset

_OP = "embedding"


def embedding(
    tokens: Tensor,
    weight: Tensor,
    positions: Tensor | None = None,
    padding_idx: int | None = None,
    scale: float = 1.0,
    p: float = 0.0,
    training: bool = True,
    layer_norm: tuple[Tensor | None, Tensor | None, float] | None = None,
) -> Tensor:
    """y = dropout(scale * weight[tokens] + positions[position]) in one pass; see :func:`ls_plugin.reference.embedding`.

    The position of each token is counted in the kernel by fairseq's rule (padding counts nothing, so padding on either side gives the
    same rows); no tensor of positions and no padding mask is made. Its value is looked up, for sinusoidal positions too: the table
    stays in the cache, the row is bit-equal to stock's, and sin and cos of fp32 angles in the hundreds would neither be.

    Args:
        tokens: int64 (B, T), each in [0, V).
        weight: (V, C), fp32, fp16 or bf16 (others run the reference).
        positions: (n_positions, C), learned (it then gets a gradient) or a fixed table, or None.  The tables are promoted to one
            dtype if they differ.
        padding_idx: the token that is padding; its row gets no gradient, in either table.  None: no token is padding, positions
            are 0, 1, ….
        p: probability of dropping an element, in [0, 1]; taken as 0 unless ``training``.
        layer_norm: (weight, bias, eps) of a layer norm between the sum and the dropout (``--layernorm-embedding``), composed of
            three ops: this one without dropout, :func:`layer_norm` and :func:`bias_dropout_residual`.
    Returns:
        (B, T, C) in the tables' dtype.
    Saves for backward: tokens (8 bytes each) and an 8-byte seed; with ``layer_norm`` also what that op saves.

    The gradients are dense. They are sums in a fixed order, in fp32, except that of an fp32 ``weight`` on a GPU, which goes by atomics
    unless ``torch.use_deterministic_algorithms(True)``. (In 16 bits atomics would round at every addition.)

    Raises:
        ValueError: p outside [0, 1].  RuntimeError: a shape, dtype or device does not fit; or, on a CPU, a token lies outside the
        vocabulary or a sentence has more tokens than the table of positions. On a GPU these stop the kernel with a device-side
        assertion, as torch's own embedding does.
    """
    check_probability(_OP, p)
    p = p if training else 0.0
    if layer_norm is not None:
        x = embedding(tokens, weight, positions, padding_idx, scale)
        return bias_dropout_residual(apply_layer_norm(x, *layer_norm), None, None, p)
    if not isinstance(tokens, Tensor):
        raise not_a_tensor(_OP, "tokens", tokens)
    weight, positions = to_common_dtype(_OP, "weight", weight, positions)
    seed = draw_seed(weight.device) if p > 0.0 else None
    offset = rank_offset()
    if not _library.has_kernel(weight):
        check_devices(_OP, weight=weight, tokens=tokens, positions=positions)
        _check(tokens, weight, positions, padding_idx)
        _check_values(tokens, weight.shape[0], positions, padding_idx)
        return reference.embedding(tokens, weight, positions, padding_idx, scale, p, seed, offset)
    if weight.dim() != 2:
        _check(tokens, weight, positions, padding_idx)
    # the kernels' own word for None is -1, which nn.Embedding takes for V - 1
    _check_padding_idx(padding_idx, weight.shape[0])
    positions = positions if positions is None else positions.contiguous()
    return _forward(tokens.contiguous(), weight.contiguous(), positions, padding_idx, scale, p, seed, offset)


def _check(tokens, weight, positions, padding_idx):
    check(weight.dim() == 2, lambda: f"{_OP}: weight must have shape (V, C), got {tuple(weight.shape)}")
    check_floating(_OP, "weight", weight)
    embeddings, columns = weight.shape
    check(
        positions is None or (positions.dim() == 2 and positions.shape[1] == columns),
        lambda: f"{_OP}: positions must have shape (n_positions, C) = (*, {columns}), got {tuple(positions.shape)}",
    )
    check(tokens.dim() == 2, lambda: f"{_OP}: tokens must have shape (B, T), got {tuple(tokens.shape)}")
    check(tokens.dtype == torch.int64, lambda: f"{_OP}: tokens must be Long, got {tokens.dtype}")
    _check_padding_idx(padding_idx, embeddings)


def _check_padding_idx(padding_idx, n_embeddings):
    check(
        padding_idx is None or 0 <= padding_idx < n_embeddings,
        lambda: f"{_OP}: padding_idx must lie in [0, V) = [0, {n_embeddings}) or be None, got {padding_idx}",
    )


def _check_values(tokens, n_embeddings, positions, padding_idx):
    """As the binding does, where it costs no wait for a device."""
    if tokens.device.type != "cpu":
        return
    outside = (tokens < 0) | (tokens >= n_embeddings)
    if outside.any():
        sentence, t = outside.nonzero()[0].tolist()
        raise RuntimeError(
            f"{_OP}: tokens must lie in [0, V) = [0, {n_embeddings}), the size of the dictionary, got {int(tokens[sentence, t])} at "
            f"position {t} of sentence {sentence}; was the data preprocessed with another dictionary?"
        )
    if positions is None or tokens.numel() == 0:
        return
    first = 0 if padding_idx is None else padding_idx + 1
    length, sentence = (tokens >= 0 if padding_idx is None else tokens != padding_idx).sum(dim=1).max(dim=0)
    if first + length > positions.shape[0]:
        raise RuntimeError(
            f"{_OP}: sentence {int(sentence)} has {int(length)} tokens, but positions has rows for at most "
            f"{max(positions.shape[0] - first, 0)}; shorten the sentence or enlarge the table (--max-source-positions, "
            "--max-target-positions)"
        )


def _forward_fake(tokens, weight, positions, padding_idx, scale, p, seed, offset):
    _check(tokens, weight, positions, padding_idx)
    return weight.new_empty((*tokens.shape, weight.shape[1]))


def _backward_fake(
    grad_y,
    tokens,
    padding_idx,
    scale,
    p,
    seed,
    offset,
    n_embeddings,
    n_positions,
    needs_weight_grad,
    needs_positions_grad,
    deterministic,
):
    columns = grad_y.shape[-1]
    return (
        grad_y.new_empty((n_embeddings, columns) if needs_weight_grad else (0,)),
        grad_y.new_empty((n_positions, columns) if needs_positions_grad else (0,)),
    )


def _setup_context(ctx, inputs, output):
    tokens, weight, positions, ctx.padding_idx, ctx.scale, ctx.p, seed, ctx.offset = inputs
    ctx.n_embeddings, ctx.n_positions = weight.shape[0], 0 if positions is None else positions.shape[0]
    # Finding the rows that occur reads them.
    adds_rows = not host.waits_for(weight.device) and packing.owner_of(weight) is not None
    ctx.weight = weight if adds_rows else None
    ctx.save_for_backward(tokens, seed)


def _backward(ctx, grad_y):
    tokens, seed = ctx.saved_tensors
    _, needs_weight_grad, needs_positions_grad, *_ = ctx.needs_input_grad
    if ctx.weight is not None and needs_weight_grad and not needs_positions_grad and fills_grads(ctx):
        home, is_first = packing.claim_shared_grad(ctx.weight)
        if home is not None:
            _add_rows(home, is_first, ctx, grad_y, tokens, seed)
            return None, home if is_first else None, *[None] * 6
    grad_weight, grad_positions = _library.kernels().embedding_backward.default(
        grad_y.contiguous(),
        tokens,
        ctx.padding_idx,
        ctx.scale,
        ctx.p,
        seed,
        ctx.offset,
        ctx.n_embeddings,
        ctx.n_positions,
        needs_weight_grad,
        needs_positions_grad,
        torch.are_deterministic_algorithms_enabled(),
    )
    grad_weight = grad_weight if needs_weight_grad else None
    return None, grad_weight, grad_positions if needs_positions_grad else None, None, None, None, None, None


def _add_rows(home, is_first, ctx, grad_y, tokens, seed):
    """Adds the gradient of the weight to ``home`` (V, C), by the rows of the tokens that occur; the first to write there sets all of it."""
    rows, tokens = torch.unique(tokens, return_inverse=True)
    padding = [] if ctx.padding_idx is None else (rows == ctx.padding_idx).nonzero().flatten().tolist()
    options = padding[0] if padding else None, ctx.scale, ctx.p, seed, ctx.offset, rows.numel(), 0, True, False, True
    grad, _ = _library.kernels().embedding_backward.default(grad_y.contiguous(), tokens, *options)
    if is_first:
        home.zero_()
    else:
        grad += home.index_select(0, rows)
    home.index_copy_(0, rows, grad)


_forward = DifferentiableOp(_OP, _setup_context, _backward)


def register(namespace: str) -> None:
    """Fake kernels and autograd for one build of the library."""
    register_fake(f"{namespace}::embedding_forward", _forward_fake)
    register_fake(f"{namespace}::embedding_backward", _backward_fake)
    _forward.register(namespace)
