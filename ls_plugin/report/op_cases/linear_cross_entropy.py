import torch
import torch.nn.functional as F
from fairseq import utils
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss

from ls_plugin import ops
from ls_plugin.report.op_cases.label_smoothed_cross_entropy import EPSILON, PAD, torchs_epsilon
from ls_plugin.report.op_timing import Case


def cases(device, dtype):
    """Projection, loss and the gradients of both factors. Bound by arithmetic, so no bytes are given."""
    generator = torch.Generator(device).manual_seed(0)
    for n_tokens, n_cols, n_classes in ((1024, 256, 8_000), (1024, 512, 32_000)):
        x = torch.randn(n_tokens, n_cols, generator=generator, device=device).to(dtype)
        weight = (torch.randn(n_classes, n_cols, generator=generator, device=device) * n_cols**-0.5).to(dtype)
        target = torch.randint(4, n_classes, (n_tokens,), generator=generator, device=device)
        epsilon = torchs_epsilon(n_classes)

        def eager(x, weight, target=target):
            lprobs = utils.log_softmax(F.linear(x, weight), dim=-1)
            return label_smoothed_nll_loss(lprobs, target.unsqueeze(-1), EPSILON, ignore_index=PAD, reduce=True)[0]

        def ls(x, weight, target=target):
            return ops.linear_cross_entropy(x, weight, target, EPSILON, PAD)[0]

        def liger(x, weight, target=target, epsilon=epsilon):
            from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

            smoothed = {"ignore_index": PAD, "label_smoothing": epsilon, "reduction": "sum"}
            return liger_fused_linear_cross_entropy(x, weight, target, **smoothed).float()

        yield Case(
            op="linear_cross_entropy",
            shape=f"N {n_tokens}, C {n_cols}, V {n_classes:,}",
            leaves=(x.requires_grad_(), weight.requires_grad_()),
            eager=eager,
            ls=ls,
            grad_outputs=(torch.ones((), device=device),),
            forward_bytes=None,
            backward_bytes=None,
            others={"liger": liger},
        )
