"""fairseq-train or lightseq-train, with a stop-watch: the same one for both.

    python ls_plugin/report/timed_train.py RECORD {stock,ls} [--deadline T] [--stock-with NAMES] [--split-every N] [--count-at N] -- ARGUMENTS OF fairseq-train

Runs the real command in this process and appends one JSON line to RECORD for its start, each update, each validation and
its end (``records.py`` reads them). At the deadline (Unix time) or on SIGTERM the run ends after the update in hand, with a
checkpoint, as at --max-update.

What the phases hold, by fairseq's Trainer: forward = the criterion with the model, backward = optimizer.backward, sync = all_reduce_grads
and what the backward waits for other processes once this one has its gradients, clip = clip_grad_norm, update = zero_grad + multiply_grads +
optimizer step, rest = everything else until the next update ends (data, seeding, logging). An optimizer that defers work pays for it in the
phase that does it. A validation is in none of them.

Only every fourth update is split into phases, unless --split-every says otherwise. On a GPU a phase can be timed only by waiting for the device at its end, which takes
away the overlap of host and device; so the other updates wait once, when they end, and the speed is taken from those alone.

--stock-with adds to stock what PyTorch offers today, e.g. medium+fused_adam (``BASELINES``): the best that stock can be made to do. Stock by
itself trains without apex, which fairseq would use where it is installed; --stock-with apex lets it.

--count-at N counts the kernels that update N launches, and records no times of it.

Under torchrun rank 0 keeps the record. fairseq's own reading of torchrun's variables needs GPUs; on a CPU both kinds get the same by flags.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import math
import os
import resource
import runpy
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path

STARTED = time.perf_counter()
PHASES_EVERY = 4  # updates


class Stopwatch:
    """Times the phases of each update by wrapping methods of fairseq's Trainer, task and optimizer."""

    def __init__(
        self, record_path: str, kind: str, deadline: float | None, split_every: int = PHASES_EVERY, count_at: int = 0
    ):
        self.record = open(record_path, "a", encoding="utf-8")  # noqa: SIM115 (open as long as the process lives)
        self.kind = kind
        self.deadline = deadline or math.inf
        self.split_every = split_every
        self.count_at = count_at
        self.hides_kernels = False  # compiled for a CPU, an update does not show what it is made of
        self.stopping = False
        self.splitting = False  # whether the update in hand is split into phases
        self.phase_s: dict[str, float] = defaultdict(float)
        self.logged: list[dict] = []  # the criterion's logging outputs of the update in hand
        self.gpu_peak_bytes = 0
        self.first_s: float | None = None  # when the first update began
        self.last_s = 0.0  # when the last update ended

    def write(self, **entry) -> None:
        self.record.write(json.dumps(entry) + "\n")
        self.record.flush()

    def now(self) -> float:
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(self, phase: str, function):
        """The function, its time added to the phase in the updates that are split."""

        def wrapper(*args, **kwargs):
            if not self.splitting:
                return function(*args, **kwargs)
            start = self.now()
            try:
                return function(*args, **kwargs)
            finally:
                self.phase_s[phase] += self.now() - start

        return wrapper

    def install(self) -> None:
        """Wraps the classes; the optimizer is wrapped when the trainer has built it (again after a checkpoint is loaded)."""
        import fairseq_cli.train
        from fairseq.tasks.fairseq_task import FairseqTask
        from fairseq.trainer import Trainer

        build_optimizer, train_step = Trainer._build_optimizer, Trainer.train_step
        task_step, validate = FairseqTask.train_step, fairseq_cli.train.validate

        def build_and_wrap(trainer):
            build_optimizer(trainer)
            optimizer = trainer._optimizer
            optimizer.backward = self.timed("backward", self.waiting_apart(optimizer.backward))
            optimizer.all_reduce_grads = self.timed("sync", optimizer.all_reduce_grads)
            for name in ("zero_grad", "multiply_grads"):
                setattr(optimizer, name, self.timed("update", getattr(optimizer, name)))

        def task_step_logged(task, *args, **kwargs):
            result = task_step(task, *args, **kwargs)
            self.logged.append(result[2])
            return result

        def optimizer_step(task, optimizer, model, update_num):
            import torch

            optimizer.step()
            if torch.cuda.is_initialized():  # fairseq resets the peak right after
                self.gpu_peak_bytes = max(self.gpu_peak_bytes, torch.cuda.max_memory_allocated())

        def validate_logged(cfg, trainer, *args, **kwargs):
            began = self.now()
            losses = validate(cfg, trainer, *args, **kwargs)
            self.last_s += self.now() - began  # no time of the next update
            self.write(update=trainer.get_num_updates(), valid_loss=losses[0])
            return losses

        def train_step_recorded(trainer, samples, *args, **kwargs):
            if self.first_s is None:
                self.first_s = self.last_s = self.now()
                self.write_start(trainer.model)
            update = trainer.get_num_updates() + 1
            if update == self.count_at:
                return self.count(functools.partial(train_step, trainer, samples, *args, **kwargs))
            self.splitting = update % self.split_every == 0
            self.phase_s.clear()
            self.logged.clear()
            batches = [batch_shape(sample) for sample in samples if sample]
            result = train_step(trainer, samples, *args, **kwargs)
            self.write_update(trainer.get_num_updates(), batches)
            if self.stopping or time.time() > self.deadline:
                # The Trainer's own way to end early, with its checkpoint.
                trainer.cfg.optimization.stop_time_hours = sys.float_info.min
                trainer.cfg.dataset.disable_validation |= self.stopping
            return result

        Trainer._build_optimizer = build_and_wrap
        Trainer.train_step = train_step_recorded
        Trainer.clip_grad_norm = self.timed("clip", Trainer.clip_grad_norm)
        FairseqTask.train_step = self.timed("forward", task_step_logged)
        FairseqTask.optimizer_step = self.timed("update", optimizer_step)
        fairseq_cli.train.validate = validate_logged

    def waiting_apart(self, backward):
        """optimizer.backward; in the updates that are split, what it waits for other processes is no time of its own but sync's."""
        import torch
        from torch.autograd import Variable

        def wrapper(loss, *args, **kwargs):
            if not (self.splitting and torch.distributed.is_initialized()):
                return backward(loss, *args, **kwargs)
            done: list[float] = []

            def note() -> None:
                # Not the whole device: NCCL's streams are what is waited for.
                if torch.cuda.is_initialized():
                    torch.cuda.current_stream().synchronize()
                done.append(time.perf_counter())

            # Callbacks run when all gradients are there, in the order in which they were asked for: PyTorch's wrapper, which waits in its own,
            # asks later.
            loss.register_hook(lambda grad: Variable._execution_engine.queue_callback(note))
            result = backward(loss, *args, **kwargs)
            self.phase_s["waited"] += self.now() - done[-1]
            return result

        return wrapper

    def count(self, train_step):
        """Runs an update and records how many kernels it launches."""
        self.splitting = False
        if self.hides_kernels:
            self.write(kernels=None)
            return train_step()
        spec = importlib.util.spec_from_file_location("dispatched", Path(__file__).with_name("dispatched.py"))
        dispatched = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(dispatched)
        results = []
        self.write(kernels=dispatched.count_kernels(lambda: results.append(train_step())))
        return results[0]

    def write_start(self, model) -> None:
        import torch

        self.write(
            start=self.kind,
            startup_s=round(time.perf_counter() - STARTED, 3),
            threads=torch.get_num_threads(),
            device=torch.cuda.get_device_name() if torch.cuda.is_initialized() else "CPU",
            n_params=sum(p.numel() for p in model.parameters()),
        )

    def write_update(self, update: int, batches: list[dict]) -> None:
        """The line of one finished update. Losses are in bits per target token, as fairseq logs them."""
        sample_size, tokens, loss, nll = (
            float(sum(float(output.get(key, output["loss"])) for output in self.logged))
            for key in ("sample_size", "ntokens", "loss", "nll_loss")  # cross_entropy's loss is all it has
        )
        now = self.now()
        step_s = now - self.last_s
        self.last_s = now
        self.write(
            update=update,
            time_s=round(now - self.first_s, 4),
            step_ms=round(step_s * 1e3, 3),
            phase_ms=self.phase_ms(step_s) if self.splitting else None,
            tokens=int(tokens),
            batches=batches,
            loss=loss / sample_size / math.log(2),
            nll_loss=nll / tokens / math.log(2),
            peak_rss_mib=round(peak_rss_kib() / 1024, 1),
            peak_gpu_mib=round(self.gpu_peak_bytes / 2**20, 1),
        )

    def phase_ms(self, step_s: float) -> dict[str, float]:
        """The phases of an update that took ``step_s``; they add up to it."""
        phases_s = {name: self.phase_s[name] for name in ("forward", "backward", "sync", "clip", "update")}
        phases_s["forward"] -= phases_s["backward"]  # the task's step holds both
        phases_s["backward"] -= self.phase_s["waited"]
        phases_s["sync"] += self.phase_s["waited"]
        phases_s["rest"] = step_s - sum(phases_s.values())
        return {name: round(seconds * 1e3, 3) for name, seconds in phases_s.items()}

    def stop(self, *_signal) -> None:
        self.stopping = True


