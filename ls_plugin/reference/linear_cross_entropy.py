"""Output projection and label-smoothed cross entropy in one."""

from torch import Tensor

from ls_plugin.reference.label_smoothed_cross_entropy import label_smoothed_cross_entropy


def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, epsilon: float, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Per-token loss and nll of the logits x weight^T; see :func:`ls_plugin.reference.label_smoothed_cross_entropy`.

    With g = q - p per token, the gradients are grad_x = g weight and grad_weight = g^T x.

    Args:
        x: (N, C), floating.  weight: (V, C), the (tied) table of the output projection.
        target: int64 (N,), in [0, V) or ignore_index.
    Returns:
        loss, nll: (N,), fp32 (fp64 for fp64 inputs); 0 where target is ignore_index.
    """
    return label_smoothed_cross_entropy(x @ weight.t(), target, epsilon, ignore_index)
