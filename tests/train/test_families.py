"""Language models, BART and RoBERTa from the command line, through Hydra, and back from their checkpoints, by stock fairseq too."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from fairseq import models, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models.bart import BARTModel
from fairseq.models.roberta import RobertaModel
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel
from fairseq_cli import eval_lm, preprocess, train

PLUGIN = Path(__file__).resolve().parents[2] / "ls_plugin"
COMMON = shlex.split(
    "--lr 5e-3 --lr-scheduler inverse_sqrt --warmup-updates 4 --max-update 3 --max-tokens 256 --num-workers 0 --seed 7 --dropout 0 "
    "--log-format none --cpu"
)
ENCODER = "--encoder-embed-dim 32 --encoder-ffn-embed-dim 64 --encoder-layers 2 --encoder-attention-heads 2"
DECODER = "--decoder-layers 2 --decoder-attention-heads 2"
LM_WIDTHS = "--decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32 --decoder-ffn-embed-dim 64"
MONOLINGUAL = "--tokens-per-sample 32 --task"
# By stock architecture.
FLAGS = {
    "transformer": f"--criterion label_smoothed_cross_entropy {ENCODER} {DECODER}",
    "transformer_lm": f"--criterion cross_entropy {MONOLINGUAL} language_modeling {LM_WIDTHS} {DECODER}",
    "bart_base": f"--criterion cross_entropy {MONOLINGUAL} denoising --mask 0.3 --mask-length word {ENCODER} {DECODER}",
    "roberta": f"--criterion masked_lm {MONOLINGUAL} masked_lm {ENCODER}",
}
OUR_CRITERIONS = {
    "transformer": "--criterion ls_label_smoothed_cross_entropy",
    "transformer_lm": "--criterion ls_cross_entropy",
    "bart_base": "--criterion ls_cross_entropy",
    "roberta": "",
}
STOCK_CLASSES = {
    "transformer": TransformerModel,
    "transformer_lm": TransformerLanguageModel,
    "bart_base": BARTModel,
    "roberta": RobertaModel,
}


@pytest.fixture(scope="module")
def data(commands) -> dict[str, Path]:
    """The data of each architecture: pairs, or the English side alone."""
    english = commands.data.parent / "english"
    prefixes = [f"--{split}pref={commands.data.parent / split}.en" for split in ("train", "valid", "test")]
    flags = ["--only-source", *prefixes, "--destdir", str(english)]
    preprocess.main(options.get_preprocessing_parser().parse_args(flags))
    return {arch: commands.data if arch == "transformer" else english for arch in FLAGS}


@pytest.fixture(scope="module")
def train_arch(data, tmp_path_factory):
    """A function that trains an architecture for three updates, once, and returns its folder of checkpoints."""
    folders: dict[str, Path] = {}

    def run(arch: str) -> Path:
        if arch not in folders:
            folders[arch] = tmp_path_factory.mktemp(arch)
            stock_arch = arch.removeprefix("ls_")
            flags = [str(data[stock_arch]), "--arch", arch, *shlex.split(FLAGS[stock_arch]), "--optimizer", "adam"]
            if arch != stock_arch:  # the last one counts
                flags += ["--optimizer", "ls_adam", *shlex.split(OUR_CRITERIONS[stock_arch])]
            flags += [*COMMON, "--save-dir", str(folders[arch])]
            args = options.parse_args_and_arch(options.get_training_parser(), flags)
            train.main(convert_namespace_to_omegaconf(args))
        return folders[arch]

    return run


def load(folder: Path) -> dict:
    return torch.load(folder / "checkpoint_last.pt", weights_only=False)


# --- fairseq-eval-lm


def test_stock_finds_the_perplexity_that_we_find_without_the_plugin(commands, data, train_arch):
    checkpoint = train_arch("ls_transformer_lm") / "checkpoint_last.pt"
    flags = [data["transformer_lm"], "--path", checkpoint, "--gen-subset", "valid", "--cpu"]
    flags += ["--tokens-per-sample", 32]  # longer blocks than in training would be left out, all of them
    process = commands.start("fairseq_cli.eval_lm", *flags, plugin=False)
    args = options.parse_args_and_arch(options.get_eval_lm_parser(), [str(flag) for flag in flags])
    ours = eval_lm.main(convert_namespace_to_omegaconf(args))
    log = commands.finish(process)
    assert "ls_plugin" not in log
    stock = re.search(r"Loss \(base 2\): ([\d.]+), Perplexity: ([\d.]+)", log)
    assert stock is not None, log
    assert stock.groups() == (f"{ours['loss']:.4f}", f"{ours['perplexity']:.2f}")
    assert 15 < ours["perplexity"] < 30  # of 24 words, after three updates; nothing scored would be 1


def test_lightseq_eval_lm_finds_it_too(commands, data, train_arch):
    """Of one model, and of several, which stock takes for one file; and it says where nothing was scored."""
    checkpoint = train_arch("ls_transformer_lm") / "checkpoint_last.pt"

    def start(path, *flags):
        flags = [data["transformer_lm"], "--path", path, "--gen-subset", "valid", "--cpu", *flags]
        return commands.start("ls_plugin.cli.eval_lm", *flags)

    runs = [
        start(checkpoint, "--tokens-per-sample", 32),
        start(f"{checkpoint}:{checkpoint}", "--tokens-per-sample", 32),
    ]
    nothing = start(checkpoint, "--tokens-per-sample", 2000)
    flags = [data["transformer_lm"], "--path", checkpoint, "--gen-subset", "valid", "--cpu", "--tokens-per-sample", 32]
    args = options.parse_args_and_arch(options.get_eval_lm_parser(), [str(flag) for flag in flags])
    expected = eval_lm.main(convert_namespace_to_omegaconf(args))
    for run in runs:
        assert f"Loss (base 2): {expected['loss']:.4f}, Perplexity: {expected['perplexity']:.2f}" in commands.finish(
            run
        )
    assert "lightseq-eval-lm: error: --gen-subset valid: no token was scored" in commands.finish(nothing, 1)


# --- from_pretrained


def hub_outputs(cls, folder: Path, data: Path) -> tuple[object, list]:
    """The model that ``cls.from_pretrained`` gives, and what it computes."""
    # BART's and RoBERTa's default is GPT-2's encoding, which is downloaded.
    no_bpe = {"bpe": None} if issubclass(cls, BARTModel | RobertaModel) else {}
    hub = cls.from_pretrained(str(folder), "checkpoint_last.pt", str(data), **no_bpe)
    model = hub.models[0] if hasattr(hub, "models") else hub.model
    model.eval()  # RoBERTa comes in train mode
    tokens = torch.tensor([[5, 6, 7, 8, 9, 2], [1, 1, 10, 4, 11, 2]])
    inputs = {"src_tokens": tokens if hasattr(model, "encoder") else tokens[:1], "src_lengths": torch.tensor([6, 4])}
    if hasattr(model, "encoder") and hasattr(model, "decoder"):
        inputs["prev_output_tokens"] = tokens.roll(1, 1)
    results = [model(**inputs)[0].flatten().tolist()]
    if cls.__name__.endswith("TransformerModel"):
        results.append(hub.translate("der hund sieht die katze", beam=4))
    return model, results


def stock_outputs() -> None:
    """What the process without the plugin runs: prints the outputs of stock's classes, as JSON."""
    arguments = json.loads(sys.argv[1])
    results = {arch: hub_outputs(STOCK_CLASSES[arch], *map(Path, paths))[1] for arch, paths in arguments.items()}
    assert "ls_plugin" not in sys.modules
    print("RESULTS", json.dumps(results))


