"""Checkpoints: what loads, what is refused and how, and what a killed, interrupted or failed save leaves behind."""

import collections
import io
import os
import resource
import signal
import subprocess
import sys
import time
from argparse import Namespace
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import CheckpointConfig
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import meters
from fairseq.trainer import Trainer
from omegaconf import OmegaConf

from ls_plugin import checkpoint
from ls_plugin.errors import CheckpointError, UsageError
from tests.limits import LIMIT_S


def make_state(value=1.0, n_elem=5000):
    """What fairseq's trainer saves, in small."""
    return {
        "args": None,
        "cfg": {
            "model": Namespace(_name="ls_transformer", arch="ls_transformer", encoder_layers=2),
            "criterion": {"_name": "ls_label_smoothed_cross_entropy", "label_smoothing": 0.1},
            "optimizer": {"_name": "ls_adam", "adam_eps": 1e-8},
            "task": {"_name": "translation"},
        },
        "model": {"weight": torch.full((n_elem,), value), "bias": torch.zeros(3)},
        "optimizer_history": [
            {
                "optimizer_name": "FairseqAdam",
                "criterion_name": "X",
                "lr_scheduler_state": {"best": None},
                "num_updates": 3,
            }
        ],
        "extra_state": {"train_iterator": {"epoch": 1}, "val_loss": np.float64(2.5), "metrics": {}},
    }


N_WEIGHT_BYTES = 4 * 5000  # written at once; nothing else in such a file is as large


def save(path, state=None):
    checkpoint_utils.torch_persistent_save(make_state() if state is None else state, str(path))
    return path


def load(path):
    return checkpoint_utils.load_checkpoint_to_cpu(str(path))


# --- loading


def test_what_fairseq_stores_loads_with_the_protection_on(tmp_path):
    state = make_state()
    state["extra_state"]["scores"] = [np.arange(4), np.float32(1.5), np.int64(3), np.array(["a", "b"]), np.bool_(True)]
    meter = meters.AverageMeter()
    meter.update(2.0)
    state["extra_state"]["meters"] = [meter, meters.TimeMeter(), meters.StopwatchMeter()]
    loaded = load(save(tmp_path / "c.pt", state))
    assert loaded["extra_state"]["val_loss"] == 2.5
    assert loaded["extra_state"]["meters"][0].avg == 2.0
    assert (loaded["extra_state"]["scores"][0] == np.arange(4)).all()


def test_configurations_of_fairseq_0_10_load(tmp_path):
    state = make_state()
    tree = {
        "model": {"_name": "transformer", "layers": [1, 2], "rate": 0.5, "flag": True, "nothing": None},
        "task": {"_name": "x"},
    }
    state["cfg"] = OmegaConf.create(tree)
    torch.save(state, tmp_path / "c.pt")
    assert load(tmp_path / "c.pt")["cfg"].model.layers == [1, 2]


def test_a_checkpoint_travels_between_ranks(tmp_path):
    """Rank 0 reads it, and sends it with placeholders for the tensors, which follow one by one."""
    tensors: list = []
    for message in (
        distributed_utils._split_tensors_from_obj(load(save(tmp_path / "c.pt")), tensors),
        [{"dtype": t.dtype} for t in tensors],
    ):
        buffer = io.BytesIO()
        torch.save(message, buffer)
        buffer.seek(0)
        received = torch.load(buffer)
    assert received[0]["dtype"] == torch.float32


class Foreign:
    pass


def write_foreign(path):
    torch.save(make_state() | {"x": Foreign()}, path)


