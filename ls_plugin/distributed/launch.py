"""Who starts the processes of a run: torchrun, this process itself, or the user by hand.

:func:`install` wraps ``fairseq.distributed.utils.call_main``, through which fairseq's commands go. On GPUs fairseq's own launch stays; new are
torchrun's variables, which count whatever ``--distributed-world-size`` is by default, and CPUs: gloo takes nccl's place, and as many
processes start as ``--distributed-world-size`` says.
"""

import atexit
import gc
import logging
import os
import socket
import sys
import time

import torch
import torch.distributed as dist
from fairseq.distributed import utils as distributed_utils
from torch.multiprocessing import ProcessExitedException

from ls_plugin.errors import RankError, UsageError
from ls_plugin.rebinding import wrap

logger = logging.getLogger(__name__)

_LAUNCH_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
# What gloo and NCCL raise where the process at the other end is gone.
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "Connection was likely closed",
)
# A rank that fails closes its connections while it exits. A rank that loses them lets that one end first, so that the parent process sees the cause.
_GRACE_S = 5.0
_RESUME = "checkpoints that were written are whole; start the same command again to resume from the last one"


def install() -> None:
    wrap(distributed_utils, "call_main", _call_main)
    wrap(distributed_utils, "distributed_main", _distributed_main)


def on_cpu(cfg) -> bool:
    """Whether a run with this configuration is on the CPU, as fairseq's trainer decides it."""
    return cfg.common.cpu or not torch.cuda.is_available()


def _call_main(stock, cfg, main, **kwargs):
    """Starts ``main`` in every process of the run.

    Raises:
        UsageError: flags that contradict each other, or torchrun's variables.
        RankError: a process was ended by a signal.
    """
    job = cfg.distributed_training
    if cfg.common.tpu or job.pipeline_model_parallel:
        return stock(cfg, main, **kwargs)
    launched = all(name in os.environ for name in _LAUNCH_VARIABLES)
    by_hand = job.distributed_init_method not in (None, "env://") and "TORCHELASTIC_RUN_ID" not in os.environ
    if launched and not by_hand:
        _take_launch_variables(job)
    n_procs = _prepare_cpu(job) if on_cpu(cfg) else 0
    start_rank = job.distributed_rank
    try:
        if n_procs == 0:
            return stock(cfg, main, **kwargs)
        job.distributed_rank = None  # each process gets its own
        # Left alone, each would start a thread on every core.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // n_procs)))
        torch.multiprocessing.spawn(_worker, (main, cfg, {**kwargs, "start_rank": start_rank}), nprocs=n_procs)
    except ProcessExitedException as error:
        if error.exit_code >= 0:  # it has said why itself
            raise
        raise RankError(
            f"rank {start_rank + error.error_index} (process {error.error_pid}) was ended by {error.signal_name}, so the other ranks were "
            f"stopped (SIGKILL often means that the machine ran out of memory); {_RESUME}"
        ) from error


def _worker(i: int, main, cfg, kwargs: dict) -> None:
    """What a spawned process runs; unpickling it imports the plugin there."""
    try:
        distributed_utils.distributed_main(i, main, cfg, kwargs)
    except RankError as error:  # the parent tells of the rank that is gone
        print(error, file=sys.stderr, flush=True)
        os._exit(1)
    except Exception:
        # torch hands the error to the parent; then the process ends at once, since the groups and their threads are still there.
        atexit.register(os._exit, 1)
        raise


def _distributed_main(stock, i: int, main, cfg, kwargs: dict) -> None:
    """Ends the process groups with the run. Raises RankError where a collective fails because another rank is gone."""
    # Imported later, its functions would keep the group of all ranks as a default.
    import torch.distributed.nn.functional  # noqa: F401

    begins = not dist.is_initialized()
    try:
        stock(i, main, cfg, kwargs)
        if begins and dist.is_initialized():
            _end_groups()
    except RuntimeError as error:
        if isinstance(error, RankError) or not any(cause in str(error) for cause in _LOST_PEER):
            raise
        rank = dist.get_rank() if dist.is_initialized() else cfg.distributed_training.distributed_rank
        time.sleep(_GRACE_S)
        raise RankError(
            f"rank {rank} has lost the connection to another rank, which was ended or failed; see what that one says. {_RESUME}"
        ) from error


