"""Decoding by the ls_ models, token for token what stock decodes from the same weights, in fp32, whatever the batch.

The weights are those of a stock model that has begun to learn to copy: flat distributions would hide errors, and sentences of one length too.
"""

import copy
import functools
import gc
import importlib.util
import itertools
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq import models
from fairseq.data import Dictionary
from fairseq.tasks import FairseqTask
from fairseq.token_generation_constraints import pack_constraints

from ls_plugin.optim import ContiguousAdam

N_WORDS, FIRST_WORD, PAD, EOS = 26, 4, 1, 2
SCORE_TOLERANCE = 1e-4  # of log-probabilities, summed over a sentence
PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
CONFIGS = {
    "post_norm": {},
    "pre_norm": PRE_NORM,
    "cross_self_attention": {"cross_self_attention": True},
    "no_cross_attention": {"cross_self_attention": True, "no_cross_attention": True, **PRE_NORM},
    "learned_positions": {"encoder_learned_pos": True, "decoder_learned_pos": True, "layernorm_embedding": True},
    "unequal_widths": {"decoder_embed_dim": 40, "decoder_ffn_embed_dim": 56, "share_all_embeddings": False},
    "bart": {"arch": "bart_base"},
}
NO_WEIGHTS = {"dropout", "attention_dropout", "max_source_positions", "max_target_positions"}
SEARCHES = {
    "sampling": {"beam": 3, "sampling": True},
    "sampling_topk": {"beam": 3, "sampling": True, "sampling_topk": 5},
    "sampling_topp": {"beam": 3, "sampling": True, "sampling_topp": 0.8},
    "diverse_beams": {"beam": 4, "diverse_beam_groups": 2},
    "diverse_siblings": {"beam": 4, "diversity_rate": 0.5},
    "no_repeated_ngram": {"beam": 4, "no_repeat_ngram_size": 2},
    "penalties": {"beam": 4, "lenpen": 2.0, "unkpen": 1.0, "temperature": 1.7, "min_len": 4},
    "unnormalized": {"beam": 4, "unnormalized": True},
    "match_source_length": {"beam": 4, "match_source_len": True},
    "allowed_tokens": {"beam": 4, "prefix_allowed_tokens_fn": lambda batch_id, tokens: [EOS, *range(4 + batch_id, 30)]},
}


# ---- Models and sentences ----


@functools.cache
def dictionary() -> Dictionary:
    made = Dictionary()
    for i in range(N_WORDS):
        made.add_symbol(f"word{i}")
    return made


def task() -> SimpleNamespace:
    return SimpleNamespace(source_dictionary=dictionary(), target_dictionary=dictionary())


def arguments(**options) -> Namespace:
    """Two layers of width 32, dropout off."""
    args = Namespace(
        arch="transformer", encoder_layers=2, encoder_embed_dim=32, encoder_ffn_embed_dim=48, decoder_layers=2
    )
    vars(args).update(encoder_attention_heads=4, decoder_attention_heads=4, dropout=0.0, attention_dropout=0.0)
    vars(args).update(share_all_embeddings=True, task="denoising")  # BART asks for the task's name
    if "lm" in options.get("arch", ""):
        vars(args).update(decoder_embed_dim=32, decoder_ffn_embed_dim=48, share_decoder_input_output_embed=True)
        vars(args).update(add_bos_token=False, tpu=False, tokens_per_sample=64, max_target_positions=64)
    vars(args).update(options)
    return args


def sentences(seed: int, n: int, shortest: int = 3, longest: int = 9) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (n,), generator=generator).tolist()
    words = [torch.randint(FIRST_WORD, FIRST_WORD + N_WORDS, (n,), generator=generator) for n in lengths]
    return [torch.cat((w, torch.tensor([EOS]))) for w in words]


def padded(rows: list[torch.Tensor], left: bool = False) -> torch.Tensor:
    width = max(map(len, rows))
    fill = [torch.full((width - len(row),), PAD) for row in rows]
    return torch.stack([torch.cat((f, r) if left else (r, f)) for f, r in zip(fill, rows, strict=True)])


