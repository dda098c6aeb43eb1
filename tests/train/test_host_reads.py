"""What a training step reads from the device, counted on the CPU by a dispatch mode: each such read stops the host on a GPU."""

import contextlib
import functools
import itertools
import math

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.logging import metrics, progress_bar
from torch.utils._python_dispatch import TorchDispatchMode

from ls_plugin import host
from ls_plugin.cli import _fairseq_command

LOG_INTERVAL = 5
# Ops that give a value to the host, or whose result's shape depends on values; and what makes a tensor of a host's number, whose copy
# to the device is waited for as well.
READS = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_dim",
    "_unique2",
    "lift_fresh",
}


class Reads(TorchDispatchMode):
    """``ops``: the reads while it is active, in order. On the CPU some methods take the values without any op."""

    METHODS = ("cpu", "numpy", "tolist")

    def __init__(self):
        super().__init__()
        self.ops = []
        self._patches = pytest.MonkeyPatch()

    def __enter__(self):
        for name in self.METHODS:
            self._patches.setattr(torch.Tensor, name, self._noting(name, getattr(torch.Tensor, name)))
        return super().__enter__()

    def __exit__(self, *error):
        self._patches.undo()
        return super().__exit__(*error)

    def _noting(self, name, method):
        def noting(*args, **kwargs):
            self.ops.append(name)
            return method(*args, **kwargs)

        return noting

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if name in READS:
            self.ops.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def make_trainer(make_trainer, monkeypatch):
    """What knows that a CPU need not be waited for is told otherwise."""
    monkeypatch.setattr(host, "waits_for", lambda device: True)
    return functools.partial(make_trainer, log_interval=LOG_INTERVAL)


def reads_of_updates(trainer, n_updates, n_batches=1):
    """Reads in each of some updates, with a look at the log where the command would take it; and the last log."""
    counts, log = [], None
    batches = itertools.cycle(trainer.batches)
    metrics.reset_meters("train_inner") if metrics.get_meters("train_inner") else None
    for _ in range(n_updates):
        with Reads() as reads, metrics.aggregate("train_inner"):
            assert trainer.train_step([next(batches) for _ in range(n_batches)]) is not None
        counts.append(len(reads.ops))
        if trainer.get_num_updates() % LOG_INTERVAL == 0:
            log = metrics.get_smoothed_values("train_inner")
            metrics.reset_meters("train_inner")
    return counts, log


@pytest.mark.parametrize("precision", ["--log-interval=5", "--bf16", "--memory-efficient-bf16"])
@pytest.mark.parametrize("n_batches", [1, 2])
def test_nothing_is_read_between_log_intervals(make_trainer, precision, n_batches):
    trainer = make_trainer("ours", precision)
    counts, log = reads_of_updates(trainer, 2 * LOG_INTERVAL, n_batches)
    at_interval = counts[LOG_INTERVAL - 1 :: LOG_INTERVAL]
    assert at_interval == [1, 1]  # the norms since the last one
    del counts[LOG_INTERVAL - 1 :: LOG_INTERVAL]
    assert counts == [0] * len(counts)
    assert_complete(log)


@pytest.mark.parametrize("precision", ["--fp16", "--memory-efficient-fp16"])
def test_fp16_reads_the_overflow_and_nothing_else(make_trainer, precision):
    trainer = make_trainer("ours", precision, "--fp16-init-scale", 4)
    counts, log = reads_of_updates(trainer, 2 * LOG_INTERVAL)
    del counts[LOG_INTERVAL - 1 :: LOG_INTERVAL]
    assert counts == [1] * len(counts)
    assert_complete(log, "loss_scale")


def test_the_count_sees_what_stock_reads(make_trainer):
    counts, _ = reads_of_updates(make_trainer("stock"), 3)
    assert min(counts) >= 10


def assert_complete(log, *more):
    names = (
        "loss",
        "nll_loss",
        "ppl",
        "accuracy",
        "gnorm",
        "clip",
        "train_wall",
        "wps",
        "ups",
        "wpb",
        "bsz",
        "lr",
        "num_updates",
    )
    for name in (*names, *more):
        assert math.isfinite(float(log[name])), name


