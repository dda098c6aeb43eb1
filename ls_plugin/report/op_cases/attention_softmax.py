import torch
import torch.nn.functional as F

from ls_plugin import ops
from ls_plugin.report.op_timing import CUDA_ELEMENTS, Case

P = 0.1
SHAPES = ((8, 8, 32, False), (16, 4, 64, False), (4, 8, 256, False), (2, 8, 512, True))  # B, H, T = S, causal


def cases(device, dtype):
    generator = torch.Generator(device).manual_seed(0)
    seed = torch.tensor([5])
    for n_batch, n_heads, length, causal in SHAPES:
        if device.type == "cuda":
            n_batch = CUDA_ELEMENTS // (n_heads * length * length)
        shape = (n_batch, n_heads, length, length)
        scores, grad_probs = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2))
        padding = torch.zeros(n_batch, length, dtype=torch.bool)
        padding[1::2, length - length // 8 :] = True  # every other sentence an eighth shorter
        padding = None if causal else padding.to(device)
        future = torch.full((length, length), -torch.inf).triu(1).to(device, dtype) if causal else None

        # fairseq's MultiheadAttention.forward between its two products.
        def eager(scores, padding=padding, future=future):
            if future is not None:
                scores = scores + future
            if padding is not None:
                scores = scores.masked_fill(padding[:, None, None, :], -torch.inf)
            return F.dropout(F.softmax(scores, dim=-1, dtype=torch.float32).type_as(scores), P)

        def ls(scores, padding=padding, causal=causal):
            return ops.attention_softmax(scores, padding, causal=causal, p=P)

        def apex(scores, padding=padding, causal=causal):
            from apex.transformer.functional import fused_softmax

            if causal:
                flat = scores.view(-1, *scores.shape[-2:])
                probs = fused_softmax.ScaledUpperTriangMaskedSoftmax.apply(flat, 1.0).view_as(scores)
            else:
                mask = padding[:, None, None, :].expand(-1, 1, scores.shape[-2], -1).contiguous()
                probs = fused_softmax.ScaledMaskedSoftmax.apply(scores, mask, 1.0)
            return F.dropout(probs, P)

        def forward(scores, padding=padding, causal=causal):
            return torch.ops.ls.attention_softmax_forward(scores, padding, None, causal, 1.0, P, seed, 0, True)

        def backward(saved, scores=scores, grad_probs=grad_probs, padding=padding, causal=causal):
            return torch.ops.ls.attention_softmax_backward(
                grad_probs, scores, saved[1], padding, None, causal, 1.0, P, seed, 0
            )

        seen = (length + 1) / (2 * length) if causal else 1.0
        yield Case(
            op="attention_softmax",
            shape=f"{n_batch} x {n_heads} x {length} x {length}, {'causal' if causal else 'padding'}, p {P}",
            leaves=(scores.requires_grad_(),),
            eager=eager,
            ls=ls,
            grad_outputs=(grad_probs,),
            forward_bytes=int((seen + 1) * scores.nbytes),  # reads what is seen of the scores, writes probs
            backward_bytes=int((2 * seen + 1) * scores.nbytes),  # reads grad_probs and scores, writes grad_scores
            kernels=(forward, backward),
            others={"apex": apex},
        )
