"""Fused output projection and label-smoothed cross entropy.

The products are torch's, the loss is the kernel of ``label_smoothed_cross_entropy``; what is fused is their order: a block of tokens
goes through projection, loss and both products of the backward while its logits are warm, and the next block takes their memory.
"""

import torch
from torch import Tensor

from ls_plugin import _library, reference
from ls_plugin.ops import product
from ls_plugin.ops.autograd import differentiable_once
from ls_plugin.ops.checks import (
    check,
    check_devices,
    check_floating,
    check_vocabulary,
    not_a_tensor,
    product_dtype,
    register_fake,
    to_common_dtype,
)

_OP = "linear_cross_entropy"

# Logits of a block: at V = 32,000 these are 312 tokens, 40 MB in fp32. The products of smaller blocks are slower (each reads the whole
# table, and adds to the whole gradient), larger ones take the memory that this op is there to save.
_BLOCK_ELEMENTS = 10_000_000
_MIN_BLOCK_ROWS = 32
# Gradients of 16-bit logits, as the kernel stores them: q - p would mostly fall below fp16's range.
_FP16_GRAD_SCALE = 1024.0
# Of a block's weight gradient before it is added in fp32, so that hundreds of tokens with one target do not overflow fp16.
_FP16_PRODUCT_SCALE = 1 / 64


def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, epsilon: float, ignore_index: int = -100, reduction: str = "sum"
) -> tuple[Tensor, Tensor]:
    """Loss and nll of the logits x weight^T by blocks of tokens: all logits are never in memory together.

    The maths is that of :func:`ls_plugin.reference.linear_cross_entropy`. Rows whose target is ignore_index are left out of the products
    on a CPU; on a GPU, which would have to be waited for, they are computed and dropped.

    Args:
        x: (..., C), fp32, fp16 or bf16 (others run the reference).  weight: (V, C).  Under autocast, or apex.amp, both take its dtype, as in a product.
        target: int64, x's leading shape; each in [0, V) or ignore_index.
        epsilon: smoothing, in [0, 1].
        reduction: "sum": scalars, and the gradients are made on the way; "none": target's shape, and the backward computes the
            logits again, one product more.
    Returns:
        loss, nll: fp32 (fp64 for fp64 inputs).  Only the loss is differentiable, once.
    Saves for backward: with "sum" the gradients of x and weight themselves, in fp32; with "none" x, weight and target.
    Peak memory beside those: one block of logits, 10 million of them.
    Raises:
        ValueError: epsilon outside [0, 1], an unknown reduction.  RuntimeError: shapes or dtypes do not fit; a second backward; or, on a
        CPU, a target outside the vocabulary (on a GPU that is a device-side assertion).
    """
    if not 0.0 <= epsilon <= 1.0:
        raise ValueError(f"{_OP}: epsilon must lie in [0, 1], got {epsilon}")
    if reduction not in ("sum", "none"):
        raise ValueError(f"{_OP}: reduction must be sum or none, got {reduction}")
    for name, t in (("x", x), ("weight", weight), ("target", target)):
        if not isinstance(t, Tensor):
            raise not_a_tensor(_OP, name, t)
    if x.dim() == 0 or x.shape[:-1] != target.shape:
        raise RuntimeError(
            f"{_OP}: target must have x's leading shape {tuple(x.shape[:-1])}, got {tuple(target.shape)}"
        )
    dtype = product_dtype(x)
    if dtype is not None:
        x, weight = x.to(dtype), weight.to(dtype)
    x, weight = to_common_dtype(_OP, "x", x, weight)
    shape = target.shape
    x, target = x.reshape(target.numel(), x.shape[-1]), target.reshape(-1).contiguous()
    if not _library.has_kernel(x):
        check_devices(_OP, x=x, weight=weight, target=target)
        _check(x, weight, target)
        check_vocabulary(_OP, target, weight.shape[0], ignore_index)
        loss, nll = reference.linear_cross_entropy(x, weight, target, epsilon, ignore_index)
        nll = nll.detach()
        return (loss.sum(), nll.sum()) if reduction == "sum" else (loss.view(shape), nll.view(shape))
    function = _Sum if reduction == "sum" else _PerToken
    needs_grad = torch.is_grad_enabled()
    loss, nll = function.apply(
        x, weight, target, epsilon, ignore_index, needs_grad and x.requires_grad, needs_grad and weight.requires_grad
    )
    return (loss, nll) if reduction == "sum" else (loss.view(shape), nll.view(shape))


