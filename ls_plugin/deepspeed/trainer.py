"""fairseq's trainer on DeepSpeed's engine."""

import logging
import os

import torch
from fairseq import utils
from fairseq.criterions.masked_lm import MaskedLmLoss
from fairseq.distributed import utils as distributed_utils
from fairseq.file_io import PathManager
from fairseq.logging import metrics
from fairseq.optim import lr_scheduler
from fairseq.trainer import Trainer
from torch import Tensor, nn

from ls_plugin.deepspeed.config import adam_options, refusal, stage_of
from ls_plugin.errors import UnsupportedError
from ls_plugin.modules import TransformerDecoderLayer, TransformerEncoderLayer
from ls_plugin.optim.resume import build_and_compare
from ls_plugin.optim.trainer import log_memory
from ls_plugin.rebinding import wrap

logger = logging.getLogger(__name__)


class DeepSpeedTrainer(Trainer):
    """Trains under ``deepspeed.initialize``; data, learning rate, validation, logging and checkpoints stay fairseq's.

    The engine is built where fairseq builds the optimizer, after the model's weights were loaded, so a checkpoint needs nothing of DeepSpeed.

    Args:
        config: as :func:`ls_plugin.deepspeed.config.resolve` gives it.
    """

    def __init__(self, cfg, task, model, criterion, quantizer=None, *, config: dict):
        if utils.has_parameters(criterion):
            raise UnsupportedError(
                f"--deepspeed: criterions with parameters are unsupported, got {type(criterion).__name__}; drop --deepspeed"
            )
        self.config, self._engine = config, None
        self._gathered_weights: dict[str, Tensor] = {}
        self._gathered_optim_state: dict | None = None
        super().__init__(cfg, task, model, criterion, quantizer)
        if self.config["zero_optimization"]["stage"] == 3 and hasattr(criterion, "fused_projection"):
            # Its blocks read the projection's weight past the module, and so past DeepSpeed, which gathers it when that is called.
            criterion.fused_projection = "never"

    @property
    def use_distributed_wrapper(self) -> bool:
        return False

    @property
    def model(self) -> nn.Module:
        return self._model if self._engine is None else self._engine

    @property
    def always_call_state_dict_during_save_checkpoint(self) -> bool:
        return False  # what all ranks have to do is done by consolidate_optimizer

    def load_checkpoint(self, filename, *args, **kwargs):
        """As fairseq's; weights of 16-bit models stay in fp32 until the engine takes them over, masters and all."""
        if self._is_half and PathManager.isfile(filename):
            for p in self._model.parameters():
                p.data = p.data.float()
        return super().load_checkpoint(filename, *args, **kwargs)

    @property
    def _is_half(self) -> bool:
        return self.cfg.common.fp16 or self.cfg.common.bf16

    def _build_optimizer(self) -> None:
        if self._engine is not None:
            raise UnsupportedError("--deepspeed: the optimizer cannot be built anew during training; drop --deepspeed")
        deepspeed = _import_deepspeed(self.cuda, self.cfg)
        import pydantic  # DeepSpeed needs it

        from ls_plugin.deepspeed import optimizer as optimizers

        if stage_of(self.config) == 3:
            # A layer of ours reads all of its weights at once, as one node of autograd, so they are gathered and released together.
            layers = {type(m) for m in self._model.modules()} & {TransformerDecoderLayer, TransformerEncoderLayer}
            if layers:
                deepspeed.utils.set_z3_leaf_modules(self._model, list(layers))
        params = [p for p in self._model.parameters() if p.requires_grad]
        masters = [p.data for p in params] if self._is_half and params[0].dtype == torch.float32 else None
        adam = optimizers.PartitionAdam(params, lr=self.cfg.optimization.lr[0], **adam_options(self.cfg.optimizer))
        try:
            self._engine, *_ = deepspeed.initialize(model=self._model, optimizer=adam, config=self.config)
        except pydantic.ValidationError as error:
            raise refusal(error) from error
        kind = optimizers.FP16Optimizer if self._is_half else optimizers.FairseqAdam
        self._optimizer = kind(self.cfg.optimizer, self._engine, adam, params)
        if masters is not None:
            self._optimizer.set_masters(masters)
        self._lr_scheduler = lr_scheduler.build_lr_scheduler(self.cfg.lr_scheduler, self._optimizer)
        self._lr_scheduler.step_update(0)
        logger.info(
            f"DeepSpeed {deepspeed.__version__}, ZeRO stage {stage_of(self.config)}; the update is ls_adam's kernel on DeepSpeed's "
            "partitions, which take the place of ls_adam's own buffers"
        )

    def consolidate_optimizer(self) -> None:
        """Gathers from all ranks what the first one saves; fairseq calls it on each of them before it saves."""
        self._gathered_weights = self.optimizer.weights(self._model)
        if not self.cfg.checkpoint.no_save_optimizer_state:
            self._gathered_optim_state = self.optimizer.state_dict()

    def state_dict(self) -> dict:
        state = super().state_dict()
        state["model"] = {**self._model.state_dict(), **self._gathered_weights}
        self._gathered_weights = {}
        return state

    @metrics.aggregate("train")
    def train_step(self, samples, raise_oom: bool = False):
        """One update from a list of batches.

        Returns:
            What fairseq logs of it, or None for an update that was skipped because of an overflow.
        Raises:
            FloatingPointError: inf or NaN in the gradients in fp32 and bf16, where no loss scale explains it; the weights are untouched.
        """
        self._set_seed()
        self.model.train()
        self.criterion.train()
        metrics.log_start_time("train_wall", priority=800, round=0)

        batches = [self._prepare_sample(sample) for sample in samples]
        # Of the same type on all ranks, which sum it: a tensor or a number.
        sizes = [self._sample_size(sample) * (not is_dummy) for sample, is_dummy in batches]
        self.optimizer.loss_factor = self._loss_factor(sum(sizes))
        logging_outputs = []
        for i, ((sample, is_dummy), size) in enumerate(zip(batches, sizes, strict=True)):
            self._engine.set_gradient_accumulation_boundary(i + 1 == len(batches))
            _, actual_size, output = self.task.train_step(
                sample=sample,
                model=self.model,
                criterion=self.criterion,
                optimizer=self.optimizer,
                update_num=self.get_num_updates(),
                ignore_grad=is_dummy,
            )
            if not is_dummy and actual_size != size:
                raise UnsupportedError(
                    f"--deepspeed: the criterion's sample size must be known before its backward, expected {int(size)}, got "
                    f"{int(actual_size)} from {type(self.criterion).__name__}; drop --deepspeed"
                )
            logging_outputs.append((output, is_dummy))
        self.task.optimizer_step(self.optimizer, model=self.model, update_num=self.get_num_updates())

        logging_outputs, sample_size = self._gather(logging_outputs, sum(sizes))
        result = None
        if self.optimizer.has_overflowed:
            self._skip()
        else:
            self.set_num_updates(self.get_num_updates() + 1)
            log_memory(self)
            result = self._reduce_and_log_stats(logging_outputs, sample_size, self.optimizer.grad_norm)
        if self.cfg.common.fp16:
            metrics.log_scalar("loss_scale", self.optimizer.loss_scale, priority=700, round=4, weight=0)
        metrics.log_stop_time("train_wall")
        return result

    def _sample_size(self, sample: dict) -> int | Tensor:
        """What the criterion will divide its loss by, for those of fairseq that count tokens, sentences or masked tokens."""
        if isinstance(self._criterion, MaskedLmLoss):
            return sample["target"].ne(self._criterion.padding_idx).sum()
        return sample["target"].size(0) if getattr(self._criterion, "sentence_avg", False) else sample["ntokens"]

    def _loss_factor(self, size: int | Tensor) -> Tensor:
        """Ranks divided by the sample size of the whole update, as DeepSpeed divides the sum over the ranks by their number."""
        total = torch.as_tensor(size, dtype=torch.float64, device=self.device)
        n_ranks = self.data_parallel_world_size
        if n_ranks > 1:
            total = total.clone()
            distributed_utils.all_reduce(total, group=self.data_parallel_process_group)
        return n_ranks / total.clamp(min=1.0).float()

    def _gather(self, outputs: list[tuple[dict, bool]], size: int | Tensor) -> tuple[list[dict], float | Tensor]:
        """Logging outputs and sample size of all ranks. Batches that only fill up a rank's share count nothing."""
        real = [output for output, is_dummy in outputs if not is_dummy]
        kept = real or [output for output, _ in outputs]
        size = size.float() if torch.is_tensor(size) else float(size)
        if self.data_parallel_world_size == 1:
            return kept, size
        spent = self._local_cumulative_training_time()
        kept, (size, spent) = self._aggregate_logging_outputs(kept, size, spent, ignore=not real)
        self._cumulative_training_time = spent / self.data_parallel_world_size
        return kept, size

    def _skip(self) -> None:
        if not self.cfg.common.fp16:
            raise FloatingPointError(
                f"inf or NaN in the gradients of update {self.get_num_updates() + 1}; weights and checkpoints are as before it. "
                "Lower --lr, or set --clip-norm"
            )
        logger.info(
            f"NOTE: gradient overflow, the update is skipped; the loss scale is now {self.optimizer.loss_scale}"
        )


# As for fairseq's own: a run resumes in another precision, but not with the state of another optimizer.
wrap(DeepSpeedTrainer, "_build_optimizer", build_and_compare)


def _import_deepspeed(on_gpu: bool, cfg):
    """DeepSpeed, on the device that fairseq trains on, in the process group that fairseq has made, or in one of a single process.

    Raises:
        UnsupportedError: a precision that DeepSpeed does not have on this device.
    """
    if not on_gpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # The device that DeepSpeed takes. fairseq's own launch does not set it, so it may be left over from another job.
    os.environ["LOCAL_RANK"] = str(cfg.distributed_training.device_id)
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    accelerator = get_accelerator()
    for name, is_supported in (("fp16", accelerator.is_fp16_supported), ("bf16", accelerator.is_bf16_supported)):
        if getattr(cfg.common, name) and not is_supported():
            raise UnsupportedError(
                f"--{name}: DeepSpeed does not support it on this device ({accelerator.device_name()}); use "
                f"{'--bf16' if name == 'fp16' else '--fp16'}, or drop --deepspeed"
            )
    # An op for inference, compiled at first use, which ranks would race to do.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not torch.distributed.is_initialized():
        backend, store = accelerator.communication_backend_name(), torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    return deepspeed
