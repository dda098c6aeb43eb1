"""The feed-forward block of the layers against fairseq's: every activation, with dropout inside, and what the fused op has to leave alone."""

import copy
from argparse import Namespace

import pytest
import torch
from fairseq.models.transformer import TransformerConfig
from fairseq.modules import transformer_layer as stock_layers
from torch import nn

from ls_plugin import _library, modules, reference
from ls_plugin.models.unsupported import ACTIVATIONS
from ls_plugin.ops.rng import draw_seed

# fairseq says that gelu_fast has a new name.
pytestmark = pytest.mark.filterwarnings("ignore:--activation-fn=gelu_fast")

C, F, T, B = 12, 20, 5, 3
SUBLAYER = {
    "Encoder": 1,
    "Decoder": 2,
}  # the position of the network in its layer, which tells its mask from others of one seed
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def layers(side, activation="relu", p=0.0):
    """A stock layer and ours, equal in weights, in train mode; dropout only inside of the feed-forward network."""
    options = {"activation_fn": activation, "activation_dropout": p, "dropout": 0.0, "attention_dropout": 0.0}
    for part in ("encoder", "decoder"):
        options |= {f"{part}_embed_dim": C, f"{part}_ffn_embed_dim": F, f"{part}_attention_heads": 2}
    # Not TransformerConfig(), whose encoder and decoder are shared by all configurations.
    config = TransformerConfig.from_namespace(Namespace(**options))
    torch.manual_seed(1)
    stock = getattr(stock_layers, f"Transformer{side}LayerBase")(config).train()
    ours = getattr(modules, f"Transformer{side}Layer")(config).train()
    for parameter in stock.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours.load_state_dict(stock.state_dict(), strict=True)
    return stock, ours


def run(layer, side):
    """Output and all gradients, the input's first."""
    torch.manual_seed(2)
    x = torch.randn(T, B, C, requires_grad=True)
    masks = (None,) if side == "Encoder" else (torch.randn(4, B, C), None)
    out = layer(x, *masks)
    out = out if side == "Encoder" else out[0]
    parameters = list(layer.parameters())
    return [out, *torch.autograd.grad(out.square().sum(), [x, *parameters])]


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("side", ["Encoder", "Decoder"])
def test_forward_and_gradients_equal_stock(side, activation, p):
    stock, ours = layers(side, activation, p)

    class Replay(nn.Module):
        """Stock's dropout, with the mask that ours draws."""

        def forward(self, x):
            shape = torch.Size((x.shape[1], x.shape[0], x.shape[2]))  # ours counts rows sentence by sentence
            offset = 2 * SUBLAYER[side] if _library.status().loaded else 0  # ops by themselves draw a seed each
            keep = reference.dropout_keep_mask(shape, p, int(draw_seed()), offset).transpose(0, 1)
            return torch.where(keep, x * reference.dropout_scale(p), 0.0)

    if p > 0.0:
        stock.activation_dropout_module = Replay()
    for actual, expected in zip(run(ours, side), run(stock, side), strict=True):
        torch.testing.assert_close(actual, expected, **TOLERANCE)


def hooked(layer):
    layer.fc1.register_forward_pre_hook(lambda module, args: (args[0] * 2.0,))


def subclassed(layer):
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2.0 * super().forward(x)

    layer.fc1.__class__ = Doubled


def other_activation(layer):
    layer.activation_fn = torch.sin


@pytest.mark.parametrize("change", [hooked, subclassed, other_activation])
def test_what_the_op_would_miss_is_called_as_it_is(change):
    stock, ours = layers("Encoder")
    for layer in (stock, ours):
        change(layer)
    for actual, expected in zip(run(ours, "Encoder"), run(stock, "Encoder"), strict=True):
        torch.testing.assert_close(actual, expected, **TOLERANCE)


def test_dropout_inside_is_off_in_eval():
    _, ours = layers("Encoder", p=0.5)
    twin = copy.deepcopy(ours)
    twin.activation_dropout_module.p = 0.0
    for actual, expected in zip(run(ours.eval(), "Encoder"), run(twin.eval(), "Encoder"), strict=True):
        assert torch.equal(actual, expected)
