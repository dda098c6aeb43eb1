"""Runs of several ranks on CPUs, as real processes: who starts them, the same losses as one rank, resuming, and a rank that is killed."""

import json
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest
from fairseq.distributed import utils as distributed_utils
from omegaconf import OmegaConf

from ls_plugin.distributed import launch
from ls_plugin.errors import UsageError
from tests.limits import LIMIT_S, wait_until

TRAIN = "ls_plugin.cli.train"
TORCHRUN = ("torch.distributed.run", "--nproc_per_node", 2, "-m", TRAIN)


@pytest.fixture
def flags(commands, training_flags):
    """Our training: an epoch has 10 updates of two batches each. Of a flag that comes twice, the last counts."""
    return [commands.data, *training_flags["ours"], "--save-interval-updates", 3, "--no-epoch-checkpoints"]


AT_EXIT = r"""
import atexit, os, sys

def threads():
    names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
    names = sorted(name for name in names if "gloo" in name or name.startswith("pt_"))
    os.write(1, f"at exit: {names}\n".encode())  # in one piece, since the ranks share it

atexit.register(threads)
"""


@pytest.fixture
def shows_threads(tmp_path):
    """Flags with which each rank says, when Python begins to end, which threads of torch.distributed are left."""
    folder = tmp_path / "threads_at_exit"
    folder.mkdir()
    (folder / "__init__.py").write_text(AT_EXIT)
    return ["--user-dir", folder]


def _assert_close(losses: list[float], expected: list[float], tolerance: float) -> None:
    assert len(losses) == len(expected)
    assert losses == pytest.approx(expected, abs=tolerance)


def test_ranks_come_and_go(commands, flags, losses, tmp_path, shows_threads):
    """One rank with two batches an update, then two ranks with one each, then one again, are one run; all in the middle of an epoch.

    Neither of two ranks leaves a thread to Python's shutdown, which some would not survive.
    """
    alone = [*flags, "--update-freq", 2, "--max-update", 9]
    expected = losses(commands.run(TRAIN, *alone, "--save-dir", tmp_path / "one"))
    assert len(expected) == 9

    two = [*flags, "--distributed-world-size", 2, "--max-update", 6, "--save-dir", tmp_path / "two"]
    (tmp_path / "two").mkdir()  # as a save leaves it that was killed before it wrote checkpoint_last.pt
    shutil.copy(tmp_path / "one" / "checkpoint_1_3.pt", tmp_path / "two")
    log = commands.run(TRAIN, *two, *shows_threads)
    assert log.count(f"going on from {tmp_path}/two/checkpoint_1_3.pt (3 updates)") == 1
    assert log.count("at exit: []") == log.count("at exit:") == 3  # the process that started them, too
    _assert_close(losses(log), expected[3:6], 2e-3)  # and not twice: one rank logs
    assert (tmp_path / "two" / "checkpoint_1_6.pt").exists()

    log = commands.run(TRAIN, *alone, "--restore-file", tmp_path / "two" / "checkpoint_last.pt", "--no-save")
    _assert_close(losses(log), expected[6:], 2e-3)


def test_torchrun_in_bf16(commands, flags, losses, shows_threads):
    """Validation, too; legacy_ddp; the gradients are sent in 16 bits; no thread is left at the end."""
    common = [*flags, "--bf16", "--max-update", 8, "--no-save", "--validate-interval-updates", 4]
    common.remove("--disable-validation")
    alone = commands.start(TRAIN, *common, "--update-freq", 2)
    both = commands.run(*TORCHRUN, *common, "--ddp-backend", "legacy_ddp", "--ddp-comm-hook", "bf16", *shows_threads)
    assert both.count("at exit: []") == both.count("at exit:") == 2
    alone = commands.finish(alone)
    _assert_close(losses(both), losses(alone), 2e-2)
    valid = [
        [json.loads(line.split("| valid | ")[1])["valid_loss"] for line in log.splitlines() if "| valid | " in line]
        for log in (alone, both)
    ]
    assert len(valid[0]) >= 2
    _assert_close([float(loss) for loss in valid[1]], [float(loss) for loss in valid[0]], 2e-2)


