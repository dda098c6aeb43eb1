import fairseq.utils
import torch
import torch.nn.functional as F

from ls_plugin import ops
from ls_plugin.report.op_timing import Case, bias_of_product, shapes_for

P = 0.1
CODES = {"relu": 0, "gelu": 1}  # Activation, kernels/common/params.h


def cases(device, dtype):
    generator = torch.Generator(device).manual_seed(0)
    seed = torch.tensor([5])
    small, large = (32, 2048), (1024, 2048)
    shapes = [("relu", shape) for shape in shapes_for(device, (small, (1024, 1024), large))]
    shapes += [("gelu", shape) for shape in shapes_for(device, (large,))]
    for activation, (n_rows, n_cols) in shapes:
        x, grad_y = (torch.randn(n_rows, n_cols, generator=generator, device=device).to(dtype) for _ in range(2))
        bias = torch.zeros(n_cols, device=device, dtype=dtype)  # what bias_of_product has added
        stock, code = fairseq.utils.get_activation_fn(activation), CODES[activation]

        def forward(x, bias, code=code):
            return torch.ops.ls.bias_act_dropout_forward(x, bias, code, P, seed, 0)

        def backward(y, x=x, bias=bias, grad_y=grad_y, code=code):
            saved = (y, None) if code == CODES["relu"] else (x, bias)
            return torch.ops.ls.bias_act_dropout_backward(grad_y, *saved, code, P, seed, 0, True)

        yield Case(
            op="bias_act_dropout",
            shape=f"{n_rows} x {n_cols}, {activation}, p {P}",
            leaves=tuple(leaf.requires_grad_() for leaf in (x, bias)),
            eager=lambda x, bias, stock=stock: F.dropout(stock(bias_of_product(x, bias)), P),
            ls=lambda x, bias, activation=activation: ops.bias_act_dropout(x, bias, activation, P),
            grad_outputs=(grad_y,),
            forward_bytes=2 * x.nbytes,  # reads x, writes y
            backward_bytes=3 * x.nbytes,  # reads grad_y and y or x, writes grad_x
            kernels=(forward, backward),
        )
