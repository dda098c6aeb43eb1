"""The update of DeepSpeed's partitions by the fused Adam kernel, and the optimizer that fairseq's trainer and checkpoints see."""

import deepspeed
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from fairseq.optim import FairseqOptimizer
from torch import Tensor, nn

from ls_plugin import ops
from ls_plugin.errors import CheckpointError
from ls_plugin.optim.state import to_flat, to_list, unscaled

_MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALER = "ls_deepspeed_scaler"  # in a saved state: where the loss scaler stands
_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class PartitionAdam(torch.optim.Optimizer):
    """Adam by fairseq's formula on the flat pieces by which DeepSpeed replaces the parameters, one launch for each.

    eps stands beside the uncorrected sqrt(v). torch's and DeepSpeed's Adam add it to the corrected one, sqrt(v / (1 - beta2^t)), so there
    it counts 1 / sqrt(1 - beta2^t) times less, 7 times in the first update with beta2 = 0.98.

    Args:
        params, lr, betas, eps, weight_decay: as ``fairseq.optim.adam.Adam``. Pieces are fp32, on the CPU or a GPU.

    ``n_updates`` counts the updates done, for all pieces: DeepSpeed calls ``step`` once for each of them.
    """

    def __init__(self, params, lr: float, betas: tuple[float, float], eps: float, weight_decay: float):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.n_updates = 0

    def state_of(self, p: Tensor) -> dict:
        """The moments of a piece, zero before its first update."""
        state = self.state[p]
        if not state:
            state.update({name: torch.zeros_like(p, requires_grad=False) for name in _MOMENTS})
        return state

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                moments = (self.state_of(p)[name].view(-1) for name in _MOMENTS)
                ops.adam_step(
                    p.data.view(-1),
                    p.grad.reshape(-1),
                    *moments,
                    lr=group["lr"],
                    beta1=beta1,
                    beta2=beta2,
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    step=self.n_updates + 1,
                )


