import torch
import torch.nn.functional as F

from ls_plugin import ops
from ls_plugin.report.op_timing import Case, bias_of_product, shapes_for

P, EPS = 0.1, 1e-5


def cases(device, dtype):
    """Post-norm, where only y is used, and pre-norm, where the sum goes on as the next residual."""
    generator = torch.Generator(device).manual_seed(0)
    seed = torch.tensor([5])
    shapes = [(False, shape) for shape in shapes_for(device, ((32, 512), (1024, 512), (1024, 1024)))]
    shapes += [(True, shape) for shape in shapes_for(device, ((1024, 512),))]
    for pre_norm, (n_rows, n_cols) in shapes:
        x, residual, grad_sum, grad_y = (
            torch.randn(n_rows, n_cols, generator=generator, device=device).to(dtype) for _ in range(4)
        )
        weight, norm_bias = (torch.randn(n_cols, generator=generator, device=device).to(dtype) for _ in range(2))
        bias = torch.zeros(n_cols, device=device, dtype=dtype)  # what bias_of_product has added

        def eager(x, bias, residual, weight, norm_bias, pre_norm=pre_norm):
            total = residual + F.dropout(bias_of_product(x, bias), P)
            y = F.layer_norm(total, weight.shape, weight, norm_bias, EPS)
            return (y, total) if pre_norm else y

        def ls(x, bias, residual, weight, norm_bias, pre_norm=pre_norm):
            total, y = ops.residual_layer_norm(x, bias, residual, weight, norm_bias, P, EPS)
            return (y, total) if pre_norm else y

        def forward(x, bias, residual, weight, norm_bias):
            return torch.ops.ls.residual_layer_norm_forward(x, bias, residual, weight, norm_bias, P, seed, 0, EPS)

        def backward(saved, weight=weight, grad_sum=grad_sum if pre_norm else None, grad_y=grad_y):
            total, _y, mean, rstd = saved
            return torch.ops.ls.residual_layer_norm_backward(
                grad_sum, grad_y, total, weight, mean, rstd, P, seed, 0, *(True,) * 5
            )

        yield Case(
            op="residual_layer_norm",
            shape=f"{n_rows} x {n_cols}, p {P}, {'pre' if pre_norm else 'post'}-norm",
            leaves=tuple(leaf.requires_grad_() for leaf in (x, bias, residual, weight, norm_bias)),
            eager=eager,
            ls=ls,
            grad_outputs=(grad_y, grad_sum) if pre_norm else (grad_y,),
            forward_bytes=4 * x.nbytes,  # reads x and residual, writes sum and y
            backward_bytes=(5 if pre_norm else 4)
            * x.nbytes,  # reads grad_sum, grad_y, sum; writes grad_residual, grad_x
            kernels=(forward, backward),
        )
