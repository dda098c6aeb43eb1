import torch
import torch.nn.functional as F

from ls_plugin import ops
from ls_plugin.report.op_timing import Case

P = 0.1
SHAPES = (
    (32, 4, 32, 64, False),
    (16, 4, 64, 64, False),
    (4, 8, 256, 64, False),
    (2, 8, 512, 64, True),
)  # B, H, T = S, D, causal


def cases(device, dtype):
    generator = torch.Generator(device).manual_seed(0)
    seed = torch.tensor([5])
    for n_batch, n_heads, length, head_dim, causal in SHAPES:
        if device.type == "cuda":
            n_batch *= 8
        width = n_heads * head_dim
        q, k, v, grad_out = (
            torch.randn(length, n_batch, width, generator=generator, device=device).to(dtype) for _ in range(4)
        )
        future = torch.full((length, length), -torch.inf).triu(1).to(device, dtype) if causal else None

        def heads(t, sizes=(length, n_batch, n_heads, head_dim)):
            return t.view(sizes).permute(1, 2, 0, 3)

        # fairseq's MultiheadAttention.forward between its projections.
        def eager(q, k, v, n_pairs=n_batch * n_heads, head_dim=head_dim, future=future):
            length, n_batch, width = q.shape
            q = q * head_dim**-0.5
            q, k, v = (t.contiguous().view(length, n_pairs, head_dim).transpose(0, 1) for t in (q, k, v))
            scores = torch.bmm(q, k.transpose(1, 2))
            if future is not None:
                scores = scores + future
            probs = F.dropout(F.softmax(scores, dim=-1, dtype=torch.float32).type_as(scores), P)
            return torch.bmm(probs, v).transpose(0, 1).contiguous().view(length, n_batch, width)

        def ls(q, k, v, heads=heads, causal=causal):
            out = ops.fused_attention(heads(q), heads(k), heads(v), causal=causal, p=P)
            return out.permute(2, 0, 1, 3).reshape(q.shape)

        rest = (None, None, causal, head_dim**-0.5, P, seed, 0)

        def forward(q, k, v, heads=heads, rest=rest):
            return torch.ops.ls.fused_attention_forward(heads(q), heads(k), heads(v), *rest)

        def backward(saved, q=q, k=k, v=v, grad_out=grad_out, heads=heads, rest=rest):
            grads = [torch.empty_like(heads(t)) for t in (q, k, v)]
            torch.ops.ls.fused_attention_backward(*map(heads, (grad_out, q, k, v)), saved[1], *rest, *grads)
            return grads

        yield Case(
            op="fused_attention",
            shape=f"{n_batch} x {n_heads} x {length} x {head_dim}{', causal' if causal else ''}, p {P}",
            leaves=tuple(t.requires_grad_() for t in (q, k, v)),
            eager=eager,
            ls=ls,
            grad_outputs=(grad_out,),
            forward_bytes=None,  # bound by its products
            backward_bytes=None,
            kernels=(forward, backward) if device.type == "cpu" else None,
        )