def test_from_pretrained(commands, data, train_arch):
    """Stock's classes without the plugin, and ours, read our checkpoints; ours read stock's as well."""
    arguments = {arch: [str(train_arch(f"ls_{arch}")), str(data[arch])] for arch in FLAGS}
    (commands.data.parent / "stock_outputs.py").write_text(
        f"import importlib.util\nspec = importlib.util.spec_from_file_location('families', {__file__!r})\n"
        "families = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(families)\nfamilies.stock_outputs()\n"
    )
    process = commands.start("stock_outputs", json.dumps(arguments), plugin=False)
    log = commands.finish(process)
    expected = json.loads(log.split("RESULTS", 1)[1])
    for arch, (folder, arch_data) in arguments.items():
        ls_class = models.ARCH_MODEL_REGISTRY[f"ls_{arch}"]
        as_stock_saves = Path(folder) / "stock_names"
        as_stock_saves.mkdir()
        state = load(Path(folder))
        assert state.pop("ls_plugin")["model"] == f"ls_{arch}"
        torch.save(state, as_stock_saves / "checkpoint_last.pt")
        for cls, path in ((ls_class, folder), (STOCK_CLASSES[arch], folder), (ls_class, as_stock_saves)):
            model, results = hub_outputs(cls, Path(path), Path(arch_data))
            assert type(model) is ls_class, arch
            torch.testing.assert_close(*(torch.tensor(r[0]) for r in (results, expected[arch])), rtol=1e-5, atol=1e-5)
            assert results[1:] == expected[arch][1:]
        model, _ = hub_outputs(STOCK_CLASSES[arch], as_stock_saves, Path(arch_data))
        assert type(model) is STOCK_CLASSES[arch]


# --- Hydra

