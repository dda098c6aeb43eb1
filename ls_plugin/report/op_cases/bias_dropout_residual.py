import torch
import torch.nn.functional as F

from ls_plugin import ops
from ls_plugin.report.op_timing import Case, bias_of_product, shapes_for

P = 0.1


def cases(device, dtype):
    generator = torch.Generator(device).manual_seed(0)
    seed = torch.tensor([5])
    for n_rows, n_cols in shapes_for(device, ((32, 512), (1024, 256), (1024, 512), (1024, 1024))):
        x, residual, grad_y = (
            torch.randn(n_rows, n_cols, generator=generator, device=device).to(dtype) for _ in range(3)
        )
        bias = torch.zeros(n_cols, device=device, dtype=dtype)  # what bias_of_product has added

        def backward(_y, grad_y=grad_y):
            return torch.ops.ls.bias_dropout_residual_backward(grad_y, P, seed, 0, True, True)

        yield Case(
            op="bias_dropout_residual",
            shape=f"{n_rows} x {n_cols}, p {P}",
            leaves=tuple(leaf.requires_grad_() for leaf in (x, bias, residual)),
            eager=lambda x, bias, residual: residual + F.dropout(bias_of_product(x, bias), P),
            ls=lambda x, bias, residual: ops.bias_dropout_residual(x, bias, residual, P),
            grad_outputs=(grad_y,),
            forward_bytes=3 * x.nbytes,  # reads x and residual, writes y
            backward_bytes=2 * x.nbytes,  # reads grad_y, writes grad_x
            kernels=(
                lambda x, bias, residual: torch.ops.ls.bias_dropout_residual_forward(x, bias, residual, P, seed, 0),
                backward,
            ),
        )