def shifted(rows: list[torch.Tensor]) -> torch.Tensor:
    return padded([torch.cat((torch.tensor([EOS]), row[:-1])) for row in rows])


def as_sample(rows: list[torch.Tensor], left: bool = True, translated: bool | None = None) -> dict:
    """A batch of sources; with their copies as translations, or (False) of a language model's inputs."""
    lengths = torch.tensor([len(row) for row in rows])
    if translated is False:
        return {"net_input": {"src_tokens": shifted(rows), "src_lengths": lengths}}
    net_input = {"src_tokens": padded(rows, left), "src_lengths": lengths}
    return {"net_input": net_input | ({"prev_output_tokens": shifted(rows)} if translated else {})}


@functools.cache
@torch.enable_grad()  # the first to ask may be a test without gradients
def trained_weights(seed: int, options: tuple) -> dict:
    """Of a stock model, after 40 updates of copying; of a language model, of continuing words that each are three after the last."""
    torch.manual_seed(seed)
    model = models.build_model(arguments(**dict(options)), task())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, betas=(0.9, 0.98))
    for update in range(40):
        rows = sentences(1000 * seed + update, 16)
        if not hasattr(model, "encoder"):
            rows = [torch.cat(((row[0] + 3 * torch.arange(len(row) - 1) - 4) % N_WORDS + 4, row[-1:])) for row in rows]
        logits = model(**as_sample(rows, translated=hasattr(model, "encoder"))["net_input"])[0]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), padded(rows).flatten(), ignore_index=PAD)
        optimizer.param_groups[0]["lr"] = 8e-3 * min(1.0, (update + 1) / 10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict()


def build(ls: bool, seed: int = 1, **options):
    """In evaluation mode, with trained weights."""
    weights = trained_weights(seed, tuple(sorted(item for item in options.items() if item[0] not in NO_WEIGHTS)))
    args = arguments(**options)
    args.arch = f"ls_{args.arch}" if ls else args.arch
    model = models.build_model(args, task())
    model.load_state_dict(copy.deepcopy(weights), strict=True)
    return model.eval()


def build_twins(seed: int = 1, **options) -> tuple:
    """(stock, ls_)."""
    return build(False, seed, **options), build(True, seed, **options)


def generator_for(models: list, **options):
    """What ``fairseq-generate`` builds from its flags."""
    options = {"beam": 1, "max_len_b": 16, **options}
    allowed = options.pop("prefix_allowed_tokens_fn", None)
    return FairseqTask.build_generator(task(), models, Namespace(**options), prefix_allowed_tokens_fn=allowed)


def generate(model, rows: list[torch.Tensor], left: bool = True, inputs: dict | None = None, **options) -> list:
    """Hypotheses, best first, of each sentence. inputs: further arguments of the generator's ``generate``."""
    models = model if isinstance(model, list) else [model]
    torch.manual_seed(11)
    return generator_for(models, **options).generate(models, as_sample(rows, left), **(inputs or {}))


def assert_same(ours: list, stock: list, tolerance: float = SCORE_TOLERANCE) -> None:
    """The same tokens in the same order; scores, and attention where stock gives it, within rounding."""
    assert len(ours) == len(stock) > 0
    for our_beams, stock_beams in zip(ours, stock, strict=True):
        assert [h["tokens"].tolist() for h in our_beams] == [h["tokens"].tolist() for h in stock_beams]
        for a, b in zip(our_beams, stock_beams, strict=True):
            for name in ("score", "positional_scores", "attention"):
                assert (a[name] is None) == (b[name] is None), name
                if b[name] is not None and torch.is_tensor(b[name]) and b[name].numel():
                    torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance, msg=name)


def best(hypotheses: list) -> list[list[int]]:
    return [beams[0]["tokens"].tolist() for beams in hypotheses]


def test_hypotheses_are_worth_comparing():
    """Most sentences end by themselves, at different lengths, with different words."""
    tokens = best(generate(build(False), sentences(7, 8), beam=4))
    assert len({len(words) for words in tokens}) >= 3
    assert len({word for words in tokens for word in words}) >= 8
    assert sum(len(words) < 16 for words in tokens) >= 6


