"""Every flag that is honoured, for every family: same weights in, same outputs and gradients out as fairseq's own model.

fp64 runs the reference ops and shows that the maths is the same; fp32 runs the kernels, and in training one autograd node per layer. There
the errors against stock in fp64 are compared, by the rule of the op tests: ours may be twice (gradients three times) stock's own.
"""

import copy
import dataclasses
import re
from collections.abc import Callable

import pytest
import torch
from fairseq import utils
from fairseq.modules import gelu
from torch import Tensor

from ls_plugin.models.unsupported import ACTIVATIONS
from ls_plugin.modules import TransformerDecoderLayer, TransformerEncoderLayer
from ls_plugin.optim import ContiguousAdam
from tests.models.families import PAD, PADDINGS, batch, build_twins
from tests.ops.accuracy import GRAD_FACTOR, VALUE_FACTOR, assert_as_accurate

EVALUATED = ("left", "empty sentence")
OUR_LAYERS = (TransformerEncoderLayer, TransformerDecoderLayer)
FP64_TOLERANCE = 1e-12  # of the largest value


@dataclasses.dataclass(frozen=True)
class Case:
    """A family, the options of the model, how it is called, and a regular expression for the parameters that are not trained."""

    family: str
    options: dict = dataclasses.field(default_factory=dict)
    call: Callable | None = None
    frozen: str = "nothing"


PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
ODD = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("embed_dim", 20), ("ffn_embed_dim", 37))}


def _with(**arguments) -> Callable:
    return lambda model, inputs: model(**inputs, **arguments)


def _aligned(**arguments) -> Callable:
    """With a term of the attention in the output, so that the gradient flows through the attention, as from the loss over alignments."""

    def call(model, inputs):
        output, extra = model(**inputs, **arguments)
        words = inputs["prev_output_tokens"].ne(PAD)
        return output + extra["attn"][0][words].square().sum(), extra

    return call


def _full_context_alignment(model, inputs):
    if not hasattr(model, "encoder"):
        return model.decoder(inputs["src_tokens"], full_context_alignment=True)
    encoder_out = model.encoder(inputs["src_tokens"], src_lengths=inputs["src_lengths"])
    return model.decoder(inputs["prev_output_tokens"], encoder_out=encoder_out, full_context_alignment=True)


def _token_embeddings(model, inputs):
    """Embeddings of the caller's own, to which the gradient flows through a table here."""
    encoder = getattr(model.encoder, "sentence_encoder", model.encoder)
    embedded = encoder.embed_tokens.weight.tanh()[inputs["src_tokens"]]
    encoder_out = encoder(inputs["src_tokens"], token_embeddings=embedded, return_all_hiddens=True)
    if not hasattr(model, "decoder"):
        return encoder_out["encoder_out"][0].transpose(0, 1), {"inner_states": encoder_out["encoder_states"]}
    return model.decoder(inputs["prev_output_tokens"], encoder_out=encoder_out)


def _classify(model, inputs):
    if "nli" not in model.classification_heads:
        torch.manual_seed(11)
        model.register_classification_head("nli", num_classes=3, inner_dim=16)
        model.classification_heads.to(next(model.parameters()))
    if "prev_output_tokens" in inputs:  # BART's head looks for the end of the source in the target
        inputs = {**inputs, "prev_output_tokens": inputs["src_tokens"]}
    return model(**inputs, classification_head_name="nli")


def _masked_tokens(model, inputs):
    masked = torch.zeros_like(inputs["src_tokens"], dtype=torch.bool)
    masked[:, 1::3] = True
    return model(**inputs, masked_tokens=masked & inputs["src_tokens"].ne(PAD))


def _regularized(model, inputs):
    """AdaPruning's terms, which sentence_prediction adds to the loss."""
    output, extra = model(**inputs)
    return output + model._get_adaptive_head_loss() + model._get_adaptive_ffn_loss(), extra


