"""What somebody replaced in a built model is called as in stock: a ``forward`` on an instance, a class, a parametrised weight."""

import copy
from unittest import mock

import pytest
import torch
from fairseq.modules import MultiheadAttention
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

from ls_plugin.modules.transformer_layer import TransformerDecoderLayer
from tests.models import families

OPTIONS = {"layernorm_embedding": True, "encoder_normalize_before": True, "decoder_normalize_before": True}
# Not what is inside of self_attn: stock reads its weights and calls it in steps of decoding only.
LAYER = ("", ".self_attn", ".self_attn_layer_norm", ".fc1", ".fc2", ".final_layer_norm")
LAYER += (".dropout_module", ".activation_dropout_module")
AROUND_LAYERS = ("", ".embed_tokens", ".embed_positions", ".layernorm_embedding", ".dropout_module", ".layer_norm")
PLACES = [f"encoder{name}" for name in AROUND_LAYERS] + [f"decoder{name}" for name in AROUND_LAYERS]
PLACES += [f"{side}.layers.0{name}" for side in ("encoder", "decoder") for name in LAYER]
PLACES += ["decoder.layers.0.encoder_attn", "decoder.layers.0.encoder_attn.q_proj", "decoder.output_projection"]


def results(model, batch, training):
    """Output, and gradients by name, of one pass."""
    model.train(training).zero_grad()
    output = model(**batch)[0]
    output.square().mean().backward()
    return output, {name: p.grad for name, p in model.named_parameters()}