def block_rows(n_classes: int) -> int:
    """Rows of the logits that are in memory at once: by the sizes alone, so that equal inputs give equal bits."""
    return max(_MIN_BLOCK_ROWS, _BLOCK_ELEMENTS // max(n_classes, 1))


class _Sum(torch.autograd.Function):
    """The gradients are made in the forward, for a factor of one, and multiplied in the backward."""

    @staticmethod
    def forward(ctx, x, weight, target, epsilon, ignore_index, needs_x_grad, needs_weight_grad):
        loss, nll, grad_x, grad_weight = _library.kernels().linear_cross_entropy_forward.default(
            x, weight, target, None, epsilon, ignore_index, needs_x_grad, needs_weight_grad
        )
        loss, nll = loss.sum(), nll.sum()
        # Not in save_for_backward, which would hold a second reference: the backward hands this very memory on.
        ctx.grads = (grad_x if needs_x_grad else None, grad_weight if needs_weight_grad else None)
        ctx.dtype = x.dtype
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @differentiable_once(_OP)
    def backward(ctx, grad_loss, _grad_nll):
        if ctx.grads is None:
            raise RuntimeError(
                f"{_OP}: backward ran already and consumed the stored gradients; compute the loss again for a second backward"
            )
        grads, ctx.grads = ctx.grads, None
        if not _is_one_for_sure(grad_loss):
            grads = [None if g is None else g.mul_(grad_loss) for g in grads]
        return (*(None if g is None else g.to(ctx.dtype) for g in grads), *[None] * 5)


def _is_one_for_sure(factor: Tensor) -> bool:
    """Asked only where it costs no wait and no graph break."""
    return not torch.compiler.is_compiling() and factor.is_cpu and factor.item() == 1.0


class _PerToken(torch.autograd.Function):
    """The backward makes the logits again, since only it knows the tokens' weights."""

    @staticmethod
    def forward(ctx, x, weight, target, epsilon, ignore_index, needs_x_grad, needs_weight_grad):
        loss, nll, _, _ = _library.kernels().linear_cross_entropy_forward.default(
            x, weight, target, None, epsilon, ignore_index, False, False
        )
        ctx.save_for_backward(x, weight, target)
        ctx.options = (epsilon, ignore_index, needs_x_grad, needs_weight_grad)
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @differentiable_once(_OP)
    def backward(ctx, grad_loss, _grad_nll):
        x, weight, target = ctx.saved_tensors
        # fp16 logits hold their gradients times _FP16_GRAD_SCALE: a loss scale on top of that, they do not hold.
        largest = None
        if x.dtype == torch.float16 and grad_loss.numel() > 0:
            largest = grad_loss.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)
            grad_loss = grad_loss / largest
        _, _, *grads = _library.kernels().linear_cross_entropy_forward.default(
            x, weight, target, grad_loss.contiguous(), *ctx.options
        )
        if largest is not None:
            grads = [g.mul_(largest) for g in grads]
        needed = ctx.options[2:]
        return (
            *(g.to(x.dtype) if is_needed else None for g, is_needed in zip(grads, needed, strict=True)),
            *[None] * 5,
        )


def linear_cross_entropy_forward(
    kernels, x, weight, target, token_weight, epsilon, ignore_index, needs_x_grad, needs_weight_grad
):
    """(N, C), (V, C), (N,), fp32 (N,) or None -> loss, nll fp32 (N,) and the fp32 gradients of sum(token_weight * loss), or empty."""
    _check(x, weight, target)
    check_vocabulary(_OP, target, weight.shape[0], ignore_index)
    options = (epsilon, ignore_index, needs_x_grad, needs_weight_grad)
    if target.device.type == "cpu":  # it costs no wait to ask
        kept = (target != ignore_index).nonzero().squeeze(1)
        if kept.numel() < target.numel():
            weight_of_kept = None if token_weight is None else token_weight[kept]
            *per_row, grad_weight = _forward_blocks(kernels, x[kept], weight, target[kept], weight_of_kept, *options)
            return *(_spread(t, kept, target.numel()) for t in per_row), grad_weight
    return _forward_blocks(kernels, x.contiguous(), weight, target, token_weight, *options)