HYDRA = [
    *("common.cpu=true", "common.log_format=none", "common.seed=7", f"common.user_dir={PLUGIN}", "hydra.run.dir=."),
    *("dataset.max_tokens=256", "dataset.num_workers=0", "optimization.lr=[0.005]", "optimization.max_update=3"),
]
LM_SIZES = {"embed_dim": 32, "input_dim": 32, "output_dim": 32, "ffn_embed_dim": 64, "layers": 2, "attention_heads": 2}
LANGUAGE_MODEL = [
    *("task=language_modeling", "task.tokens_per_sample=32"),
    *("criterion=cross_entropy", "criterion._name=ls_cross_entropy"),
    *("model=transformer_lm/transformer_lm_gpt", "+model._name=ls_transformer_lm", "model.activation_fn=relu"),
    *("model.decoder_normalize_before=false", "model.dropout=0", "model.attention_dropout=0"),
    *(f"model.decoder_{name}={n}" for name, n in LM_SIZES.items()),
    *("optimizer=adam", "optimizer._name=ls_adam", "lr_scheduler=inverse_sqrt", "lr_scheduler.warmup_updates=4"),
]
# The example of ls_plugin/README.md is trained as it stands there, but for its sizes and what is random.
TRANSFORMER_SIZES = {"embed_dim": 32, "ffn_embed_dim": 64, "layers": 2, "attention_heads": 2}
TRANSFORMER = [
    *(f"model.{side}_{name}={n}" for side in ("encoder", "decoder") for name, n in TRANSFORMER_SIZES.items()),
    *("model.dropout=0", "model.share_all_embeddings=false", "criterion.label_smoothing=0", "common.bf16=false"),
    *("lr_scheduler.warmup_updates=4", "optimizer.adam_betas='(0.9, 0.999)'", "optimization.clip_norm=0"),
]


def example_of_the_readme() -> str:
    text = (PLUGIN / "README.md").read_text()
    return text.partition("```yaml\n")[2].partition("```")[0]


@pytest.mark.parametrize("arch", ["transformer_lm", pytest.param("transformer", marks=pytest.mark.slow)])
def test_hydra_trains_as_the_command_line_does(commands, data, train_arch, tmp_path, arch):
    """A language model from one of fairseq's presets, and a translation model from a file; ls_ names are given as ``_name``.

    The groups on the command line (model=...) are stock's, since Hydra reads them before fairseq imports the plugin.
    """
    (tmp_path / "translation.yaml").write_text(example_of_the_readme())
    arguments = {
        "transformer_lm": LANGUAGE_MODEL,
        "transformer": ["--config-dir", tmp_path, "--config-name", "translation", *TRANSFORMER],
    }
    paths = [f"task.data={data[arch]}", f"checkpoint.save_dir={tmp_path}"]
    commands.run("fairseq_cli.hydra_train", *arguments[arch], *HYDRA, *paths)
    state, expected = load(tmp_path), load(train_arch(arch))
    assert state["cfg"]["model"]["_name"] == arch
    criterion = OUR_CRITERIONS[arch].split()[-1]
    assert state["ls_plugin"] == {"model": f"ls_{arch}", "criterion": criterion, "optimizer": "ls_adam"}
    assert state["extra_state"]["val_loss"] == pytest.approx(expected["extra_state"]["val_loss"], abs=2e-3)


@pytest.mark.slow
def test_every_job_of_a_hydra_sweep_trains_as_if_alone(commands, data, tmp_path):
    """In one process. The third job is the first one again; the second, whose loss is higher, has its own best checkpoint."""
    flags = [f"task.data={data['transformer_lm']}", f"hydra.sweep.dir={tmp_path}"]
    sweep = "optimization.lr=[0.005],[0.001],[0.005]"
    commands.run("fairseq_cli.hydra_train", "-m", *LANGUAGE_MODEL, *HYDRA, *flags, sweep)
    saved = [load(tmp_path / str(job) / "checkpoints") for job in range(3)]
    first, second, third = (state["extra_state"]["val_loss"] for state in saved)
    assert first == third < second
    assert [state["extra_state"]["best"] for state in saved] == [first, second, third]
    assert all((tmp_path / str(job) / "checkpoints" / "checkpoint_best.pt").exists() for job in range(3))
    assert all(state["ls_plugin"]["criterion"] == "ls_cross_entropy" for state in saved)


@pytest.mark.parametrize("ls", [False, True], ids=["roberta", "ls_roberta"])
def test_batches_without_a_masked_token_count_as_nothing(data, tmp_path, ls, caplog):
    """fairseq logs 0 / 0 for them, and one of them makes the mean of the epoch NaN."""
    flags = [str(data["roberta"]), "--arch", "ls_roberta" if ls else "roberta", *shlex.split(FLAGS["roberta"]), *COMMON]
    flags += ["--optimizer", "ls_adam" if ls else "adam", "--mask-prob", "1e-9", "--save-dir", str(tmp_path)]
    flags += ["--save-interval-updates", "1", "--log-format", "json", "--log-interval", "1"]
    args = options.parse_args_and_arch(options.get_training_parser(), flags)
    with caplog.at_level("INFO"):
        train.main(convert_namespace_to_omegaconf(args))
    logged = [json.loads(r.message) for r in caplog.records if r.name in ("train_inner", "train", "valid")]
    losses = [
        float(value) for line in logged for key, value in line.items() if key in ("loss", "train_loss", "valid_loss")
    ]
    assert len(losses) >= 5 and set(losses) == {0.0}
    names = ("checkpoint_1_1.pt", "checkpoint_last.pt")
    states = [torch.load(tmp_path / name, weights_only=False)["model"] for name in names]
    assert all(torch.equal(a, b) for a, b in zip(*(s.values() for s in states), strict=True))