TRANSFORMER = {
    "post_norm": {},
    "pre_norm": PRE_NORM,
    "no_decoder_final_norm": {**PRE_NORM, "no_decoder_final_norm": True},
    "mixed_norm": {"encoder_normalize_before": True},
    **{f"activation_{name}": {"activation_fn": name} for name in ACTIVATIONS},
    "relu_dropout_off": {"relu_dropout": 0.0},
    "tied_output": {"share_decoder_input_output_embed": True},
    "share_all": {"share_all_embeddings": True},
    "merge_embeddings": {"merge_src_tgt_embed": True},
    "learned_positions": {"encoder_learned_pos": True, "decoder_learned_pos": True},
    "no_positions": {"no_token_positional_embeddings": True},
    "layernorm_embedding": {"layernorm_embedding": True},
    "no_scale_embedding": {"no_scale_embedding": True},
    "unequal_widths": {"decoder_embed_dim": 40, "decoder_ffn_embed_dim": 56},
    "decoder_output_dim": {"decoder_output_dim": 24},
    "no_cross_attention": {"no_cross_attention": True, "cross_self_attention": True},
    "cross_self_attention": {"cross_self_attention": True},
    "cross_self_attention_pre_norm": {**PRE_NORM, "cross_self_attention": True},
    "layerdrop": {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5, "encoder_layers": 4, "decoder_layers": 4},
    "checkpoint_activations": {"checkpoint_activations": True},
    "offload_activations": {"offload_activations": True},
    "adaptive_softmax": {"adaptive_softmax_cutoff": "8,16", "adaptive_softmax_dropout": 0.0},
    "odd_widths": {**ODD, "decoder_attention_heads": 2},
    "unequal_depths": {"encoder_layers": 1, "decoder_layers": 3},
    "many_at_once": {
        **PRE_NORM,
        **{"layernorm_embedding": True, "encoder_learned_pos": True, "activation_fn": "gelu_accurate"},
        **{"decoder_embed_dim": 40, "decoder_output_dim": 24, "encoder_layerdrop": 0.4, "decoder_layerdrop": 0.4},
        **{"checkpoint_activations": True, "encoder_layers": 4, "decoder_layers": 3, "decoder_attention_heads": 2},
    },
    "cross_self_at_once": {
        **{"decoder_normalize_before": True, "cross_self_attention": True, "share_all_embeddings": True},
        **{"checkpoint_activations": True, "decoder_layerdrop": 0.4, "activation_fn": "tanh", "decoder_layers": 3},
    },
}
LANGUAGE_MODEL = {
    "post_norm": {},
    "pre_norm": PRE_NORM,
    "no_decoder_final_norm": {**PRE_NORM, "no_decoder_final_norm": True},
    "gpt": {**PRE_NORM, "activation_fn": "gelu", "decoder_learned_pos": True, "share_decoder_input_output_embed": True},
    "no_positions": {"no_token_positional_embeddings": True},
    "layernorm_embedding": {"layernorm_embedding": True},
    "no_scale_embedding": {"no_scale_embedding": True},
    "decoder_input_dim": {"decoder_input_dim": 24},
    "decoder_output_dim": {"decoder_output_dim": 24},
    "layerdrop": {"decoder_layerdrop": 0.5, "decoder_layers": 4},
    "checkpoint_activations": {"checkpoint_activations": True},
    "offload_activations": {"offload_activations": True},
    "adaptive_softmax": {"adaptive_softmax_cutoff": "8,16"},
    "adaptive_input": {"adaptive_input": True, "adaptive_input_cutoff": "8,16"},
    "adaptive_tied": {
        **{"adaptive_input": True, "adaptive_input_cutoff": "8,16", "adaptive_softmax_cutoff": "8,16"},
        **{"tie_adaptive_weights": True, "tie_adaptive_proj": True},
    },
    "character_embeddings": {"character_embeddings": True, "character_filters": "[(1, 8), (2, 8)]"},
    "odd_widths": {**ODD, "decoder_input_dim": 20, "decoder_output_dim": 20},
}
BART = {
    "bart": {},
    "mbart": {"no_scale_embedding": False, **PRE_NORM},
    "no_layernorm_embedding": {"layernorm_embedding": False},
    "untied": {"share_all_embeddings": False, "share_decoder_input_output_embed": False},
    "sinusoidal_positions": {"encoder_learned_pos": False, "decoder_learned_pos": False},
    "layerdrop": {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5},
    "checkpoint_activations": {"checkpoint_activations": True},
}
ROBERTA = {
    "roberta": {},
    "prenorm": {"encoder_normalize_before": True, "layernorm_embedding": False},
    "untied": {"untie_weights_roberta": True},
    "tanh": {"activation_fn": "tanh"},
    "sinusoidal_positions": {"encoder_learned_pos": False},
    "no_positions": {"no_token_positional_embeddings": True},
    "scaled_embedding": {"no_scale_embedding": False},
    "layerdrop": {"encoder_layerdrop": 0.5, "encoder_layers": 4},
    "checkpoint_activations": {"checkpoint_activations": True},
    "odd_widths": ODD,
}
CALLS = {
    "features_only": (("transformer", "bart", "transformer_lm", "roberta"), {}, _with(features_only=True)),
    "no_hiddens": (("transformer", "bart"), {}, _with(return_all_hiddens=False)),
    "all_hiddens": (("roberta",), {}, _with(return_all_hiddens=True)),
    "alignment_layer": (("transformer", "bart"), {}, _aligned(alignment_layer=0)),
    "alignment_heads": (("transformer", "bart"), {}, _aligned(alignment_layer=1, alignment_heads=1)),
    "full_context_alignment": (("transformer", "bart", "transformer_lm"), {}, _full_context_alignment),
    "full_context_cross_self": (("transformer",), {"cross_self_attention": True}, _full_context_alignment),
    "token_embeddings": (("transformer", "bart", "roberta"), {}, _token_embeddings),
    "classification_head": (("bart", "roberta"), {}, _classify),
    "spectral_norm_head": (("bart", "roberta"), {"spectral_norm_classification_head": True}, _classify),
    "masked_tokens": (("roberta",), {}, _masked_tokens),
    "adaptive_pruning_loss": (
        ("roberta",),
        {"mha_reg_scale_factor": 0.01, "ffn_reg_scale_factor": 0.02},
        _regularized,
    ),
}
CASES = {
    f"{family}-{name}": Case(family, options)
    for family, flags in (
        ("transformer", TRANSFORMER),
        ("transformer_lm", LANGUAGE_MODEL),
        ("bart", BART),
        ("roberta", ROBERTA),
    )
    for name, options in flags.items()
}
# Fine-tuning with parts of the model fixed: whole stacks, and single weights, whose neighbours share a product or a node with them.
FROZEN = {
    "encoder": r"encoder\.",
    "decoder_layers": r"decoder\.layers",
    "embeddings": r".*embed_tokens",
    "all_but_norms": r"(?!.*layer_norm)",
    "all_but_keys": r"(?!.*k_proj\.weight)",
    "queries_and_biases": r".*(q_proj|fc1\.bias|out_proj\.bias|layers\.1\.fc2\.weight)",
}
CASES |= {
    f"{family}-frozen_{name}": Case(family, frozen=pattern)
    for name, pattern in FROZEN.items()
    for family in ("transformer", "roberta")
    if (family, name) not in (("roberta", "encoder"), ("roberta", "decoder_layers"))
}
CASES |= {
    f"{family}-{name}": Case(family, options, call)
    for name, (families, options, call) in CALLS.items()
    for family in families
}


