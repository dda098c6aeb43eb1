"""Transformer layers on the fused ops.

Both subclass fairseq's layers: construction, parameter names, pruning and state-dict upgrades are inherited, attention is
stock. Only the forward is written anew, so that the dropout and the residual after each sublayer, in post-norm layers the layer norm
that follows, and the bias of the last product of the feed-forward network, are one op, and what stands between its two products, bias,
activation and dropout, another.

Dimensions: T target or source length, S source length, B batch, C model width.
"""

import torch
import torch.nn.functional as F
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from fairseq.utils import get_activation_fn
from torch import Tensor, nn

from ls_plugin.modules.dropout import Dropout
from ls_plugin.modules.swap import use_fused_modules

_MASKED_SCORE_FP32, _MASKED_SCORE_HALF = -1e8, -1e4  # finite, so that a fully masked row stays free of NaN


class TransformerEncoderLayer(TransformerEncoderLayerBase):
    """Encoder layer: self-attention and feed-forward network, pre-norm or post-norm."""

    def __init__(self, cfg, return_fc: bool = False):
        super().__init__(cfg, return_fc)
        # fairseq 0.12.2 sends inference through torch's nested-tensor fast path unless a layer says that it cannot.
        self.can_use_fastpath = False
        use_fused_modules(self, "TransformerEncoderLayerBase")

    def forward(self, x: Tensor, encoder_padding_mask: Tensor | None, attn_mask: Tensor | None = None):
        """x: (T, B, C).  encoder_padding_mask: (B, T), true at padding.  attn_mask: (T, T), nonzero where attention is barred.

        Returns (T, B, C), or with ``return_fc`` also the feed-forward output before dropout and residual, (T, B, C).
        """
        if attn_mask is not None:
            barred = _MASKED_SCORE_FP32 if x.dtype == torch.float32 else _MASKED_SCORE_HALF
            attn_mask = attn_mask.masked_fill(attn_mask.to(torch.bool), barred)

        residual = x
        if self.normalize_before:
            x = self.self_attn_layer_norm(x)
        x, _ = _attend(self.self_attn, x, x, encoder_padding_mask, need_weights=False, attn_mask=attn_mask)
        x = _add_to(residual, self, self.self_attn_layer_norm, x)

        residual = x
        if self.normalize_before:
            x = self.final_layer_norm(x)
        x = _feed_forward_without_bias(self, x)
        fc_result = x + self.fc2.bias if self.return_fc else None
        x = _add_to(residual, self, self.final_layer_norm, x, self.fc2.bias)
        return (x, fc_result) if self.return_fc else x


class TransformerDecoderLayer(TransformerDecoderLayerBase):
    """Decoder layer: causal self-attention, attention over the encoder, feed-forward network; pre-norm or post-norm."""

    def __init__(self, cfg, no_encoder_attn: bool = False, add_bias_kv: bool = False, add_zero_attn: bool = False):
        super().__init__(cfg, no_encoder_attn, add_bias_kv, add_zero_attn)
        use_fused_modules(self, "TransformerDecoderLayerBase")

    def forward(
        self,
        x: Tensor,
        encoder_out: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        prev_self_attn_state: list[Tensor] | None = None,
        prev_attn_state: list[Tensor] | None = None,
        self_attn_mask: Tensor | None = None,
        self_attn_padding_mask: Tensor | None = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
    ):
        """x: (T, B, C), T = 1 when decoding step by step with an ``incremental_state``.  encoder_out: (S, B, C).

        Padding masks (B, S) and (B, T) are true at padding; ``self_attn_mask`` (T, T) is added to the scores. The ``prev_*_state``
        lists (key, value[, padding mask]) overwrite what the incremental state holds.

        Returns (T, B, C), the attention over the encoder or None ((B, T, S) averaged over heads, or (H, B, T, S) with
        ``need_head_weights``), and None, the place of an ONNX-only state.
        """
        need_attn = need_attn or need_head_weights

        residual = x
        if self.normalize_before:
            x = self.self_attn_layer_norm(x)
        _restore_attention_state(self.self_attn, incremental_state, prev_self_attn_state)
        key, key_padding_mask, self_attn_mask = self._self_attention_inputs(
            x, encoder_out, encoder_padding_mask, incremental_state, self_attn_mask, self_attn_padding_mask
        )
        x, attn = _attend(
            self.self_attn,
            x,
            key,
            key_padding_mask,
            incremental_state=incremental_state,
            need_weights=False,
            attn_mask=self_attn_mask,
        )
        x = _add_to(residual, self, self.self_attn_layer_norm, x)

        if self.encoder_attn is not None and encoder_out is not None:
            residual = x
            if self.normalize_before:
                x = self.encoder_attn_layer_norm(x)
            _restore_attention_state(self.encoder_attn, incremental_state, prev_attn_state)
            x, attn = _attend(
                self.encoder_attn,
                x,
                encoder_out,
                encoder_padding_mask,
                incremental_state=incremental_state,
                static_kv=True,
                need_weights=need_attn or (not self.training and self.need_attn),
                need_head_weights=need_head_weights,
            )
            x = _add_to(residual, self, self.encoder_attn_layer_norm, x)

        residual = x
        if self.normalize_before:
            x = self.final_layer_norm(x)
        x = _add_to(residual, self, self.final_layer_norm, _feed_forward_without_bias(self, x), self.fc2.bias)
        return x, attn, None

    def _self_attention_inputs(self, x, encoder_out, encoder_padding_mask, incremental_state, attn_mask, padding_mask):
        """Keys, their padding mask and the score mask of self-attention.

        They are x and the masks as given, except with ``--cross-self-attention``, where the encoder's output stands before x; while
        decoding only at the first step, after which it is in the cache.
        """
        cached = self.self_attn._get_input_buffer(incremental_state) if incremental_state is not None else {}
        if not self.cross_self_attention or "prev_key" in cached:
            return x, padding_mask, attn_mask
        n_source, batch_size = encoder_out.size(0), encoder_out.size(1)
        if attn_mask is not None:
            attn_mask = torch.cat((x.new_zeros(x.size(0), n_source), attn_mask), dim=1)
        if padding_mask is not None:
            if encoder_padding_mask is None:
                encoder_padding_mask = padding_mask.new_zeros(batch_size, n_source)
            padding_mask = torch.cat((encoder_padding_mask, padding_mask), dim=1)
        return torch.cat((encoder_out, x), dim=0), padding_mask, attn_mask


