"""Stacks in which only some layers can be fused."""

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tests.models.families import build_twins

FLAGS = {"pre_norm": True, "post_norm": False}


@pytest.mark.parametrize("watched", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("pre_norm", FLAGS.values(), ids=FLAGS.keys())
def test_watched_layers_among_others(batch, pre_norm, training, watched):
    """A hook, on a layer or inside of it, sees what it sees in stock; the layers around it stay fused and nothing changes."""
    options = {f"{side}_normalize_before": pre_norm for side in ("encoder", "decoder")}
    stock, ours = build_twins(encoder_layers=3, decoder_layers=3, **options)
    ours.load_state_dict(stock.state_dict())
    results = []
    for model in (stock, ours):
        model.train(training)
        seen = []
        for stack in (model.encoder, model.decoder):
            for i in watched:
                stack.layers[i].register_forward_hook(lambda module, args, output, seen=seen: seen.append(output))
                stack.layers[i].fc2.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output))
        output, extra = model(**batch)
        output.square().sum().backward()
        seen = [out[0] if isinstance(out, tuple) else out for out in seen]
        results.append(([output, *extra["inner_states"], *seen], [p.grad for p in model.parameters()]))
    assert len(results[0][0]) == len(results[1][0])
    for theirs, mine in zip(*(r[0] for r in results), strict=True):
        assert theirs.shape == mine.shape
    torch.testing.assert_close(results[1][0][0], results[0][0][0], rtol=1e-4, atol=2e-5)
    for theirs, mine in zip(*(r[1] for r in results), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("register", [register_module_forward_hook, register_module_forward_pre_hook])
def test_hooks_on_all_modules(batch, register):
    """They see as many layer norms, linear maps and embeddings as in stock."""
    counts = []
    for model in build_twins(layernorm_embedding=True):
        names, seen = {module: name for name, module in model.named_modules()}, set()
        handle = register(lambda module, *_, seen=seen, names=names: seen.add(names[module]))
        try:
            model(**batch)
        finally:
            handle.remove()
        counts.append(seen)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", ["embed_tokens", "embed_positions", "layernorm_embedding", "dropout_module"])
def test_hooks_on_what_makes_up_the_embedding(batch, name):
    _, model = build_twins(layernorm_embedding=True)
    seen = []
    for side in (model.encoder, model.decoder):
        getattr(side, name).register_forward_hook(lambda *_, side=side: seen.append(side))
    model(**batch)
    assert seen == [model.encoder, model.decoder]


def test_tokens_with_gaps_between_them(batch):
    """As columns of a larger batch, or a transposed one, are: in training, too, masks of any strides do."""
    _, model = build_twins()
    expected, _ = model(**batch)
    strided = {name: t.t().contiguous().t() if t.dim() == 2 else t for name, t in batch.items()}
    assert not strided["src_tokens"].is_contiguous()
    actual, _ = model(**strided)
    actual.sum().backward()
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("training", [True, False])
def test_a_boolean_mask_bars_where_it_is_true(training):
    x, memory = torch.randn(5, 3, 32), torch.randn(4, 3, 32)
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    outputs = [model.train(training).decoder.layers[0](x, memory, self_attn_mask=mask)[0] for model in build_twins()]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