def assert_as_stock(change, training=True, family="transformer", after_a_forward=True, **options):
    """``change(model)`` does to ours what it does to stock, and something at all."""
    stock, ours = families.build_twins(family, **options)
    batch, found = families.batch(family), []
    before, _ = results(stock, batch, training)
    for model in (stock, ours):
        if after_a_forward:
            results(model, batch, training)
        torch.manual_seed(0)
        change(model)
        found.append(results(model, batch, training))
    (theirs, their_grads), (mine, my_grads) = found
    assert not torch.allclose(theirs, before, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-5)
    assert my_grads.keys() == their_grads.keys()
    for name, grad in their_grads.items():
        if grad is not None:
            torch.testing.assert_close(my_grads[name], grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def scaled(output):
    """The first tensor of an output, in the way in which modules return one, 1.5 times as large."""
    if torch.is_tensor(output):
        return 1.5 * output
    if isinstance(output, dict):
        return {**output, "encoder_out": [1.5 * output["encoder_out"][0]]}
    return (1.5 * output[0], *output[1:])


def patch_forward(module):
    forward = module.forward
    module.forward = lambda *args, **kwargs: scaled(forward(*args, **kwargs))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_a_forward_on_an_instance(place, training):
    assert_as_stock(lambda model: patch_forward(model.get_submodule(place)), training, **OPTIONS)


def test_a_forward_that_was_patched_before_the_first_pass():
    assert_as_stock(lambda model: patch_forward(model.encoder.layers[0].fc1), after_a_forward=False)


def test_a_patch_that_is_taken_back(batch):
    _, model = families.build_twins()
    before = model(**batch)[0]
    fc1 = model.encoder.layers[1].fc1
    patch_forward(fc1)
    assert not torch.equal(model(**batch)[0], before)
    del fc1.forward
    assert torch.equal(model(**batch)[0], before)
    assert all(layer.is_plain() for layer in model.encoder.layers)


class Louder(nn.Linear):
    def forward(self, x):
        return 1.5 * super().forward(x)


def test_a_class_that_changes():
    def change(model):
        for linear in (model.encoder.layers[0].fc1, model.decoder.layers[1].fc2, model.decoder.output_projection):
            linear.__class__ = Louder

    assert_as_stock(change)


@pytest.mark.parametrize("cls", [nn.Linear, nn.LayerNorm, MultiheadAttention])
def test_a_class_that_is_patched(cls):
    """As a debugging tool does it; our layer norm has another class than stock's, so it is stock's here that is left alone."""
    forward = cls.forward
    with mock.patch.object(cls, "forward", lambda self, *args, **kwargs: scaled(forward(self, *args, **kwargs))):
        stock, ours = families.build_twins()
        stock.eval(), ours.eval()
        if cls is nn.LayerNorm:
            assert not ours.encoder.layers[0].is_plain()
        else:
            torch.testing.assert_close(ours(**families.batch())[0], stock(**families.batch())[0], rtol=1e-4, atol=1e-5)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2.0 * weight


PARAMETRISATIONS = {
    "parametrize": lambda linear: parametrize.register_parametrization(linear, "weight", Doubled()),
    "weight_norm": lambda linear: (weight_norm(linear), linear.weight_g.data.mul_(2.0)),
    "new weight_norm": lambda linear: (
        parametrizations.weight_norm(linear),
        linear.parametrizations.weight.original0.data.mul_(2.0),
    ),
    "spectral_norm": spectral_norm,
    "new spectral_norm": parametrizations.spectral_norm,
    "pruning": lambda linear: prune.l1_unstructured(linear, "weight", 0.5),
    "plain tensor": lambda linear: vars(linear).update(weight=2.0 * linear._parameters.pop("weight").detach()),
}
PARAMETRISED = ("encoder.layers.0.fc1", "decoder.layers.1.fc2", "decoder.layers.0.encoder_attn.k_proj")
PARAMETRISED += ("encoder.layers.1.self_attn.q_proj", "decoder.output_projection")


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", PARAMETRISATIONS)
def test_a_weight_that_is_computed(kind, training):
    def change(model):
        for place in PARAMETRISED:
            # Stock's self-attention reads the weight that a hook sets, in training, but does not run the hook.
            if not (place.endswith("q_proj") and kind in ("weight_norm", "spectral_norm", "pruning")):
                PARAMETRISATIONS[kind](model.get_submodule(place))

    assert_as_stock(change, training)


def test_embeddings_that_are_computed():
    def change(model):
        for side in (model.encoder, model.decoder):
            parametrize.register_parametrization(side.embed_tokens, "weight", Doubled())
            parametrize.register_parametrization(side.embed_positions, "weight", Doubled())

    assert_as_stock(change, encoder_learned_pos=True, decoder_learned_pos=True)


def test_a_bias_that_is_taken_away():
    def change(model):
        model.encoder.layers[0].fc1.bias = None
        model.decoder.layers[0].fc2.bias = None

    with torch.no_grad():
        stock, ours = families.build_twins()
        for model in (stock, ours):
            for layer in (model.encoder.layers[0].fc1, model.decoder.layers[0].fc2):
                layer.bias.fill_(1.0)
        for model in (stock, ours):
            model.eval()(**families.batch())
            change(model)
        torch.testing.assert_close(ours(**families.batch())[0], stock(**families.batch())[0], rtol=1e-4, atol=1e-5)


def test_numbers_that_change():
    """Epsilons and scales are read in every pass, not only in the first."""

    def change(model):
        for layer in (*model.encoder.layers, *model.decoder.layers):
            layer.self_attn_layer_norm.eps = layer.final_layer_norm.eps = 0.5
        model.decoder.layers[0].encoder_attn.scaling *= 9.0

    assert_as_stock(change, training=False)  # in training stock's self-attention has a scale of its own
    assert_as_stock(change)


def test_an_activation_that_changes():
    def change(model):
        model.encoder.layers[0].activation_fn = torch.tanh
        model.decoder.layers[0].activation_fn = nn.Softplus()

    assert_as_stock(change)


def test_methods_of_layers_and_stacks():
    """Stock calls these from its own forward: who replaces one changes the model."""

    def louder_embedding(model):
        forward = model.encoder.forward_embedding
        model.encoder.forward_embedding = lambda *args: tuple(1.5 * x for x in forward(*args))

    def louder_residual(model):
        for layer in (model.encoder.layers[0], model.decoder.layers[0]):
            layer.residual_connection = lambda x, residual: 2.0 * residual + x

    def open_mask(model):
        mask = model.decoder.buffered_future_mask
        model.decoder.buffered_future_mask = lambda x: mask(x).masked_fill(torch.ones_like(mask(x)).tril(2) > 0, 0.0)

    for change in (louder_embedding, louder_residual, open_mask):
        for training in (True, False):
            assert_as_stock(change, training)


@pytest.mark.parametrize("place", ["dense", "layer_norm"])
def test_the_head_of_roberta(place):
    def change(model):
        patch_forward(getattr(model.encoder.lm_head, place))

    assert_as_stock(change, family="roberta")


def test_the_activation_of_the_head_of_roberta():
    assert_as_stock(lambda model: setattr(model.encoder.lm_head, "activation_fn", torch.tanh), family="roberta")


def test_a_hook_on_the_head_of_roberta():
    def change(model):
        model.encoder.lm_head.dense.register_forward_hook(lambda module, args, output: 1.5 * output)

    assert_as_stock(change, family="roberta")


@pytest.mark.parametrize("family", ["transformer_lm", "bart"])
def test_other_families(family):
    assert_as_stock(lambda model: patch_forward(model.decoder.layers[0].fc1), family=family)
    assert_as_stock(lambda model: patch_forward(model.decoder.output_projection), family=family)


def test_decoding_with_a_patched_layer(batch):
    """Step by step, as a search does it."""
    tokens, outputs = batch["prev_output_tokens"][:, :3], []
    for model in families.build_twins():
        model.eval()
        patch_forward(model.decoder.layers[0].fc1)
        patch_forward(model.decoder.layers[1].encoder_attn)
        for part in ("k_proj", "out_proj", "dropout_module"):
            patch_forward(model.decoder.layers[0].self_attn.get_submodule(part))
        with torch.no_grad():
            encoder_out, state = model.encoder(batch["src_tokens"], batch["src_lengths"]), {}
            steps = [model.decoder(tokens[:, : n + 1], encoder_out, incremental_state=state)[0] for n in range(3)]
        outputs.append(torch.cat(steps, dim=1))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def test_a_copy_of_a_used_model_is_fused(batch):
    _, model = families.build_twins()
    model(**batch)
    twin = copy.deepcopy(model)
    patch_forward(model.decoder.layers[0].fc1)
    assert all(layer.is_plain() for layer in twin.decoder.layers)
    assert [layer.is_plain() for layer in model.decoder.layers] == [False, True]
    assert type(twin.decoder.layers[0]) is TransformerDecoderLayer
