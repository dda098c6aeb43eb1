import torch
from fairseq.optim.adam import Adam as FairseqAdam
from harness import Case

from ls_plugin import ops, reference

OPTIONS = {"lr": 5e-4, "eps": 1e-8, "weight_decay": 1e-4}
BETA1, BETA2, STEP = 0.9, 0.98, 5


def parameter_shapes(n_elem):
    """A Transformer's mixture of matrices and vectors, C 256, F 1024, and an embedding for the rest."""
    layer = [(256, 256), (256,)] * 4 + [(1024, 256), (1024,), (256, 1024), (256,)] + [(256,)] * 4
    shapes = layer * 8
    rest = n_elem - sum(torch.Size(shape).numel() for shape in shapes)
    return [*shapes, (rest // 256, 256)]


def cases(device, dtype):
    """One update: stock's parameter by parameter, ours over one buffer; torch.compile gets the formula over one buffer too."""
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for shape in parameter_shapes(100_000_000 if device.type == "cuda" else 10_000_000):
        parameter = torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))
        parameter.grad = torch.randn(shape, generator=generator).to(device, dtype)
        parameters.append(parameter)
    optimizer = FairseqAdam(parameters, betas=(BETA1, BETA2), **OPTIONS)
    n_elem = sum(parameter.numel() for parameter in parameters)
    param, grad = (torch.randn(n_elem, generator=generator).to(device, dtype) for _ in range(2))
    exp_avg, exp_avg_sq = (torch.zeros(n_elem, device=device) for _ in range(2))

    def update(step_function):
        def call(param, grad, exp_avg, exp_avg_sq):
            step_function(param, grad, exp_avg, exp_avg_sq, beta1=BETA1, beta2=BETA2, step=STEP, **OPTIONS)

        return call

    def forward(param, grad, exp_avg, exp_avg_sq):
        lr, eps, decay = OPTIONS["lr"], OPTIONS["eps"], OPTIONS["weight_decay"]
        torch.ops.ls.adam_step(param, grad, exp_avg, exp_avg_sq, None, lr, BETA1, BETA2, eps, decay, STEP, False)

    yield Case(
        op="adam",
        shape=f"{n_elem:,} parameters",
        leaves=(param, grad, exp_avg, exp_avg_sq),
        eager=lambda *_: optimizer.step(),
        ls=update(ops.adam_step),
        grad_outputs=None,
        # The parameter and both moments are read and written, the gradient is read.
        forward_bytes=2 * param.nbytes + grad.nbytes + 4 * exp_avg.nbytes,
        backward_bytes=None,
        kernels=(forward, None),
        compilable=update(reference.adam_step),
        in_place=True,
    )