def peak_rss_kib() -> int:
    """Of this process. Linux's ru_maxrss would hold that of the process that started this one, where it is larger."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def batch_shape(sample: dict) -> dict:
    """Sizes of a batch with its padding, (sentences, length) of each side, and its target tokens without."""
    inputs = sample["net_input"]
    decoder_input = inputs.get("prev_output_tokens", inputs["src_tokens"])  # a language model has one side
    source = {"source": list(inputs["src_tokens"].shape)} if "prev_output_tokens" in inputs else {}
    return {**source, "target": list(decoder_input.shape), "tokens": int(sample["ntokens"])}


# ---- What stock can be made to do by PyTorch alone ----


def medium() -> None:
    """fp32 products through bf16 ones where the processor has them."""
    import torch

    torch.set_float32_matmul_precision("medium")


def fused_adam() -> None:
    """torch's fused AdamW instead of fairseq's Adam, whose formula differs in where eps is added."""
    import torch
    from fairseq.optim import adam

    adam.Adam = functools.partial(torch.optim.AdamW, fused=True)


def compiled() -> None:
    """torch.compile of each layer and of the loss, for all shapes of batches. Layers alike share one compilation, so that it takes a minute;
    of a whole model it grows with the layers."""
    import torch
    from fairseq.criterions.cross_entropy import CrossEntropyCriterion
    from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
    from fairseq.tasks.fairseq_task import FairseqTask

    build_model = FairseqTask.build_model

    def build_and_compile(task, *args, **kwargs):
        model = build_model(task, *args, **kwargs)
        for side in (getattr(model, "encoder", None), model.decoder):
            for layer in side.layers if side is not None else ():
                layer.compile(dynamic=True)
        for module in model.modules():
            if hasattr(module, "_incremental_state_id"):  # read in training, though of use in decoding alone
                module._incremental_state_id = (
                    "any"  # its own id in each layer would make each a compilation of its own
                )
        return model

    FairseqTask.build_model = build_and_compile
    for criterion in (CrossEntropyCriterion, LabelSmoothedCrossEntropyCriterion):
        criterion.compute_loss = torch.compile(criterion.compute_loss, dynamic=True)


def apex() -> None:
    """Nothing to be done: fairseq takes apex's fused Adam and layer norm by itself where it can import them, and :func:`main` has let it.

    Raises:
        ImportError: it cannot.
    """
    from apex.normalization import FusedLayerNorm  # noqa: F401
    from apex.optimizers import FusedAdam  # noqa: F401


def keep_last_batches() -> None:
    """Gives stock the last batch of an epoch, which it drops and the plugin keeps: contenders are compared on the same batches."""
    from fairseq.data import data_utils

    batching = runpy.run_path(str(Path(__file__).resolve().parents[1] / "batching.py"))
    data_utils.batch_by_size = functools.partial(batching["batch_by_size"], data_utils.batch_by_size)


def keep_off_tpu() -> None:
    """Lets stock train in bf16: its parser takes ``--bf16`` for a TPU, and without torch_xla the trainer ends at once."""
    from fairseq import options

    parse = options.parse_args_and_arch

    def parse_args_and_arch(*args, **kwargs):
        parsed = parse(*args, **kwargs)
        (parsed[0] if isinstance(parsed, tuple) else parsed).tpu = False
        return parsed

    options.parse_args_and_arch = parse_args_and_arch


BASELINES = {"medium": medium, "fused_adam": fused_adam, "compile": compiled, "apex": apex}


def device_type() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() and "--cpu" not in sys.argv else "cpu"


def join_launch() -> list[str]:
    """The flags by which fairseq takes part, on a CPU, in what torchrun has started; none without torchrun, or with GPUs, where it finds out itself."""
    if "TORCHELASTIC_RUN_ID" not in os.environ or device_type() == "cuda":
        return []
    size, rank = os.environ["WORLD_SIZE"], os.environ["RANK"]
    flags = ["--distributed-init-method", "env://", "--distributed-world-size", size, "--distributed-rank", rank]
    return [*flags, "--distributed-no-spawn", "--distributed-backend", "gloo"]


def main() -> None:
    # By its path it is run so that stock trains without the plugin, which corrects faults of fairseq. Python has put this folder first on the path.
    del sys.path[0]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record")
    parser.add_argument("kind", choices=("stock", "ls"))
    parser.add_argument("--deadline", type=float)
    parser.add_argument("--stock-with", default="", help=f"names joined by +, of {', '.join(BASELINES)}")
    parser.add_argument("--split-every", type=int, default=PHASES_EVERY, help="updates (default %(default)s)")
    parser.add_argument("--count-at", type=int, default=0, metavar="N", help="the update whose kernels are counted")
    split = sys.argv.index("--")
    args = parser.parse_args(sys.argv[1:split])
    baselines = [name for name in args.stock_with.split("+") if name]
    if baselines and (args.kind != "stock" or not set(baselines) <= set(BASELINES)):
        parser.error(f"--stock-with adds {', '.join(BASELINES)} to stock, got {args.stock_with} for {args.kind}")

    if args.kind == "stock" and "apex" not in baselines:
        sys.modules["apex"] = None  # its import fails, as where there is none
    record = args.record if os.environ.get("RANK", "0") == "0" else os.devnull
    stopwatch = Stopwatch(record, args.kind, args.deadline, args.split_every, args.count_at)
    signal.signal(signal.SIGTERM, stopwatch.stop)
    sys.argv = ["lightseq-train" if args.kind == "ls" else "fairseq-train", *sys.argv[split + 1 :]]
    sys.argv += join_launch()
    if args.kind == "ls":
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the ls_plugin that this file belongs to
        from ls_plugin.cli.train import main as train
    else:
        from fairseq_cli.train import cli_main as train

        keep_last_batches()
        keep_off_tpu()
    stopwatch.install()
    for name in baselines:
        BASELINES[name]()
    stopwatch.hides_kernels = "compile" in baselines and device_type() == "cpu"
    try:
        train()
    except SystemExit as exit_:  # lightseq-train always ends so
        if exit_.code:
            raise
    stopwatch.write(end=args.kind, interrupted=stopwatch.stopping)


if __name__ == "__main__":
    main()