def write_truncated(path):
    save(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def write_bit_flip(path):
    save(path)
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1  # in the middle of the weights
    path.write_bytes(contents)


def write_dangling(path):
    path.symlink_to(path.parent / "nowhere.pt")


BAD_FILES = {
    "foreign class": (write_foreign, r"got \S*test_checkpoint\.Foreign; .*refused.*add_safe_globals"),
    "truncated": (write_truncated, r"got [\d,]+ bytes that do not load.*Take an earlier checkpoint"),
    "bit flip": (write_bit_flip, r"record \S+ differs from its checksum"),
    "garbage": (lambda path: path.write_bytes(bytes(range(256)) * 20), r"got 5,120 bytes that do not load"),
    "text": (lambda path: path.write_text("hello\n"), r"got 6 bytes that do not load"),
    "empty": (lambda path: path.touch(), r"empty file \(0 bytes\)"),
    "directory": (lambda path: path.mkdir(), "got a directory"),
    "dangling link": (write_dangling, r"does not exist \(a dangling link\)"),
    "missing": (lambda path: None, "does not exist"),
    "another program's": (lambda path: torch.save({"weights": 1}, path), "whole fairseq checkpoint"),
}


@pytest.mark.parametrize("write, message", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_file_is_named_with_its_fault(tmp_path, write, message):
    path = tmp_path / "checkpoint_last.pt"
    write(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert "weights_only" not in str(caught.value)


def fake_trainer():
    return SimpleNamespace(checkpoint_suffix="", data_parallel_rank=0)


def checkpoint_config(save_dir, restore_file="checkpoint_last.pt", finetune_from_model=None, **flags):
    """What is read before fairseq's own function takes over."""
    return SimpleNamespace(
        save_dir=str(save_dir), restore_file=str(restore_file), finetune_from_model=finetune_from_model, **flags
    )


@pytest.mark.parametrize("write", [BAD_FILES[name][0] for name in ("empty", "directory", "dangling link")])
def test_resuming_never_starts_from_scratch_beside_an_unreadable_checkpoint(tmp_path, write):
    write(tmp_path / "checkpoint_last.pt")
    with pytest.raises(CheckpointError, match="to start from scratch, move it away"):
        checkpoint_utils.load_checkpoint(checkpoint_config(tmp_path), fake_trainer())


def test_a_file_that_some_ranks_do_not_see_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.distributed_utils, "get_data_parallel_world_size", lambda: 2)
    monkeypatch.setattr(checkpoint.distributed_utils, "all_gather_list", lambda found: [True, found])
    with pytest.raises(CheckpointError, match=r"must be seen by every rank, but is not by \[1\] \(of 2\)"):
        checkpoint._check_all_ranks_find(str(tmp_path / "missing.pt"), "checkpoints")
    (tmp_path / "there.pt").touch()
    checkpoint._check_all_ranks_find(str(tmp_path / "there.pt"), "checkpoints")


@pytest.mark.parametrize("flag", ["restore_file", "continue_once"])
def test_a_missing_file_to_resume_starts_from_scratch_with_a_warning(tmp_path, caplog, flag):
    """As in fairseq, which says no more than "No existing checkpoint found"."""
    cfg = checkpoint_config(tmp_path, **{flag: str(tmp_path / "other.pt")})
    with pytest.raises(AttributeError):  # the fake configuration ends it, after the check
        checkpoint_utils.load_checkpoint(cfg, fake_trainer())
    flag = f"--{flag.replace('_', '-')}"
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"{flag} {tmp_path}/other.pt: no such file; training starts from scratch"
    ]


def test_a_missing_file_to_fine_tune_is_refused_unless_there_is_one_to_resume(tmp_path):
    """In fairseq as well, by a ValueError."""
    cfg = checkpoint_config(tmp_path, finetune_from_model=str(tmp_path / "no.pt"))
    with pytest.raises(
        CheckpointError, match=r"no\.pt: must be a file, but does not exist.*drop --finetune-from-model"
    ):
        checkpoint_utils.load_checkpoint(cfg, fake_trainer())
    save(tmp_path / "checkpoint_last.pt")
    with pytest.raises(AttributeError):  # the fake configuration ends it, after the check
        checkpoint_utils.load_checkpoint(cfg, fake_trainer())


def test_flags_that_contradict_finetuning_are_refused(tmp_path):
    finetune = {"finetune_from_model": str(save(tmp_path / "c.pt"))}
    for options, message in (
        (
            {"reset_meters": True, "reset_dataloader": True},
            r"set together with --reset-meters, --reset-dataloader; drop",
        ),
        ({"restore_file": "other.pt"}, r"set together with --restore-file other\.pt; drop"),
    ):
        with pytest.raises(UsageError, match=rf"--finetune-from-model: cannot be {message}"):
            checkpoint_utils.load_checkpoint(checkpoint_config(tmp_path, **finetune, **options), fake_trainer())


@pytest.mark.parametrize(
    "entries, got",
    [((), "a bare state dict of 2 tensors"), (("model",), "'model' alone"), (("cfg", "model"), "'cfg', 'model' alone")],
    ids=["bare", "model", "cfg and model"],
)
def test_weights_alone_are_recognised(tmp_path, entries, got):
    state = make_state()
    torch.save({name: state[name] for name in entries} or state["model"], tmp_path / "w.pt")
    readers = (
        [load, checkpoint.load_raw] if not entries else [load]
    )  # an average needs the weights alone, under "model"
    for read in readers:
        with pytest.raises(CheckpointError, match=rf"w\.pt: must hold 'model', .*, got {got}; .*--finetune-from-model"):
            read(str(tmp_path / "w.pt"))


@pytest.mark.parametrize("is_bare", [True, False])
def test_a_run_may_begin_with_weights_alone(make_trainer, tmp_path, is_bare):
    weights = {name: x.detach().clone() for name, x in make_trainer("ours").model.state_dict().items()}
    weights["decoder.layers.0.fc1.bias"] += 1
    torch.save(weights if is_bare else {"model": weights}, tmp_path / "w.pt")
    trainer = make_trainer("ours", "--finetune-from-model", tmp_path / "w.pt")
    _, epoch_itr = checkpoint_utils.load_checkpoint(trainer.cfg.checkpoint, trainer)
    assert (epoch_itr.next_epoch_idx, trainer.get_num_updates()) == (1, 0)
    assert trainer.train_step([next(epoch_itr.next_epoch_itr())]) is not None
    checkpoint_utils.save_checkpoint(trainer.cfg.checkpoint, trainer, epoch_itr, None)
    again = make_trainer("ours", "--finetune-from-model", tmp_path / "w.pt")
    checkpoint_utils.load_checkpoint(again.cfg.checkpoint, again)
    assert again.get_num_updates() == 1
    bias = again.model.state_dict()["decoder.layers.0.fc1.bias"]
    torch.testing.assert_close(bias, weights["decoder.layers.0.fc1.bias"], rtol=0, atol=0.1)


def test_ema_seed_from_a_bad_file(tmp_path):
    write_truncated(tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match="do not load"):
        checkpoint_utils.load_ema_from_checkpoint(str(tmp_path / "c.pt"))


# --- saving


def test_names_are_stock_on_disk_and_ours_after_loading(tmp_path):
    state = make_state()
    path = save(tmp_path / "c.pt", state)
    assert state["cfg"]["model"].arch == "ls_transformer"  # what the trainer holds is untouched
    on_disk = torch.load(path)["cfg"]
    assert (on_disk["model"].arch, on_disk["model"]._name) == ("transformer", "transformer")
    assert on_disk["criterion"] == {"_name": "label_smoothed_cross_entropy", "label_smoothing": 0.1}
    assert on_disk["optimizer"]["_name"] == "adam"
    cfg = load(path)["cfg"]
    assert (cfg.model.arch, cfg.criterion._name, cfg.optimizer._name) == (
        "ls_transformer",
        "ls_label_smoothed_cross_entropy",
        "ls_adam",
    )


def test_stock_checkpoints_keep_their_names(tmp_path):
    state = make_state()
    state["cfg"]["model"] = Namespace(_name="transformer", arch="transformer")
    state["cfg"]["criterion"]["_name"] = "cross_entropy"
    state["cfg"]["optimizer"]["_name"] = "adam"
    assert "ls_plugin" not in torch.load(save(tmp_path / "c.pt", state))
    assert load(tmp_path / "c.pt")["cfg"].model.arch == "transformer"


def test_a_trainer_that_is_not_ours_saves_and_loads(tmp_path):
    """fairseq's own tests pass a mock."""
    trainer = MagicMock(spec=Trainer)
    trainer.checkpoint_suffix, trainer.data_parallel_rank = "", 0
    trainer.get_num_updates.return_value = 3
    trainer.load_checkpoint.return_value = None
    trainer.task = SimpleNamespace()
    trainer.save_checkpoint.side_effect = lambda path, extra: save(path, make_state())
    cfg = CheckpointConfig(save_dir=str(tmp_path))
    vars(checkpoint_utils.save_checkpoint).pop("best", None)  # of other runs in this process
    checkpoint_utils.save_checkpoint(cfg, trainer, MagicMock(epoch=1), 2.5)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint1.pt",
        "checkpoint_best.pt",
        "checkpoint_last.pt",
    ]
    checkpoint_utils.load_checkpoint(cfg, trainer)
    assert trainer.load_checkpoint.call_args.args[0] == str(tmp_path / "checkpoint_last.pt")
    checkpoint_utils.load_checkpoint(cfg, MagicMock())  # beside files that a name of its suffix may not match