def _attend(attention, query: Tensor, key: Tensor, key_padding_mask: Tensor | None, **options):
    """Attention whose output, and gradient, is zero in sentences that are padding throughout.

    A softmax over nothing is NaN, which would reach every weight in the update. So the keys of such a sentence are unmasked, and what
    they give is discarded.

    query: (T, B, C), or (T, B * beam, C) while decoding.  key: (S, B, C).  key_padding_mask: (B, S), true at padding.
    options: the other arguments of fairseq's attention.  Returns what that returns: (T, B, C), and the weights or None.
    """
    if key_padding_mask is None or _extends_a_cache(options):
        return attention(query, key, key, key_padding_mask, **options)
    is_empty = key_padding_mask.all(dim=1)
    # On the CPU it costs nothing to ask; a GPU would have to be waited for.
    if is_empty.device.type == "cpu" and not is_empty.any():
        return attention(query, key, key, key_padding_mask, **options)
    x, attn = attention(query, key, key, key_padding_mask & ~is_empty[:, None], **options)
    is_empty = is_empty.repeat_interleave(x.size(1) // is_empty.size(0))
    return x.masked_fill(is_empty[:, None], 0.0), attn


def _extends_a_cache(options: dict) -> bool:
    """Whether the keys given are not all that is attended to, so that their mask alone does not tell an empty sentence."""
    return options.get("incremental_state") is not None and not options.get("static_kv", False)


def _add_to(residual: Tensor, layer, norm, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """residual + dropout(x + bias), in post-norm layers normalised: (T, B, C), one op."""
    if layer.normalize_before:
        return layer.dropout_module.add_to(residual, x, bias)
    return layer.dropout_module.add_and_normalize(norm, residual, x, bias)[1]


def _feed_forward_without_bias(layer, x: Tensor) -> Tensor:
    """W2 dropout(activation(W1 x + b1)): (T, B, C) -> (T, B, C); b2 is added by the op that follows."""
    activation, dropout = _OP_NAMES.get(layer.activation_fn), layer.activation_dropout_module
    if activation is not None and isinstance(dropout, Dropout) and _is_bare_linear(layer.fc1):
        x = dropout.activate(F.linear(x, layer.fc1.weight), layer.fc1.bias, activation)
    else:
        x = dropout(layer.activation_fn(layer.fc1(x)))
    return F.linear(x, layer.fc2.weight)


# fairseq's activation functions, as the op names them. "linear" is missing, a new function in each layer: there the product adds
# the bias, and the dropout is one op all the same.
_OP_NAMES = {get_activation_fn(name): name for name in ("relu", "relu_squared", "gelu", "gelu_accurate", "tanh")}


def _is_bare_linear(module) -> bool:
    """Whether calling it is nothing but the product and the bias: no subclass, no hooks (quant-noise has one)."""
    return type(module) is nn.Linear and not module._forward_pre_hooks and not module._forward_hooks


def _restore_attention_state(attention, incremental_state, state: list[Tensor] | None) -> None:
    """Puts keys and values (and a key padding mask) that the caller kept into the incremental state."""
    if state is None:
        return
    if incremental_state is None:
        raise ValueError("decoder layer: prev_self_attn_state and prev_attn_state need an incremental_state, got None")
    names = ("prev_key", "prev_value", "prev_key_padding_mask")
    attention._set_input_buffer(incremental_state, dict(zip(names, state, strict=False)))
