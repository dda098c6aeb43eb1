"""``ls_adam``: fairseq's Adam over contiguous buffers; scaling, clipping and the update are one pass over memory."""

from collections.abc import Callable

import torch
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim import adam as stock
from torch import Tensor

from ls_plugin import ops
from ls_plugin.errors import CheckpointError, UnsupportedError
from ls_plugin.optim.engine import ContiguousBuffer, GradientScale

_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamBuffer(ContiguousBuffer):
    """A contiguous buffer with the moments of its parameters beside it: ``exp_avg``, ``exp_avg_sq``, fp32 (n,).

    ``states``: of each parameter its entry in the optimizer's ``state``, or None; a look-up by tensor costs more than a step's arithmetic on
    a small one.
    """

    def __init__(self, params: list[Tensor]):
        super().__init__(params)
        self.exp_avg = torch.zeros_like(self.param, dtype=torch.float32)
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)
        self.forget_states()

    def forget_states(self) -> None:
        self.states: list[dict | None] = [None] * len(self.params)


class ContiguousAdam(torch.optim.Optimizer):
    """Adam by fairseq's formula (eps beside the uncorrected sqrt(v), decoupled weight decay), one launch per buffer.

    Parameters and gradients are fp32, fp16 or bf16, moments fp32. ``state[p]`` holds ``step``, ``exp_avg`` and ``exp_avg_sq`` (views of
    the moment buffers) from the first update of ``p`` on, which is stock's format, so state dicts move both ways.

    Args:
        params, lr, betas, eps, weight_decay: as ``fairseq.optim.adam.Adam``.
    """

    supports_memory_efficient_fp16 = True
    supports_flat_params = True
    # fairseq's MemoryEfficientFP16Optimizer would put the loaded moments in the place of the views.
    disable_mem_eff_fp16_loading_hack = True

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        # amsgrad is never set; the key is part of the format.
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=False))
        self.grad_scale = GradientScale()
        self._buffers = [self._build_buffers(group["params"]) for group in self.param_groups]

    def add_param_group(self, param_group: dict) -> None:
        if hasattr(self, "_buffers"):
            raise UnsupportedError(
                "--optimizer ls_adam: adding a parameter group later is unsupported, since the buffers are laid out once; "
                "build the optimizer with all groups"
            )
        super().add_param_group(param_group)

    @staticmethod
    def _build_buffers(params: list[Tensor]) -> list[AdamBuffer]:
        if any(hasattr(p, "expert") for p in params):
            raise UnsupportedError(
                "--optimizer ls_adam: expert parameters (--base-layers) are unsupported, since their norm is taken apart. "
                "Use --optimizer adam"
            )
        by_kind: dict = {}
        for p in params:
            by_kind.setdefault((p.device, p.dtype), []).append(p)
        return [AdamBuffer(same_kind) for same_kind in by_kind.values()]

    @property
    def buffers(self) -> list[AdamBuffer]:
        return [buffer for buffers in self._buffers for buffer in buffers]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, and a factor that was still pending. ``p.grad`` is None afterwards in any case."""
        self.grad_scale.clear()
        for buffer in self.buffers:
            buffer.zero_grad()

    def multiply_grads(self, c: float | Tensor) -> None:
        """Multiplies the gradients by ``c``, when the update reads them."""
        self._adopt_foreign_grads()
        self.grad_scale.multiply(c)

    def clip_grad_norm(self, max_norm: float, aggregate_norm_fn: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Has the gradients scaled down to ``max_norm`` by the update, where it is positive and exceeded.

        Returns:
            fp32 scalar: L2 norm of the gradients before that, a pending factor included; 0 where there are none.
            ``aggregate_norm_fn`` makes it the norm over all ranks. Nothing is read on the host.
        """
        self._adopt_foreign_grads()
        grads: dict[torch.device, list[Tensor]] = {}
        for buffer in self.buffers:
            grads.setdefault(buffer.grad.device, []).extend(buffer.grads())
        grads = {device: pieces for device, pieces in grads.items() if pieces}
        if not grads:
            norm = torch.zeros((), device=self.buffers[0].grad.device)
            return norm if aggregate_norm_fn is None else aggregate_norm_fn(norm)
        results = [ops.grad_norm(pieces, self.grad_scale.tensor(device), max_norm) for device, pieces in grads.items()]
        if len(results) == 1 and aggregate_norm_fn is None:
            norm, coefficient, _ = results[0]
            if max_norm > 0:
                self.grad_scale.replace(coefficient)
            return norm
        norm = torch.linalg.vector_norm(torch.stack([norm.to(results[0][0].device) for norm, _, _ in results]))
        if aggregate_norm_fn is not None:
            norm = aggregate_norm_fn(norm)
        if max_norm > 0:
            # 1e-6 as in fairseq.utils.clip_grad_norm_
            self.grad_scale.multiply((float(max_norm) / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def materialize_grads(self) -> None:
        """Applies a pending factor to ``p.grad``, for code that reads or changes gradients between scaling and step."""
        self._adopt_foreign_grads()
        self.grad_scale.apply_to(self.buffers)

    def _adopt_foreign_grads(self) -> None:
        foreign = [(buffer, indices) for buffer in self.buffers if (indices := buffer.foreign_grads())]
        if foreign:
            # Foreign gradients hold true values; a pending factor concerns only those that were in the buffers before.
            self.grad_scale.apply_to(self.buffers)
        for buffer, indices in foreign:
            buffer.adopt(indices)

    @torch.no_grad()
    def step(self, closure=None):
        """Updates every parameter that has a gradient; the others, and their moments, keep their bits.

        ``p.grad`` is left as it was, without the factor that was pending.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._adopt_foreign_grads()
        for group, buffers in zip(self.param_groups, self._buffers, strict=True):
            for buffer in buffers:
                buffer.check_views()
                self._step_buffer(group, buffer)
        self.grad_scale.clear()
        return loss

    def _step_buffer(self, group: dict, buffer: AdamBuffer) -> None:
        beta1, beta2 = group["betas"]
        scale = self.grad_scale.tensor(buffer.grad.device)
        steps = [0 if state is None else state["step"] for state in buffer.states]
        for run in buffer.runs(steps):
            at = slice(run.start, run.stop)
            step = steps[run.indices[0]] + 1
            ops.adam_step(
                buffer.param[at],
                buffer.grad[at],
                buffer.exp_avg[at],
                buffer.exp_avg_sq[at],
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=step,
                grad_scale=scale,
            )
            for i in run.indices:
                self._state_of(buffer, i)["step"] = step

    def _state_of(self, buffer: AdamBuffer, index: int) -> dict:
        """The state of one parameter, made on first use."""
        state = buffer.states[index]
        if state is None:
            state = buffer.states[index] = self.state[buffer.params[index]]
            state.update(step=0)
            state.update({name: buffer.view(getattr(buffer, name), index) for name in _MOMENTS})
        return state

    def load_state_dict(self, state_dict: dict) -> None:
        """Takes over options and moments, in fp32 whatever the parameters' dtype; the buffers and the views of them stay.

        Raises:
            CheckpointError: other parameters than these, or a state of amsgrad.
        """
        saved_groups = state_dict["param_groups"]
        saved_sizes, sizes = [[len(g["params"]) for g in groups] for groups in (saved_groups, self.param_groups)]
        if saved_sizes != sizes:
            raise CheckpointError(
                f"ls_adam: the saved state must have {sizes} parameters per group, got {saved_sizes}; was it saved by another model, "
                "or by another precision (--fp16 stores one flat parameter)? Resume with --reset-optimizer"
            )
        if any(group.get("amsgrad") for group in saved_groups):
            raise CheckpointError(
                "ls_adam: the saved state must be without amsgrad, got amsgrad=True; resume with --reset-optimizer"
            )
        self.state.clear()
        for buffer in self.buffers:
            buffer.forget_states()
        for saved_group, group, buffers in zip(saved_groups, self.param_groups, self._buffers, strict=True):
            group.update({key: value for key, value in saved_group.items() if key in self.defaults})
            saved_state = {
                p: state_dict["state"][key]
                for key, p in zip(saved_group["params"], group["params"], strict=True)
                if key in state_dict["state"]
            }
            for buffer in buffers:
                for i, p in enumerate(buffer.params):
                    if p in saved_state:
                        # apex's FusedAdam counts the steps of a group, not of a parameter.
                        step = saved_state[p].get("step", saved_group.get("step", 0))
                        _load_moments(self._state_of(buffer, i), saved_state[p], int(step))
                    else:  # and not all of them before: what is loaded may be this optimizer's own state
                        for name in _MOMENTS:
                            buffer.view(getattr(buffer, name), i).zero_()


def _load_moments(state: dict, saved: dict, step: int) -> None:
    state["step"] = step
    for name in _MOMENTS:
        if saved[name].shape != state[name].shape:
            raise CheckpointError(
                f"ls_adam: the saved {name} must have the parameter's shape {tuple(state[name].shape)}, got {tuple(saved[name].shape)}; "
                "resume with --reset-optimizer"
            )
        state[name].copy_(saved[name])
        state[name].mul_(saved.get(f"{name}_scale", 1.0))  # of --fp16-adam-stats


# The class name is stock's on purpose: resuming compares it with the one that the checkpoint stores, and training may move between
# the two optimizers in either direction.
@register_optimizer("ls_adam", dataclass=stock.FairseqAdamConfig)
class FairseqAdam(stock.FairseqAdam):
    """``--optimizer ls_adam``, with stock's ``--adam-betas``, ``--adam-eps`` and ``--weight-decay``.

    ``multiply_grads`` and ``clip_grad_norm`` leave ``p.grad`` as it is and hand their factor to ``step``, as fairseq's own fp16 wrappers
    do; ``optimizer.materialize_grads()`` applies it for code that wants to look.

    Raises:
        UnsupportedError: ``--use-old-adam``, ``--fp16-adam-stats``, ``--tpu``.
    """

    def __init__(self, cfg, params):
        FairseqOptimizer.__init__(self, cfg)
        for name, why in (
            ("use_old_adam", "there is only one Adam here"),
            ("fp16_adam_stats", "moments are kept in fp32"),
            ("tpu", "there are no TPU kernels (--bf16 implies it where torch_xla is installed)"),
        ):
            if getattr(cfg, name, False):
                raise UnsupportedError(
                    f"--optimizer ls_adam: --{name.replace('_', '-')} is unsupported, since {why}. Drop it, or use --optimizer adam"
                )
        self._optimizer = ContiguousAdam(params, **self.optimizer_config)

    def zero_grad(self):
        self.optimizer.zero_grad()

    def multiply_grads(self, c):
        self.optimizer.multiply_grads(c)

    def backward(self, loss):
        # A gradient that accumulates must find the true value of what was there.
        self.optimizer.materialize_grads()
        super().backward(loss)

    def clip_grad_norm(self, max_norm, aggregate_norm_fn=None) -> Tensor:
        """Scales the gradients down to ``max_norm`` where it is positive and exceeded; returns their norm before that, on the device."""
        return self.optimizer.clip_grad_norm(max_norm, aggregate_norm_fn)

    def step(self, closure=None, scale=1.0, groups=None):
        """One update with the gradients divided by ``scale``."""
        if groups is not None:
            raise UnsupportedError(
                "--optimizer ls_adam: stepping some parameter groups only is unsupported. Use --optimizer adam"
            )
        if not (isinstance(scale, (int, float)) and scale == 1.0):
            self.optimizer.multiply_grads(1.0 / scale)
        self.optimizer.step(closure)
