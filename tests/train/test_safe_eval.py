"""Strings of a configuration are data: what fairseq gives to ``eval`` cannot run code, wherever it comes from."""

import ast
import importlib
import sys
from argparse import Namespace
from pathlib import Path

import fairseq
import fairseq_cli
import pytest
import torch
from fairseq import checkpoint_utils, criterions, models, utils
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY
from omegaconf import OmegaConf

from ls_plugin import safe_eval
from ls_plugin.errors import CheckpointError
from ls_plugin.safe_eval import MAX_ELEMENTS, NotDataError, evaluate


@pytest.mark.parametrize(
    "text, value",
    [
        ("(0.9, 0.98)", (0.9, 0.98)),
        ("[(512, 3)] * 2 + [(1024, 3)]", [(512, 3), (512, 3), (1024, 3)]),
        ("2 * [True]", [True, True]),
        (" {'beam': 4, 'lenpen': -1e-3} ", {"beam": 4, "lenpen": -1e-3}),
        ("5 * 1e-4", 5e-4),
        ("1 / 8", 0.125),
        ("not True", False),
        ("'prefix'", "prefix"),
        ("None", None),
        ("{1, 2}", {1, 2}),
        (f"[0] * {MAX_ELEMENTS - 1}", [0] * (MAX_ELEMENTS - 1)),
    ],
)
def test_values(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "print(1)",
        "().__class__",
        "os",
        "lambda: 1",
        "[x for x in (1, 2)]",
        "[*'ab']",
        "(1)(2)",
        "'a' * 9",
        "2 ** 9",
        "f'{1}'",
        "{**{}}",
        "[0][0]",
        "(x := 1)",
        "1 / 0",
        "[0] * 1.5",
        f"[0] * {MAX_ELEMENTS + 1}",
        "[[0] * 9000] * 9000",
        "[0] * 10000 * 10000",
        "[()] * 300000",
        "[[[]] * 9000] * 9000",
        "{[]: 1}",
        "(" * 5000 + ")" * 5000,
        "-" * 9000 + "1",
        "1" * 20_000,
        "",
        "a b",
    ],
)
def test_what_is_no_value_is_refused(text):
    with pytest.raises(NotDataError, match=r"configuration: must be numbers, strings, lists, tuples or dicts, .* got"):
        evaluate(text)


def test_every_module_of_fairseq_that_calls_eval_has_ours():
    """Found in the sources, so one that a later release adds is here too."""
    found, absent = [], []
    for package in (fairseq, fairseq_cli):
        folder = Path(package.__path__[0])
        for path in sorted(folder.rglob("*.py")):
            if "examples" in path.parts or not _calls_eval(path):
                continue
            name = ".".join((package.__name__, *path.relative_to(folder).with_suffix("").parts))
            try:
                found.append(importlib.import_module(name))
            except ImportError:  # an optional package that it needs is missing, so it cannot run
                absent.append(name)
    assert len(found) >= 15 and utils in found
    assert [module.__name__ for module in found if module.eval is not evaluate] == []
    assert len(absent) <= 2, absent


def _calls_eval(path: Path) -> bool:
    return any(isinstance(n, ast.Name) and n.id == "eval" for n in ast.walk(ast.parse(path.read_text())))


def test_a_module_that_is_imported_later_has_ours_before_its_code_runs():
    name = "fairseq.models.fconv_lm"
    before = sys.modules.pop(name)
    registries = [dict(r) for r in (models.MODEL_REGISTRY, ARCH_CONFIG_REGISTRY)]
    finder = next(f for f in sys.meta_path if isinstance(f, safe_eval._Finder))
    spec = finder.find_spec(name, fairseq.models.__path__)
    module = importlib.util.module_from_spec(spec)
    try:
        with pytest.raises(ValueError, match="Cannot register duplicate model"):
            spec.loader.exec_module(module)
    finally:
        sys.modules[name] = before
    assert module.eval is evaluate
    assert registries == [dict(r) for r in (models.MODEL_REGISTRY, ARCH_CONFIG_REGISTRY)]


def test_the_values_of_fairseqs_own_architectures_are_what_they_were():
    n_strings = 0
    for configure in set(ARCH_CONFIG_REGISTRY.values()):
        args = Namespace()
        try:
            configure(args)
        except AttributeError:
            continue  # it needs flags that have no default
        for text in vars(args).values():
            if isinstance(text, str) and text.startswith(("(", "[", "{")):
                assert evaluate(text) == eval(text, {"__builtins__": {}})
                n_strings += 1
    assert n_strings >= 5


# --- through a checkpoint

FCONV = ("encoder_layers", "decoder_layers", "decoder_attention")
SELF_ATTENTION = (*FCONV, "encoder_attention", "self_attention", "project_input", "gated_attention", "downsample")
TRANSLATION_KEYS = [
    *(("transformer", key) for key in ("adaptive_softmax_cutoff",)),
    *(("ls_transformer", key) for key in ("adaptive_softmax_cutoff",)),
    *(("fconv", key) for key in FCONV),
    *(("fconv_self_att", key) for key in (*SELF_ATTENTION, "pretrained")),
    ("lightconv", "adaptive_softmax_cutoff"),
]
LANGUAGE_MODEL_KEYS = [
    *(("transformer_lm", key) for key in ("character_filters", "adaptive_softmax_cutoff", "adaptive_input_cutoff")),
    *(("fconv_lm", key) for key in ("decoder_layers", "decoder_attention", "adaptive_softmax_cutoff")),
    *(("lightconv_lm", key) for key in ("character_filters", "adaptive_input_cutoff")),
    ("wav2vec2", "conv_feature_layers"),
    ("wav2vec", "conv_feature_layers"),
    ("wav2vec", "conv_aggregator_layers"),
]
# What brings a model to the key, where its defaults pass it by.
WITH = {
    "adaptive_softmax_cutoff": {"criterion": "adaptive_loss"},
    "adaptive_input_cutoff": {"adaptive_input": True},
    "character_filters": {"character_embeddings": True},
}


