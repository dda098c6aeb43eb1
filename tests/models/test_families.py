"""What holds for every family: twins of the stock architectures, refusals by name, pruned checkpoints, and loading by name."""

import copy
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq import models
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_INV_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    MODEL_REGISTRY,
)
from fairseq.trainer import Trainer
from omegaconf import OmegaConf

from ls_plugin.errors import UnsupportedError
from ls_plugin.models import unsupported
from ls_plugin.models.unsupported import unsupported_reasons
from tests.models.families import FAMILIES, batch, build, build_twins, task, tiny_args

STOCK_MODELS = ["transformer", "transformer_lm", "bart", "roberta"]


@pytest.mark.parametrize("stock_model", STOCK_MODELS)
def test_every_stock_architecture_has_a_twin(stock_model):
    archs = ARCH_MODEL_INV_REGISTRY[stock_model]
    assert set(ARCH_MODEL_INV_REGISTRY[f"ls_{stock_model}"]) == {f"ls_{arch}" for arch in archs}
    for arch in archs:
        twin = ARCH_MODEL_REGISTRY[f"ls_{arch}"]
        assert twin is MODEL_REGISTRY[f"ls_{stock_model}"] and issubclass(twin, ARCH_MODEL_REGISTRY[arch])
        defaults, stock_defaults = (_defaults(name) for name in (f"ls_{arch}", arch))
        assert defaults == stock_defaults
    assert MODEL_DATACLASS_REGISTRY.get(f"ls_{stock_model}") is MODEL_DATACLASS_REGISTRY.get(stock_model)


def _defaults(arch: str) -> dict:
    args = Namespace(decoder_embed_dim=16)  # which GPT-3's base reads
    ARCH_CONFIG_REGISTRY[arch](args)
    return vars(args)


def test_known_presets_are_among_them():
    known = [
        "transformer_wmt_en_de_big_t2t",
        "transformer_lm_gpt3_175",
        "transformer_lm_baevski_wiki103",
        "mbart_large",
        "xlm",
    ]
    assert all(f"ls_{arch}" in ARCH_MODEL_REGISTRY for arch in known)


REFUSED = {
    "quant_noise_pq": 0.1,
    "quant_noise_scalar": 0.1,
    "quantization_config_path": "quantization.yaml",
    "encoder_xformers_att_config": "{}",
    "decoder_xformers_att_config": "{}",
    "scale_fc": True,
    "scale_attn": True,
    "scale_heads": True,
    "scale_resids": True,
    "base_layers": 1,
    "export": True,
    "adaptive_input": True,
    "tie_adaptive_weights": True,
    "tie_adaptive_proj": True,
    "char_inputs": True,
    "activation_fn": "swish",
}
PRUNING = {"mha_heads_to_keep": 2, "ffn_blocks_to_remove": 8}
# What each model has of these. A language model is built from its dataclass, which drops what it does not know.
REFUSED_BY = {
    "transformer": REFUSED,
    "bart": REFUSED,
    "transformer_lm": {
        name: value
        for name, value in REFUSED.items()
        if name in MODEL_DATACLASS_REGISTRY["transformer_lm"].__dataclass_fields__ and "adaptive" not in name
    },
    "roberta": {**REFUSED, **PRUNING},
}


@pytest.mark.parametrize(
    "family, name, value", [(family, *flag) for family, flags in REFUSED_BY.items() for flag in flags.items()]
)
def test_unsupported_flag_is_refused_by_name(family, name, value):
    with pytest.raises(UnsupportedError, match=rf"--{name.replace('_', '-')} .*--arch {FAMILIES[family][0]}"):
        build(family, ls=True, **{name: value})


def test_all_reasons_are_given_at_once():
    assert len(unsupported_reasons(tiny_args(**REFUSED))) == len(REFUSED)
    assert unsupported_reasons(tiny_args()) == []
    assert unsupported_reasons(Namespace(mha_heads_to_keep=-1, ffn_blocks_to_remove=-1)) == []


