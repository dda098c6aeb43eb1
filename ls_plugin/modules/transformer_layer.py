"""Transformer layers on the fused ops.

Both subclass fairseq's layers: construction, parameter names, pruning and state-dict upgrades are inherited; the forward is written anew, as a
chain of sublayers with one fused step between any two matrix products (``layer_node.py`` shows the chain). It runs in one of three ways:

- in training as one node of autograd (``layer_node.py``);
- composed of differentiable ops: in evaluation and decoding, under autocast and torch.compile, in fp64 or without the compiled library, and
  for options that the node leaves out;
- as fairseq wrote it, where a submodule or its ``forward`` was replaced, or has a hook: the fused ops would not call it.

Dimensions: T target or source length, S source length, B batch, C model width, H heads, D = C / H. Inside of a stack activations are
(B, T, C); the layers' own ``forward`` keeps fairseq's (T, B, C).
"""

import dataclasses

import torch
from fairseq.modules import FairseqDropout, MultiheadAttention
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor, nn
from torch.autograd import forward_ad

from ls_plugin import _library, ops, packing
from ls_plugin.modules.dropout import Dropout
from ls_plugin.modules.joint import joint
from ls_plugin.modules.layer_node import EncoderAttention, FeedForward, Run, SelfAttention, apply_layer_node
from ls_plugin.modules.layer_norm import LayerNorm
from ls_plugin.modules.scripting import ScriptedAsStock
from ls_plugin.modules.swap import NO_PARAMETER, WEIGHT_AND_BIAS, are_as_built, are_classes_as_built, use_fused_modules
from ls_plugin.ops import product
from ls_plugin.ops.checks import product_dtype

# The submodules that the fused ops stand for, and the parameters that they read.
_PARTS = {
    nn.Linear: WEIGHT_AND_BIAS,
    LayerNorm: WEIGHT_AND_BIAS,
    Dropout: NO_PARAMETER,
    MultiheadAttention: NO_PARAMETER,
}
_PARTS_OF_ATTENTION = {nn.Linear: WEIGHT_AND_BIAS, FairseqDropout: NO_PARAMETER}


@dataclasses.dataclass(slots=True)
class Context:
    """What a layer attends to and how, the same for all layers of a stack.

    Padding masks (B, T) and (B, S), of any dtype and strides, are true at padding. ``score_bias`` is added to the scores of self-attention; a
    stack says ``causal`` instead, unless the decoder has a mask of its own.
    """

    padding_mask: Tensor | None = None
    encoder_out: Tensor | None = None  # (S, B, E)
    encoder_padding_mask: Tensor | None = None
    causal: bool = False
    score_bias: Tensor | None = None
    incremental_state: dict | None = None
    as_nodes: bool | None = None  # whether layers run as nodes, found out by the first

    def __post_init__(self) -> None:
        self.padding_mask, self.encoder_padding_mask = _as_bool(self.padding_mask), _as_bool(self.encoder_padding_mask)


