"""Cross entropy with fairseq's label smoothing, whose gradient is q - p."""

import torch
from torch import Tensor


def label_smoothed_cross_entropy(
    logits: Tensor, target: Tensor, epsilon: float, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Per-token loss and negative log-likelihood.

    With q = softmax(logits) and p = 1 - epsilon at the target, epsilon / (V - 1) at every other class (fairseq's
    convention; PyTorch's ``label_smoothing`` gives the target epsilon / V more), loss = -sum_v p_v log q_v, and its
    gradient with respect to the logits is q - p because p sums to one.

    Args:
        logits: (N, V), floating. Half types are computed in fp32.
        target: int64 (N,), in [0, V) or ignore_index.
    Returns:
        loss, nll: (N,), fp32 (fp64 for fp64 logits); 0 where target is ignore_index.
    """
    n_classes = logits.size(-1)
    log_q = torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    if n_classes == 0:  # every target is ignored, and there is no class to look up
        nothing = log_q.sum(dim=-1)
        return nothing, nothing.detach()
    ignored = target == ignore_index
    safe_target = target.masked_fill(ignored, 0)
    nll = -log_q.gather(-1, safe_target.unsqueeze(-1)).squeeze(-1)
    loss = (1.0 - epsilon) * nll
    if epsilon > 0.0 and n_classes > 1:
        epsilon_other = epsilon / (n_classes - 1)
        loss = loss - epsilon_other * nll - epsilon_other * log_q.sum(dim=-1)
    return loss.masked_fill(ignored, 0.0), nll.masked_fill(ignored, 0.0)