@dataclasses.dataclass
class Result:
    """What a model gave: the output at words, its states at words, the attention, and the gradients by name."""

    output: Tensor
    states: list[Tensor]
    attn: Tensor | None
    grads: dict[str, Tensor | None]


def _in_fp64(model):
    """A copy in fp64, without the detour over fp32 that fairseq's gelu makes; our layers know their activation by name."""
    exact = copy.deepcopy(model).double()
    for module in exact.modules():
        if getattr(module, "activation_fn", None) is gelu and not isinstance(module, OUR_LAYERS):
            module.activation_fn = torch.nn.functional.gelu
    return exact


def _run(case: Case, model, inputs: dict[str, Tensor], train: bool) -> Result:
    model.train(train)
    model.zero_grad()
    torch.default_generator.manual_seed(
        3
    )  # of layerdrop; torch.manual_seed costs a millisecond for each kind of absent accelerator
    with torch.set_grad_enabled(train):
        output, extra = (case.call or _with())(model, inputs)
        target = inputs.get("prev_output_tokens", inputs["src_tokens"])
        words = target.ne(PAD)
        if case.call is _classify:
            target, words = inputs["src_tokens"], inputs["src_tokens"].ne(PAD)
            at_words = output[words.any(1)]
        elif case.call is _masked_tokens:
            at_words = output
        else:
            at_words = output[words]
        if train:
            _loss(model, at_words, target[words]).backward()
    states = [state.transpose(0, 1)[words].detach() for state in extra.get("inner_states") or []]
    attn = (extra.get("attn") or [None])[0]
    attn = attn[words].detach() if attn is not None else None
    return Result(at_words.detach(), states, attn, {name: p.grad for name, p in model.named_parameters()})