@pytest.mark.parametrize("n_batches", [1, 2])
def test_what_is_logged_is_what_stock_logs(make_trainer, n_batches):
    logs, outputs, shown = [], [], []
    for names in ("stock", "ours"):
        trainer = make_trainer(names, "--dropout", "0")
        with metrics.aggregate(new_root=True) as meters:
            for i in range(3):
                output = trainer.train_step(trainer.batches[n_batches * i : n_batches * (i + 1)])
        logs.append({name: float(value) for name, value in meters.get_smoothed_values().items()})
        shown.append({name: progress_bar.format_stat(value) for name, value in meters.get_smoothed_values().items()})
        outputs.append({name: float(value) for name, value in output.items()})
    for theirs, ours in (logs, outputs):
        assert list(theirs) == list(ours)
        for name in theirs.keys() - {"wps", "ups", "train_wall"}:
            assert ours[name] == pytest.approx(theirs[name], rel=2e-3), name
    assert shown[1]["total"] == shown[0]["total"]
    assert [type(value) for value in shown[1].values()] == [type(value) for value in shown[0].values()]


# --- gradients that are not finite


@contextlib.contextmanager
def nan_loss(trainer, at_update):
    """Makes the loss, and so every gradient, NaN in one update."""
    stock = trainer.task.train_step

    def train_step(*args, **kwargs):
        if "update_num" not in kwargs:  # stock's search for the module at fault
            return stock(*args, **kwargs)
        update_num, optimizer = kwargs["update_num"], kwargs["optimizer"]
        backward = optimizer.backward
        optimizer.backward = lambda loss: backward(loss * math.nan if update_num == at_update else loss)
        try:
            return stock(*args, **kwargs)
        finally:
            del optimizer.backward

    trainer.task.train_step = train_step
    yield
    del trainer.task.train_step


@pytest.mark.parametrize("precision", ["--log-interval=5", "--bf16"])
def test_gradients_that_are_not_finite_end_training_at_the_log_interval(make_trainer, precision, tmp_path):
    trainer = make_trainer("ours", precision)
    weights = []
    with nan_loss(trainer, at_update=2), pytest.raises(FloatingPointError, match="at update 3, which left the weights"):
        for batch in trainer.batches:
            trainer.train_step([batch])
            weights.append([p.detach().clone() for p in trainer.model.parameters()])
    assert trainer.get_num_updates() == LOG_INTERVAL - 1
    assert all(torch.equal(a, b) for a, b in zip(weights[1], weights[2], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights[2], weights[3], strict=True))
    state = torch.load(tmp_path / "crash.pt", weights_only=False)
    assert all(value.isfinite().all() for value in state["model"].values())


@pytest.mark.parametrize("end", ["save", "epoch"])
def test_none_is_overlooked_before_a_checkpoint_or_the_end(make_trainer, end, tmp_path):
    trainer = make_trainer("ours")
    with nan_loss(trainer, at_update=1):
        for batch in trainer.batches[:3]:
            trainer.train_step([batch])
    with pytest.raises(FloatingPointError, match="at update 2, which left the weights"):
        if end == "save":
            checkpoint_utils.save_checkpoint(trainer.cfg.checkpoint, trainer, None, None)
        else:
            trainer.lr_step(1)
    assert [path.name for path in tmp_path.iterdir()] == ["crash.pt"]


def test_on_a_cpu_they_end_it_at_once(make_trainer, monkeypatch, caplog, capsys):
    monkeypatch.setattr(host, "waits_for", lambda device: False)
    trainer = make_trainer("ours")
    with nan_loss(trainer, at_update=2), pytest.raises(FloatingPointError, match="at update 3") as error:
        for batch in trainer.batches:
            trainer.train_step([batch])
    assert trainer.get_num_updates() == 2
    assert "parameters: encoder.embed_tokens.weight, encoder.layers.0" in caplog.text
    assert _fairseq_command._tell("lightseq-train", error.value) == 1
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert line.startswith("lightseq-train: error: gradients are Nan/Inf at update 3") and "crash.pt" in line


@pytest.mark.parametrize("names", ["ours", "stock"])
def test_a_crash_file_that_cannot_be_written_hides_no_cause(make_trainer, monkeypatch, tmp_path, caplog, names):
    """A folder of its name stands for a full disk: both are the system's refusal."""
    monkeypatch.setattr(host, "waits_for", lambda device: False)
    (tmp_path / "crash.pt").mkdir()
    trainer = make_trainer(names)
    trainer.train_step([trainer.batches[0]])
    with nan_loss(trainer, at_update=1), pytest.raises(FloatingPointError, match="gradients are Nan/Inf") as error:
        trainer.train_step([trainer.batches[1]])
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told[0].startswith("training ends at update 2: gradients are Nan/Inf")
    assert told[1].startswith(f"checkpoint {tmp_path}/crash.pt: cannot be written: Is a directory")
    if names == "ours":
        assert str(error.value).startswith("gradients are Nan/Inf at update 2, which left the weights")
        assert str(error.value).endswith("; crash.pt cannot be written")
