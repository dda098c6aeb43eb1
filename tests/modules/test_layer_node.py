"""Layers as one node of autograd: against the same layers composed of differentiable ops, and what the node must not swallow."""

import contextlib
import itertools
import sys
from argparse import Namespace

import pytest
import torch
from fairseq.models.transformer import TransformerConfig
from fairseq.modules import FairseqDropout
from torch import nn
from torch.utils.checkpoint import checkpoint

from ls_plugin import _library, modules, ops
from ls_plugin.modules import layer_node
from ls_plugin.modules.stack import joint_keys_and_values
from ls_plugin.modules.transformer_layer import Context
from ls_plugin.optim.adam import ContiguousAdam

pytestmark = pytest.mark.skipif(
    not _library.status().loaded, reason="without the compiled library layers are composed of ops"
)

B, T, S, C, E, F, H = 3, 6, 5, 12, 8, 20, 3
TOLERANCE = {"rtol": 1e-5, "atol": 2e-6}
SEED = torch.tensor([123456789], dtype=torch.int64)


def make_layer(side="Decoder", pre_norm=True, p=0.3, activation="relu", encoder=True, device="cpu", seed=1):
    options = {"activation_fn": activation, "activation_dropout": p, "dropout": p, "attention_dropout": p}
    for part, width in (("encoder", E if side == "Decoder" else C), ("decoder", C)):
        sizes = {"embed_dim": width, "ffn_embed_dim": F, "attention_heads": H, "normalize_before": pre_norm}
        options |= {f"{part}_{name}": value for name, value in sizes.items()}
    # Not TransformerConfig(), whose encoder and decoder are shared by all configurations.
    config = TransformerConfig.from_namespace(Namespace(**options))
    torch.manual_seed(seed)
    if side == "Encoder":
        layer = modules.TransformerEncoderLayer(config)
    else:
        layer = modules.TransformerDecoderLayer(config, no_encoder_attn=not encoder)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer.to(device).train()


def make_inputs(layer, device="cpu", padded=True):
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randn(B, T, C, generator=generator).to(device).requires_grad_() for _ in range(2))
    has_encoder = getattr(layer, "encoder_attn", None) is not None
    kv = torch.randn(B, S, 2 * C, generator=generator).to(device).requires_grad_() if has_encoder else None
    mask, encoder_mask = torch.zeros(B, T, dtype=torch.bool), torch.zeros(B, S, dtype=torch.bool)
    mask[0, 4:] = encoder_mask[1, :2] = True
    encoder_mask[2] = True  # an empty sentence
    context = Context(
        padding_mask=mask.to(device) if padded else None,
        encoder_padding_mask=encoder_mask.to(device) if padded and has_encoder else None,
        causal=has_encoder or not padded,
    )
    return x if layer.normalize_before else None, y, context, kv


@contextlib.contextmanager
def masks_of_the_node(monkeypatch, cuda_kernels=False):
    """Has every op in turn draw the mask that the node gives its like: one seed, told apart by the offset."""
    count = itertools.count()
    # On the CPU attention is one op, with the CUDA kernels its softmax draws the mask.
    attention = "attention_softmax" if cuda_kernels else "fused_attention"
    with monkeypatch.context() as patch:
        patch.setattr(layer_node, "draw_seed", lambda _: SEED)
        for name in ("fused_attention", "attention_softmax"):
            patch.setattr(sys.modules[f"ls_plugin.ops.{name}"], "draw_seed", lambda *_: SEED)
        for name in (attention, "bias_dropout_residual", "residual_layer_norm", "bias_act_dropout"):
            op = sys.modules[f"ls_plugin.ops.{name}"]
            patch.setattr(op, "draw_seed", lambda *_: SEED)
            patch.setattr(op, "rank_offset", lambda: next(count))
        yield


def run(layer, as_node, next_norm=None, weights=None, uses=(True, True, True), **options):
    """Outputs, and gradients of the inputs and all parameters, of those outputs that are used."""
    device = next(layer.parameters()).device
    x, y, context, kv = make_inputs(layer, device, **options)
    context.as_nodes = as_node
    outputs = layer.run(x, y, context, kv, next_norm, weights)
    generator = torch.Generator().manual_seed(11)
    loss = sum(
        (out * torch.randn(out.shape, generator=generator).to(device)).sum()
        for out, used in zip(outputs, uses, strict=True)
        if out is not None and used
    )
    wanted = [
        t for t in (x, y, kv, *layer.parameters(), *(next_norm.parameters() if next_norm else ())) if t is not None
    ]
    wanted = [t for t in wanted if t.requires_grad]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    names = [out is not None for out in outputs]
    return names, [out for out in outputs if out is not None], grads