class _FusedLayer(ScriptedAsStock):
    """What encoder and decoder layers share; mixed into fairseq's layer classes."""

    def _set_up(self, stock_name: str, activation: str) -> None:
        use_fused_modules(self, stock_name)
        self._activation_name, self._stock_activation_fn = activation, self.activation_fn
        attentions = [a for a in (self.self_attn, getattr(self, "encoder_attn", None)) if a is not None]
        for attention in attentions:
            if attention.self_attention:
                packing.declare([p.weight for p in _projections(attention)])
                packing.declare([p.bias for p in _projections(attention)])
        # The submodules from which the blueprints were made.
        self._known_parts: list = []
        self._blueprints: dict[tuple, _Blueprint] = {}

    def is_fusable(self) -> bool:
        """Whether the fused ops do all that calling the submodules would do. Asked in every forward."""
        modules = self._modules
        parts, of_attention = list(modules.values()), []
        for name in ("self_attn", "encoder_attn"):
            attention = modules.get(name)
            if attention is not None:
                if type(attention) is not MultiheadAttention or not _is_plain_attention(attention):
                    return False
                of_attention += attention._modules.values()
        if not (
            are_classes_as_built()
            and are_as_built(parts, _PARTS)
            and are_as_built(of_attention, _PARTS_OF_ATTENTION)
            and self.activation_fn is self._stock_activation_fn
            and "residual_connection" not in self.__dict__
        ):
            return False
        parts += of_attention
        if parts != self._known_parts:
            self._known_parts, self._blueprints = parts, {}
        return True

    def is_plain(self) -> bool:
        """Whether a stack may call :meth:`run` in place of the layer itself, which nothing wraps or watches."""
        return are_as_built((self,), _LAYERS) and self.is_fusable()

    def run(
        self,
        x: Tensor | None,
        y: Tensor,
        context: Context,
        kv: Tensor | None = None,
        next_norm: nn.LayerNorm | None = None,
        attention_weights: str | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The layer inside of a stack.

        Args:
            x: the residual stream (B, T, C), None in post-norm layers.  y: what the first sublayer reads, (B, T, C): the normed stream.
            kv: keys beside values (B, S, 2C) of the attention over the encoder, computed for all layers together; None: from the encoder's
                output or the incremental state.
            next_norm: pre-norm only: the norm that is applied to the layer's output for who comes next.
            attention_weights: of the attention over the encoder: None, "heads" (H, B, T, S) or "mean" over heads (B, T, S).
        Returns:
            x, y as they were given to this layer (y None without a next norm), and the attention weights or None.
        """
        has_encoder = self._modules.get("encoder_attn") is not None and (
            kv is not None or context.encoder_out is not None
        )
        norms = self._norms_after(has_encoder, next_norm)
        if self._can_be_a_node(y, context, has_encoder, kv):
            x, y, weights = self._run_as_node(x, y, context, kv, norms, has_encoder, attention_weights is not None)
            return x, y, _as_asked(weights, attention_weights)
        return self._run_composed(x, y, context, kv, norms, has_encoder, attention_weights)

    def _run_alone(
        self, x: Tensor, context: Context, attention_weights: str | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The layer by itself, (T, B, C) -> (T, B, C), and the attention weights as asked."""
        x = x.transpose(0, 1).contiguous()
        y = self.self_attn_layer_norm(x) if self.normalize_before else x
        kv = None
        attention = getattr(self, "encoder_attn", None)
        if attention is not None and context.encoder_out is not None and context.incremental_state is None:
            kv = joint_linear(context.encoder_out.transpose(0, 1), attention.k_proj, attention.v_proj)
        x, y, weights = self.run(x if self.normalize_before else None, y, context, kv, None, attention_weights)
        return (x if self.normalize_before else y).transpose(0, 1), weights

    def _norms_after(self, has_encoder: bool, next_norm) -> list[nn.LayerNorm | None]:
        """The norm after each sublayer: its own in post-norm, that of the next one in pre-norm."""
        modules = self._modules
        norms = [modules["self_attn_layer_norm"], modules["final_layer_norm"]]
        if has_encoder:
            norms.insert(1, modules["encoder_attn_layer_norm"])
        return [*norms[1:], next_norm] if self.normalize_before else norms

    def _can_be_a_node(self, y: Tensor, context: Context, has_encoder: bool, kv: Tensor | None) -> bool:
        if context.as_nodes is None:
            context.as_nodes = can_be_nodes(y, self.training)
        return (
            context.as_nodes
            and context.incremental_state is None
            and context.score_bias is None
            and self._modules["self_attn"].self_attention
            and has_encoder == (kv is not None)
            and self._modules["fc1"].weight.dtype == y.dtype
        )

    def _run_as_node(self, x, y, context, kv, norms, has_encoder, needs_weights):
        modules, last_norm = self._modules, norms[-1]
        attention, encoder_attention = modules["self_attn"], modules["encoder_attn"] if has_encoder else None
        # Numbers of heads and scales may change, by pruning for example.
        key = attention.num_heads, attention.scaling
        if has_encoder:
            key += encoder_attention.num_heads, encoder_attention.scaling
        blueprint = self._blueprints.get(key)
        if blueprint is None:
            blueprint = self._blueprints[key] = _Blueprint(self, norms[:-1])
        run = Run(
            sublayers=blueprint.sublayers,
            pre_norm=self.normalize_before,
            eps=tuple([None if norm is None else norm.eps for norm in norms]),
            padding_mask=context.padding_mask,
            encoder_padding_mask=context.encoder_padding_mask,
            causal=context.causal,
            p=_probability(modules["dropout_module"]),
            p_attention=_probability(attention._modules["dropout_module"]),
            p_activation=_probability(modules["activation_dropout_module"]),
            needs_weights=needs_weights and has_encoder,
        )
        params = [parameters[name] for parameters, name in blueprint.parameters]
        return apply_layer_node(run, x, y, kv, *params, *_weight_and_bias(last_norm))

    def _run_composed(self, x, y, context, kv, norms, has_encoder, attention_weights):
        weights = None
        norms_after = iter(norms)
        out = self._attend_to_itself(y, context)
        x, y = self._residual(x, y, out, self.self_attn.out_proj.bias, next(norms_after))
        if has_encoder:
            out, weights = self._attend_to_encoder(y, context, kv, attention_weights)
            x, y = self._residual(x, y, out, self.encoder_attn.out_proj.bias, next(norms_after))
        h = self.activation_dropout_module.activate(
            product.linear(y, self.fc1.weight), self.fc1.bias, self._activation_name
        )
        x, y = self._residual(x, y, product.linear(h, self.fc2.weight), self.fc2.bias, next(norms_after))
        return x, y, weights

    def _residual(self, x, y, out: Tensor, bias: Tensor, norm) -> tuple[Tensor | None, Tensor | None]:
        """The step between two sublayers: the new x and y."""
        residual = x if self.normalize_before else y
        if norm is None:
            return self.dropout_module.add_to(residual, out, bias), None
        total, y = self.dropout_module.add_and_normalize(norm, residual, out, bias)
        return total if self.normalize_before else None, y

    def _attend_to_itself(self, y: Tensor, context: Context) -> Tensor:
        """Self-attention (B, T, C) -> (B, T, C), without the output bias; with ``--cross-self-attention`` over the encoder's output, too."""
        attention = self.self_attn
        padding_mask, score_bias, keys = context.padding_mask, context.score_bias, y
        state = _state_of(attention, context.incremental_state)
        if getattr(self, "cross_self_attention", False) and "prev_key" not in state and context.encoder_out is not None:
            keys, padding_mask, score_bias = _with_encoder(y, context)
        if attention.self_attention:
            q, k, v = joint_linear(y, *_projections(attention)).chunk(3, dim=-1)
        else:
            q = product.linear(y, attention.q_proj.weight, attention.q_proj.bias)
            k, v = joint_linear(keys, attention.k_proj, attention.v_proj).chunk(2, dim=-1)
        q, k, v = (split_heads(t, attention.num_heads) for t in (q, k, v))
        if context.incremental_state is not None:
            k, v, padding_mask = _extend_cache(attention, context.incremental_state, state, k, v, padding_mask)
        return _attend(attention, q, k, v, padding_mask, score_bias, context.causal)[0]

    def _attend_to_encoder(self, y: Tensor, context: Context, kv: Tensor | None, attention_weights: str | None):
        """Attention over the encoder (B, T, C) -> (B, T, C), without the output bias, and the weights as asked."""
        attention = self.encoder_attn
        q = split_heads(product.linear(y, attention.q_proj.weight, attention.q_proj.bias), attention.num_heads)
        k, v, padding_mask = encoder_keys(attention, context, kv, y.shape[0])
        return _attend(attention, q, k, v, padding_mask, None, False, attention_weights)


class _Blueprint:
    """A layer as a node: its sublayers, and where their parameters are. It holds as long as no submodule is replaced.

    Args:
        norms: after each sublayer but the last one; there is an attention over the encoder if there are two.
    """

    def __init__(self, layer, norms):
        attention, encoder_attention = layer.self_attn, layer.encoder_attn if len(norms) == 2 else None
        sublayers = [SelfAttention(attention.num_heads, attention.scaling)]
        projections = _projections(attention)
        places = [(p, "weight") for p in projections] + [(p, "bias") for p in projections]
        places += _output_and_norm(attention.out_proj, norms[0])
        if encoder_attention is not None:
            sublayers.append(EncoderAttention(encoder_attention.num_heads, encoder_attention.scaling))
            places += [(encoder_attention.q_proj, "weight"), (encoder_attention.q_proj, "bias")]
            places += _output_and_norm(encoder_attention.out_proj, norms[1])
        sublayers.append(FeedForward(layer._activation_name))
        places += [(layer.fc1, "weight"), (layer.fc1, "bias"), (layer.fc2, "weight"), (layer.fc2, "bias")]
        self.sublayers = tuple(sublayers)
        self.parameters = [(module._parameters, name) for module, name in places]


def _output_and_norm(linear: nn.Linear, norm: nn.LayerNorm) -> list[tuple[nn.Module, str]]:
    return [(linear, "weight"), (linear, "bias"), (norm, "weight"), (norm, "bias")]


class TransformerEncoderLayer(_FusedLayer, TransformerEncoderLayerBase):
    """Encoder layer: self-attention and feed-forward network, pre-norm or post-norm."""

    def __init__(self, cfg, return_fc: bool = False):
        super().__init__(cfg, return_fc)
        # fairseq 0.12.2 sends inference through torch's nested-tensor fast path unless a layer says that it cannot.
        self.can_use_fastpath = False
        self._set_up("TransformerEncoderLayerBase", cfg.activation_fn)

    def is_fusable(self) -> bool:
        return not self.return_fc and super().is_fusable()

    def forward(self, x: Tensor, encoder_padding_mask: Tensor | None, attn_mask: Tensor | None = None):
        """x: (T, B, C).  encoder_padding_mask: (B, T), true at padding.  attn_mask: (T, T), nonzero where attention is barred.

        Returns (T, B, C), or with ``return_fc`` also the feed-forward output before dropout and residual, (T, B, C).
        """
        if not self.is_fusable():
            return super().forward(x, encoder_padding_mask, attn_mask)
        score_bias = None
        if attn_mask is not None:
            # Finite, as stock's, so that a fully barred row is an average.
            score_bias = _barred(attn_mask, x.dtype, -1e8 if x.dtype == torch.float32 else -1e4)
        context = Context(padding_mask=encoder_padding_mask, score_bias=score_bias)
        return self._run_alone(x, context)[0]


class TransformerDecoderLayer(_FusedLayer, TransformerDecoderLayerBase):
    """Decoder layer: causal self-attention, attention over the encoder, feed-forward network; pre-norm or post-norm."""

    def __init__(self, cfg, no_encoder_attn: bool = False, add_bias_kv: bool = False, add_zero_attn: bool = False):
        super().__init__(cfg, no_encoder_attn, add_bias_kv, add_zero_attn)
        self._set_up("TransformerDecoderLayerBase", cfg.activation_fn)

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
        causal: bool = False,
    ):
        """x: (T, B, C), T = 1 when decoding step by step with an ``incremental_state``.  encoder_out: (S, B, C).

        Padding masks (B, S) and (B, T) are true at padding; ``self_attn_mask`` (T, T) is added to the scores,
        or bars where it is true; ``causal`` stands for that of an autoregressive decoder, without a tensor. The ``prev_*_state`` lists (key, value[, padding mask]) overwrite what the incremental state holds.

        Returns (T, B, C), the attention over the encoder or None ((B, T, S) averaged over heads, or (H, B, T, S) with
        ``need_head_weights``), and None, the place of an ONNX-only state.
        """
        if not self.is_fusable():
            if causal:
                self_attn_mask = torch.full((x.shape[0],) * 2, float("-inf"), dtype=x.dtype, device=x.device).triu(1)
            return super().forward(
                x,
                encoder_out,
                encoder_padding_mask,
                incremental_state,
                prev_self_attn_state,
                prev_attn_state,
                self_attn_mask,
                self_attn_padding_mask,
                need_attn,
                need_head_weights,
            )
        _restore_attention_state(self.self_attn, incremental_state, prev_self_attn_state)
        if self.encoder_attn is not None and encoder_out is not None:
            _restore_attention_state(self.encoder_attn, incremental_state, prev_attn_state)
        if self_attn_mask is not None and self_attn_mask.dtype == torch.bool:
            self_attn_mask = _barred(self_attn_mask, x.dtype, float("-inf"))
        context = Context(
            padding_mask=self_attn_padding_mask,
            encoder_out=encoder_out,
            encoder_padding_mask=encoder_padding_mask,
            causal=causal,
            score_bias=self_attn_mask,
            incremental_state=incremental_state,
        )
        x, weights = self._run_alone(x, context, self._weights_wanted(need_attn, need_head_weights))
        return x, weights, None

    def _weights_wanted(self, need_attn: bool, need_head_weights: bool) -> str | None:
        """fairseq's rule for the attention weights, in the words of :meth:`run`."""
        if need_head_weights:
            return "heads"
        return "mean" if need_attn or (not self.training and self.need_attn) else None