@pytest.mark.slow
def test_layers_that_are_dropped(commands, training_flags, losses):
    """The losses of stock, whose legacy_ddp steps parameters without a gradient too; and stock's Adam under PyTorch's wrapper goes through."""
    common = ["--encoder-layerdrop", 0.5, "--max-update", 6, "--no-save", "--distributed-world-size", 2]
    stock = commands.start(TRAIN, commands.data, *training_flags["stock"], *common, "--ddp-backend", "legacy_ddp")
    expected = losses(commands.finish(stock))
    ours = [commands.data, *training_flags["ours"], *common]
    _assert_close(losses(commands.run(TRAIN, *ours, "--ddp-backend", "legacy_ddp")), expected, 2e-3)
    log = commands.run(TRAIN, *ours, "--optimizer", "adam", "--ddp-backend", "pytorch_ddp")
    assert "--find-unused-parameters is on" in log
    assert len(losses(log)) == 6


def _wait_for_training(process, log: Path) -> None:
    wait_until(lambda: "| train_inner |" in log.read_text(), process, log.read_text)


def _children(process) -> list[int]:
    listing = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return [pid for pid in map(int, listing.split()) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.fixture
def start_logged(commands):
    """Runs training in the background; the output goes to a file, which can be read in the meantime."""
    started = []

    def start(log: Path, *arguments):
        with log.open("w") as f:
            started.append(commands.start(TRAIN, *arguments, stdout=f))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_killed_rank_of_our_own_launch(start_logged, flags, tmp_path):
    log = tmp_path / "log"
    arguments = [*flags, "--max-update", 100_000, "--distributed-world-size", 2, "--no-save"]
    process = start_logged(log, *arguments)
    _wait_for_training(process, log)
    os.kill(_children(process)[1], signal.SIGKILL)
    assert process.wait(timeout=LIMIT_S) == 1
    assert "lightseq-train: error: rank 1 (process " in log.read_text()
    assert "was ended by SIGKILL" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_killed_rank_of_a_launch_by_hand(start_logged, flags, tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"tcp://localhost:{probe.getsockname()[1]}"
    by_hand = ["--distributed-world-size", 2, "--distributed-init-method", address, "--distributed-no-spawn"]
    arguments = [*flags, "--max-update", 100_000, *by_hand, "--no-save", "--distributed-rank"]
    logs = [tmp_path / "0", tmp_path / "1"]
    ranks = [start_logged(log, *arguments, rank) for rank, log in enumerate(logs)]
    _wait_for_training(ranks[0], logs[0])
    assert "| train_inner |" not in logs[1].read_text()
    ranks[1].kill()
    ranks[1].wait()
    assert ranks[0].wait(timeout=LIMIT_S) == 1
    assert "lightseq-train: error: rank 0 has lost the connection to another rank" in logs[0].read_text()
    assert "Traceback" not in logs[0].read_text()


# --- who starts what, without starting it


@pytest.fixture
def job(monkeypatch):
    """Calls ``call_main`` with a command line and an environment; what would run is noted: (how, configuration)."""

    def call(arguments: str, cuda: bool = False, **environment):
        for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setattr("sys.argv", ["lightseq-train", *arguments.split()])
        monkeypatch.setattr("torch.cuda.is_available", lambda: cuda)
        given = iter(arguments.split())
        training = {
            "distributed_world_size": 8 if cuda else 1,
            "distributed_num_procs": 8 if cuda else 1,
            "distributed_rank": 0,
            "distributed_backend": "nccl",
            "distributed_init_method": None,
            "distributed_port": -1,
            "device_id": 0,
            "distributed_no_spawn": False,
            "pipeline_model_parallel": False,
        }
        for flag in given:
            name = flag.removeprefix("--").replace("-", "_")
            training[name] = True if flag == "--distributed-no-spawn" else next(given)
            if str(training[name]).isdigit():
                training[name] = int(training[name])
        cfg = OmegaConf.create({"common": {"cpu": False, "tpu": False}, "distributed_training": training})
        calls = []
        monkeypatch.setattr(
            "torch.multiprocessing.spawn", lambda fn, args, nprocs: calls.append((f"spawn {nprocs}", args[1]))
        )
        launch._call_main(lambda cfg, main: calls.append(("stock", cfg)), cfg, None)
        ((how, cfg),) = calls
        return how, cfg.distributed_training

    return call


UNDER_TORCHRUN = {
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
    "WORLD_SIZE": "4",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "TORCHELASTIC_RUN_ID": "none",
}


def test_torchruns_variables_count(job):
    for cuda in (False, True):
        how, training = job("", cuda=cuda, **UNDER_TORCHRUN)
        assert (how, training.distributed_no_spawn) == ("stock", True)
        assert (training.distributed_init_method, training.distributed_world_size) == ("env://", 4)
        assert (training.distributed_rank, training.device_id) == (3, 1 if cuda else 0)
        assert training.distributed_backend == ("nccl" if cuda else "gloo")


@pytest.mark.parametrize(
    "contradiction",
    ["--distributed-world-size 1", "--distributed-rank 1", "--distributed-init-method tcp://localhost:1"],
)
def test_flags_that_contradict_torchrun(job, contradiction):
    with pytest.raises(UsageError, match=contradiction):
        job(contradiction, **UNDER_TORCHRUN)
    agreeing = {"--distributed-world-size": 4, "--distributed-rank": 3, "--distributed-init-method": "env://"}
    flag = contradiction.split()[0]
    assert job(f"{flag} {agreeing[flag]}", **UNDER_TORCHRUN)[0] == "stock"


def test_launch_on_cpus(job):
    assert job("")[0] == "stock"
    how, training = job("--distributed-world-size 3")
    assert (how, training.distributed_backend) == ("spawn 3", "gloo")
    assert training.distributed_init_method == f"tcp://localhost:{training.distributed_port}"
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        taken.listen()
        with pytest.raises(UsageError, match=f"--distributed-port {port}: cannot be used: .*in use"):
            job(f"--distributed-world-size 2 --distributed-port {port}")
    assert job(f"--distributed-world-size 2 --distributed-port {port}")[1].distributed_port == port
    with pytest.raises(UsageError, match="--distributed-port 99999: cannot be used"):
        job("--distributed-world-size 2 --distributed-port 99999")
    # One process a machine, as fairseq starts one a GPU.
    by_hand = "--distributed-world-size 2 --distributed-init-method tcp://elsewhere:1 --distributed-rank 1"
    assert job(by_hand)[0] == "spawn 1"
    assert job(f"{by_hand} --distributed-no-spawn")[0] == "stock"
    with pytest.raises(UsageError, match="--distributed-no-spawn: needs --distributed-init-method"):
        job("--distributed-world-size 2 --distributed-no-spawn")
    with pytest.raises(UsageError, match="--distributed-backend nccl"):
        job("--distributed-world-size 2 --distributed-backend nccl")
    with pytest.raises(UsageError, match="srun"):
        job("--distributed-world-size 2", SLURM_STEP_NUM_TASKS="2")


def test_stock_launch_on_gpus(job):
    how, training = job("", cuda=True)
    assert (how, training.distributed_world_size, training.distributed_backend) == ("stock", 8, "nccl")


def test_a_lost_peer_is_told_in_one_line(monkeypatch):
    def fail(message):
        def stock(i, main, cfg, kwargs):
            raise RuntimeError(message)

        return stock

    waits = []
    monkeypatch.setattr(launch.time, "sleep", waits.append)
    cfg = OmegaConf.create({"distributed_training": {"distributed_rank": 1}})
    for message in ("[pair.cc:547] Connection closed by peer [127.0.0.1]:1", "NCCL: remote process exited or so"):
        with pytest.raises(launch.RankError, match="rank 1 has lost the connection"):
            launch._distributed_main(fail(message), 0, None, cfg, {})
    with pytest.raises(RuntimeError, match=r"^another$"):
        launch._distributed_main(fail("another"), 0, None, cfg, {})
    assert waits == [launch._GRACE_S] * 2  # the rank that is the cause ends first
    assert distributed_utils.distributed_main._ls_wrapper is launch._distributed_main