def assert_same(actual, expected):
    assert actual[0] == expected[0]
    for ours, theirs in zip((*actual[1], *actual[2]), (*expected[1], *expected[2]), strict=True):
        if ours is None or theirs is None:  # autograd gives zeros where nothing is used, or nothing
            present = ours if theirs is None else theirs
            assert present is None or not present.any()
        else:
            torch.testing.assert_close(ours, theirs, **TOLERANCE)


def norm_after(layer):
    if not layer.normalize_before:
        return None
    torch.manual_seed(5)
    norm = modules.LayerNorm(C).to(next(layer.parameters()).device)
    nn.init.normal_(norm.weight)
    return norm


@pytest.mark.parametrize("weights", [None, "heads", "mean"])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize("side, encoder", [("Encoder", False), ("Decoder", True), ("Decoder", False)])
def test_equals_the_composed_layer(monkeypatch, side, encoder, pre_norm, p, weights):
    layer = make_layer(side, pre_norm, p, encoder=encoder)
    results = []
    for as_node in (True, False):
        with masks_of_the_node(monkeypatch):
            results.append(run(layer, as_node, norm_after(make_layer(side, pre_norm)), weights if encoder else None))
    assert_same(*results)


@pytest.mark.parametrize("activation", ["gelu", "gelu_accurate", "tanh", "linear", "relu_squared"])
def test_every_activation(monkeypatch, activation):
    layer = make_layer(activation=activation)
    results = []
    for as_node in (True, False):
        with masks_of_the_node(monkeypatch):
            results.append(run(layer, as_node))
    assert_same(*results)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_on_the_cuda_kernels(monkeypatch, backend, p):
    """Attention takes its three steps there."""
    layer = make_layer(p=p, device=backend.device)
    results = []
    for as_node in (True, False):
        with masks_of_the_node(monkeypatch, cuda_kernels=backend.name != "cpu"):
            results.append(run(layer, as_node, norm_after(layer), "heads" if p == 0.0 else None))
    assert_same(*results)


@pytest.mark.parametrize("uses", [u for u in itertools.product([True, False], repeat=3) if any(u)])
@pytest.mark.parametrize("pre_norm", [True, False])
def test_outputs_that_nobody_uses(monkeypatch, pre_norm, uses):
    layer = make_layer(pre_norm=pre_norm)
    if not pre_norm and uses == (True, False, False):
        pytest.skip("there is no such output")
    results = []
    for as_node in (True, False):
        with masks_of_the_node(monkeypatch):
            results.append(run(layer, as_node, norm_after(layer), "heads", uses))
    assert_same(*results)


@pytest.mark.parametrize("every", [2, 3])
def test_frozen_parameters(monkeypatch, every):
    layer = make_layer()
    for i, parameter in enumerate(layer.parameters()):
        parameter.requires_grad_(i % every == 0)
    results = []
    for as_node in (True, False):
        with masks_of_the_node(monkeypatch):
            results.append(run(layer, as_node, norm_after(layer)))
    assert_same(*results)


def backward(layer, times=1, seed=3):
    for i in range(times):
        torch.manual_seed(seed + i)
        x, y, context, kv = make_inputs(layer)
        x, y, _ = layer.run(x, y, context, kv, None)
        x.sum().backward()
    return [p.grad.clone() for p in layer.parameters() if p.grad is not None]


@pytest.mark.parametrize("times", [1, 2])
def test_gradients_written_into_the_optimizers_buffer(times):
    """They are what autograd would have put elsewhere, also where a second backward adds to them.

    Not to the bit: the weights lie elsewhere too, and the kernel that MKL chooses may depend on their alignment.
    """
    close = {"rtol": 1e-5, "atol": 1e-5}
    expected = backward(make_layer(), times)
    layer = make_layer()
    optimizer = ContiguousAdam(list(layer.parameters()))
    (buffer,) = optimizer.buffers
    actual = backward(layer, times)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **close)
    storage = buffer.grad.untyped_storage().data_ptr()
    assert layer.fc1.weight.grad.untyped_storage().data_ptr() == storage
    assert layer.self_attn.k_proj.weight.grad.untyped_storage().data_ptr() == storage
    optimizer.zero_grad()
    torch.testing.assert_close(backward(layer, times), expected, **close)


