import torch

from ls_plugin.ops import product
from ls_plugin.report.op_timing import Case

# Rows N, inner K, columns M of a step's products: q, k and v, both of the feed-forward network, the output projection.
SHAPES = {
    "cpu": [(1024, 256, 768), (1024, 256, 1024), (1024, 1024, 256), (1024, 256, 8000), (2048, 512, 2048)],
    "cuda": [(4096, 1024, 4096)],
}


def cases(device, dtype):
    """x W^T and both gradients, with torch's product and with the way that ``ls_plugin/routes.py`` chooses."""
    for n_rows, n_k, n_cols in SHAPES[device.type]:
        generator = torch.Generator(device).manual_seed(0)
        x, weight, grad = (
            torch.randn(shape, generator=generator, device=device).to(dtype)
            for shape in ((n_rows, n_k), (n_cols, n_k), (n_rows, n_cols))
        )
        yield Case(
            op="product",
            shape=f"N {n_rows:,}, K {n_k:,}, M {n_cols:,}, and both gradients",
            leaves=(x, weight, grad),
            eager=lambda x, weight, grad: (x @ weight.t(), grad @ weight, grad.t() @ x),
            ls=lambda x, weight, grad: (
                product.mm(x, weight.t()),
                product.mm(grad, weight),
                product.mm(grad.t(), x),
            ),
            grad_outputs=None,
            forward_bytes=None,
            backward_bytes=None,
        )