def _end_groups() -> None:
    """Destroys the process groups that fairseq has made, and so ends their threads.

    fairseq leaves them to Python's shutdown. A thread of gloo that then drops the last tensor of a collective waits for Python's lock, and is ended for
    that in the middle of C++: "terminate called without an active exception", status 134. A group of gloo ends its threads when it is
    deleted, so its owner must let go first.
    """
    vars(distributed_utils.get_global_group).pop("_global_group", None)
    gc.collect()  # the trainer of the run has them, in cycles
    dist.destroy_process_group()


def _take_launch_variables(job) -> None:
    """Makes the configuration that of the process that torchrun, or another launcher with its variables, has started."""
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    for flag, given, expected in (
        ("--distributed-world-size", job.distributed_world_size, world_size),
        ("--distributed-rank", job.distributed_rank, rank),
        ("--distributed-init-method", job.distributed_init_method, "env://"),
    ):
        if given != expected and _is_given(flag):
            raise UsageError(
                f"{flag} {given}: contradicts the variables of torchrun, which started this process as rank {rank} of {world_size}; drop the "
                "flag, since torchrun's --nproc_per_node and --nnodes decide, or start the command without torchrun"
            )
    job.distributed_init_method = "env://"
    job.distributed_world_size = world_size
    job.distributed_rank = rank
    job.device_id = int(os.environ.get("LOCAL_RANK", 0))
    job.distributed_no_spawn = True


def _prepare_cpu(job) -> int:
    """Completes the configuration of a run on CPUs; returns the number of processes that are to be spawned, 0 for none."""
    if job.distributed_backend == "nccl":
        if _is_given("--distributed-backend"):
            raise UsageError("--distributed-backend nccl: needs GPUs; give gloo, or drop the flag, for a run on CPUs")
        job.distributed_backend = "gloo"
    job.device_id = 0
    if job.distributed_init_method is not None:
        # As many as one machine has GPUs, so 1 on a machine without; each command starts its share.
        return 0 if job.distributed_no_spawn else min(job.distributed_num_procs, job.distributed_world_size)
    if not _is_given("--distributed-world-size"):
        job.distributed_world_size = 1  # the default is the number of GPUs, even with --cpu
    if job.distributed_world_size == 1:
        return 0
    if job.distributed_no_spawn:
        raise UsageError(
            f"--distributed-no-spawn: needs --distributed-init-method tcp://host:port and --distributed-rank to find the other ranks of "
            f"--distributed-world-size {job.distributed_world_size}; give both, or drop the flag"
        )
    if int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        raise UsageError(
            "--distributed-world-size: srun's tasks on CPUs do not find each other; have srun start one torchrun on each machine, as in "
            "srun --ntasks-per-node 1 torchrun --nnodes $SLURM_NNODES --nproc_per_node N --rdzv_backend c10d --rdzv_endpoint HOST:PORT"
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
        try:
            probe.bind(("", max(0, job.distributed_port)))
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"--distributed-port {job.distributed_port}: cannot be used: {error}; give another, or drop the flag for a free one"
            ) from error
        job.distributed_port = probe.getsockname()[1]
    job.distributed_init_method = f"tcp://localhost:{job.distributed_port}"
    return job.distributed_world_size


def _is_given(flag: str) -> bool:
    """Whether the command line gives a flag, which the parser also takes shortened, or hydra's override of the same name."""
    field = flag.removeprefix("--").replace("-", "_")
    names = [argument.partition("=")[0] for argument in sys.argv[1:]]
    return any(
        name == f"distributed_training.{field}" or (len(name) > len("--distributed-") and flag.startswith(name))
        for name in names
    )