def test_views_of_a_buffer_are_stored_without_it_and_ties_are_kept(tmp_path):
    buffer = torch.arange(100_000.0)
    state = make_state()
    state["model"] = {"a": buffer[:10].view(2, 5), "tied": buffer[:10].view(2, 5), "b": buffer[10:12]}
    path = save(tmp_path / "c.pt", state)
    assert path.stat().st_size < 10_000
    weights = torch.load(path)["model"]
    assert weights["a"].data_ptr() == weights["tied"].data_ptr()
    assert torch.equal(weights["b"], buffer[10:12])


def test_mappings_keep_their_kind(tmp_path):
    """Whatever a task or an lr scheduler keeps in its state."""
    factory = collections.defaultdict(list, seen=[torch.ones(2)])
    ordered = collections.OrderedDict(b=1, a=torch.zeros(1))
    state = make_state() | {"task_state": {"counter": collections.Counter(a=1), "factory": factory, "ordered": ordered}}
    loaded = torch.load(save(tmp_path / "c.pt", state), weights_only=False)["task_state"]
    assert loaded["counter"] == collections.Counter(a=1)
    assert loaded["factory"].default_factory is list
    assert torch.equal(loaded["factory"]["seen"][0], torch.ones(2))
    assert type(loaded["ordered"]) is collections.OrderedDict
    assert list(loaded["ordered"]) == ["b", "a"]


