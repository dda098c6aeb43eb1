import torch
from fairseq.optim.adam import Adam as FairseqAdam
from harness import Case

from ls_plugin import ops

OPTIONS = {"lr": 5e-4, "eps": 1e-8, "weight_decay": 1e-4}
BETAS = (0.9, 0.98)


def parameter_shapes(n_elem):
    """A Transformer's mixture of matrices and vectors, C 256, F 1024, and an embedding for the rest."""
    layer = [(256, 256), (256,)] * 4 + [(1024, 256), (1024,), (256, 1024), (256,)] + [(256,)] * 4
    shapes = layer * 8
    rest = n_elem - sum(torch.Size(shape).numel() for shape in shapes)
    return [*shapes, (rest // 256, 256)]


def cases(device):
    """One update of about 10 million parameters: stock parameter by parameter, ours over one buffer."""
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for shape in parameter_shapes(10_000_000):
        parameter = torch.nn.Parameter(torch.randn(shape, generator=generator).to(device))
        parameter.grad = torch.randn(shape, generator=generator).to(device)
        parameters.append(parameter)
    optimizer = FairseqAdam(parameters, betas=BETAS, **OPTIONS)
    n_elem = sum(parameter.numel() for parameter in parameters)
    param, grad = (torch.randn(n_elem, generator=generator).to(device) for _ in range(2))
    exp_avg, exp_avg_sq = torch.zeros_like(param), torch.zeros_like(param)

    def ls():
        ops.adam_step(param, grad, exp_avg, exp_avg_sq, beta1=BETAS[0], beta2=BETAS[1], step=5, **OPTIONS)

    yield Case("adam", f"{n_elem:,} parameters", optimizer.step, ls, n_bytes=7 * n_elem * 4)
