"""Which model flags the fused layers do not honour, and why: one function answers for all of them and all models."""

import re
from argparse import Namespace

from fairseq.trainer import Trainer
from fairseq.utils import get_available_activation_fns

from ls_plugin.errors import UnsupportedError
from ls_plugin.names import stock_name
from ls_plugin.rebinding import wrap

# relu_squared is no choice of --activation-fn but works when a configuration sets it; swish does not (fairseq hands out a class).
ACTIVATIONS = (*get_available_activation_fns(), "relu_squared")

_QUANTIZED = "quantisation takes the place of single products, which the fused layers compute together with others"
_XFORMERS = "attention is fairseq's own here, not that of xFormers"
_NO_LAYER = "the fused layers do not contain it"
_PRUNED = "layers would change their shape in the middle of loading, after their weights were laid out for one product"
_IGNORED = "fairseq's {model} ignores it"

# Attribute of the model's arguments, and why a value other than "off" is refused.
_REFUSED = {
    "quant_noise_pq": _QUANTIZED,
    "quant_noise_scalar": _QUANTIZED,
    "quantization_config_path": _QUANTIZED,
    "encoder_xformers_att_config": _XFORMERS,
    "decoder_xformers_att_config": _XFORMERS,
    "scale_fc": _NO_LAYER,
    "scale_attn": _NO_LAYER,
    "scale_heads": _NO_LAYER,
    "scale_resids": _NO_LAYER,
    "base_layers": "BASE layers exchange tokens between ranks and are not tested on the fused layers",
    "export": "it chooses a layer norm for TorchScript, which gets torch's from the fused layers in any case",
    "mha_heads_to_keep": _PRUNED,
    "ffn_blocks_to_remove": _PRUNED,
    "adaptive_input": _IGNORED,
    "tie_adaptive_weights": f"it needs --adaptive-input, and {_IGNORED}",
    "tie_adaptive_proj": f"it needs --adaptive-input, and {_IGNORED}",
    "char_inputs": _IGNORED,
}
_OFF = (None, False, 0, "")
_OFF_IS_MINUS_ONE = ("mha_heads_to_keep", "ffn_blocks_to_remove")
# What a stock model reads of the above, and runs outside of the layers.
_HONOURED = {"transformer_lm": ("adaptive_input", "tie_adaptive_weights", "tie_adaptive_proj")}


def unsupported_reasons(args: Namespace, stock_model: str = "transformer") -> list[str]:
    """All reasons, in the words of the flags, why the fused layers cannot run a model with these arguments; empty if they can.

    Args:
        args: the model's arguments, flat as argparse gives them or nested as a configuration file may (absent ones count as off).
        stock_model: fairseq's name of the model, e.g. transformer_lm.
    """
    reasons = []
    for name, why in _REFUSED.items():
        value = _value(args, name)
        off = value in _OFF or (name in _OFF_IS_MINUS_ONE and value == -1)
        if not off and name not in _HONOURED.get(stock_model, ()):
            reasons.append(f"{_flag(name)} {value}: {why.format(model=stock_model)}")
    activation = _value(args, "activation_fn") or "relu"
    if activation not in ACTIVATIONS:
        reasons.append(f"--activation-fn {activation}: unknown; choose one of {', '.join(ACTIVATIONS)}")
    return reasons


def refuse_unsupported(args: Namespace, stock_model: str) -> None:
    """Raises UnsupportedError with every reason and the stock architecture that honours the flags."""
    reasons = unsupported_reasons(args, stock_model)
    if reasons:
        arch = _value(args, "_name") or _value(args, "arch") or f"ls_{stock_model}"
        raise UnsupportedError(_message(arch, reasons))


def install() -> None:
    """Makes fairseq's trainer refuse what only the whole configuration tells.  Calling it again changes nothing."""
    wrap(Trainer, "__init__", _checked_trainer_init)


def _checked_trainer_init(stock, self, cfg, task, model, *args, **kwargs):
    path = cfg.common.quantization_config_path
    if path and hasattr(model, "stock_model"):
        arch = _value(cfg.model, "_name") or f"ls_{model.stock_model}"
        raise UnsupportedError(_message(arch, [f"{_flag('quantization_config_path')} {path}: {_QUANTIZED}"]))
    stock(self, cfg, task, model, *args, **kwargs)


def _message(arch: str, reasons: list[str]) -> str:
    return f"--arch {arch}: unsupported {'; '.join(reasons)}. Drop the flag, or train with --arch {stock_name(arch)}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _value(args, name: str):
    """An argument by its flat name; where the group is nested (encoder.layers), fairseq reads that in place of the flat one."""
    nested = re.match("(encoder|decoder|quant_noise)_(.*)", name)
    group = getattr(args, nested[1], None) if nested else None
    return getattr(args, name, None) if group is None else getattr(group, nested[2], None)