# ---- The same as stock ----


@pytest.mark.parametrize("beam", [1, 4, 5])
@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS.keys())
def test_beams_and_batches(options, beam):
    """Batches of 8 (padded at the left), 3 (no padding) and 1."""
    stock, ours = build_twins(**options)
    for rows in (sentences(7, 8), sentences(8, 3, 6, 6), sentences(9, 1)):
        hypotheses = [generate(model, rows, beam=beam) for model in (stock, ours)]
        assert_same(*reversed(hypotheses))


@pytest.mark.parametrize("options", SEARCHES.values(), ids=SEARCHES.keys())
def test_search_strategies(options):
    """With the same seed where the search draws random numbers."""
    stock, ours = build_twins()
    hypotheses = [generate(model, sentences(7, 5), **options) for model in (stock, ours)]
    assert_same(*reversed(hypotheses))


@pytest.mark.parametrize("kind", ["ordered", "unordered"])
def test_lexical_constraints(kind):
    stock, ours = build_twins()
    wanted = [[torch.tensor([20, 21])], [torch.tensor([9]), torch.tensor([25])], []]
    inputs = {"constraints": pack_constraints(wanted)}
    hypotheses = [generate(model, sentences(8, 3), beam=4, constraints=kind, inputs=inputs) for model in (stock, ours)]
    assert_same(*reversed(hypotheses))
    assert {9, 25} <= set(best(hypotheses[1])[1])


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("options", [{}, CONFIGS["cross_self_attention"]], ids=["post_norm", "cross_self_attention"])
def test_prefix_tokens(options, beam):
    """Of different lengths; one of them ends its sentence."""
    stock, ours = build_twins(**options)
    prefix = torch.tensor([[20, 21, 22], [9, PAD, PAD], [5, EOS, PAD], [30 - 1, 8, PAD]])
    inputs = {"prefix_tokens": prefix}
    hypotheses = [generate(model, sentences(7, 4), beam=beam, inputs=inputs) for model in (stock, ours)]
    assert_same(*reversed(hypotheses))
    assert best(hypotheses[1])[0][:3] == [20, 21, 22]


@pytest.mark.parametrize("beam", [1, 4])
def test_ensembles(beam):
    """Of two models, and of a stock model with one of ours."""
    (stock, ours), (stock2, ours2) = build_twins(seed=1), build_twins(seed=2)
    rows = sentences(7, 5)
    expected = generate([stock, stock2], rows, beam=beam)
    assert best(expected) != best(generate(stock, rows, beam=beam))
    for mixed in ([ours, ours2], [stock, ours2]):
        assert_same(generate(mixed, rows, beam=beam), expected)


@pytest.mark.parametrize("options", [{}, CONFIGS["cross_self_attention"]], ids=["post_norm", "cross_self_attention"])
def test_make_generation_fast(options):
    stock, ours = build_twins(**options)
    rows = sentences(7, 5)
    expected = generate(stock, rows, beam=4)
    for model in (stock, ours):
        model.prepare_for_inference_(SimpleNamespace(generation=Namespace(beam=4)))
        assert_same(generate(model, rows, beam=4), expected)
        with pytest.raises(RuntimeError, match="cannot train"):
            model.train()


@pytest.mark.parametrize("options", [{}, PRE_NORM], ids=["post_norm", "pre_norm"])
def test_beams_share_the_encoder_keys(options):
    """set_beam_size has cross-attention keep one key per sentence, not one per beam."""
    stock, ours = build_twins(**options)
    rows = sentences(7, 5)
    expected = generate(stock, rows, beam=4)
    for model in (stock, ours):
        told = [module for module in model.decoder.modules() if hasattr(module, "set_beam_size")]
        assert len(told) >= 2
        for module in told:
            module.set_beam_size(4)
        assert_same(generate(model, rows, beam=4), expected)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_print_alignment(kind):
    stock, ours = build_twins()
    rows = sentences(7, 5)
    aligned = []
    for model in (stock, ours):
        model.make_generation_fast_(beamable_mm_beam_size=4, need_attn=True)
        generator = generator_for([model], beam=4, print_alignment=kind)
        sample = as_sample(rows)
        sample["target"] = padded(rows)
        aligned.append(generator.generate([model], sample))
    assert_same(*reversed(aligned))
    for beams in zip(*aligned, strict=True):
        for a, b in zip(*beams, strict=True):
            if kind == "hard":
                assert a["alignment"] == b["alignment"]
            else:  # the weights of each target token, as texts of six digits
                weights = [[[float(text) for text in texts] for texts in h["alignment"]] for h in (a, b)]
                torch.testing.assert_close(*map(torch.tensor, weights), rtol=0, atol=1e-5)


