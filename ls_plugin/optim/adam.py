"""``ls_adam``: fairseq's Adam over contiguous buffers; scaling, clipping and the update are one pass over memory."""

import math
from collections.abc import Callable

import torch
from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim import adam as stock
from fairseq.optim.dynamic_loss_scaler import DynamicLossScaler
from torch import Tensor

from ls_plugin import ops, reference
from ls_plugin.errors import CheckpointError, UnsupportedError
from ls_plugin.optim.engine import ContiguousBuffer, GradientScale, Overflow, Run
from ls_plugin.optim.state import to_flat

_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamBuffer(ContiguousBuffer):
    """A contiguous buffer with Adam's state beside it, and what is missing to the exact fp32 master of 16-bit parameters.

    Args:
        dtype: what the parameters become, fp16 or bf16; None: what they are. fp32 values go into the masters in full.
    Attributes:
        exp_avg, exp_avg_sq: the moments, fp32 (n,).
        param_low: with bf16 parameters, int16 (n,): the low halves of the masters whose high halves they are; else None.
        master: with fp16 parameters, fp32 (n,); else None.
        states: of each parameter its entry in the optimizer's ``state``, or None; a look-up by tensor costs more than a step's arithmetic
            on a small one.
    """

    def __init__(self, params: list[Tensor], dtype: torch.dtype | None = None):
        full = {}
        for p in params:
            if dtype not in (None, p.dtype):
                full[p] = p.data
                p.data = p.data.to(dtype)
        super().__init__(params)
        self.exp_avg = torch.zeros_like(self.param, dtype=torch.float32)
        self.exp_avg_sq = torch.zeros_like(self.exp_avg)
        self.param_low = torch.zeros_like(self.param, dtype=torch.int16) if self.param.dtype == torch.bfloat16 else None
        self.master = self.param.float() if self.param.dtype == torch.float16 else None
        for i, p in enumerate(self.params):
            if p in full:
                self._set_master(i, full.pop(p))
        self.forget_states()

    def forget_states(self) -> None:
        self.states: list[dict | None] = [None] * len(self.params)

    def _set_master(self, index: int, value: Tensor) -> None:
        """value: fp32, the parameter's shape; its rounding is in the parameter, but for ties."""
        if self.master is not None:
            self.view(self.master, index).copy_(value)
        else:
            weight, low = reference.split_master(value)
            self.params[index].data.copy_(weight)
            self.view(self.param_low, index).copy_(low)

    def masters(self) -> list[Tensor]:
        """Of each parameter its value in full: fp32 in its shape, or the parameter itself where it is not of 16 bits."""
        self.follow_rewritten()
        if self.param_low is not None:
            whole = reference.join_master(self.param, self.param_low)
        else:
            whole = self.param if self.master is None else self.master
        return [self.view(whole, i) for i in range(len(self.params))]

    def follow_rewritten(self) -> None:
        """Makes the masters equal to the parameters that somebody wrote to."""
        if self.param_low is None and self.master is None:
            return
        for i in self.rewritten():
            if self.master is not None:
                self.view(self.master, i).copy_(self.params[i].data)
            else:
                self.view(self.param_low, i).zero_()

    def step(self, run: Run, **options) -> None:
        """One launch: updates a run of parameters, see :func:`ls_plugin.ops.adam_step`."""
        at = slice(run.start, run.stop)
        if self.master is not None:
            param, options["param_copy"] = self.master[at], self.param[at]
        else:
            param = self.param[at]
        if self.param_low is not None:
            options["param_low"] = self.param_low[at]
        ops.adam_step(param, self.grad[at], self.exp_avg[at], self.exp_avg_sq[at], **options)


