"""The console scripts on bad input: one line that says what to do, an exit status, no traceback."""

import logging
import re
import shutil
import sys
from pathlib import Path

import fairseq_cli.eval_lm
import fairseq_cli.train
import pytest
import torch

from ls_plugin.cli import _fairseq_command, average, eval_lm, generate, interactive, train, validate
from ls_plugin.cli._fairseq_command import EXIT_USAGE
from ls_plugin.errors import CheckpointError, UnsupportedError

MAINS = {
    "train": train.main,
    "validate": validate.main,
    "generate": generate.main,
    "interactive": interactive.main,
    "eval-lm": eval_lm.main,
    "average": average.main,
}


@pytest.fixture(autouse=True)
def keep_logging():
    """The commands point the root logger at the standard output of their test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


@pytest.fixture(autouse=True)
def stay_alive(monkeypatch):
    """In this process an error raises SystemExit; the real function would end pytest."""
    monkeypatch.setattr(_fairseq_command, "leave", sys.exit)
    monkeypatch.setattr(fairseq_cli.eval_lm, "main", fairseq_cli.eval_lm.main)  # restores what the command rebinds


@pytest.fixture
def run_command(monkeypatch, capsys):
    """Runs a console script in this process; returns (exit status, standard error)."""

    def run(command, *arguments, **env):
        monkeypatch.setattr(sys, "argv", [f"lightseq-{command}", *map(str, arguments)])
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as caught:
            MAINS[command]()
        return caught.value.code or 0, capsys.readouterr().err

    return run


def assert_one_line(errors, *parts):
    (line,) = [line for line in errors.splitlines() if line.startswith("lightseq-")]
    assert "Traceback" not in errors
    for part in parts:
        assert part in line


BASE = ["--arch", "ls_transformer_tiny", "--max-tokens", "100", "--optimizer", "ls_adam", "--cpu"]


def test_missing_data_directory(run_command, tmp_path):
    status, errors = run_command("train", tmp_path / "nowhere", *BASE, "--save-dir", tmp_path)
    assert status == 1
    assert_one_line(errors, "data: must be a directory written by fairseq-preprocess", "nowhere", "does not exist")


def test_directory_without_data(run_command, tmp_path):
    status, errors = run_command("train", tmp_path, *BASE, "--save-dir", tmp_path)
    assert status == 1
    assert_one_line(errors, "cannot infer the languages", "fairseq-preprocess")


def test_missing_dictionary(run_command, tmp_path):
    status, errors = run_command(
        "train", tmp_path, *BASE, "--source-lang", "de", "--target-lang", "en", "--save-dir", tmp_path
    )
    assert status == 1
    assert_one_line(errors, "not found", "dict.de.txt")


def test_missing_binary_data(run_command, tmp_path):
    for language in ("de", "en"):
        (tmp_path / f"dict.{language}.txt").write_text("word 1\n")
    flags = ["--source-lang", "de", "--target-lang", "en", "--save-dir", tmp_path]
    status, errors = run_command("train", tmp_path, *BASE, *flags)
    assert status == 1
    assert_one_line(errors, "not found: valid", str(tmp_path))


@pytest.mark.parametrize(
    "arch, suggestion",
    [("ls_transformr", "ls_transformer"), ("lstransformer_iwslt_de_en", "ls_transformer_iwslt_de_en")],
)
def test_unknown_architecture_is_answered_with_the_nearest(run_command, tmp_path, arch, suggestion):
    for flags in (["--arch", arch], [f"--arch={arch}"], ["-a", arch]):
        status, errors = run_command("train", tmp_path, *flags)
        assert status == 2
        assert_one_line(errors, f"--arch {arch}: unknown", suggestion)


def test_unsupported_flag(run_command, commands, tmp_path):
    status, errors = run_command("train", commands.data, *BASE, "--quant-noise-pq", "0.1", "--save-dir", tmp_path)
    assert status == 2
    assert_one_line(errors, "--quant-noise-pq 0.1", "--arch transformer_tiny")


def test_unknown_activation(run_command, commands, tmp_path):
    status, errors = run_command("train", commands.data, *BASE, "--activation-fn", "relux", "--save-dir", tmp_path)
    assert status == 2
    assert "--activation-fn: invalid choice: 'relux'" in errors


def test_unreadable_checkpoint(run_command, commands, tmp_path):
    (tmp_path / "checkpoint_last.pt").write_bytes(b"half")
    status, errors = run_command("train", commands.data, *BASE, "--save-dir", tmp_path)
    assert status == 1
    assert_one_line(errors, "checkpoint_last.pt", "4 bytes that do not load")
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == b"half"


def test_checkpoint_of_another_model(run_command, commands, trained, tmp_path):
    flags = [*BASE, "--restore-file", trained["ours"][0] / "checkpoint_last.pt", "--save-dir", tmp_path]
    status, errors = run_command("train", commands.data, *flags)
    assert status == 1
    assert_one_line(errors, "Cannot load model parameters", "flags of the model that was saved")


@pytest.fixture
def damaged(trained, tmp_path):
    """Writes our checkpoint with its weights changed by a function."""

    def write(change):
        state = torch.load(trained["ours"][0] / "checkpoint_last.pt", weights_only=False)
        change(state["model"])
        torch.save(state, tmp_path / "damaged.pt")
        return tmp_path / "damaged.pt"

    return write


def commands_that_load(data, path, folder):
    """Of each command that reads a model: its flags."""
    task = ["--task", "translation", "--max-tokens", "300"]
    return {
        "generate": [data, "--path", path, "--cpu"],
        "validate": [data, "--path", path, "--cpu", *task],
        "interactive": [data, "--path", path, "--cpu"],
    }


def test_weights_that_are_not_finite_are_named_with_their_file(
    run_command, commands, damaged, training_flags, tmp_path
):
    def spoil(model):
        model["decoder.layers.1.fc1.weight"][3, 5] = float("nan")
        model["decoder.layers.1.fc2.bias"][:] = float("inf")

    path = damaged(spoil)
    told = f"checkpoint {path}: weights must be finite, got NaN in decoder.layers.1.fc1.weight and in 1 more"
    resuming = [commands.data, *training_flags["ours"], "--save-dir", tmp_path / "save", "--restore-file", path]
    averaging = ["--inputs", path, path, "--output", tmp_path / "mean.pt"]
    calls = {**commands_that_load(commands.data, path, tmp_path), "train": resuming, "average": averaging}
    for command, flags in calls.items():
        status, errors = run_command(command, *flags)
        assert status == 1, command
        assert_one_line(errors, told)
    assert not (tmp_path / "mean.pt").exists()


def test_parameters_that_are_missing_or_unknown_are_named(run_command, commands, damaged, tmp_path):
    def rename(model):
        for layer in (0, 1):
            for kind in ("weight", "bias"):
                model[f"encoder.layers.{layer}.other.{kind}"] = model.pop(f"encoder.layers.{layer}.fc1.{kind}")

    path = damaged(rename)
    for command, flags in commands_that_load(commands.data, path, tmp_path).items():
        status, errors = run_command(command, *flags)
        assert status == 1, command
        first = "encoder.layers.0.{0}.weight, encoder.layers.0.{0}.bias, encoder.layers.1.{0}.weight and 1 more"
        assert_one_line(errors, f"checkpoint {path}: ", f"missing {first.format('fc1')}; unexpected")


def test_every_file_of_a_path_is_validated(commands, trained, monkeypatch, capsys):
    """Joined by colons, as the help of --path says."""
    first, last = (trained["ours"][0] / name for name in ("checkpoint_1_10.pt", "checkpoint_last.pt"))

    def losses(path):
        flags = [commands.data, "--path", path, "--task", "translation", "--max-tokens", 300, "--cpu"]
        monkeypatch.setattr(sys, "argv", ["lightseq-validate", *map(str, flags), "--log-format", "simple"])
        validate.main()
        return re.findall(r"valid \| .*\bloss ([\d.]+)", capsys.readouterr().out)

    both = losses(f"{first}:{last}")
    assert both == losses(first) + losses(last)
    assert both[0] != both[1]


def test_fewer_batches_than_the_checkpoint_has_seen(run_command, commands, trained, training_flags, tmp_path):
    path = trained["ours"][0] / "checkpoint_1_10.pt"
    flags = [*training_flags["ours"], "--restore-file", path, "--max-tokens", 100_000, "--save-dir", tmp_path]
    status, errors = run_command("train", commands.data, *flags)
    assert status == 1
    assert_one_line(errors, f"checkpoint {path}: was saved after more batches of its epoch", "--reset-dataloader")


@pytest.mark.parametrize("metric, flag", [("bleu", "--eval-bleu"), ("accuracy", "--report-accuracy")])
def test_a_figure_that_is_not_logged_chooses_no_checkpoint(run_command, commands, tmp_path, metric, flag):
    flags = [*BASE, "--criterion", "label_smoothed_cross_entropy", "--best-checkpoint-metric", metric]
    status, errors = run_command("train", commands.data, *flags, "--save-dir", tmp_path)
    assert status == 2
    assert_one_line(errors, f"--best-checkpoint-metric {metric}: needs {flag}")


def test_a_figure_that_validation_does_not_know(run_command, commands, tmp_path):
    flags = [*BASE, "--best-checkpoint-metric", "blue", "--max-update", 1, "--lr", "0.1", "--num-workers", 0]
    status, errors = run_command("train", commands.data, *flags, "--save-dir", tmp_path)
    assert status == 2
    assert_one_line(errors, "--best-checkpoint-metric blue: must be a figure of the validation, which logs ", " loss, ")


@pytest.mark.parametrize("command", ["generate", "interactive", "eval-lm"])
def test_missing_model_file(run_command, commands, tmp_path, command):
    if command == "eval-lm":
        (tmp_path / "dict.txt").symlink_to(commands.data / "dict.de.txt")
    status, errors = run_command(
        command, tmp_path if command == "eval-lm" else commands.data, "--path", tmp_path / "no.pt", "--cpu"
    )
    assert status == 1
    assert_one_line(errors, "no.pt")


@pytest.mark.parametrize(
    ("command", "flags", "missing", "given"),
    [
        ("validate", [], ["data", "--task", "--path", "--max-tokens"], []),
        ("validate", ["data", "--path", "no.pt"], ["--task", "--max-tokens"], ["data", "--path"]),
        (
            "validate",
            ["data", "--task=translation", "--batch-size", "8"],
            ["--path"],
            ["data", "--task", "--max-tokens"],
        ),
        ("validate", ["--path", "no.pt", "--cpu"], ["data", "--task", "--max-tokens"], ["--path"]),
        ("train", ["--max-tokens", "9"], ["data", "--arch", "--optimizer"], ["--max-tokens"]),
        ("train", ["data", "-a", "ls_transformer", "--max-sentences", "9"], ["--optimizer"], ["data", "--arch"]),
        ("generate", [], ["data", "--path"], []),
        ("eval-lm", [], ["data", "--path"], []),
        ("interactive", ["data", "--beam", "4"], ["--path"], ["data"]),
    ],
)
def test_all_that_is_missing_is_named_at_once(run_command, command, flags, missing, given):
    status, errors = run_command(command, *flags)
    assert status == 2
    assert_one_line(errors, *[f"{name}: required" for name in missing])
    assert not any(f"{name}: required" in errors for name in given)


@pytest.mark.parametrize(
    ("command", "flags", "told"),
    [
        ("train", [*BASE, "--label-smoothing", "2"], "--label-smoothing 2.0: must lie in [0, 1]"),
        ("train", [*BASE, "--fp16", "--bf16"], "--fp16, --bf16: one at a time"),
        ("generate", ["--path", "no.pt", "--beam", "0"], "--beam 0: must be at least 1"),
        ("interactive", ["--path", "no.pt", "--lenpen", "inf"], "--lenpen inf: must be finite"),
        (
            "validate",
            ["--path", "no.pt", "--task", "translation", "--max-tokens", "0"],
            "--max-tokens 0: must be at least 1",
        ),
    ],
)
def test_a_value_out_of_range_is_misuse(run_command, command, flags, told):
    criterion = ["--criterion", "ls_label_smoothed_cross_entropy"] if command == "train" else []
    status, errors = run_command(command, "data", *flags, *criterion)
    assert status == 2
    assert_one_line(errors, told)


def test_ls_adam_refuses_sharding_before_the_model_is_built(run_command, commands, tmp_path):
    status, errors = run_command(
        "train", commands.data, *BASE, "--ddp-backend", "fully_sharded", "--save-dir", tmp_path
    )
    assert status == 2
    assert_one_line(errors, "--optimizer ls_adam: --ddp-backend fully_sharded is unsupported")


def test_data_that_is_cut_off(run_command, commands, tmp_path):
    """Of a subset that training reads at the end of an epoch only: no update is made before."""
    shutil.copytree(commands.data, tmp_path / "bin")
    path = tmp_path / "bin" / "valid.de-en.en.bin"
    path.write_bytes(path.read_bytes()[:-2])
    status, errors = run_command("train", tmp_path / "bin", *BASE, "--save-dir", tmp_path / "save")
    assert status == 1
    assert_one_line(errors, f"data {path}: must have", "is cut off")


def test_token_outside_the_dictionary(run_command, commands, tmp_path):
    """The data directory of one run with the smaller dictionary of another."""
    for path in commands.data.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "dict.de.txt").unlink()
    (tmp_path / "dict.de.txt").write_text(
        "\n".join((commands.data / "dict.de.txt").read_text().splitlines()[:5]) + "\n"
    )
    status, errors = run_command(
        "train", tmp_path, *BASE, "--lr", "0.1", "--save-dir", tmp_path / "save", "--num-workers", "0"
    )
    assert status == 1
    assert_one_line(errors, ".bin: token ids must lie in", "another dictionary")


def test_help_and_bad_flags_keep_argparse_statuses(run_command):
    assert run_command("train", "--help")[0] == 0
    assert run_command("train", "data", *BASE, "--no-such-flag")[0] == 2


def test_a_short_flag_names_the_architecture(run_command, tmp_path):
    status, errors = run_command("train", tmp_path, "-a", *BASE[1:])
    assert status == 1
    assert_one_line(errors, "cannot infer the languages")


def raising(error):
    def main(cfg, **_):
        raise error

    return main


@pytest.mark.parametrize(
    "error", [RuntimeError(), KeyError(None), AssertionError("query dim 3 != 4")], ids=["runtime", "key", "assertion"]
)
def test_errors_that_only_resemble_misuse_keep_their_traceback(run_command, monkeypatch, tmp_path, error):
    monkeypatch.setattr(train, "_stock_main", raising(error))
    status, errors = run_command("train", tmp_path, *BASE)
    assert status == 1
    assert "Traceback" in errors
    assert "required" not in errors


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--max-source-positions", "4"], "Size of sample #"),
        (["--max-source-positions", "1", "--skip-invalid-size-inputs-valid-test"], "The dataset is empty"),
        (["--share-all-embeddings"], "--share-all-embeddings requires a joined dictionary"),
    ],
    ids=["long sentences", "no batch", "dictionaries"],
)
def test_data_that_does_not_fit_the_flags_takes_one_line(run_command, commands, tmp_path, flags, told):
    flags = [*BASE, *flags, "--max-tokens", "100000", "--save-dir", tmp_path]
    status, errors = run_command("train", commands.data, *flags)
    assert status == 1
    assert_one_line(errors, told)


def test_only_files_of_the_data_get_the_advice_to_preprocess(run_command, commands, tmp_path):
    flags = [*BASE, "--encoder-embed-path", tmp_path / "no.vec", "--save-dir", tmp_path]
    status, errors = run_command("train", commands.data, *flags)
    assert status == 1
    assert_one_line(errors, "no.vec")
    assert "fairseq-preprocess" not in errors


def test_adaptive_softmax_is_refused_before_training(run_command, commands, tmp_path):
    flags = [*BASE, "--criterion", "ls_label_smoothed_cross_entropy", "--adaptive-softmax-cutoff", "10"]
    status, errors = run_command("train", commands.data, *flags, "--save-dir", tmp_path)
    assert status == 2
    assert_one_line(errors, "--adaptive-softmax-cutoff is unsupported", "--criterion adaptive_loss")
    assert not list(tmp_path.glob("*.pt"))


def test_errors_keep_their_status_while_batches_are_read_ahead(commands, tmp_path):
    """In processes of their own, several times: Python's shutdown aborted most of them while fairseq's thread was reading."""
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "__init__.py").write_text(
        "from fairseq.trainer import Trainer\n"
        "def train_step(self, samples, raise_oom=False):\n"
        "    from ls_plugin.errors import UnsupportedError\n"
        "    raise UnsupportedError('late')\n"
        "Trainer.train_step = train_step\n"
    )
    flags = [*BASE, "--num-workers", "0", "--data-buffer-size", "1000", "--save-dir", tmp_path / "save"]
    flags += ["--user-dir", tmp_path / "late"]
    runs = [commands.start("ls_plugin.cli.train", commands.data, *flags) for _ in range(3)]
    for output in [commands.finish(run, EXIT_USAGE) for run in runs]:
        assert output.endswith("lightseq-train: error: late\n")


def test_bugs_and_ls_debug_show_the_traceback(run_command, monkeypatch, tmp_path):
    def fail(cfg, **_):
        raise ZeroDivisionError("bug")

    monkeypatch.setattr(train, "_stock_main", fail)
    status, errors = run_command("train", tmp_path, *BASE)
    assert status == 1
    assert "ZeroDivisionError: bug" in errors

    def refuse(cfg, **_):
        raise CheckpointError("checkpoint x: bad")

    monkeypatch.setattr(train, "_stock_main", refuse)
    status, errors = run_command("train", tmp_path, *BASE, LS_DEBUG="1")
    assert status == 1
    assert "Traceback" in errors
    assert "lightseq-train: error: checkpoint x: bad" in errors


def test_interrupt(run_command, monkeypatch, tmp_path):
    def interrupt(cfg, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "_stock_main", interrupt)
    status, errors = run_command("train", tmp_path, *BASE)
    assert status == 130
    assert_one_line(errors, "interrupted")


def test_another_user_dir_is_kept(monkeypatch, tmp_path):
    """Both are imported: the other through its flag, the plugin through the worker function."""
    seen = []
    monkeypatch.setattr(fairseq_cli.train, "cli_main", lambda: seen.append(list(sys.argv)))
    for flags in ([], ["--user-dir", "mine"], ["--user-dir=mine"]):
        monkeypatch.setattr(sys, "argv", ["lightseq-train", "data", *BASE, *flags])
        train.main()
    plugin_dir = str(_fairseq_command.PLUGIN_DIR)
    assert seen[0][-2:] == ["--user-dir", plugin_dir]
    assert all(plugin_dir not in argv for argv in seen[1:])
    assert fairseq_cli.train.main is train.worker_main


def test_statuses_tell_misuse_from_failure():
    assert _fairseq_command._tell("x", UnsupportedError("no")) == 2
    assert _fairseq_command._tell("x", CheckpointError("no")) == 1


@pytest.mark.parametrize("given", [["--input", "nowhere.txt"], ["--input=nowhere.txt"], []])
def test_a_file_that_cannot_be_opened_names_its_flag(monkeypatch, tmp_path, given):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightseq-interactive", "data", *given])
    with pytest.raises(FileNotFoundError) as caught:
        Path("nowhere.txt").read_text()
    status, line = _fairseq_command._known_cause(caught.value)
    assert (status, line) == (1, f"{'--input ' if given else ''}nowhere.txt: no such file or directory")


def test_a_folder_of_code_that_is_not_there(run_command):
    status, errors = run_command("train", "data", *BASE, "--user-dir", "/nowhere")
    assert status == 1
    assert_one_line(errors, "--user-dir /nowhere: no such file or directory")


def test_a_translation_model_is_no_language_model():
    model = torch.nn.Linear(1, 1)
    with pytest.raises(AttributeError) as caught:
        model.supported_targets  # noqa: B018 (as fairseq's task asks)
    status, line = _fairseq_command._known_cause(caught.value)
    assert status == 1 and line.startswith("--task language_modeling: must have a language model, got 'Linear'; ")