def test_given_references_are_scored_as_by_stock():
    stock, ours = build_twins()
    rows = sentences(7, 5)
    sample = as_sample(rows, translated=True) | {"target": padded(rows)}
    scored = [
        generator_for([model], score_reference=True, print_alignment="hard").generate([model], sample)
        for model in (stock, ours)
    ]
    assert_same(*reversed(scored))


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("need_attn", [False, True])
def test_attention_in_evaluation(options, need_attn):
    """What the decoder returns beside its output, after make_generation_fast_ has told it whether attention is wanted."""
    results = []
    rows = sentences(7, 3)
    for model in build_twins(**options):
        model.make_generation_fast_(need_attn=need_attn)
        encoder_out = model.encoder(**as_sample(rows)["net_input"])
        results.append(model.decoder(padded(rows), encoder_out=encoder_out))
    (stock, stock_extra), (ours, our_extra) = results
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)
    assert (our_extra["attn"][0] is None) == (stock_extra["attn"][0] is None)
    if stock_extra["attn"][0] is not None:
        torch.testing.assert_close(our_extra["attn"][0], stock_extra["attn"][0], rtol=1e-4, atol=1e-5)


def test_fp64():
    stock, ours = (model.double() for model in build_twins())
    rows = sentences(7, 5)
    hypotheses = [generate(model, rows, beam=4) for model in (stock, ours)]
    assert_same(*reversed(hypotheses), tolerance=1e-6)  # the generator keeps scores in fp32


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("options", [{}, PRE_NORM], ids=["post_norm", "pre_norm"])
def test_longer_than_anything_before(options, beam):
    """A source of 300 tokens and a translation of more than 100, past max_positions (64), then short ones again."""
    twins = build_twins(**options, max_source_positions=64, max_target_positions=64)
    long = sentences(3, 2, 250, 300)
    hypotheses = []
    for model in twins:
        generator = generator_for([model], beam=beam, min_len=110, max_len_b=120)
        generator.max_len = 1000  # the generator's own limit is that of the training
        hypotheses.append(generator.generate([model], as_sample(long)))
    assert_same(*reversed(hypotheses), tolerance=1e-3)
    assert all(len(beams[0]["tokens"]) > 110 for beams in hypotheses[1])
    short = [generate(model, sentences(7, 3), beam=beam) for model in twins]
    assert_same(*reversed(short))


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("arch", ["transformer_lm", "transformer_lm_gpt"])
def test_language_models_continue_prompts(arch, beam):
    """Prompts of different lengths, as fairseq's language_modeling task hands them on; alone and in a batch."""
    stock, ours = build_twins(arch=arch)
    prompts = [row[:-1] for row in sentences(7, 5, 1, 5)]

    def continue_(model, prompts, **options):
        sample = as_sample(prompts, left=False)
        inputs = {"prefix_tokens": sample["net_input"]["src_tokens"], "bos_token": EOS}
        return generate(model, prompts, inputs=inputs, **{"beam": beam, **options})

    hypotheses = [continue_(model, prompts) for model in (stock, ours)]
    assert_same(*reversed(hypotheses))
    tokens = best(hypotheses[1])
    assert all(words[: len(prompt)] == prompt.tolist() for words, prompt in zip(tokens, prompts, strict=True))
    assert len({len(words) for words in tokens}) >= 2
    for options in (SEARCHES["sampling_topk"], SEARCHES["no_repeated_ngram"]):
        assert_same(continue_(ours, prompts, **options), continue_(stock, prompts, **options))