def test_gradients_that_were_asked_for_belong_to_the_caller():
    """Those of torch.autograd.grad do not change when the optimizer's buffer takes the next ones."""
    layer = make_layer(p=0.0, pre_norm=False)
    params = list(layer.parameters())
    optimizer = ContiguousAdam(params)

    def loss():
        x, y, context, _ = make_inputs(layer)
        context.encoder_out = torch.ones(S, B, E)
        (kv,) = joint_keys_and_values([layer], context, B)
        return layer.run(x, y, context, kv, None)[1].square().sum()

    grads = torch.autograd.grad(loss(), params)
    kept = [grad.clone() for grad in grads]
    (5.0 * loss()).backward()
    optimizer.materialize_grads()
    optimizer.zero_grad()
    (3.0 * loss()).backward()
    torch.testing.assert_close(list(grads), kept, rtol=0, atol=0)
    torch.testing.assert_close([p.grad for p in params], [3.0 * grad for grad in kept], rtol=1e-4, atol=1e-4)
    assert layer.fc1.weight.grad.untyped_storage().data_ptr() == optimizer.buffers[0].grad.untyped_storage().data_ptr()


def test_activations_are_computed_anew_where_autograd_works():
    """checkpoint() runs the forward again from inside of the node's backward."""
    results = []
    for checkpointed in (False, True):
        layer = make_layer()
        inputs = [torch.randn(n, B, c, generator=torch.Generator().manual_seed(1)) for n, c in ((T, C), (S, E))]
        inputs = [t.requires_grad_() for t in inputs]

        def forward(x, memory, layer=layer):
            (kv,) = joint_keys_and_values([layer], Context(encoder_out=memory.sin()), B)
            y = layer.self_attn_layer_norm(x.tanh().transpose(0, 1).contiguous())
            x, _, _ = layer.run(y, y, Context(causal=True), kv, None)
            return layer(x.transpose(0, 1), memory.cos())[0]

        torch.manual_seed(2)
        out = checkpoint(forward, *inputs, use_reentrant=False) if checkpointed else forward(*inputs)
        out.sum().backward()
        results.append([t.grad for t in (*inputs, *layer.parameters())])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_layer_that_is_used_twice_gets_both_gradients():
    gradients = []
    for owned in (False, True):
        layer = make_layer("Encoder")
        optimizer = ContiguousAdam(list(layer.parameters())) if owned else None
        torch.manual_seed(3)
        x, y, context, _ = make_inputs(layer)
        for _ in range(2):
            x, y, _ = layer.run(x, y, context, None, layer.self_attn_layer_norm)
        (x.sum() + y.square().sum()).backward()
        if optimizer is not None:
            optimizer.materialize_grads()
        gradients.append([p.grad for p in layer.parameters()])
    torch.testing.assert_close(*gradients)


def test_a_second_derivative_is_refused():
    layer = make_layer(p=0.0)
    x, y, context, kv = make_inputs(layer)
    x, _, _ = layer.run(x, y, context, kv)
    (grad,) = torch.autograd.grad(x.square().sum(), y, create_graph=True)
    with pytest.raises(RuntimeError, match="ls_plugin layer"):
        grad.sum().backward()


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_keys_of_all_layers_in_one_product(p):
    layers_ = [make_layer(p=p, seed=i) for i in range(3)]
    encoder_out = torch.randn(S, B, E, requires_grad=True)
    context = Context(encoder_out=encoder_out)
    together = joint_keys_and_values(layers_, context, B)
    apart = [
        torch.cat(
            [proj(encoder_out.transpose(0, 1)) for proj in (layer.encoder_attn.k_proj, layer.encoder_attn.v_proj)], -1
        )
        for layer in layers_
    ]
    params = [
        encoder_out,
        *(
            q
            for layer in layers_
            for n, q in layer.named_parameters()
            if "encoder_attn.k" in n or "encoder_attn.v" in n
        ),
    ]
    results = []
    for kv in (together, apart):
        loss = sum((t * t.detach().cos()).sum() for t in kv[1:])  # the first layer was dropped
        results.append(torch.autograd.grad(loss, params, allow_unused=True))
    torch.testing.assert_close(list(together), apart, **TOLERANCE)
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs, rtol=1e-5, atol=1e-5)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2.0 * super().forward(x)


