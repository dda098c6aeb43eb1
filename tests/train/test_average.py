"""lightseq-average: the right checkpoints, their mean, a result that stock translates with, and errors that say what is wrong."""

import logging
import sys

import pytest
import torch
from fairseq import checkpoint_utils

from ls_plugin.cli import _fairseq_command
from ls_plugin.cli import average as command
from ls_plugin.errors import CheckpointError
from tests.train.test_checkpoint import BAD_FILES


def save(path, weight, **more):
    weight = torch.as_tensor(weight)
    model = {"weight": weight, "tied": weight, "version": torch.tensor([3.0]), "count": torch.tensor([7])}
    extra = {"train_iterator": {"epoch": 1}, "ema": {"weight": weight}}
    state = {
        "model": model,
        "extra_state": extra,
        "last_optimizer_state": {"state": {}},
        "cfg": {"task": {"_name": "translation"}},
    }
    torch.save(state | more, path)
    return str(path)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command in this process; returns (exit status, standard error)."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setattr(_fairseq_command, "leave", sys.exit)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["lightseq-average", *map(str, arguments)])
        try:
            command.main()
        except SystemExit as end:
            return end.code, capsys.readouterr().err
        return 0, capsys.readouterr().err

    yield run
    root.handlers[:], root.level = handlers, level


def test_mean(tmp_path, run):
    paths = [save(tmp_path / f"{i}.pt", [float(i), 2.0 * i]) for i in (1, 2, 6)]
    assert run("--inputs", *paths, "--output", tmp_path / "mean.pt")[0] == 0
    state = torch.load(tmp_path / "mean.pt")
    assert state["model"]["weight"].tolist() == [3.0, 6.0]
    assert state["model"]["tied"].data_ptr() == state["model"]["weight"].data_ptr()
    assert (state["model"]["version"].item(), state["model"]["count"].item()) == (3.0, 7)
    assert "last_optimizer_state" not in state
    assert state["extra_state"] == {"train_iterator": {"epoch": 1}}
    assert torch.load(paths[0])["model"]["weight"].tolist() == [1.0, 2.0]


def test_inputs_are_joined_by_blanks_or_commas(tmp_path, run):
    paths = [save(tmp_path / name, [float(i)]) for i, name in enumerate(("1.pt", "2.pt", "a,b.pt"))]
    assert run("--inputs", f"{paths[0]},{paths[1]}", paths[2], "--output", tmp_path / "mean.pt")[0] == 0
    assert torch.load(tmp_path / "mean.pt")["model"]["weight"].tolist() == [1.0]


def test_sixteen_bits_are_summed_in_fp32(tmp_path):
    """Of 64 checkpoints; a sum in bf16 would stop at 256."""
    values = torch.linspace(4.0, 6.0, 64).bfloat16()
    paths = [save(tmp_path / f"{i}.pt", value.reshape(1)) for i, value in enumerate(values)]
    mean = command.average(paths)["model"]["weight"]
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean, values.float().mean().reshape(1), rtol=1e-6, atol=0)


def test_ties_that_some_files_lack_are_given_up(tmp_path):
    paths = [save(tmp_path / f"{i}.pt", [float(i)]) for i in (1, 2)]
    state = torch.load(paths[1])
    state["model"]["tied"] = torch.tensor([4.0])
    torch.save(state, paths[1])
    model = command.average(paths)["model"]
    assert (model["weight"].item(), model["tied"].item()) == (1.5, 2.5)


def test_the_last_of_a_run(tmp_path, run):
    for epoch in range(1, 12):
        save(tmp_path / f"checkpoint{epoch}.pt", [float(epoch)])
        save(tmp_path / f"checkpoint_{epoch}_{epoch * 100}.pt", [epoch * 100.0])
    for name in ("checkpoint_last.pt", "checkpoint_best.pt", "checkpoint12.pt.tmp"):
        save(tmp_path / name, [1e6])

    def averaged(*flags):
        assert run("--inputs", tmp_path, "--output", tmp_path / "mean.pt", *flags)[0] == 0
        return torch.load(tmp_path / "mean.pt")["model"]["weight"].item()

    assert averaged("--num-epoch-checkpoints", 3) == 10.0
    assert averaged("--num-epoch-checkpoints", 2, "--checkpoint-upper-bound", 9) == 8.5
    assert averaged("--num-update-checkpoints", 3) == 1000.0
    assert averaged("--num-update-checkpoints", 2, "--checkpoint-upper-bound", 450) == 350.0


