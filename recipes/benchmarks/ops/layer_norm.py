import torch
import torch.nn.functional as F
from harness import Case

from ls_plugin import ops


def cases(device):
    """Forward and backward."""
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((1024, 256), (1024, 512), (1024, 1024)):
        x, grad_y = (torch.randn(rows, columns, generator=generator).to(device) for _ in range(2))
        weight, bias = (torch.randn(columns, generator=generator).to(device) for _ in range(2))
        leaves = tuple(leaf.requires_grad_() for leaf in (x, weight, bias))

        def stock(leaves=leaves, grad_y=grad_y, columns=columns):
            x, weight, bias = leaves
            torch.autograd.grad(F.layer_norm(x, (columns,), weight, bias), leaves, grad_y)

        def ls(leaves=leaves, grad_y=grad_y):
            torch.autograd.grad(ops.layer_norm(*leaves), leaves, grad_y)

        # Forward reads x and writes y, backward reads grad_y and x and writes grad_x.
        yield Case("layer_norm", f"{rows} x {columns}", stock, ls, n_bytes=5 * x.numel() * 4)
