"""Fused label-smoothed cross entropy."""

import torch
from torch import Tensor

from ls_plugin import _library, reference
from ls_plugin.ops.autograd import differentiable_once
from ls_plugin.ops.checks import check, check_devices, check_floating, check_vocabulary, not_a_tensor, register_fake

_OP = "label_smoothed_cross_entropy"

# q - p lies in [-1, 1]; in fp16 most of q would fall among the subnormals (below 6e-5) or vanish (below 6e-8), so it is
# stored 1024 times larger and the backward, which multiplies by fairseq's loss scale anyway, takes the factor out.
_FP16_GRAD_SCALE = 1024.0


def label_smoothed_cross_entropy(
    logits: Tensor, target: Tensor, epsilon: float, ignore_index: int = -100, inplace: bool = False
) -> tuple[Tensor, Tensor]:
    """Per-token loss and nll in one pass over the logits, with the gradient q - p written on the way.

    The maths and the smoothing convention are those of :func:`ls_plugin.reference.label_smoothed_cross_entropy`.

    Args:
        logits: (..., V), fp32, fp16 or bf16 (others run the reference).
        target: int64, logits' leading shape; each in [0, V) or ignore_index.
        epsilon: smoothing, in [0, 1].
        inplace: write the gradient over the logits' memory. Their values are lost, and autograd knows it (another node that
            saved them refuses to run backward), and nothing is written when no gradient is needed.
    Returns:
        loss, nll: fp32 (fp64 for fp64 logits), target's shape; 0 where target is ignore_index.  Only the loss is differentiable, once.
    Saves for backward: the gradient, in the logits' dtype (their own memory when inplace).
    Raises:
        ValueError: epsilon outside [0, 1].  RuntimeError: shapes or dtypes do not fit; ``inplace`` on a leaf; the logits were
        overwritten before the backward; or, on a CPU, a target outside the vocabulary.  On a GPU such a target stops the kernel with
        a device-side assertion, as torch's own loss does.
    """
    if not 0.0 <= epsilon <= 1.0:
        raise ValueError(f"{_OP}: epsilon must lie in [0, 1], got {epsilon}")
    for name, t in (("logits", logits), ("target", target)):
        if not isinstance(t, Tensor):
            raise not_a_tensor(_OP, name, t)
    if logits.dim() == 0 or logits.shape[:-1] != target.shape:
        raise RuntimeError(
            f"{_OP}: target must have logits' leading shape {tuple(logits.shape[:-1])}, got {tuple(target.shape)}"
        )
    grad_enabled = torch.is_grad_enabled() and logits.requires_grad
    if inplace and grad_enabled and logits.is_leaf:
        raise RuntimeError(f"{_OP}: inplace=True would overwrite a leaf that requires grad; call it with inplace=False")
    shape = target.shape
    logits = logits.reshape(target.numel(), logits.shape[-1]).contiguous()
    target = target.reshape(-1).contiguous()
    if _library.has_kernel(logits):
        loss, nll = _LabelSmoothedCrossEntropy.apply(logits, target, epsilon, ignore_index, inplace, grad_enabled)
    else:
        check_devices(_OP, logits=logits, target=target)
        _check(logits, target)
        check_vocabulary(_OP, target, logits.shape[1], ignore_index)
        loss, nll = reference.label_smoothed_cross_entropy(logits, target, epsilon, ignore_index)
        nll = nll.detach()
    return loss.view(shape), nll.view(shape)


class _LabelSmoothedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, epsilon, ignore_index, inplace, grad_enabled):
        grad = None
        ctx.grad_scale = _FP16_GRAD_SCALE if logits.dtype == torch.float16 else 1.0
        if grad_enabled:
            if inplace:
                grad = logits.detach()
                torch.autograd.graph.increment_version(logits)
            else:
                grad = torch.empty_like(logits)
            # Under torch.compile memory is functional, and there is no version to compare.
            ctx.version = None if torch.compiler.is_compiling() else grad._version
        loss, nll = _library.kernels().label_smoothed_cross_entropy_forward.default(
            logits, target, grad, epsilon, ignore_index, ctx.grad_scale
        )
        # Not in save_for_backward, which would hold a second reference: the backward hands this very memory on.
        ctx.grad = grad
        ctx.mark_non_differentiable(nll)
        ctx.set_materialize_grads(False)
        return loss, nll

    @staticmethod
    @differentiable_once(_OP)
    def backward(ctx, grad_loss, _grad_nll):
        if grad_loss is None:
            return None, None, None, None, None, None
        if ctx.grad is None:
            raise RuntimeError(
                f"{_OP}: backward ran already and consumed the stored gradient; compute the loss again for a second backward"
            )
        grad, ctx.grad = ctx.grad, None
        if ctx.version is not None and grad._version != ctx.version:
            raise RuntimeError(
                f"{_OP}: the logits' memory, which holds the gradient after inplace=True, was modified by an inplace operation "
                "before the backward; call it with inplace=False"
            )
        _library.kernels().label_smoothed_cross_entropy_backward.default(grad, grad_loss, 1.0 / ctx.grad_scale)
        return grad, None, None, None, None, None


def _check(logits, target):
    check(logits.dim() == 2, lambda: f"{_OP}: logits must have shape (N, V), got {tuple(logits.shape)}")
    check_floating(_OP, "logits", logits)
    rows = logits.shape[0]
    check(
        target.dim() == 1 and target.shape[0] == rows,
        lambda: f"{_OP}: target must have shape (N,) = ({rows},), got {tuple(target.shape)}",
    )
    check(target.dtype == torch.int64, lambda: f"{_OP}: target must be Long, got {target.dtype}")


def _forward_fake(logits, target, grad, epsilon, ignore_index, grad_scale):
    _check(logits, target)
    return logits.new_empty(target.shape, dtype=torch.float32), logits.new_empty(target.shape, dtype=torch.float32)


def _backward_fake(grad, grad_loss, factor):
    rows = grad.shape[0]
    check(
        grad_loss.dim() == 1 and grad_loss.shape[0] == rows,
        lambda: f"{_OP}_backward: grad_loss must have shape (N,) = ({rows},), got {tuple(grad_loss.shape)}",
    )


def register(namespace: str) -> None:
    """Fake kernels for one build of the library; autograd is :class:`_LabelSmoothedCrossEntropy`."""
    register_fake(f"{namespace}::{_OP}_forward", _forward_fake)
    register_fake(f"{namespace}::{_OP}_backward", _backward_fake)