WATCHED = ["self_attn", "self_attn.out_proj", "self_attn.q_proj", "encoder_attn", "fc1", "fc2", "dropout_module"]
WATCHED += ["final_layer_norm", "self_attn_layer_norm", "self_attn.dropout_module", "activation_dropout_module"]


@pytest.mark.parametrize("name", WATCHED)
def test_a_hook_on_a_submodule_is_called(name):
    """MultiheadAttention itself passes its projections by in training: their hooks run where stock's run."""
    layer = make_layer(p=0.0)
    calls = []
    layer.get_submodule(name).register_forward_hook(lambda *_: calls.append(name))
    assert not layer.is_plain()
    x, memory = torch.randn(T, B, C), torch.randn(S, B, E)
    layer.eval()(x, memory, incremental_state=None)
    layer.train()(x, memory)
    inside = name in ("self_attn.out_proj", "self_attn.q_proj", "self_attn.dropout_module")
    assert len(calls) == 0 if inside else len(calls) >= 2


def test_a_dropout_of_another_type_is_called():
    layer = make_layer(p=0.3)
    layer.dropout_module = FairseqDropout(0.0)
    layer.activation_dropout_module.p = layer.self_attn.dropout_module.p = layer.encoder_attn.dropout_module.p = 0.0
    assert not layer.is_plain()
    x, memory = torch.randn(T, B, C), torch.randn(S, B, E)
    torch.testing.assert_close(layer(x, memory)[0], make_layer(p=0.0)(x, memory)[0], **TOLERANCE)


def test_a_replaced_submodule_is_called():
    layer, reference = make_layer(p=0.0), make_layer(p=0.0)
    x, memory = torch.randn(T, B, C), torch.randn(S, B, E)
    layer(x, memory)  # everything is prepared by now
    doubled = Doubled(C, F)
    doubled.load_state_dict(layer.fc1.state_dict())
    layer.fc1 = doubled
    reference.fc1.weight.data *= 2
    reference.fc1.bias.data *= 2
    torch.testing.assert_close(layer(x, memory)[0], reference(x, memory)[0], **TOLERANCE)
    layer.fc1 = nn.Linear(C, F)
    layer.fc1.load_state_dict(reference.fc1.state_dict())
    torch.testing.assert_close(layer(x, memory)[0], reference(x, memory)[0], **TOLERANCE)
    assert layer.is_plain()


def test_autocast_casts_the_products():
    layer = make_layer("Encoder", p=0.0)
    x = torch.randn(T, B, C)
    exact = layer(x, None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = layer(x, None)
    cast.float().sum().backward()
    assert 0 < (cast.float() - exact).abs().max() < 0.2
    assert all(p.grad is not None for p in layer.parameters())


def test_kept_for_the_backward():
    """To the byte: what layer_node.py says that it keeps, and nothing twice."""
    layer = make_layer(p=0.3, pre_norm=True)
    x, y, context, kv = make_inputs(layer)
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    layer.run(x, y, context, kv, norm_after(layer))  # parameters move side by side
    known = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), kv)}
    norm = norm_after(layer)
    known |= {t.untyped_storage().data_ptr() for t in norm.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer.run(x, y, context, kv, norm)
    rows = B * T * 4
    # y, qkv, attention's output, sum; y, q, attention's output, sum; y, activation, sum
    expected = rows * (C + 3 * C + C + C) + rows * (C + C + C + C) + rows * (C + F + C)
    expected += 3 * 2 * rows  # mean and 1 / deviation after each sublayer
    expected += 2 * 2 * rows * H  # row statistics of either attention
    assert sum(size for pointer, size in kept.items() if pointer not in known) == expected


def test_the_ops_are_called(monkeypatch):
    """In evaluation, one for each step between two products."""
    layer = make_layer().eval()
    calls = []
    for name in ("fused_attention", "residual_layer_norm", "bias_act_dropout", "bias_dropout_residual"):
        op = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *a, name=name, op=op, **o: calls.append(name) or op(*a, **o))
    x, y, context, kv = make_inputs(layer)
    with torch.no_grad():
        layer.run(x, y, context, kv, norm_after(layer))
    assert calls == ["fused_attention", "residual_layer_norm"] * 2 + ["bias_act_dropout", "residual_layer_norm"]