@pytest.fixture
def canary(tmp_path):
    """A file that hostile strings would write, and such a string."""
    path = tmp_path / "PWNED"
    return path, f"[(64, 3)] * (1 + len([__import__('pathlib').Path({str(path)!r}).touch()]))"


def hostile_checkpoint(path: Path, source: Path, model: dict, **parts) -> Path:
    """A whole checkpoint of a stock run, of another model."""
    state = torch.load(source, weights_only=False)
    kept = state["cfg"]["model"]
    state["cfg"]["model"] = {**(vars(kept) if isinstance(kept, Namespace) else kept), **model}
    for part, fields in parts.items():
        state["cfg"][part] = {**state["cfg"][part], **fields}
    torch.save(state, path)
    return path


@pytest.mark.parametrize("arch, key", TRANSLATION_KEYS)
def test_a_stored_string_of_a_translation_model(arch, key, trained, commands, tmp_path, canary):
    written, hostile = canary
    model = {"_name": arch, "arch": arch, key: hostile}
    if "conv" in arch:  # of the checkpoint's Transformer, which has numbers there
        ok = {"encoder_layers": "[(32, 3)]", "decoder_layers": "[(32, 3)]", "decoder_attention": "True"}
        if arch.startswith("fconv"):
            model = {**ok, "encoder_attention": "False", "self_attention": "False", "project_input": "False", **model}
            model = {"gated_attention": "False", "downsample": "False", "pretrained": "False", **model}
    if arch == "lightconv":
        conv = {"kernel_size_list": [3, 3], "conv_type": "dynamic", "glu": False}
        model = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in conv.items()} | model
        model |= {"weight_softmax": True, "relu_dropout": 0.0, "input_dropout": 0.0, "weight_dropout": 0.0}
    path = hostile_checkpoint(tmp_path / "hostile.pt", trained["stock"][0] / "checkpoint_last.pt", model)
    with pytest.raises(CheckpointError, match=rf"checkpoint {path}: model\.{key}: must be numbers"):
        checkpoint_utils.load_model_ensemble_and_task([str(path)], arg_overrides={"data": str(commands.data)})
    assert not written.exists()


@pytest.mark.parametrize("arch, key", LANGUAGE_MODEL_KEYS)
def test_a_stored_string_of_another_model(arch, key, canary, monkeypatch):
    written, hostile = canary
    dictionary = Dictionary()
    task = Namespace(source_dictionary=dictionary, target_dictionary=dictionary, dictionary=dictionary)
    model = {"_name": arch, "arch": arch, "tokens_per_sample": 64, **WITH.get(key, {}), key: hostile}
    if arch == "transformer_lm":
        model["max_target_positions"] = 64
    if arch == "lightconv_lm":
        model |= {"attention_dropout": 0.0, "decoder_layers": 6}
    monkeypatch.setattr(safe_eval, "_origins", {})
    safe_eval.remember_origin("c.pt", {"model": model})
    cfg = Namespace(**model) if arch not in models.MODEL_DATACLASS_REGISTRY else OmegaConf.create(model)
    with pytest.raises(CheckpointError, match=rf"checkpoint c\.pt: model\.{key}: must be numbers"):
        models.build_model(cfg, task, from_checkpoint=True)
    assert not written.exists()


def test_a_stored_string_of_a_criterion(canary, monkeypatch):
    written, hostile = canary
    task = Namespace(target_dictionary=Namespace(index=lambda _: 0, bos=lambda: 0, pad=lambda: 1, eos=lambda: 2))
    monkeypatch.setattr(safe_eval, "_origins", {})
    safe_eval.remember_origin("c.pt", {"criterion": {"wer_args": hostile}})
    with pytest.raises(CheckpointError, match=r"checkpoint c\.pt: criterion\.wer_args: must be numbers"):
        criterions.build_criterion(OmegaConf.create({"_name": "ctc", "wer_args": hostile}), task)
    assert not written.exists()


@pytest.mark.parametrize("command", ["generate", "validate"])
def test_a_command_refuses_it_in_one_line(command, trained, commands, tmp_path, canary):
    """And does not import the folder that the checkpoint names as its --user-dir."""
    written, hostile = canary
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / "__init__.py").write_text(f"open({str(tmp_path / 'IMPORTED')!r}, 'w')")
    model = {"_name": "transformer", "arch": "transformer", "adaptive_softmax_cutoff": hostile}
    source = trained["stock"][0] / "checkpoint_last.pt"
    path = hostile_checkpoint(tmp_path / "hostile.pt", source, model, common={"user_dir": str(folder)})
    flags = [commands.data, "--path", path, "--cpu", "--max-tokens", "200"]
    log = commands.run(f"ls_plugin.cli.{command}", *flags, "--task", "translation", status=1)
    line = log.strip().splitlines()[-1]
    assert line.startswith(f"lightseq-{command}: error: checkpoint {path}: model.adaptive_softmax_cutoff: must be")
    assert "Traceback" not in log
    assert not written.exists() and not (tmp_path / "IMPORTED").exists()
