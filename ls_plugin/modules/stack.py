"""A stack of layers, in which each applies the norm that the next one begins with."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from ls_plugin import packing
from ls_plugin.modules.layer_node import JointKeysAndValues
from ls_plugin.modules.layer_norm import LayerNorm
from ls_plugin.modules.swap import WEIGHT_AND_BIAS, are_as_built, are_classes_as_built
from ls_plugin.modules.transformer_layer import (
    Context,
    can_be_nodes,
    joint_linear,
    keep_encoder_keys,
    one_per_sentence,
    split_heads,
)


def run_stack(
    layers: Sequence[nn.Module],
    x: Tensor,
    context: Context,
    final_norm: nn.Module | None,
    call: Callable,
    weights_of: int | None = None,
) -> tuple[Tensor, list, Tensor | None]:
    """Sends x (B, T, C) through the layers and the norm after them.

    Args:
        call: ``call(layer, x, index)`` for a layer that is wrapped or watched: (T, B, C) -> (T, B, C), something to keep, attention weights.
        weights_of: index of the layer whose attention weights (H, B, T, S) are wanted, or None.
    Returns:
        (B, T, C); for each layer its output (T, B, C) with what ``call`` gave to keep, or None; the attention weights or None.
    """
    plain = [getattr(layer, "is_plain", bool)() for layer in layers]
    keys_and_values = joint_keys_and_values(layers, context, x.shape[0]) if all(plain) else None
    n_layers, outputs, weights = len(layers), [], None
    x = x.contiguous()
    y = None  # the stream normed for the next layer, where that is done already
    for i, layer in enumerate(layers):
        kept = None
        if plain[i]:
            pre_norm = layer.normalize_before
            if y is None:
                y = layer.self_attn_layer_norm(x) if pre_norm else x
            next_norm = None
            if pre_norm:
                if i + 1 == n_layers:
                    next_norm = final_norm if is_plain_norm(final_norm) else None
                elif plain[i + 1]:
                    next_norm = layers[i + 1].self_attn_layer_norm
            total, y, layer_weights = layer.run(
                x if pre_norm else None,
                y,
                context,
                None if keys_and_values is None else keys_and_values[i],
                next_norm,
                "heads" if i == weights_of else None,
            )
            x = total if pre_norm else y
        else:
            output, kept, layer_weights = call(layer, x.transpose(0, 1), i)
            x, y = output.transpose(0, 1).contiguous(), None
        weights = layer_weights if i == weights_of else weights
        outputs.append((x.transpose(0, 1), kept))
    if final_norm is not None:
        normed = n_layers > 0 and plain[-1] and layers[-1].normalize_before and is_plain_norm(final_norm)
        x = y if normed else final_norm(x)
    return x, outputs, weights


def is_plain_norm(norm: nn.Module | None) -> bool:
    return norm is not None and are_classes_as_built() and are_as_built((norm,), {LayerNorm: WEIGHT_AND_BIAS})


def declare_joint_keys(layers: Sequence[nn.Module]) -> None:
    """Has the projections to keys and values of all layers lie side by side, in the order in which :func:`joint_keys_and_values` takes them."""
    attentions = [layer.encoder_attn for layer in layers if getattr(layer, "encoder_attn", None) is not None]
    if attentions:
        for params in _key_and_value_params(attentions):
            packing.declare(params)


def joint_keys_and_values(layers: Sequence[nn.Module], context: Context, n_batch: int) -> list[Tensor] | None:
    """Keys beside values (B, S, 2C) of the attention over the encoder, for all of the plain layers in one product; None if there is none.

    ``n_batch`` is the number of rows of the decoder's input, sentences times hypotheses.
    While decoding they go into the incremental state at the first step, and None is returned.
    """
    if context.encoder_out is None or not layers or any(layer.encoder_attn is None for layer in layers):
        return None
    attentions = [layer.encoder_attn for layer in layers]
    encoder_out, padding_mask, state = context.encoder_out, context.encoder_padding_mask, context.incremental_state
    if state is not None:
        if "prev_key" in attentions[0]._get_input_buffer(state):
            return None
        encoder_out, padding_mask = one_per_sentence(context, n_batch, attentions[0].beam_size)
    encoder_out = encoder_out.transpose(0, 1)
    if can_be_nodes(encoder_out, layers[0].training) and state is None:
        weights, biases = _key_and_value_params(attentions)
        kv = JointKeysAndValues.apply(len(layers), encoder_out, *weights, *biases)
    else:
        kv = joint_linear(encoder_out, *_projections(attentions)).chunk(len(layers), dim=-1)
    if state is None:
        return kv
    for attention, layer_kv in zip(attentions, kv, strict=True):
        keep_encoder_keys(
            attention, state, *(split_heads(t, attention.num_heads) for t in layer_kv.chunk(2, dim=-1)), padding_mask
        )
    return None


def _projections(attentions) -> list[nn.Linear]:
    return [p for attention in attentions for p in (attention.k_proj, attention.v_proj)]


def _key_and_value_params(attentions) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    projections = _projections(attentions)
    return [p.weight for p in projections], [p.bias for p in projections]