def knows_causal(layer: nn.Module) -> bool:
    """Whether a layer, perhaps wrapped, is a decoder layer of ours, whose ``forward`` takes ``causal``."""
    return type(getattr(layer, "module", layer)) is TransformerDecoderLayer


def can_be_nodes(x: Tensor, training: bool) -> bool:
    """Whether layers that read ``x`` can run as nodes of autograd: the kernels serve it, and nothing has to see the ops inside.

    While training also where no gradient is wanted: activation checkpointing runs a layer once without and once with, and the masks must be
    equal.
    """
    return (
        (training or torch.is_grad_enabled())
        and _library.has_kernel(x)
        and not torch.compiler.is_compiling()
        and product_dtype(x) is None
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


def joint_linear(x: Tensor, *linears: nn.Linear) -> Tensor:
    """The outputs of several linear maps of ``x`` side by side, in one product."""
    weights, biases = [p.weight for p in linears], [p.bias for p in linears]
    if torch.is_grad_enabled():
        return product.linear(x, torch.cat(weights), torch.cat(biases))
    return product.linear(x, joint(weights), joint(biases))


def encoder_keys(attention, context: Context, kv: Tensor | None, n_batch: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values (B', H, S, D) of the attention over the encoder, and their padding mask (B', S).

    While decoding they are computed at the first step, once for all hypotheses of a sentence where ``set_beam_size`` gave their number,
    and kept in the incremental state.
    """
    state = _state_of(attention, context.incremental_state)
    if "prev_key" in state:
        return state["prev_key"], state["prev_value"], _as_bool(state.get("prev_key_padding_mask"))
    padding_mask = context.encoder_padding_mask
    if kv is None:
        encoder_out = context.encoder_out
        if context.incremental_state is not None:
            encoder_out, padding_mask = one_per_sentence(context, n_batch, attention.beam_size)
        kv = joint_linear(encoder_out.transpose(0, 1), attention.k_proj, attention.v_proj)
    k, v = (split_heads(t, attention.num_heads) for t in kv.chunk(2, dim=-1))
    if context.incremental_state is not None:
        keep_encoder_keys(attention, context.incremental_state, k, v, padding_mask)
    return k, v, padding_mask


def one_per_sentence(context: Context, n_batch: int, beam_size: int) -> tuple[Tensor, Tensor | None]:
    """The encoder's output (S, B', C) and its padding mask, once for every sentence.

    ``n_batch`` hypotheses are ``beam_size`` for each of B' sentences. Stock repeats the encoder's output for each, unless the model knows better
    (BART leaves it alone after ``set_beam_size``).
    """
    encoder_out, padding_mask = context.encoder_out, context.encoder_padding_mask
    if beam_size == 1 or encoder_out.shape[1] != n_batch:
        return encoder_out, padding_mask
    return encoder_out[:, ::beam_size], None if padding_mask is None else padding_mask[::beam_size]


def keep_encoder_keys(attention, incremental_state: dict, k: Tensor, v: Tensor, padding_mask: Tensor | None) -> None:
    """Puts keys and values (B', H, S, D) where fairseq's attention keeps and reorders them."""
    state = {"prev_key": k, "prev_value": v, "prev_key_padding_mask": padding_mask}
    attention._set_input_buffer(incremental_state, state)


def _extend_cache(attention, incremental_state: dict, state: dict, k: Tensor, v: Tensor, padding_mask: Tensor | None):
    """Keys, values (B, H, S, D) and their padding mask with those of the steps before, which are kept for the next one."""
    if "prev_key" in state:
        k = torch.cat((state["prev_key"], k), dim=2)
        v = torch.cat((state["prev_value"], v), dim=2)
    padding_mask = attention._append_prev_key_padding_mask(
        key_padding_mask=padding_mask,
        prev_key_padding_mask=state.get("prev_key_padding_mask"),
        batch_size=k.shape[0],
        src_len=k.shape[2],
        static_kv=False,
    )
    attention._set_input_buffer(
        incremental_state, {"prev_key": k, "prev_value": v, "prev_key_padding_mask": padding_mask}
    )
    return k, v, _as_bool(padding_mask)


def _attend(attention, q, k, v, padding_mask, score_bias, causal, attention_weights: str | None = None):
    """Attention and its output product without the bias.

    q (B, H, T, D); k, v (B', H, S, D), where B' divides B: then B / B' neighbours, the hypotheses of a sentence, share their keys.
    Returns (B, T, C), and the weights as asked.
    """
    n_batch, n_heads, length, head_dim = q.shape
    shared = n_batch // k.shape[0]
    if shared > 1:
        q = q.unflatten(0, (-1, shared)).transpose(1, 2).flatten(2, 3)  # (B', H, shared * T, D)
    p = _probability(attention.dropout_module)
    out = ops.fused_attention(q, k, v, padding_mask, score_bias, causal, attention.scaling, p)
    weights = None
    if attention_weights is not None:
        scores = product.matmul(q * attention.scaling, k.transpose(-1, -2))
        weights = ops.attention_softmax(scores, padding_mask, score_bias, causal)
    if shared > 1:
        out, weights = (
            None if t is None else t.unflatten(2, (shared, length)).transpose(1, 2).flatten(0, 1)
            for t in (out, weights)
        )
    out = out.transpose(1, 2).reshape(n_batch, length, n_heads * head_dim)
    return product.linear(out, attention.out_proj.weight), _as_asked(weights, attention_weights)


def _as_asked(weights: Tensor | None, wish: str | None) -> Tensor | None:
    """Attention weights (B, H, T, S) as fairseq's attention returns them: (H, B, T, S), or their mean over heads (B, T, S)."""
    if weights is None:
        return None
    return weights.transpose(0, 1) if wish == "heads" else weights.mean(dim=1)


def _with_encoder(y: Tensor, context: Context) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Keys, their padding mask and the score bias of ``--cross-self-attention``: the encoder's output stands before y."""
    encoder_out = context.encoder_out.transpose(0, 1)
    (n_batch, n_source, _), length = encoder_out.shape, y.shape[1]
    score_bias, padding_mask, encoder_mask = context.score_bias, context.padding_mask, context.encoder_padding_mask
    if score_bias is not None:
        score_bias = torch.cat((score_bias.new_zeros(length, n_source), score_bias), dim=1)
    if padding_mask is not None or encoder_mask is not None:
        padding_mask, encoder_mask = (
            y.new_zeros((n_batch, n), dtype=torch.bool) if mask is None else mask
            for mask, n in ((padding_mask, length), (encoder_mask, n_source))
        )
        padding_mask = torch.cat((encoder_mask, padding_mask), dim=1)
    return torch.cat((encoder_out, y), dim=1), padding_mask, score_bias


def _is_plain_attention(attention: MultiheadAttention) -> bool:
    own = attention.__dict__
    return not (
        attention.bias_k is not None or own["add_zero_attn"] or own["use_xformers"] or "apply_sparse_mask" in own
    )


def _projections(attention) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    return attention.q_proj, attention.k_proj, attention.v_proj


def _weight_and_bias(norm) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if norm is None else (norm.weight, norm.bias)


def _probability(dropout) -> float:
    return dropout.p if dropout.training or dropout.apply_during_inference else 0.0


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """(B, T, C) -> (B, H, T, D), a view."""
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def _as_bool(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.to(torch.bool).contiguous()


def _barred(attn_mask: Tensor, dtype: torch.dtype, value: float) -> Tensor:
    """Score bias that is ``value`` where the mask is not zero."""
    return torch.zeros_like(attn_mask, dtype=dtype).masked_fill(attn_mask.to(torch.bool), value)


def _state_of(attention, incremental_state: dict | None) -> dict:
    return {} if incremental_state is None else attention._get_input_buffer(incremental_state)


def _restore_attention_state(attention, incremental_state, state: list[Tensor] | None) -> None:
    """Puts keys and values (and a key padding mask) that the caller kept into the incremental state."""
    if state is None:
        return
    if incremental_state is None:
        raise ValueError("decoder layer: prev_self_attn_state and prev_attn_state need an incremental_state, got None")
    names = ("prev_key", "prev_value", "prev_key_padding_mask")
    attention._set_input_buffer(incremental_state, dict(zip(names, state, strict=False)))


_LAYERS = {TransformerEncoderLayer: NO_PARAMETER, TransformerDecoderLayer: NO_PARAMETER}
