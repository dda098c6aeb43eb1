"""Fused label-smoothed cross entropy."""

import torch
from torch import Tensor

from ls_plugin import _library, reference

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
        inplace: write the gradient over the logits' memory. Their values are lost, autograd is told so (another node that
            saved them refuses to run backward), and nothing is written when no gradient is needed.
    Returns:
        loss, nll: fp32, target's shape; 0 where target is ignore_index.  Only the loss is differentiable, once.
    Saves for backward: the gradient, in the logits' dtype (their own memory when inplace).
    Raises:
        ValueError: epsilon outside [0, 1].  RuntimeError: shapes or dtypes do not fit, or, on a CPU, a target outside the
        vocabulary; on a GPU such a target stops the kernel with a device-side assertion, as torch's own loss does.
    """
    if not 0.0 <= epsilon <= 1.0:
        raise ValueError(f"label_smoothed_cross_entropy: epsilon must lie in [0, 1], got {epsilon}")
    if logits.shape[:-1] != target.shape:
        raise RuntimeError(
            "label_smoothed_cross_entropy: target must have logits' leading shape "
            f"{tuple(logits.shape[:-1])}, got {tuple(target.shape)}"
        )
    shape = target.shape
    logits, target = logits.reshape(-1, logits.shape[-1]).contiguous(), target.reshape(-1).contiguous()
    if _library.has_kernel(logits):
        loss, nll = _LabelSmoothedCrossEntropy.apply(
            logits, target, epsilon, ignore_index, inplace, torch.is_grad_enabled()
        )
    else:
        loss, nll = reference.label_smoothed_cross_entropy(logits, target, epsilon, ignore_index)
        nll = nll.detach()
    return loss.view(shape), nll.view(shape)


class _LabelSmoothedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, epsilon, ignore_index, inplace, grad_enabled):
        grad = None
        ctx.grad_scale = _FP16_GRAD_SCALE if logits.dtype == torch.float16 else 1.0
        if grad_enabled and ctx.needs_input_grad[0]:
            if inplace:
                grad = logits.detach()
                torch.autograd.graph.increment_version(logits)
            else:
                grad = torch.empty_like(logits)
        loss, nll = _library.kernels().label_smoothed_cross_entropy_forward(
            logits, target, grad, epsilon, ignore_index, ctx.grad_scale
        )
        ctx.grad = grad
        ctx.mark_non_differentiable(nll)
        ctx.set_materialize_grads(False)
        return loss, nll

    @staticmethod
    def backward(ctx, grad_loss, _grad_nll):
        if grad_loss is None:
            return None, None, None, None, None, None
        if ctx.grad is None:
            raise RuntimeError(
                "label_smoothed_cross_entropy: backward ran already and consumed the stored gradient; "
                "compute the loss again for a second backward"
            )
        grad, ctx.grad = ctx.grad, None
        _library.kernels().label_smoothed_cross_entropy_backward(grad, grad_loss, 1.0 / ctx.grad_scale)
        return grad, None, None, None, None, None


def _forward_fake(logits, target, grad, epsilon, ignore_index, grad_scale):
    return logits.new_empty(target.shape, dtype=torch.float32), logits.new_empty(target.shape, dtype=torch.float32)


def _backward_fake(grad, grad_loss, factor):
    return None


def register(namespace: str) -> None:
    """Fake kernels for one build of the library; autograd is :class:`_LabelSmoothedCrossEntropy`."""
    torch.library.register_fake(f"{namespace}::label_smoothed_cross_entropy_forward", _forward_fake)
    torch.library.register_fake(f"{namespace}::label_smoothed_cross_entropy_backward", _backward_fake)
