"""The checkpoint that a run goes on from after a save that was cut short, with fairseq's own save and load around a small state."""

import os
import shutil
import signal
import time
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import CheckpointConfig
from omegaconf import OmegaConf

from ls_plugin import newest
from ls_plugin.errors import CheckpointError
from tests.limits import LIMIT_S
from tests.train.test_checkpoint import fork

LAST = "checkpoint_last.pt"


class Run:
    """One start of a run: what fairseq's two functions need of a trainer."""

    def __init__(self, folder, suffix="", seed=1, arch="ls_transformer", task="translation", width=4, **flags):
        self.cfg = CheckpointConfig(save_dir=str(folder), save_interval_updates=1, **flags)
        self.weights = {"weight": torch.ones(width)}
        self.parts = {
            "model": Namespace(_name=arch),
            "task": {"_name": task},
            "common": {"seed": seed},
            "checkpoint": {"finetune_from_model": self.cfg.finetune_from_model},
        }
        self.loaded = []
        self.n_updates = 0
        self.trainer = SimpleNamespace(
            cfg=OmegaConf.create(self.parts, flags={"allow_objects": True}),
            checkpoint_suffix=suffix,
            data_parallel_rank=0,
            should_save_checkpoint_on_current_rank=True,
            is_fsdp=False,
            task=SimpleNamespace(),
            consolidate_optimizer=lambda: None,
            get_num_updates=lambda: self.n_updates,
            get_model=lambda: SimpleNamespace(state_dict=lambda: self.weights),
            save_checkpoint=self._save,
            load_checkpoint=lambda path, *_, **__: self.loaded.append(os.path.basename(path)),
            get_train_iterator=lambda **_: SimpleNamespace(epoch=1),
            lr_step=lambda epoch: None,
        )

    def _save(self, path, extra_state):
        state = {"cfg": self.parts, "model": self.weights, "last_optimizer_state": {}, "extra_state": extra_state}
        checkpoint_utils.torch_persistent_save(state | {"optimizer_history": [{"num_updates": self.n_updates}]}, path)

    def save(self, n_updates, val_loss=None):
        vars(checkpoint_utils.save_checkpoint).pop("best", None)  # of the process
        self.n_updates = n_updates
        position = {"epoch": 1, "iterations_in_epoch": n_updates}
        epoch_itr = SimpleNamespace(epoch=1, end_of_epoch=lambda: False, state_dict=lambda: position)
        checkpoint_utils.save_checkpoint(self.cfg, self.trainer, epoch_itr, val_loss)
        time.sleep(0.02)  # a file system may count time in hundredths
        return self

    def resume(self):
        """The file that is loaded; what is not there is a start from scratch."""
        checkpoint_utils.load_checkpoint(self.cfg, self.trainer)
        (name,) = self.loaded
        return name if os.path.exists(os.path.join(self.cfg.save_dir, name)) else None


def cut_short(folder, n_updates, val_loss=None):
    """A save of which nothing but the first file was written."""
    Run(folder, no_last_checkpoints=True).save(n_updates)


@pytest.fixture(autouse=True)
def forget_the_best():
    yield
    vars(checkpoint_utils.save_checkpoint).pop("best", None)