class EngineOptimizer(FairseqOptimizer):
    """fairseq's face of a DeepSpeed engine.

    ``loss_factor``, a scalar tensor, multiplies every loss before its backward: DeepSpeed averages gradients over ranks, fairseq divides
    their sum by the sample size of the whole update.

    Args:
        cfg: the configuration of ``--optimizer``.  engine: what ``deepspeed.initialize`` gave.  adam: its inner optimizer.
        params: the model's trainable parameters, in its order, which is that of the saved state.
    """

    def __init__(self, cfg, engine, adam: PartitionAdam, params: list[nn.Parameter]):
        super().__init__(cfg)
        self.engine, self._optimizer, self._params = engine, adam, params
        self.stage = engine.zero_optimization_stage()
        self._is_half = engine.fp16_enabled() or engine.bfloat16_enabled()
        self.loss_factor: Tensor | None = None
        self.grad_norm, self.has_overflowed = torch.zeros(()), False
        self._make_moments()

    def _make_moments(self) -> None:
        """DeepSpeed expects them after the first update, and a run that resumes fills them before."""
        if self.stage == 0:
            pieces = self._params
        elif self.stage == 3:
            pieces = self.engine.optimizer.fp32_partitioned_groups_flat
        else:
            pieces = self.engine.optimizer.single_partition_of_fp32_groups
        for piece in pieces:
            self._optimizer.state_of(piece)
        if self.stage in (1, 2):
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss * self.loss_factor, scale_wrt_gas=False)

    def zero_grad(self) -> None:
        self.engine.zero_grad()

    def step(self, closure=None, scale=1.0, groups=None) -> None:
        """One update, unless a gradient is inf or NaN; then weights and moments keep their bits.

        ``has_overflowed`` says which, and ``grad_norm``, an fp32 scalar, is the norm of the gradients before clipping.
        """
        if self.stage == 0:  # where DeepSpeed keeps no norm and looks for no overflow
            self.grad_norm = ops.grad_norm([p.grad for p in self._params if p.grad is not None])[0]
            self.has_overflowed = not bool(torch.isfinite(self.grad_norm))
            self.engine.zero_grad() if self.has_overflowed else self.engine.step()
        else:
            self.engine.step()
            self.grad_norm = torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32)
            # DeepSpeed writes -1 for a norm that is none.
            self.has_overflowed = not self.engine.was_step_applied() or not 0.0 <= float(self.grad_norm) < torch.inf
        if not self.has_overflowed:
            self._optimizer.n_updates += 1

    @property
    def loss_scale(self) -> float:
        return self.engine.optimizer.loss_scale

    def state_dict(self) -> dict:
        """The whole state on the CPU of the first rank, as a run with ``--optimizer adam`` saves it; every rank has to call it.

        Beside it, with ``--fp16``: where DeepSpeed's loss scaler stands. The other ranks get an empty state.
        """
        entries = []
        for p in self._params:
            moments = {name: self._on_first_rank(self._full(p, name)) for name in _MOMENTS}
            entries.append({"step": self._optimizer.n_updates, **moments})
        if not _is_first_rank():
            return {}
        options = {key: self.param_groups[0][key] for key in self._optimizer.defaults}
        state = {
            "state": dict(enumerate(entries)) if self._optimizer.n_updates > 0 else {},
            "param_groups": [{**options, "amsgrad": False, "params": list(range(len(entries)))}],
        }
        if self.engine.fp16_enabled():
            scaler = self.engine.optimizer.loss_scaler
            state = {**to_flat(state, self._shapes()), "loss_scale": self.loss_scale}
            state[_SCALER] = {name: getattr(scaler, name) for name in _SCALER_FIELDS if hasattr(scaler, name)}
        return state

    def load_state_dict(self, state_dict: dict, optimizer_overrides: dict | None = None) -> None:
        """Takes over a state of :meth:`state_dict`, or of a run without DeepSpeed, on any number of ranks.

        Raises:
            CheckpointError: other parameters than these, or parameters that have had different numbers of updates.
        """
        list_state = to_list(state_dict, self._shapes())
        groups = list_state["param_groups"]
        keys = [key for group in groups for key in group["params"]]
        entries = [unscaled(list_state["state"].get(key, {})) for key in keys]
        steps = {int(entry["step"]) for entry in entries if entry}
        if len(steps) > 1:
            raise CheckpointError(
                f"--deepspeed: all parameters must have had the same number of updates, got {sorted(steps)}; resume with --reset-optimizer"
            )
        for p, entry in zip(self._params, entries, strict=True):
            for name in _MOMENTS if entry else ():
                self._set_full(p, entry[name].float(), name)
        self._optimizer.n_updates = max(steps, default=0)
        options = {key: groups[0][key] for key in self._optimizer.defaults if key in groups[0]}
        for group in self.param_groups:
            group.update(options | (optimizer_overrides or {}))
        for name, value in state_dict.get(_SCALER, {}).items() if self.engine.fp16_enabled() else ():
            setattr(self.engine.optimizer.loss_scaler, name, value)

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """The weights by name that ``model`` itself does not hold whole, on the CPU of the first rank; every rank has to call it.

        The fp32 masters of 16-bit parameters, and with ZeRO stage 3 all parameters. The other ranks get none.
        """
        if self.stage < 3 and not self._is_half:
            return {}
        whole: dict[int, Tensor | None] = {}  # a tied parameter is gathered, and stored, once
        names = {}
        trained = {id(p) for p in self._params}
        for name, p in model.named_parameters(remove_duplicate=False):
            if id(p) not in whole:
                if id(p) in trained:
                    whole[id(p)] = self._on_first_rank(self._full(p))
                else:
                    with deepspeed.zero.GatheredParameters([p]):
                        whole[id(p)] = self._on_first_rank(p.detach())
            names[name] = whole[id(p)]
        return names if _is_first_rank() else {}

    def set_masters(self, values: list[Tensor]) -> None:
        """Puts fp32 values, one for each trainable parameter, where masters were made of 16-bit ones."""
        for p, value in zip(self._params, values, strict=True):
            self._set_full(p, value)

    def _shapes(self) -> list[torch.Size]:
        return [torch.Size(getattr(p, "ds_shape", p.shape)) for p in self._params]

    @staticmethod
    def _on_first_rank(tensor: Tensor) -> Tensor | None:
        return tensor.to("cpu", copy=True) if _is_first_rank() else None

    def _full(self, p: nn.Parameter, name: str | None = None) -> Tensor:
        """A moment of a parameter, or its fp32 master, gathered from all ranks."""
        if self.stage == 0:
            return p.detach() if name is None else self._optimizer.state_of(p)[name]
        return safe_get_full_fp32_param(p) if name is None else safe_get_full_optimizer_state(p, name)

    def _set_full(self, p: nn.Parameter, value: Tensor, name: str | None = None) -> None:
        """Puts this rank's part of a value in its place."""
        if self.stage == 3:
            # DeepSpeed's setter of whole values fails where the ranks do not divide the parameter evenly.
            rank = torch.distributed.get_rank(p.ds_process_group)
            n_local = p.ds_tensor.numel()
            piece = value.flatten()[rank * n_local : (rank + 1) * n_local]
            piece = nn.functional.pad(piece, (0, n_local - piece.numel()))
            if name is None:
                safe_set_local_fp32_param(p, piece)
            else:
                safe_set_local_optimizer_state(p, piece, name)
        elif self.stage == 0:
            (p.data if name is None else self._optimizer.state_of(p)[name]).copy_(value.view_as(p))
        elif name is None:
            safe_set_full_fp32_param(p, value)
        else:
            safe_set_full_optimizer_state(p, value, name)


# A checkpoint stores the class name of the optimizer, and resuming compares it: runs move between stock, the plugin and DeepSpeed.
class FairseqAdam(EngineOptimizer):
    """In fp32."""


class FP16Optimizer(EngineOptimizer):
    """With ``--fp16`` or ``--bf16``."""


def _is_first_rank() -> bool:
    return torch.distributed.get_rank() == 0
