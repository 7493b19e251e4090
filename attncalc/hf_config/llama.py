"""Llama and the decoders that differ from it in biases, norms and windows. Source: transformers 5.24 `models/`."""

from attncalc.hf_config.config import Config
from attncalc.hf_config.decoder import (
    FULL,
    SLIDING,
    Decoder,
    by_layer_types,
    every,
    flag,
    window_everywhere,
)
from attncalc.hf_config.layers import Row, dense


def _mlp_bias(c: Config, total: int) -> list[Row]:
    return [dense(c.count("intermediate_size"), bias=c.flag("mlp_bias"))] * total


def _plain_bias(c: Config, total: int) -> list[Row]:
    return [dense(c.count("intermediate_size"), gated=False, bias=c.flag("use_bias"))] * total


def _every_4(c: Config, total: int) -> list[str]:  # noqa: ARG001
    return every(4, total)


def _first_of_4(c: Config, total: int) -> list[str]:  # noqa: ARG001
    return [SLIDING if i % 4 else FULL for i in range(total)]


ATTENTION_BIAS = flag("attention_bias", "qkvo", "")

READERS = {
    "llama": Decoder(bias=ATTENTION_BIAS, ffn=_mlp_bias, ignored=("is_llama_config",)),
    "mistral": Decoder(windows=window_everywhere),
    "ministral3": Decoder(windows=window_everywhere),
    "phi3": Decoder(
        windows=window_everywhere,
        rope=1.0,
        expected=(("lm_head_bias", False), ("mlp_bias", False), ("attention_bias", False)),
        ignored=("full_attn_mod", "interpolate_factor"),
    ),
    "starcoder2": Decoder(
        bias=flag("use_bias", "qkvo", ""),
        windows=window_everywhere,
        ffn=_plain_bias,
        norm="layer_bias",
        expected=(("mlp_type", "default"), ("norm_type", "layer_norm")),
    ),
    "olmo2": Decoder(bias=ATTENTION_BIAS, qk_norm="full"),
    "olmo3": Decoder(bias=ATTENTION_BIAS, qk_norm="full", windows=by_layer_types(_every_4)),
    "cwm": Decoder(windows=by_layer_types(_first_of_4)),
}