def _spread(t: Tensor, rows: Tensor, n_rows: int) -> Tensor:
    """The rows of t at their places among n_rows, zeros elsewhere; nothing stays nothing."""
    if t.numel() == 0 and t.dim() == 1 and rows.numel():
        return t
    return t.new_zeros((n_rows, *t.shape[1:])).index_copy_(0, rows, t)


def _forward_blocks(kernels, x, weight, target, token_weight, epsilon, ignore_index, needs_x_grad, needs_weight_grad):
    n_rows, n_classes = x.shape[0], weight.shape[0]
    loss, nll = (x.new_empty(n_rows, dtype=torch.float32) for _ in range(2))
    grad_x = x.new_empty(x.shape if needs_x_grad else (0,), dtype=torch.float32)
    grad_weight = weight.new_empty(weight.shape if needs_weight_grad else (0,), dtype=torch.float32)
    if n_rows == 0:
        grad_weight.zero_()
    grad_scale = _FP16_GRAD_SCALE if x.dtype == torch.float16 else 1.0
    step = block_rows(n_classes)
    memory = x.new_empty((min(step, n_rows), n_classes))
    for begin in range(0, n_rows, step):
        rows = slice(begin, min(begin + step, n_rows))
        logits = memory[: rows.stop - begin]
        product.mm(x[rows], weight.t(), out=logits)
        loss[rows], nll[rows] = kernels.label_smoothed_cross_entropy_forward.default(
            logits,
            target[rows],
            logits if needs_x_grad or needs_weight_grad else None,
            epsilon,
            ignore_index,
            grad_scale,
        )
        if token_weight is not None:
            kernels.label_smoothed_cross_entropy_backward.default(logits, token_weight[rows], 1.0)
        if needs_x_grad:
            if x.is_cpu or x.dtype == torch.float32:
                product.mm(logits, weight, out=grad_x[rows])
            else:
                grad_x[rows] = torch.mm(logits, weight)
        if needs_weight_grad:
            _add_product(grad_weight, logits.t(), x[rows], grad_scale, is_first=begin == 0)
    if grad_scale != 1.0:
        grad_x.mul_(1 / grad_scale)
    return loss, nll, grad_x, grad_weight


def _add_product(total: Tensor, a: Tensor, b: Tensor, grad_scale: float, is_first: bool) -> None:
    """total += a b / grad_scale, or = for the first, added in fp32: sums over many blocks in 16 bits would lose digits."""
    if a.is_cpu or a.dtype == torch.float32:
        product.mm(a, b, out=total, add=not is_first, alpha=1 / grad_scale)
        return
    if is_first:
        total.zero_()
    if a.dtype == torch.float16:
        scaled = torch.addmm(a.new_zeros(()), a, b, beta=0, alpha=_FP16_PRODUCT_SCALE)
        total.add_(scaled, alpha=1 / (grad_scale * _FP16_PRODUCT_SCALE))
    else:
        total.add_(a @ b)


def _check(x, weight, target):
    check(x.dim() == 2, lambda: f"{_OP}: x must have shape (N, C), got {tuple(x.shape)}")
    check_floating(_OP, "x", x)
    rows, columns = x.shape
    check(
        weight.dim() == 2 and weight.shape[1] == columns,
        lambda: f"{_OP}: weight must have shape (V, C) with C = {columns}, got {tuple(weight.shape)}",
    )
    check(
        target.dim() == 1 and target.shape[0] == rows,
        lambda: f"{_OP}: target must have shape (N,) = ({rows},), got {tuple(target.shape)}",
    )
    check(target.dtype == torch.int64, lambda: f"{_OP}: target must be Long, got {target.dtype}")


def _forward_fake(x, weight, target, token_weight, epsilon, ignore_index, needs_x_grad, needs_weight_grad):
    _check(x, weight, target)
    return (
        x.new_empty(target.shape, dtype=torch.float32),
        x.new_empty(target.shape, dtype=torch.float32),
        x.new_empty(x.shape if needs_x_grad else (0,), dtype=torch.float32),
        weight.new_empty(weight.shape if needs_weight_grad else (0,), dtype=torch.float32),
    )


def register(namespace: str) -> None:
    """Implementation and fake kernel for one build of the library; autograd is in :class:`_Sum` and :class:`_PerToken`."""

    def forward(*args):
        return linear_cross_entropy_forward(getattr(torch.ops, namespace), *args)

    torch.library.impl(f"{namespace}::{_OP}_forward", ("cpu", "cuda"), forward)
    register_fake(f"{namespace}::{_OP}_forward", _forward_fake)
