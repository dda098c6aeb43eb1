import torch
from fairseq import utils
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss
from harness import Case

from ls_plugin import ops

EPSILON, PAD, N_TOKENS = 0.1, 1, 1024


def cases(device):
    """Loss, nll and the gradient of the logits, as the criterion computes them."""
    generator = torch.Generator().manual_seed(0)
    for n_classes in (8_000, 32_000):
        logits = torch.randn(N_TOKENS, n_classes, generator=generator).to(device)
        target = torch.randint(4, n_classes, (N_TOKENS,), generator=generator).to(device)

        def prepare(logits=logits):
            return (logits.clone().requires_grad_(),)

        def stock(leaf, target=target):
            lprobs = utils.log_softmax(leaf, dim=-1)
            loss, _ = label_smoothed_nll_loss(lprobs, target.unsqueeze(-1), EPSILON, ignore_index=PAD, reduce=True)
            torch.autograd.grad(loss, leaf)

        def ls(leaf, target=target):
            # * 1 would cost a pass that the projection before a real criterion does not: a view is no leaf and costs none.
            loss, _ = ops.label_smoothed_cross_entropy(leaf.view_as(leaf), target, EPSILON, PAD, inplace=True)
            torch.autograd.grad(loss.sum(), leaf)

        yield Case(
            "label_smoothed_cross_entropy",
            f"N {N_TOKENS}, V {n_classes:,}",
            stock,
            ls,
            n_bytes=2 * logits.numel() * 4,
            prepare=prepare,
        )