class ContiguousAdam(torch.optim.Optimizer):
    """Adam by fairseq's formula (eps beside the uncorrected sqrt(v), decoupled weight decay), one launch per buffer.

    Parameters and gradients are fp32, fp16 or bf16, moments fp32, and so are the exact masters of 16-bit parameters. ``state[p]`` holds
    ``step``, ``exp_avg`` and ``exp_avg_sq`` (views of the moment buffers) from the first update of ``p`` on, which is stock's format, so
    state dicts move both ways.

    Where :meth:`clip_grad_norm` finds a norm that is not finite, the next step changes nothing.

    Args:
        params, lr, betas, eps, weight_decay: as ``fairseq.optim.adam.Adam``.
        dtype: what the parameters become, fp16 or bf16; None: what they are.
    Attributes:
        waits_for_overflow: whether a step asks the device if it changed anything, and sets ``skipped``, and leaves the counts of steps
            as they were where it did not. That is the only thing here for which the host waits, and it asks when all is launched.
        skipped: the last step changed nothing.
    """

    supports_memory_efficient_fp16 = True
    supports_flat_params = True
    # fairseq's MemoryEfficientFP16Optimizer would replace the views by the loaded moments.
    disable_mem_eff_fp16_loading_hack = True

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, dtype=None):
        # amsgrad is never set; the key is part of the format.
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=False))
        self.grad_scale = GradientScale()
        self.waits_for_overflow = self.skipped = False
        self._overflow: Overflow | None = None
        self._buffers = [self._build_buffers(group["params"], dtype) for group in self.param_groups]

    def add_param_group(self, param_group: dict) -> None:
        if hasattr(self, "_buffers"):
            raise UnsupportedError(
                "--optimizer ls_adam: adding a parameter group later is unsupported, since the buffers are laid out once; "
                "build the optimizer with all groups"
            )
        super().add_param_group(param_group)

    def __getstate__(self):
        raise UnsupportedError(
            "--optimizer ls_adam: copying or pickling the optimizer is unsupported, since its parameters live in its buffers; build another one "
            "and load its state_dict()"
        )

    @staticmethod
    def _build_buffers(params: list[Tensor], dtype: torch.dtype | None) -> list[AdamBuffer]:
        if any(hasattr(p, "expert") for p in params):
            raise UnsupportedError(
                "--optimizer ls_adam: expert parameters (--base-layers) are unsupported, since their norm is taken apart. "
                "Use --optimizer adam"
            )
        by_kind: dict = {}
        for p in params:
            by_kind.setdefault((p.device, p.dtype), []).append(p)
        return [AdamBuffer(same_kind, dtype) for same_kind in by_kind.values()]

    @property
    def buffers(self) -> list[AdamBuffer]:
        return [buffer for buffers in self._buffers for buffer in buffers]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, and a factor that was still pending. ``p.grad`` is None afterwards in any case."""
        self.grad_scale.clear()
        self._overflow = None
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
        results = [ops.grad_norm(pieces, self.grad_scale.total(device), max_norm) for device, pieces in grads.items()]
        norm, coefficient, overflow = results[0]
        if len(results) == 1 and aggregate_norm_fn is None:
            if max_norm > 0:
                self.grad_scale.factor = coefficient * self.grad_scale.loss_scale
        else:
            norm = torch.linalg.vector_norm(torch.stack([each.to(norm.device) for each, _, _ in results]))
            if aggregate_norm_fn is not None:
                norm = aggregate_norm_fn(norm)
            overflow = ~norm.isfinite()
            if max_norm > 0:
                # 1e-6 as in fairseq.utils.clip_grad_norm_
                self.grad_scale.multiply((float(max_norm) / (norm + 1e-6)).clamp(max=1.0))
        self._overflow = Overflow(overflow, is_read=self.waits_for_overflow)
        return norm

    @property
    def overflowed(self) -> bool:
        """Whether the gradients' norm, when it was last taken, was not finite. The host waits for the norm, and for nothing after it."""
        return self._overflow is not None and self._overflow.read()

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
            buffer.make_room(indices)
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
        launched = []
        for group, buffers in zip(self.param_groups, self._buffers, strict=True):
            for buffer in buffers:
                buffer.check_views()
                buffer.follow_rewritten()
                launched += self._step_buffer(group, buffer)
        self.skipped = self.waits_for_overflow and self.overflowed
        if not self.skipped:
            for buffer, indices, step in launched:
                for i in indices:
                    (buffer.states[i] or self._state_of(buffer, i))["step"] = step
        self.grad_scale.clear()
        self._overflow = None
        return loss

    def _step_buffer(self, group: dict, buffer: AdamBuffer) -> list[tuple[AdamBuffer, range, int]]:
        """Returns what was launched: of each run the buffer, the indices of its parameters, and the number of the step."""
        beta1, beta2 = group["betas"]
        device = buffer.grad.device
        scale = self.grad_scale.total(device)
        steps = [0 if state is None else state["step"] for state in buffer.states]
        launched = []
        for run in buffer.runs(steps):
            step = steps[run.indices[0]] + 1
            buffer.step(
                run,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                step=step,
                grad_scale=scale,
                overflow=None if self._overflow is None else self._overflow.on(device),
            )
            launched.append((buffer, run.indices, step))
        return launched

    def with_masters(self, state_dict: dict) -> dict:
        """A copy of a module's state dict with the exact fp32 masters instead of its 16-bit parameters, the tied ones still tied."""
        masters = {
            p.data_ptr(): master
            for buffer in self.buffers
            if buffer.param.dtype in (torch.float16, torch.bfloat16)
            for p, master in zip(buffer.params, buffer.masters(), strict=True)
            if p.numel()
        }
        return {
            name: masters.get(value.data_ptr(), value) if torch.is_tensor(value) and value.numel() else value
            for name, value in state_dict.items()
        }

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
                f"ls_adam: the saved state must have {sizes} parameters per group, got {saved_sizes}; was it saved by another model? "
                "Resume with --reset-optimizer"
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

    scaler: DynamicLossScaler | None = None  # of fp16
    saves_flat = False  # whether the state is one entry for all parameters, as stock's is with --fp16
    waits_before_step = (
        True  # whether an overflow is reported before the step, as stock's trainer expects, or by the step
    )

    def __init__(self, cfg, params, dtype: torch.dtype | None = None):
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
        self._optimizer = ContiguousAdam(params, **self.optimizer_config, dtype=dtype)

    def zero_grad(self):
        self.optimizer.zero_grad()
        if self.scaler is not None:
            self.optimizer.grad_scale.loss_scale = self.scaler.loss_scale

    def multiply_grads(self, c):
        self.optimizer.multiply_grads(c)

    def backward(self, loss):
        # A gradient that accumulates must find the true value of what was there.
        self.optimizer.materialize_grads()
        if self.scaler is not None:
            loss = self.optimizer.grad_scale.loss_scale * loss
        super().backward(loss)

    def clip_grad_norm(self, max_norm, aggregate_norm_fn=None) -> Tensor:
        """Scales the gradients down to ``max_norm`` where it is positive and exceeded; returns their norm before that, on the device.

        Raises:
            OverflowError: fp16, and the norm is not finite; the loss scale is lowered.
            FloatingPointError: the same, and the loss scale has come to ``--min-loss-scale``.
        """
        norm = self.optimizer.clip_grad_norm(max_norm, aggregate_norm_fn)
        if self.scaler is not None and self.waits_before_step and self.optimizer.overflowed:
            self.scaler.check_overflow(math.inf)  # raises
        return norm

    def step(self, closure=None, scale=1.0, groups=None):
        """One update with the gradients divided by ``scale``.

        Raises:
            OverflowError, FloatingPointError: as :meth:`clip_grad_norm`, where that does not. Nothing was updated then.
        """
        if groups is not None:
            raise UnsupportedError(
                "--optimizer ls_adam: stepping some parameter groups only is unsupported. Use --optimizer adam"
            )
        if not (isinstance(scale, (int, float)) and scale == 1.0):
            self.optimizer.multiply_grads(1.0 / scale)
        self.optimizer.step(closure)
        if self.scaler is not None:
            if self.optimizer.skipped:
                self.scaler.check_overflow(math.inf)  # raises
            self.scaler.update()

    def state_dict(self) -> dict:
        state = self.optimizer.state_dict()
        if self.saves_flat:
            state = to_flat(state, [p.shape for p in self.params])
        return state if self.scaler is None else {**state, "loss_scale": self.scaler.loss_scale}

    def load_state_dict(self, state_dict: dict, optimizer_overrides=None) -> None:
        """Takes over a state in either layout (``ls_plugin.optim.state``), and a loss scale where there is one."""
        if self.scaler is not None and "loss_scale" in state_dict:
            self.scaler.loss_scale = state_dict["loss_scale"]
        super().load_state_dict(state_dict, optimizer_overrides)
