"""What ls_transformer does beside the parity of outputs and gradients: generation, dropout, empty sentences, bad tokens."""

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator

from ls_plugin import modules
from ls_plugin.errors import TokenIdError
from ls_plugin.models.transformer_encoder import LightSeqTransformerEncoder

# fp32 sums of a few hundred terms in another order; gradients pass through more of them.
OUTPUT_TOLERANCE, GRAD_TOLERANCE = 2e-5, 1e-4

PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}


def assert_close(ours, stock, tolerance):
    scale = max(stock.abs().max().item(), 1.0)
    assert (ours - stock).abs().max().item() <= tolerance * scale


def test_all_norms_and_dropouts_are_fused(build_twins):
    _, ours = build_twins(**PRE_NORM, layernorm_embedding=True)
    names = {type(m).__name__: type(m) for m in ours.modules()}
    assert torch.nn.LayerNorm not in names.values()
    norms = [m for m in ours.modules() if isinstance(m, modules.LayerNorm)]
    # two per encoder layer, three per decoder layer, one after each stack, one after each embedding
    assert len(norms) == 2 * 2 + 2 * 3 + 2 + 2
    attention_dropouts = {id(layer.self_attn.dropout_module) for layer in (*ours.encoder.layers, *ours.decoder.layers)}
    attention_dropouts |= {id(layer.encoder_attn.dropout_module) for layer in ours.decoder.layers}
    for module in ours.modules():
        if type(module).__name__ == "FairseqDropout":
            assert id(module) in attention_dropouts


def test_return_fc(build_twins, batch):
    stock, ours = build_twins()
    cls_stock, cls_ours = type(stock.encoder), LightSeqTransformerEncoder
    results = []
    for cls, model in ((cls_stock, stock), (cls_ours, ours)):
        encoder = cls(model.encoder.cfg, model.encoder.dictionary, model.encoder.embed_tokens, return_fc=True)
        encoder.load_state_dict(stock.encoder.state_dict())
        results.append(encoder.eval()(batch["src_tokens"], return_all_hiddens=True))
    for stock_fc, our_fc in zip(results[0]["fc_results"], results[1]["fc_results"], strict=True):
        assert_close(our_fc, stock_fc, OUTPUT_TOLERANCE)


@pytest.mark.parametrize("beam", [1, 5])
@pytest.mark.parametrize(
    "options",
    [{}, PRE_NORM, {"cross_self_attention": True}, {"no_cross_attention": True, "cross_self_attention": True}],
)
def test_generation_equals_stock_token_for_token(build_twins, batch, beam, options):
    stock, ours = build_twins(**options)
    hypotheses = []
    for model in (stock, ours):
        model.eval()
        dictionary = model.decoder.dictionary
        generator = SequenceGenerator([model], dictionary, beam_size=beam, max_len_b=12, match_source_len=False)
        sample = {"net_input": {key: batch[key] for key in ("src_tokens", "src_lengths")}}
        hypotheses.append([[h["tokens"].tolist() for h in beam_] for beam_ in generator.generate([model], sample)])
    assert hypotheses[0] == hypotheses[1]


def test_incremental_decoding_equals_the_full_forward(build_twins, batch):
    _, ours = build_twins()
    ours.eval()
    encoder_out = ours.encoder(batch["src_tokens"], batch["src_lengths"])
    previous = batch["prev_output_tokens"][:1].expand(3, -1).contiguous()
    full = ours.decoder(previous, encoder_out=encoder_out)[0]
    state: dict = {}
    for t in range(previous.size(1)):
        step = ours.decoder(previous[:, : t + 1], encoder_out=encoder_out, incremental_state=state)[0]
        assert_close(step[:, 0], full[:, t], OUTPUT_TOLERANCE)


def test_caller_kept_attention_state(build_twins, batch):
    """prev_self_attn_state stands for what the incremental state would hold."""
    stock, ours = build_twins()
    results = []
    for model in (stock, ours):
        layer = model.eval().decoder.layers[0]
        torch.manual_seed(3)
        x, key, value = torch.randn(1, 3, 32), torch.randn(3, 4, 5, 8), torch.randn(3, 4, 5, 8)
        results.append(layer(x, incremental_state={}, prev_self_attn_state=[key, value])[0])
    assert_close(results[1], results[0], OUTPUT_TOLERANCE)
    with pytest.raises(ValueError, match="incremental_state"):
        ours.decoder.layers[0](x, prev_self_attn_state=[key, value])


