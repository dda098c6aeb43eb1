"""TorchScript: what can be scripted or traced of a stock model can be of ours, saved, and gives the same."""

import io

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from torch import nn

from ls_plugin.models.transformer_encoder import LightSeqTransformerEncoder
from ls_plugin.modules.swap import are_as_built
from tests.models import families

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def saved_and_loaded(scripted):
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    return torch.jit.load(file)


@pytest.mark.parametrize("family", ["transformer", "bart"])
def test_a_scripted_model(family):
    model = families.build(family, True, layernorm_embedding=True).eval()
    batch = families.batch(family)
    expected = model(**batch)[0]
    scripted = saved_and_loaded(torch.jit.script(model))
    torch.testing.assert_close(scripted(**batch)[0], expected, **TOLERANCE)
    assert {name: p.shape for name, p in scripted.named_parameters()} == {
        n: p.shape for n, p in model.named_parameters()
    }


@pytest.mark.parametrize("used", [False, True])
def test_scripting_leaves_the_model_as_it_is(batch, used):
    _, model = families.build_twins()
    expected = model(**batch)[0]
    if used:
        model.eval()(**batch)
    scripted = torch.jit.script(model.eval())
    ours = dict(model.named_parameters())
    assert all(p.data_ptr() == ours[name].data_ptr() for name, p in scripted.named_parameters())
    model.train()
    assert type(model.encoder) is LightSeqTransformerEncoder
    assert all(layer.is_plain() for layer in (*model.encoder.layers, *model.decoder.layers))
    torch.testing.assert_close(model(**batch)[0], expected, rtol=0.0, atol=0.0)


def test_a_scripted_decoder_of_a_language_model():
    """Of the model itself stock's, too, cannot be scripted: it takes any keyword."""
    model = families.build("transformer_lm", True).eval()
    tokens = families.batch("transformer_lm")["src_tokens"]
    torch.testing.assert_close(torch.jit.script(model.decoder)(tokens)[0], model(tokens)[0], **TOLERANCE)


def test_a_scripted_encoder_of_roberta():
    model = families.build("roberta", True).eval()
    tokens = families.batch("roberta")["src_tokens"]
    scripted = torch.jit.script(model.encoder.sentence_encoder)
    torch.testing.assert_close(
        scripted(tokens)["encoder_out"][0], model.encoder.sentence_encoder(tokens)["encoder_out"][0], **TOLERANCE
    )


@pytest.mark.parametrize("options", [{}, {"no_repeat_ngram_size": 2}], ids=["plain", "no_repeat_ngram"])
def test_a_scripted_generator(options):
    """fairseq scripts its generator in its own tests; the plugin's changes to it are compiled as well."""
    model, words = families.build("transformer", True).eval(), families.dictionary(families.N_TARGET_WORDS)
    inputs = families.batch()
    del inputs["prev_output_tokens"]
    sample = {"net_input": inputs}
    expected = SequenceGenerator([model], words, beam_size=3, max_len_b=12, **options).forward(sample)
    generator = SequenceGenerator([model], words, beam_size=3, max_len_b=12, **options)
    found = saved_and_loaded(torch.jit.script(generator))(sample)
    for theirs, mine in zip(expected, found, strict=True):
        assert [h["tokens"].tolist() for h in mine] == [h["tokens"].tolist() for h in theirs]


class Logits(nn.Module):
    """A trace cannot hold the None among a model's outputs."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *inputs):
        output = self.model(*inputs)
        return output[0] if isinstance(output, tuple) else output


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_traced_model(family):
    model = Logits(families.build(family, True, layernorm_embedding=True).eval())
    inputs = tuple(families.batch(family).values())[: 1 if family in ("transformer_lm", "roberta") else 3]
    traced = saved_and_loaded(torch.jit.trace(model, inputs))
    others = tuple(families.batch(family, "right").values())[: len(inputs)]
    with torch.no_grad():  # stock's attention scales in place, which a loaded trace does to a leaf's view
        for each in (inputs, others):
            torch.testing.assert_close(traced(*each), model(*each), **TOLERANCE)


def test_tracing_leaves_no_trace(batch):
    _, model = families.build_twins()
    model.eval()
    with pytest.warns(torch.jit.TracerWarning):
        torch.jit.trace(Logits(model), tuple(batch.values()))
    assert all(layer.is_plain() for layer in model.encoder.layers)
    assert are_as_built((model.decoder.output_projection,), {nn.Linear: 0})
