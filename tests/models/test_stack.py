"""Stacks in which only some layers can be fused."""

import pytest
import torch

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