def test_copies_are_atomic_and_whole(tmp_path):
    path = save(tmp_path / "a.pt")
    assert checkpoint_utils.PathManager.copy(str(path), str(tmp_path / "b.pt"), overwrite=True)
    assert (tmp_path / "b.pt").read_bytes() == path.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt", "b.pt"]


def test_installing_again_changes_nothing():
    before = {name: getattr(checkpoint_utils, name) for name in dir(checkpoint_utils)}
    checkpoint.install()
    assert before == {name: getattr(checkpoint_utils, name) for name in dir(checkpoint_utils)}


def fork(act) -> tuple[int, int]:
    """Runs ``act(write)`` in a process of its own, where ``write(text)`` reaches the parent; returns (process id, file to read from).

    The child answers an interrupt with status 130 and any error with status 1 and its text, as a command does.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child:
        os.close(write_end)
        return child, read_end
    status = 0
    try:
        # A shell starts background jobs with SIGINT ignored and nohup ignores SIGHUP, and the tests may be one.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        act(lambda text: os.write(write_end, text.encode()))
    except KeyboardInterrupt:
        status = 130
    except BaseException as error:
        os.write(write_end, f"{type(error).__name__}: {error}".encode())
        status = 1
    finally:
        os._exit(status)


def save_slowly(path, moment):
    """Saves, and stops in the middle: while torch writes, or in the last act before the new file takes its name, flushing to disk."""

    def act(write):
        def wait(*_):
            write("in mid-save")
            time.sleep(LIMIT_S)

        class SlowFile(io.FileIO):
            def write(self, data):
                if len(data) >= N_WEIGHT_BYTES:
                    wait()
                return super().write(data)

        if moment == "writing":
            checkpoint.open = SlowFile
        else:
            os.fsync = wait
        save(path, make_state(2.0))

    return act


@pytest.mark.parametrize("moment", ["writing", "flushing"])
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["interrupt", "terminate", "kill"]
)
def test_a_signal_in_mid_save_leaves_the_previous_checkpoint(tmp_path, number, moment):
    path = save(tmp_path / "checkpoint_last.pt", make_state(1.0))
    child, output = fork(save_slowly(path, moment))
    assert os.read(output, 100) == b"in mid-save"
    os.kill(child, number)
    _, status = os.waitpid(child, 0)
    assert (load(path)["model"]["weight"] == 1.0).all()
    left = sorted(p.name for p in tmp_path.iterdir())
    if number == signal.SIGINT:
        assert os.waitstatus_to_exitcode(status) == 130
        assert left == ["checkpoint_last.pt"]
    else:  # nobody can clean up after these; the next run does
        assert os.waitstatus_to_exitcode(status) == -number
        assert left == ["checkpoint_last.pt", "checkpoint_last.pt.tmp"]
        with pytest.raises(AttributeError):  # the fake configuration ends it, after the clean-up
            checkpoint_utils.load_checkpoint(checkpoint_config(tmp_path), fake_trainer())
        assert [p.name for p in tmp_path.iterdir()] == ["checkpoint_last.pt"]


def test_an_interrupt_while_torch_writes_stays_an_interrupt(tmp_path, monkeypatch):
    """torch's writer answers it with a RuntimeError of its own."""
    path = save(tmp_path / "checkpoint_last.pt", make_state(1.0))

    class Interrupted(io.FileIO):
        def write(self, data):
            if len(data) >= N_WEIGHT_BYTES:
                raise KeyboardInterrupt
            return super().write(data)

    monkeypatch.setattr(checkpoint, "open", Interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        save(path, make_state(2.0))
    monkeypatch.undo()
    assert (load(path)["model"]["weight"] == 1.0).all()
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint_last.pt"]


@pytest.mark.parametrize("copies", [False, True], ids=["save", "copy"])
def test_no_room_leaves_the_previous_checkpoint_and_says_what_is_missing(tmp_path, copies):
    """A limit on file size stands for a full disk: the system refuses the write in the same way."""
    path = save(tmp_path / "checkpoint_last.pt", make_state(1.0, n_elem=50_000))

    def act(write):
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
        if copies:
            checkpoint_utils.PathManager.copy(str(path), str(tmp_path / "checkpoint_best.pt"), overwrite=True)
        else:
            save(path, make_state(2.0, n_elem=50_000))

    child, output = fork(act)
    _, status = os.waitpid(child, 0)
    message = os.read(output, 4000).decode()
    assert os.waitstatus_to_exitcode(status) == 1
    assert message.startswith("CheckpointError: checkpoint ")
    for part in ("cannot be written", "needed 0.2 MiB", "MiB are free", "Earlier checkpoints are intact"):
        assert part in message
    assert (load(path)["model"]["weight"] == 1.0).all()
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint_last.pt"]


def test_a_folder_that_vanished(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot be written: No such file or directory"):
        save(tmp_path / "gone" / "c.pt")


def test_a_process_without_the_plugin_loads_it_with_the_protection_on(tmp_path):
    """Flags of the model, and numpy's numbers and arrays, which evaluation with BLEU logs."""
    state = make_state()
    state["extra_state"]["metrics"] = {"bleu": np.float64(1.5), "counts": np.arange(4), "n": np.array(3)}
    path = save(tmp_path / "c.pt", state)
    program = (
        "import sys, torch; state = torch.load(sys.argv[1]); model = state['cfg']['model'];"
        "print(type(model).__name__, model.encoder_layers, model['arch'], state['extra_state']['metrics'])"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCH_")}
    done = subprocess.run([sys.executable, "-c", program, path], env=environment, capture_output=True, text=True)
    metrics = "{'bleu': 1.5, 'counts': tensor([0, 1, 2, 3]), 'n': 3}"
    assert done.stdout.strip() == f"OrderedDict 2 transformer {metrics}", done.stderr