def _loss(model, output: Tensor, target: Tensor) -> Tensor:
    """A sum over all outputs with weights of both signs; adaptive softmax has its own."""
    adaptive = getattr(getattr(model, "decoder", None), "adaptive_softmax", None)
    if adaptive is not None:
        outputs, targets = adaptive(output, target)
        pairs = [(o, t) for o, t in zip(outputs, targets, strict=True) if o is not None]
        return sum(torch.nn.functional.cross_entropy(o, t, reduction="sum") for o, t in pairs)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return (output * weights).sum() + output.square().sum()


def _expected_inputs(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The batch without its empty sentence, of which fairseq makes NaN; it must change nothing for the others."""
    return {name: t[1:] for name, t in inputs.items()} if inputs["src_tokens"][0].eq(PAD).all() else inputs


@pytest.fixture
def softmax_in_fp64(monkeypatch):
    """Spares fp64 the detour over fp32 that the softmax of fairseq's attention over the encoder makes; fp32 stays as it is."""

    def softmax(x: Tensor, dim: int, onnx_trace: bool = False) -> Tensor:
        return torch.softmax(x, dim, torch.promote_types(x.dtype, torch.float32))

    monkeypatch.setattr(utils, "softmax", softmax)


@pytest.mark.usefixtures("softmax_in_fp64")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_equals_stock(case):
    stock, ours = build_twins(case.family, **case.options)
    assert stock.state_dict().keys() == ours.state_dict().keys()
    for (name, p), q in zip(stock.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(p, q), f"initial {name}"
    ours.load_state_dict(stock.state_dict(), strict=True)
    stock.load_state_dict(ours.state_dict(), strict=True)

    for model in (stock, ours):
        for name, p in model.named_parameters():
            p.requires_grad_(re.match(case.frozen, name) is None)
    exact_stock, exact_ours = (_in_fp64(model) for model in (stock, ours))
    paddings = [
        name for name in PADDINGS if name != "empty sentence" or (case.family, case.call) != ("bart", _classify)
    ]
    for padding in paddings:
        inputs = batch(case.family, padding)
        expected_inputs = _expected_inputs(inputs)
        for train in (True, False) if padding in EVALUATED else (True,):
            exact = _run(case, exact_stock, expected_inputs, train)
            _compare(_run(case, exact_ours, inputs, train), exact, exact, train, f"{padding}, fp64")
            torch_result = _run(case, stock, expected_inputs, train)
            _compare(_run(case, ours, inputs, train), torch_result, exact, train, f"{padding}, fp32")


def _compare(actual: Result, torch_result: Result, exact: Result, train: bool, what: str) -> None:
    what = f"{what}, {'train' if train else 'eval'}"
    _assert_close(actual.output, torch_result.output, exact.output, VALUE_FACTOR, f"{what}, output")
    assert len(actual.states) == len(exact.states), what
    for i, states in enumerate(zip(actual.states, torch_result.states, exact.states, strict=True)):
        _assert_close(*states, VALUE_FACTOR, f"{what}, state {i}")
    if exact.attn is None:
        assert actual.attn is None, what
    elif not train or actual.attn is not None:  # in training it is computed where it is asked for
        _assert_close(actual.attn, torch_result.attn, exact.attn, VALUE_FACTOR, f"{what}, attention")
    assert actual.grads.keys() == exact.grads.keys()
    scale = max((g.abs().max().item() for g in exact.grads.values() if g is not None), default=0.0)
    for name, grad in exact.grads.items():
        assert (actual.grads[name] is None) == (grad is None), f"{what}, {name}"
        if grad is not None:
            _assert_close(
                actual.grads[name], torch_result.grads[name], grad, GRAD_FACTOR, f"{what}, grad of {name}", scale
            )


def _assert_close(
    actual: Tensor, torch_result: Tensor, exact: Tensor, factor: float, what: str, magnitude: float = 0.0
) -> None:
    if actual.dtype == torch.float64:
        torch.testing.assert_close(
            actual,
            exact,
            rtol=0,
            atol=FP64_TOLERANCE * max(exact.abs().max().item(), magnitude, 1.0) if exact.numel() else 0,
            msg=lambda m: f"{what}: {m}",
        )
    else:
        assert_as_accurate(actual, torch_result, exact, factor, what, magnitude)


IN_BUFFERS = [
    *(
        "transformer-post_norm",
        "transformer-share_all",
        "transformer-merge_embeddings",
        "transformer-cross_self_attention",
    ),
    *("transformer-unequal_widths", "transformer-many_at_once", "transformer-frozen_all_but_keys"),
    *("transformer-frozen_decoder_layers", "transformer-frozen_queries_and_biases", "transformer-alignment_heads"),
    *("transformer_lm-gpt", "transformer_lm-adaptive_tied", "transformer_lm-layerdrop", "bart-bart", "roberta-roberta"),
    *("roberta-untied", "roberta-checkpoint_activations", "roberta-adaptive_pruning_loss"),
]


@pytest.mark.parametrize("name", IN_BUFFERS)
def test_gradients_accumulate_in_the_buffers_of_the_optimizer(name):
    """Two batches a step, two steps: with ls_adam the gradients of a node are written into one buffer, or added to what is there."""
    case = CASES[name]
    stock, ours = build_twins(case.family, **case.options)
    for model in (stock, ours):
        for parameter_name, p in model.named_parameters():
            p.requires_grad_(re.match(case.frozen, parameter_name) is None)
    optimizer = ContiguousAdam([p for p in ours.parameters() if p.requires_grad], lr=1e-3)
    for step in range(2):
        stock.load_state_dict(ours.state_dict(), strict=True)
        stock.zero_grad()
        optimizer.zero_grad()
        for padding in ("left", "unpadded"):
            for model in (stock, ours):
                _backward(case, model, batch(case.family, padding))
        expected = {parameter_name: p.grad for parameter_name, p in stock.named_parameters()}
        scale = max(grad.abs().max().item() for grad in expected.values() if grad is not None)
        for parameter_name, p in ours.named_parameters():
            grad = expected[parameter_name]
            assert (p.grad is None) == (grad is None), parameter_name
            if grad is not None:
                assert (p.grad - grad).abs().max().item() <= 1e-5 * scale, f"step {step}, {parameter_name}"
        optimizer.step()


def _backward(case: Case, model, inputs: dict[str, Tensor]) -> None:
    model.train()
    torch.default_generator.manual_seed(3)
    output, _ = (case.call or _with())(model, inputs)
    target = inputs.get("prev_output_tokens", inputs["src_tokens"])
    words = target.ne(PAD)
    _loss(model, output[words], target[words]).backward()