def test_nested_configurations_are_searched():
    """As a file for Hydra may have them; the defaults of the architecture then stand beside them, flat, and count for nothing."""
    nested = {"quant_noise": {"pq": 0.1}, "decoder": {"xformers_att_config": "{}"}, "encoder": {"layers": 2}}
    cfg = OmegaConf.create({"_name": "ls_transformer", "quant_noise_pq": 0, **nested})
    with pytest.raises(
        UnsupportedError, match=r"--quant-noise-pq 0\.1: .*--decoder-xformers-att-config .*--arch transformer"
    ):
        models.build_model(cfg, task())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainer_refuses_quantization_of_the_common_options(family):
    """It is no argument of the models that have a dataclass."""
    cfg = SimpleNamespace(common=SimpleNamespace(quantization_config_path="quantization.yaml"), model=Namespace())
    with pytest.raises(UnsupportedError, match=rf"--arch ls_{family}: .*--quantization-config-path .*--arch {family}"):
        Trainer(cfg, None, build(family, ls=True), None)


def test_installing_again_changes_nothing():
    before = Trainer.__init__
    unsupported.install()
    assert Trainer.__init__ is before


@pytest.mark.parametrize(
    "family, options",
    [
        ("transformer", {"encoder_layers_to_keep": "0,3"}),
        ("transformer", {"decoder_layers_to_keep": "1"}),
        ("transformer_lm", {"decoder_layers_to_keep": "1,2"}),
        ("bart", {"encoder_layers_to_keep": "0,3", "decoder_layers_to_keep": "0"}),
        ("roberta", {"encoder_layers_to_keep": "0,3"}),
    ],
)
def test_layers_to_keep_prunes_a_checkpoint_once(family, options):
    """A whole checkpoint is pruned when loaded, one that was saved by a pruned model is not; the other side keeps all layers."""
    depths = {name: 4 for name in FAMILIES[family][1] if name.endswith("coder_layers")}
    whole = build(family, ls=True, **depths)
    expected = copy.deepcopy(whole)
    for name, kept in options.items():
        side = getattr(expected, name.split("_")[0])
        stack = getattr(side, "sentence_encoder", side)
        stack.layers = torch.nn.ModuleList(stack.layers[int(i)] for i in kept.split(","))
        stack.num_layers = len(stack.layers)
    for weights in (whole.state_dict(), expected.state_dict()):
        pruned = build(family, ls=True, **depths, **options)
        pruned.load_state_dict(dict(weights), strict=True, model_cfg=tiny_args(family, **depths, **options))
        inputs = batch(family)
        assert torch.equal(pruned.eval()(**inputs)[0], expected.eval()(**inputs)[0])


@pytest.mark.parametrize("family", ["transformer", "bart"])
def test_pretrained_embeddings_are_loaded(family, tmp_path):
    vectors = tmp_path / "embed.txt"
    vectors.write_text("1 32\nword3 " + " ".join(["0.5"] * 32) + "\n")
    paths = {"encoder_embed_path": str(vectors), "decoder_embed_path": str(vectors)}
    untied = {"share_all_embeddings": False, "share_decoder_input_output_embed": False}
    stock, ours = build_twins(family, **paths, **untied)
    for side in ("encoder", "decoder"):
        embeddings = [getattr(model, side).embed_tokens for model in (stock, ours)]
        assert torch.equal(embeddings[0].weight, embeddings[1].weight)
    loaded = (ours.encoder.embed_tokens.weight == 0.5).all(1).nonzero()
    # BART draws all embeddings anew after they were loaded.
    assert loaded.flatten().tolist() == ([] if family == "bart" else [4 + 3])


@pytest.mark.parametrize("family", ["bart", "roberta"])
def test_classification_heads_load_both_ways(family):
    stock, ours = build_twins(family)
    for model, other in ((stock, ours), (ours, stock)):
        model.register_classification_head(f"of_{type(model).__name__}", num_classes=3)
        other.args.load_checkpoint_heads = True
        other.load_state_dict(model.state_dict(), strict=True)
        assert model.state_dict().keys() == other.state_dict().keys()


@pytest.mark.parametrize("mode", ["training", "evaluation"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_parameter_on_meta_is_refused(family, mode):
    """It has no values: a product with it would give what memory holds, and torch's own does."""
    model = build(family, True).train(mode == "training")
    inputs = batch(family)

    def forward():
        with torch.set_grad_enabled(mode == "training"):
            model(**inputs)[0].sum()

    forward()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(parameter.detach().to("meta")))
            with pytest.raises((RuntimeError, NotImplementedError), match=r"meta"):
                forward()
            setattr(module, name, parameter)
    forward()
