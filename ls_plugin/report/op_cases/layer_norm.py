import torch
import torch.nn.functional as F

from ls_plugin import ops
from ls_plugin.report.op_timing import Case, shapes_for

EPS = 1e-5


def cases(device, dtype):
    generator = torch.Generator(device).manual_seed(0)
    for n_rows, n_cols in shapes_for(device, ((32, 512), (1024, 256), (1024, 512), (1024, 1024))):
        x, grad_y = (torch.randn(n_rows, n_cols, generator=generator, device=device).to(dtype) for _ in range(2))
        weight, bias = (torch.randn(n_cols, generator=generator, device=device).to(dtype) for _ in range(2))
        leaves = tuple(leaf.requires_grad_() for leaf in (x, weight, bias))

        def eager(x, weight, bias):
            return F.layer_norm(x, weight.shape, weight, bias, EPS)

        def liger(x, weight, bias):
            from liger_kernel.transformers.functional import liger_layer_norm

            return liger_layer_norm(x, weight, bias, EPS)

        def apex(x, weight, bias):
            from apex.normalization.fused_layer_norm import fused_layer_norm_affine

            return fused_layer_norm_affine(x, weight, bias, weight.shape, EPS)

        def forward(x, weight, bias):
            return torch.ops.ls.layer_norm_forward(x, weight, bias, EPS)

        def backward(saved, x=x, weight=weight, grad_y=grad_y):
            _y, mean, rstd = saved
            return torch.ops.ls.layer_norm_backward(grad_y, x, weight, mean, rstd, True, True)

        yield Case(
            op="layer_norm",
            shape=f"{n_rows} x {n_cols}",
            leaves=leaves,
            eager=eager,
            ls=lambda x, weight, bias: ops.layer_norm(x, weight, bias, EPS),
            grad_outputs=(grad_y,),
            forward_bytes=2 * x.nbytes,  # reads x, writes y
            backward_bytes=3 * x.nbytes,  # reads grad_y and x, writes grad_x
            kernels=(forward, backward),
            others={"liger": liger, "apex": apex},
        )
