import torch
from fairseq import utils
from fairseq.criterions.label_smoothed_cross_entropy import label_smoothed_nll_loss

from ls_plugin import ops
from ls_plugin.report.op_timing import Case

EPSILON, PAD = 0.1, 1


def torchs_epsilon(n_classes: int) -> float:
    """For losses that smooth as torch's does: it spreads epsilon over all classes, fairseq over all but the target."""
    return EPSILON * n_classes / (n_classes - 1)


def cases(device, dtype):
    """The loss and the gradient of the logits, as the criterion computes them."""
    generator = torch.Generator(device).manual_seed(0)
    scale = 1024.0 if dtype == torch.float16 else 1.0  # as the op has it: fp16 gradients are stored larger
    tokens = 8192 if device.type == "cuda" else 1024
    for n_tokens, n_classes in ((32, 8_000), (tokens, 8_000), (tokens, 32_000)):
        logits = torch.randn(n_tokens, n_classes, generator=generator, device=device).to(dtype)
        target = torch.randint(4, n_classes, (n_tokens,), generator=generator, device=device)
        epsilon = torchs_epsilon(n_classes)
        one = torch.ones((), device=device)
        ones = torch.ones(n_tokens, device=device)

        def prepare(logits=logits, target=target):
            return logits.clone().requires_grad_(), target

        def eager(logits, target):
            lprobs = utils.log_softmax(logits, dim=-1)
            return label_smoothed_nll_loss(lprobs, target.unsqueeze(-1), EPSILON, ignore_index=PAD, reduce=True)[0]

        def ls(logits, target):
            # Only a leaf may not be overwritten; a real criterion gets the projection's output, and a view costs no pass either.
            loss, _nll = ops.label_smoothed_cross_entropy(logits.view_as(logits), target, EPSILON, PAD, inplace=True)
            return loss.sum()

        def liger(logits, target, epsilon=epsilon):
            from liger_kernel.transformers.functional import liger_cross_entropy

            logits = logits.view_as(logits)  # it writes the gradient over them
            smoothed = {"ignore_index": PAD, "label_smoothing": epsilon, "reduction": "sum"}
            return liger_cross_entropy(logits, target, **smoothed).float()

        def apex(logits, target, epsilon=epsilon, half=dtype != torch.float32):
            from apex.contrib.xentropy import SoftmaxCrossEntropyLoss

            return SoftmaxCrossEntropyLoss.apply(logits, target, epsilon, PAD, half).sum()

        def forward(logits, target):
            torch.ops.ls.label_smoothed_cross_entropy_forward(logits, target, logits, EPSILON, PAD, scale)
            return logits

        def backward(grad, ones=ones):
            torch.ops.ls.label_smoothed_cross_entropy_backward(grad, ones, 1.0 / scale)

        yield Case(
            op="label_smoothed_cross_entropy",
            shape=f"N {n_tokens}, V {n_classes:,}",
            leaves=(logits, target),
            eager=eager,
            ls=ls,
            grad_outputs=(one,),
            forward_bytes=2 * logits.nbytes,  # reads the logits, writes their gradient over them
            backward_bytes=2 * logits.nbytes if scale > 1.0 else None,  # a factor of one leaves the gradient alone
            prepare=prepare,
            kernels=(forward, backward),
            in_place=True,
            others={"liger": liger, "apex": apex},
        )
