import torch
from fairseq.optim.adam import Adam as FairseqAdam

from ls_plugin import ops, reference
from ls_plugin.report.op_timing import Case

OPTIONS = {"lr": 5e-4, "eps": 1e-8, "weight_decay": 1e-4}
BETA1, BETA2, STEP = 0.9, 0.98, 5


def sizes(device):
    """Parameters of a tiny model, and of a Transformer (base size on a GPU)."""
    return (500_000, 100_000_000) if device.type == "cuda" else (500_000, 10_000_000)


def parameter_shapes(n_elem):
    """A Transformer's mixture of matrices and vectors, and an embedding for the rest: eight layers of C 256 and F 1024, or C 64 and F 256."""
    c = 256 if n_elem > 8_000_000 else 64
    layer = [(c, c), (c,)] * 4 + [(4 * c, c), (4 * c,), (c, 4 * c), (c,)] + [(c,)] * 4
    shapes = layer * 8
    rest = n_elem - sum(torch.Size(shape).numel() for shape in shapes)
    return [*shapes, (rest // c, c)]


def cases(device, dtype):
    """One update of fp32 parameters; with dtype fp16 or bf16, from gradients of it and with the weights of it written as well."""
    for n_elem in sizes(device):
        if dtype == torch.float32:
            yield fp32_case(device, n_elem)
        else:
            yield mixed_case(device, dtype, n_elem, split=False)
            if dtype == torch.bfloat16:
                yield mixed_case(device, dtype, n_elem, split=True)


def step_arguments():
    return {"beta1": BETA1, "beta2": BETA2, "step": STEP, **OPTIONS}


def kernel(*buffers_scale_and_flag, zero_grad):
    lr, eps, decay = OPTIONS["lr"], OPTIONS["eps"], OPTIONS["weight_decay"]
    torch.ops.ls.adam_step(*buffers_scale_and_flag, lr, BETA1, BETA2, eps, decay, STEP, zero_grad)


def fp32_case(device, n_elem):
    """Stock's update parameter by parameter, ours over one buffer; torch.compile gets the formula over one buffer too."""
    generator = torch.Generator(device).manual_seed(0)
    parameters = []
    for shape in parameter_shapes(n_elem):
        parameter = torch.nn.Parameter(torch.randn(shape, generator=generator, device=device))
        parameter.grad = torch.randn(shape, generator=generator, device=device)
        parameters.append(parameter)
    optimizer = FairseqAdam(parameters, betas=(BETA1, BETA2), **OPTIONS)
    n_elem = sum(parameter.numel() for parameter in parameters)
    param, grad = (torch.randn(n_elem, generator=generator, device=device) for _ in range(2))
    exp_avg, exp_avg_sq = (torch.zeros(n_elem, device=device) for _ in range(2))
    return Case(
        op="adam",
        shape=f"{n_elem:,} parameters",
        leaves=(param, grad, exp_avg, exp_avg_sq),
        eager=lambda *_: optimizer.step(),
        ls=lambda *buffers: ops.adam_step(*buffers, **step_arguments()),
        grad_outputs=None,
        # The parameter and both moments are read and written, the gradient is read.
        forward_bytes=7 * 4 * n_elem,
        backward_bytes=None,
        kernels=(lambda *buffers: kernel(*buffers, None, None, None, None, zero_grad=False), None),
        compilable=lambda *buffers: reference.adam_step(*buffers, **step_arguments()),
        in_place=True,
    )


def mixed_case(device, dtype, n_elem, split):
    """What FP16Optimizer does between the backward and the next forward, flat: gradient to fp32, scale, update, weights to 16 bits.

    split: ours keeps the master as bf16 weight and low half, see ``reference.split_master``.
    """
    generator = torch.Generator(device).manual_seed(0)
    master, grad32 = (torch.randn(n_elem, generator=generator, device=device) for _ in range(2))
    grad, scale = grad32.to(dtype), torch.tensor(0.5, device=device)
    stock_weight, stock_master = master.to(dtype), torch.nn.Parameter(master.clone())
    stock_master.grad = torch.empty_like(grad32)
    optimizer = FairseqAdam([stock_master], betas=(BETA1, BETA2), **OPTIONS)
    exp_avg, exp_avg_sq = (torch.zeros(n_elem, device=device) for _ in range(2))

    def eager(*_):
        stock_master.grad.copy_(grad)
        stock_master.grad.mul_(scale)
        optimizer.step()
        stock_weight.copy_(stock_master.detach())

    if split:
        param, low = reference.split_master(master)
        copy = None
        leaves = (param, grad, exp_avg, exp_avg_sq, low)
    else:
        param, copy, low = master, master.to(dtype), None
        leaves = (param, grad, exp_avg, exp_avg_sq, copy)

    def step(function):
        def call(param, grad, exp_avg, exp_avg_sq, other):
            more = {"param_low" if split else "param_copy": other}
            function(param, grad, exp_avg, exp_avg_sq, grad_scale=scale, **more, **step_arguments())

        return call

    return Case(
        op="adam",
        shape=f"{n_elem:,} parameters, {'split master' if split else '16-bit copy'}",
        leaves=leaves,
        eager=eager,
        ls=step(ops.adam_step),
        grad_outputs=None,
        # Both moments and the master are read and written, the gradient is read, a copy is written.
        forward_bytes=(24 + 2 + (0 if split else 2)) * n_elem,
        backward_bytes=None,
        kernels=(lambda *_: kernel(param, grad, exp_avg, exp_avg_sq, copy, low, scale, None, zero_grad=False), None),
        compilable=step(reference.adam_step),
        in_place=True,
    )