@pytest.mark.parametrize("is_first", [True, False], ids=["first save", "later save"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_a_signal_between_a_checkpoint_and_its_copies_loses_nothing(tmp_path, caplog, number, is_first):
    if not is_first:
        Run(tmp_path).save(2, val_loss=3.0)

    def act(write):
        flush, counted = os.fsync, iter(range(1, 100))

        def fsync(descriptor):
            if next(counted) == 3:  # two for each file
                write("in the copy")
                time.sleep(LIMIT_S)
            flush(descriptor)

        os.fsync = fsync
        Run(tmp_path).save(3, val_loss=2.5)

    child, output = fork(act)
    assert os.read(output, 100) == b"in the copy"
    os.kill(child, number)
    os.waitpid(child, 0)
    assert (tmp_path / LAST).exists() != is_first
    assert Run(tmp_path).resume() == "checkpoint_1_3.pt"
    (told,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told.startswith(f"{tmp_path / LAST} is {'missing' if is_first else 'older'}: going on from ")
    assert f"{tmp_path}/checkpoint_1_3.pt (3 updates), the newest whole checkpoint of this run" in told
    best = torch.load(tmp_path / "checkpoint_best.pt")  # the save would have copied it
    assert best["optimizer_history"][-1]["num_updates"] == 3


def test_a_copy_for_which_there_is_no_room_loses_nothing(tmp_path):
    run = Run(tmp_path).save(2)
    (tmp_path / f"{LAST}.tmp").mkdir()  # the system refuses to write, as on a full disk
    with pytest.raises(CheckpointError, match=r"checkpoint_last\.pt: cannot be written"):
        run.save(3)
    (tmp_path / f"{LAST}.tmp").rmdir()
    assert Run(tmp_path).resume() == "checkpoint_1_3.pt"


def test_a_whole_save_is_resumed_from_its_last(tmp_path, caplog):
    Run(tmp_path).save(2, val_loss=2.0).save(3, val_loss=3.0)
    assert Run(tmp_path).resume() == LAST
    assert not caplog.records or "going on" not in caplog.text
    # Another program touches an older file: it is no progress for that.
    os.utime(tmp_path / "checkpoint_best.pt")
    assert Run(tmp_path).resume() == LAST


def test_the_number_of_updates_tells_the_newest_not_the_time(tmp_path):
    Run(tmp_path, no_last_checkpoints=True).save(3).save(12)
    os.utime(tmp_path / "checkpoint_1_3.pt")
    assert Run(tmp_path).resume() == "checkpoint_1_12.pt"


def test_a_best_checkpoint_alone_is_what_there_is(tmp_path):
    """As a kill leaves it under --no-epoch-checkpoints, where the best one is written first."""
    Run(tmp_path, no_last_checkpoints=True).save(3, val_loss=2.0)
    (tmp_path / "checkpoint_1_3.pt").unlink()
    assert Run(tmp_path).resume() == "checkpoint_best.pt"


def test_a_damaged_file_is_passed_over(tmp_path, caplog):
    Run(tmp_path, no_last_checkpoints=True).save(3).save(4).save(5)
    half = tmp_path / "checkpoint_1_5.pt"
    half.write_bytes(half.read_bytes()[:500])
    flipped = tmp_path / "checkpoint_1_4.pt"
    contents = bytearray(flipped.read_bytes())
    contents[contents.index(b"\x00\x00\x80\x3f" * 4)] ^= 1  # in the weights
    flipped.write_bytes(contents)
    assert Run(tmp_path).resume() == "checkpoint_1_3.pt"
    assert f"{half}: passed over, since it is no whole checkpoint" in caplog.text
    assert "checkpoint_1_4.pt" in caplog.text and "differs from its checksum" in caplog.text


@pytest.mark.parametrize(
    "change, told",
    [
        ({"seed": 2}, "--seed 1"),
        ({"arch": "transformer_lm"}, "--arch transformer"),
        ({"task": "multilingual"}, "--task translation"),
        ({"width": 5}, "parameters"),
    ],
    ids=["seed", "arch", "task", "parameters"],
)
def test_files_of_another_run_are_passed_over_with_a_warning(tmp_path, caplog, change, told):
    cut_short(tmp_path, 3)
    assert Run(tmp_path, **change).resume() is None
    assert f"checkpoint_1_3.pt (3 updates): passed over, since it is another run's, by its {told};" in caplog.text


def test_twins_are_the_same_architecture(tmp_path):
    cut_short(tmp_path, 3)
    assert Run(tmp_path, arch="transformer").resume() == "checkpoint_1_3.pt"


def test_files_older_than_the_last_are_another_runs_or_were_set_back(tmp_path):
    Run(tmp_path).save(3).save(9)
    for act in (
        lambda: Run(tmp_path).save(4),  # a run that began with --restore-file checkpoint_1_3.pt
        lambda: os.replace(tmp_path / "checkpoint_1_3.pt", tmp_path / LAST),
        lambda: ((tmp_path / LAST).unlink(), (tmp_path / LAST).symlink_to("checkpoint_1_4.pt")),
    ):
        act()
        assert Run(tmp_path).resume() == LAST


def test_a_copy_of_the_folder_names_its_files_in_an_order_of_its_own(tmp_path):
    """As ``cp -a`` and rsync do, which keep the times of writing."""
    (tmp_path / "run").mkdir()
    (tmp_path / "copy").mkdir()
    Run(tmp_path / "run").save(9).save(4)  # somebody set the run back
    for name in (LAST, "checkpoint_1_4.pt", "checkpoint_1_9.pt"):
        shutil.copy2(tmp_path / "run" / name, tmp_path / "copy" / name)
        time.sleep(0.02)
    assert Run(tmp_path / "copy").resume() == LAST


def test_an_explicit_file_stays_as_given(tmp_path):
    Run(tmp_path).save(2)
    cut_short(tmp_path, 3)
    assert Run(tmp_path, restore_file=str(tmp_path / LAST)).resume() == LAST


def test_an_unreadable_last_is_still_refused(tmp_path):
    Run(tmp_path).save(2)
    (tmp_path / LAST).write_bytes(b"")
    cut_short(tmp_path, 3)
    with pytest.raises(CheckpointError, match=r"checkpoint_last\.pt: must hold a saved state, got an empty file"):
        Run(tmp_path).resume()


def test_fine_tuning_goes_on_from_its_own_files_only(tmp_path, caplog):
    """The model to start from may lie in the same folder."""
    cut_short(tmp_path, 3)
    start = str(tmp_path / "checkpoint_1_3.pt")
    again = Run(tmp_path, finetune_from_model=start)
    checkpoint_utils.load_checkpoint(again.cfg, again.trainer)
    assert again.loaded == ["checkpoint_1_3.pt"]  # as fairseq does it, with everything else reset
    assert "another run's, by its --finetune-from-model None" in caplog.text
    Run(tmp_path, finetune_from_model=start, no_last_checkpoints=True).save(1)
    caplog.clear()
    assert Run(tmp_path, finetune_from_model=start).resume() == "checkpoint_1_1.pt"


def test_every_rank_takes_the_newest_that_all_have(tmp_path, monkeypatch):
    for rank, updates in ((0, (3, 4)), (1, (3,))):
        run = Run(tmp_path, suffix=f"-shard{rank}", no_last_checkpoints=True)
        for n_updates in updates:
            run.save(n_updates)
    runs = [Run(tmp_path, suffix=f"-shard{rank}") for rank in (0, 1)]
    sent = [newest._candidates(run.cfg, run.trainer, run.trainer.checkpoint_suffix) for run in runs]
    assert sent == [[(4, "checkpoint_1_4.pt"), (3, "checkpoint_1_3.pt")], [(3, "checkpoint_1_3.pt")]]
    monkeypatch.setattr(newest.distributed_utils, "get_data_parallel_world_size", lambda: 2)
    monkeypatch.setattr(newest.distributed_utils, "all_gather_list", lambda x: sent if isinstance(x, list) else [x, x])
    assert [run.resume() for run in runs] == ["checkpoint_1_3-shard0.pt", "checkpoint_1_3-shard1.pt"]


def test_the_first_rank_chooses_for_all(tmp_path, monkeypatch):
    cut_short(tmp_path, 3)
    runs = [Run(tmp_path), Run(tmp_path)]
    runs[1].trainer.data_parallel_rank = 1
    sent = []
    monkeypatch.setattr(newest.distributed_utils, "get_data_parallel_world_size", lambda: 2)

    def gather(x):
        if isinstance(x, list):
            sent.append(x)
            return [sent[0], []]
        return [x, x]

    monkeypatch.setattr(newest.distributed_utils, "all_gather_list", gather)
    assert [run.resume() for run in runs] == ["checkpoint_1_3.pt"] * 2
    assert sent == [[(3, "checkpoint_1_3.pt")], []]
