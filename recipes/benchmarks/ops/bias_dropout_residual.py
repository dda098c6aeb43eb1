import torch
import torch.nn.functional as F
from harness import Case

from ls_plugin import ops

P = 0.1


def cases(device):
    """Forward and backward. Stock adds the bias inside the matrix product before, so its side has no bias to add."""
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((1024, 256), (1024, 512), (1024, 1024)):
        x, residual, grad_y = (torch.randn(rows, columns, generator=generator).to(device) for _ in range(3))
        bias = torch.randn(columns, generator=generator).to(device)
        for leaf in (x, residual, bias):
            leaf.requires_grad_()

        def stock(x=x, residual=residual, grad_y=grad_y):
            torch.autograd.grad(residual + F.dropout(x, P), (x, residual), grad_y)

        def ls(x=x, bias=bias, residual=residual, grad_y=grad_y):
            torch.autograd.grad(ops.bias_dropout_residual(x, bias, residual, P), (x, bias, residual), grad_y)

        # Forward reads x and the residual and writes y, backward reads grad_y and writes grad_x.
        yield Case("bias_dropout_residual", f"{rows} x {columns}, p {P}", stock, ls, n_bytes=5 * x.numel() * 4)