# ---- Incremental state ----


def decode_stepwise(model, encoder_out: dict, previous: torch.Tensor, state: dict, begin: int = 0) -> torch.Tensor:
    """Logits (B, T - begin, V)."""
    steps = [
        model.decoder(previous[:, : t + 1], encoder_out=encoder_out, incremental_state=state)[0]
        for t in range(begin, previous.size(1))
    ]
    return torch.cat(steps, dim=1)


@torch.no_grad()
@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS.keys())
def test_incremental_decoding_equals_the_full_forward(options):
    ours = build(True, **options)
    rows = sentences(8, 3, 6, 6)
    previous = padded(rows)
    encoder_out = ours.encoder(**as_sample(sentences(7, 3))["net_input"])
    full = ours.decoder(previous, encoder_out=encoder_out)[0]
    torch.testing.assert_close(decode_stepwise(ours, encoder_out, previous, {}), full, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS.keys())
def test_reordered_state_is_that_of_the_chosen_beams(options):
    """Sentences change places, one is continued twice and one is dropped, midway; as stock, and as without a cache."""
    rows, previous = sentences(7, 4), padded(sentences(8, 4, 7, 7))
    order = torch.tensor([2, 0, 2])
    after = torch.cat((previous[order, :4], padded(sentences(9, 3, 3, 3))), dim=1)
    logits, full = [], None
    for model in build_twins(**options):
        encoder_out, state = model.encoder(**as_sample(rows)["net_input"]), {}
        decode_stepwise(model, encoder_out, previous[:, :4], state)
        model.decoder.reorder_incremental_state_scripting(state, order)
        encoder_out = model.encoder.reorder_encoder_out(encoder_out, order)
        logits.append(decode_stepwise(model, encoder_out, after, state, begin=4))
        full = model.decoder(after, encoder_out=encoder_out)[0][:, 4:]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits[1], full, rtol=1e-4, atol=1e-4)


def test_states_of_two_searches_do_not_mix():
    """Steps of two decodings in turn, each with its own state: as one after the other."""
    ours = build(True)
    first, second = (padded(sentences(seed, 2, 5, 5)) for seed in (1, 2))
    outs = [ours.encoder(**as_sample(sentences(seed, 2))["net_input"]) for seed in (3, 4)]
    expected = [decode_stepwise(ours, out, p, {}) for out, p in zip(outs, (first, second), strict=True)]
    states, steps = ({}, {}), ([], [])
    for t in range(first.size(1)):
        for i, previous in enumerate((first, second)):
            steps[i].append(ours.decoder(previous[:, : t + 1], encoder_out=outs[i], incremental_state=states[i])[0])
    for got, want in zip(steps, expected, strict=True):
        torch.testing.assert_close(torch.cat(got, dim=1), want, rtol=0, atol=0)


# ---- Independent of the batch ----


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_sentence_does_not_depend_on_its_batch(options, beam):
    """Alone, among others, in another order, and beside one that is much longer."""
    ours = build(True, **options)
    rows = sentences(7, 6)
    alone = list(itertools.chain.from_iterable(generate(ours, [row], beam=beam) for row in rows))
    together = generate(ours, rows, beam=beam)
    reverse = list(reversed(generate(ours, list(reversed(rows)), beam=beam)))
    beside = generate(ours, [*rows, *sentences(5, 1, 40, 40)], beam=beam)[:6]
    for others in (together, reverse, beside):
        for hypotheses, expected in zip(others, alone, strict=True):
            for a, b in zip(hypotheses, expected, strict=True):
                a["attention"], b["attention"] = None, None  # as wide as the padded source
        # max_len_b counts from the width of the batch, which the search must not reach for this comparison
        assert_same(others, alone)


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS.keys())
def test_left_and_right_padded_sources_give_the_same(options):
    ours = build(True, **options)
    rows = sentences(7, 6)
    left, right = (ours.encoder(**as_sample(rows, left=side)["net_input"]) for side in (True, False))
    for i, row in enumerate(rows):
        states = [out["encoder_out"][0][:, i] for out in (left, right)]
        torch.testing.assert_close(states[0][-len(row) :], states[1][: len(row)], rtol=1e-4, atol=1e-5)
    hypotheses = [generate(ours, rows, left=side, beam=4) for side in (True, False)]
    for beams in itertools.chain(*hypotheses):
        for hypothesis in beams:
            hypothesis["attention"] = None  # along the padded source
    assert_same(*hypotheses)


