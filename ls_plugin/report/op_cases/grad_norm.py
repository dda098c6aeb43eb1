import torch
from fairseq.utils import clip_grad_norm_

from ls_plugin import ops
from ls_plugin.report.op_cases.adam import parameter_shapes, sizes
from ls_plugin.report.op_timing import Case


def cases(device, dtype):
    """The norm of the gradients, no clipping: stock's parameter by parameter, ours over one buffer."""
    for n_elem in sizes(device):
        generator = torch.Generator(device).manual_seed(0)
        parameters = []
        for shape in parameter_shapes(n_elem):
            parameter = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            parameter.grad = torch.randn(shape, generator=generator, device=device).to(dtype)
            parameters.append(parameter)
        grad = torch.cat([parameter.grad.flatten() for parameter in parameters])
        yield Case(
            op="grad_norm",
            shape=f"{grad.numel():,} parameters",
            leaves=(grad,),
            eager=lambda _, parameters=parameters: clip_grad_norm_(parameters, 0.0),
            ls=lambda grad: ops.grad_norm([grad]),
            grad_outputs=None,
            forward_bytes=grad.nbytes,
            backward_bytes=None,
            kernels=(lambda grad: torch.ops.ls.grad_norm([grad], None, 0.0), None),
            compilable=lambda grad: torch.linalg.vector_norm(grad, dtype=torch.float32),
        )