@pytest.mark.parametrize("write, message", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_a_bad_file_is_named_with_its_fault(tmp_path, write, message):
    good = save(tmp_path / "good.pt", [1.0])
    bad = tmp_path / "bad.pt"
    write(bad)
    for paths in ((good, bad), (bad, good)):
        with pytest.raises(CheckpointError, match=message) as caught:
            command.average([str(path) for path in paths])
        assert str(bad) in str(caught.value)


def test_other_parameters_are_told(tmp_path, run):
    paths = [save(tmp_path / "a.pt", [1.0]), save(tmp_path / "b.pt", [1.0, 2.0])]
    status, errors = run("--inputs", *paths, "--output", tmp_path / "mean.pt")
    assert status == 1
    assert errors.startswith(
        f"lightseq-average: error: checkpoint {paths[1]}: must hold the parameters of {paths[0]}, got weight (2,) instead of (1,)"
    )
    assert not (tmp_path / "mean.pt").exists()
    save(tmp_path / "c.pt", [1.0], model={"weight": torch.ones(1), "other": torch.ones(1)})
    with pytest.raises(
        CheckpointError, match=r"tied nothing instead of \(1,\), .* and 1 more; average checkpoints of one run"
    ):
        command.average([paths[0], str(tmp_path / "c.pt")])


def test_what_cannot_be_asked_for(tmp_path, run):
    path = save(tmp_path / "checkpoint1.pt", [1.0])
    output = ["--output", tmp_path / "mean.pt"]
    for flags, status, message in (
        (
            ["--inputs", tmp_path, "--num-epoch-checkpoints", 2],
            1,
            "must hold 2 checkpoints named like checkpoint7.pt, got 1",
        ),
        (
            ["--inputs", tmp_path, "--num-update-checkpoints", 1, "--checkpoint-upper-bound", 5],
            1,
            "named like checkpoint_3_5000.pt up to --checkpoint-upper-bound 5, got 0",
        ),
        (["--inputs", path, "--num-epoch-checkpoints", 1], 1, "--inputs: must be a run's --save-dir"),
        (
            ["--inputs", path, path, "--num-epoch-checkpoints", 1],
            2,
            "must be one folder with --num-*-checkpoints, got 2",
        ),
        (["--inputs", path, "--checkpoint-upper-bound", 1], 2, "--checkpoint-upper-bound: needs"),
        (["--inputs", tmp_path], 2, f"--inputs {tmp_path}: is a directory, which needs --num-epoch-checkpoints N"),
        (["--inputs", path, "--num-epoch-checkpoints", 0], 2, "must be at least 1, got 0"),
        (
            ["--inputs", path, "--output", tmp_path / "gone" / "mean.pt"],
            1,
            "cannot be written: No such file or directory",
        ),
    ):
        got, errors = run(*output, *flags)
        assert got == status
        assert message in errors
        assert "Traceback" not in errors


def test_stock_translates_with_the_mean(trained, commands, tmp_path, run):
    """From checkpoints of ls_adam, and without the plugin."""
    folder = trained["ours"][0]
    output = tmp_path / "mean.pt"
    assert run("--inputs", folder / "checkpoint_1_10.pt", folder / "checkpoint_last.pt", "--output", output)[0] == 0
    flags = ["--path", output, "--beam", 2, "--max-len-b", 20, "--cpu", "--required-batch-size-multiple", 1]
    translations = commands.run("fairseq_cli.generate", commands.data, *flags, plugin=False)
    assert translations.count("\nH-") == 20
    assert checkpoint_utils.load_checkpoint_to_cpu(str(output))["cfg"].model.arch == "ls_transformer"