# ---- Dropout, weights, memory ----


def test_retained_dropout_draws_in_generation():
    ours = build(True, dropout=0.3, attention_dropout=0.3)
    rows = sentences(7, 5)
    plain = best(generate(ours, rows, beam=4))
    assert best(generate(ours, rows, beam=4)) == plain
    ours.make_generation_fast_(retain_dropout=True, retain_dropout_modules=None)
    drawn = best(generate(ours, rows, beam=4))
    assert drawn != plain
    assert best(generate(ours, rows, beam=4)) == drawn  # by the seed alone


def _ls_adam_step(model):
    optimizer = ContiguousAdam(model.parameters(), lr=3e-2)
    model.train()
    rows = sentences(1, 3)
    model(**as_sample(rows, translated=True)["net_input"])[0].square().mean().backward()
    optimizer.step()
    model.eval()


def _edit_in_place(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.1)


def _replace_data(model):
    for p in model.parameters():
        p.data = p.data * 1.1


CHANGES = {
    "load_state_dict": lambda model: model.load_state_dict(trained_weights(2, ())),
    "ls_adam": _ls_adam_step,
    "in_place": _edit_in_place,
    "data": _replace_data,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_generation_follows_the_weights(change):
    """Nothing that was derived from the weights outlives a change of them."""
    stock, ours = build_twins()
    rows = sentences(7, 5)
    before = generate(ours, rows, beam=4)
    change(ours)
    stock.load_state_dict(ours.state_dict())
    expected = generate(stock, rows, beam=4)
    assert [beams[0]["score"] for beams in before] != [beams[0]["score"] for beams in expected]
    assert_same(generate(ours, rows, beam=4), expected)


def test_a_copy_generates_by_its_own_weights():
    ours = build(True)
    rows = sentences(7, 5)
    expected = generate(ours, rows, beam=4)
    twin = copy.deepcopy(ours)
    assert_same(generate(twin, rows, beam=4), expected, tolerance=0)
    _edit_in_place(twin)
    assert [b[0]["score"] for b in generate(twin, rows, beam=4)] != [b[0]["score"] for b in expected]
    assert_same(generate(ours, rows, beam=4), expected, tolerance=0)


def test_training_goes_on_after_generation():
    """Gradients after a generation are those of a model that has not generated."""
    gradients = []
    rows = sentences(7, 5)
    for generates in (False, True):
        ours = build(True)
        if generates:
            generate(ours, rows, beam=4)
        ours.train()
        ours(**as_sample(rows, translated=True)["net_input"])[0].square().mean().backward()
        gradients.append([p.grad for p in ours.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


@pytest.fixture(scope="module")
def live_bytes():
    """The benchmarks' follower of storages, a script."""
    path = Path(__file__).resolve().parents[2] / "recipes" / "benchmarks" / "live_bytes.py"
    spec = importlib.util.spec_from_file_location("live_bytes", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LiveBytes


def test_evaluation_keeps_no_buffers(live_bytes):
    """After training, validation and generation, with everything returned let go: alive is what stock keeps, its parameters and its masks."""
    held = []
    rows = sentences(7, 8)
    trained_weights(1, ())  # made before, not while counting
    for ls in (False, True):
        gc.collect()
        with live_bytes() as tracker:
            model = build(ls).train()
            model(**as_sample(rows, translated=True)["net_input"])[0].square().mean().backward()
            model.zero_grad()
            model.eval()
            with torch.no_grad():
                model(**as_sample(rows, translated=True)["net_input"])
            generate(model, rows, beam=4)
            gc.collect()
            held.append(tracker.live)
            parameters = tracker.bytes_of(list(model.parameters()))
            assert parameters >= sum(p.numel() * p.element_size() for p in model.parameters())
            del model
    assert held[1] <= held[0]
