"""Which model flags the fused layers do not honour, and why: one function answers for all of them."""

from argparse import Namespace

from fairseq.utils import get_available_activation_fns

from ls_plugin.errors import UnsupportedError

# relu_squared is no choice of --activation-fn but works when a configuration sets it; swish does not (fairseq hands out a class).
ACTIVATIONS = (*get_available_activation_fns(), "relu_squared")

_FUSED_PRODUCT = (
    "the last product of the feed-forward network is fused with its dropout and residual, and would bypass it"
)
_NO_LAYER = "the fused layers do not contain it"

# Attribute of the model's arguments, and why a value other than "off" is refused.
_REFUSED = {
    "quant_noise_pq": _FUSED_PRODUCT,
    "quant_noise_scalar": _FUSED_PRODUCT,
    "quantization_config_path": _FUSED_PRODUCT,
    "encoder_xformers_att_config": "attention is fairseq's own here, not that of xFormers",
    "decoder_xformers_att_config": "attention is fairseq's own here, not that of xFormers",
    "scale_fc": _NO_LAYER,
    "scale_attn": _NO_LAYER,
    "scale_heads": _NO_LAYER,
    "scale_resids": _NO_LAYER,
    "base_layers": "BASE layers exchange tokens between ranks and are not tested on the fused layers",
    "export": "the fused ops cannot be exported through TorchScript",
    "adaptive_input": "fairseq's translation model ignores it",
    "tie_adaptive_weights": "it needs --adaptive-input, which fairseq's translation model ignores",
    "tie_adaptive_proj": "it needs --adaptive-input, which fairseq's translation model ignores",
    "char_inputs": "fairseq's translation model ignores it",
}


def unsupported_reasons(args: Namespace) -> list[str]:
    """All reasons, in the words of the flags, why the fused layers cannot run a model with these arguments; empty if they can.

    Args:
        args: the model's arguments, flat as argparse gives them (absent attributes count as off).
    """
    reasons = []
    for name, why in _REFUSED.items():
        value = getattr(args, name, None)
        if value not in (None, False, 0, ""):
            reasons.append(f"--{name.replace('_', '-')} {value}: {why}")
    activation = getattr(args, "activation_fn", "relu")
    if activation not in ACTIVATIONS:
        reasons.append(f"--activation-fn {activation}: unknown; choose one of {', '.join(ACTIVATIONS)}")
    return reasons


def refuse_unsupported(args: Namespace, stock_arch: str) -> None:
    """Raises UnsupportedError with every reason and the stock architecture that honours the flags."""
    reasons = unsupported_reasons(args)
    if reasons:
        arch = getattr(args, "arch", None) or f"ls_{stock_arch}"
        raise UnsupportedError(
            f"--arch {arch}: unsupported " + "; ".join(reasons) + f". Drop the flag, or train with --arch {stock_arch}"
        )