def test_dropout_follows_the_seed_and_is_off_in_eval(build_twins, batch):
    _, ours = build_twins(dropout=0.3, activation_dropout=0.2)

    def run(seed):
        torch.manual_seed(seed)
        return ours(**batch)[0]

    ours.train()
    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    ours.eval()
    assert torch.equal(run(1), run(2))


def test_checkpointed_activations_redraw_the_same_masks(build_twins, batch):
    gradients = []
    for checkpointed in (False, True):
        _, ours = build_twins(dropout=0.3, checkpoint_activations=checkpointed)
        torch.manual_seed(9)
        ours.train()(**batch)[0].square().sum().backward()
        gradients.append([p.grad for p in ours.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert_close(checkpointed, plain, GRAD_TOLERANCE)


@pytest.mark.parametrize(
    "kept, expected",
    [(None, {"all"}), (["TransformerDecoderLayerBase"], {"decoder_layers"}), (["TransformerEncoder"], {"encoder"})],
)
def test_retain_dropout_knows_stock_names(build_twins, kept, expected):
    _, ours = build_twins(dropout=0.3)
    ours.make_generation_fast_(retain_dropout=True, retain_dropout_modules=kept)
    places = {
        "encoder": ours.encoder.dropout_module,
        "decoder": ours.decoder.dropout_module,
        "encoder_layers": ours.encoder.layers[0].dropout_module,
        "decoder_layers": ours.decoder.layers[0].dropout_module,
    }
    active = {name for name, module in places.items() if module.eval().active}
    assert active == (set(places) if expected == {"all"} else expected)


@pytest.mark.parametrize("options", [{}, PRE_NORM, {"cross_self_attention": True}])
def test_fully_padded_sentence_adds_nothing(build_twins, batch, options):
    """As without it, in the outputs of the others and in all gradients."""
    _, ours = build_twins(**options)
    batch["src_tokens"][0] = batch["prev_output_tokens"][0] = 1
    others = {name: tensor[1:] for name, tensor in batch.items()}
    results = []
    for inputs in (batch, others):
        ours.zero_grad()
        output = ours.train()(**inputs)[0]
        assert torch.isfinite(output).all()
        output[-2:].square().sum().backward()
        results.append((output[-2:], [p.grad for p in ours.parameters()]))
    assert_close(results[0][0], results[1][0], OUTPUT_TOLERANCE)
    for grad, expected in zip(results[0][1], results[1][1], strict=True):
        assert_close(grad, expected, GRAD_TOLERANCE)


def test_fully_padded_source_gets_nothing_from_the_encoder(build_twins, batch):
    """Its target is then trained as by a language model, and the encoder gets no gradient."""
    _, ours = build_twins()
    batch["src_tokens"][0] = 1
    output = ours.train()(**batch)[0]
    assert torch.isfinite(output).all()
    output[0].square().sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in ours.encoder.parameters())
    assert all(torch.isfinite(p.grad).all() for p in ours.decoder.parameters() if p.grad is not None)


@pytest.mark.parametrize("beam", [1, 4])
def test_fully_padded_source_leaves_the_other_translations_as_they_are(build_twins, batch, beam):
    _, ours = build_twins()
    batch["src_tokens"][0] = 1
    generator = SequenceGenerator([ours.eval()], ours.decoder.dictionary, beam_size=beam, max_len_b=12)
    results = []
    for first in (0, 1):
        sample = {"net_input": {key: batch[key][first:] for key in ("src_tokens", "src_lengths")}}
        results.append([[h["tokens"].tolist() for h in beams] for beams in generator.generate([ours], sample)])
    assert results[0][1:] == results[1]
    assert results[0][0]


@pytest.mark.parametrize("name", ["src_tokens", "prev_output_tokens"])
@pytest.mark.parametrize("bad_id", [27, 1000, -1])
def test_token_id_outside_the_dictionary(build_twins, batch, name, bad_id):
    _, ours = build_twins()
    batch[name][1, 2] = bad_id
    with pytest.raises(TokenIdError, match=rf"got {bad_id} .*another dictionary"):
        ours(**batch)
