"""Llama and the decoders that differ from it in biases, norms and windows. Source: transformers 5.24 `models/`."""

from attncalc.errors import AttncalcError
from attncalc.hf_config.config import Config
from attncalc.hf_config.decoder import (
    FULL,
    SLIDING,
    Decoder,
    Rule,
    by_layer_types,
    every,
    flag,
    layer_types,
    no_rope_in_full_layers,
    window_everywhere,
)
from attncalc.hf_config.layers import Row, dense
from attncalc.hf_config.rope import only_types


def _mlp_bias(c: Config, total: int) -> list[Row]:
    return [dense(c.count("intermediate_size"), bias=c.flag("mlp_bias"))] * total


def _use_bias(*, gated: bool) -> Rule:
    return lambda c, total: [dense(c.count("intermediate_size"), gated=gated, bias=c.flag("use_bias"))] * total


def _every_4(c: Config, total: int) -> list[str]:  # noqa: ARG001
    return every(4, total)


def _first_of_4(c: Config, total: int) -> list[str]:  # noqa: ARG001
    return [SLIDING if i % 4 else FULL for i in range(total)]


def _pattern(c: Config, total: int) -> list[str]:
    return every(c.count("sliding_window_pattern", absent=4), total)


def _cohere2(c: Config, total: int) -> list[str]:
    if not c.null("layer_switch"):
        c.only("layer_switch", c.count("sliding_window_pattern", absent=4))
    return _pattern(c, total)


def _exaone4(c: Config, total: int) -> list[str]:
    if c.value("sliding_window") is None:
        raise AttncalcError(c.path("layer_types"), "must be given where sliding_window is null", got="null")
    return every(c.count("sliding_window_pattern"), total)


def _smollm3_rope(c: Config, windows: list[int | None]) -> list[bool]:
    """no_rope_layers: 1 where a layer rotates; else every layer but each no_rope_layer_interval-th."""
    total = len(windows)
    interval = c.count("no_rope_layer_interval")
    derived = [int((i + 1) % interval != 0) for i in range(total)]
    given = c.listed("no_rope_layers", total, null=derived)
    return [c.whole(f"no_rope_layers[{i}]", n, 0, 1) == 1 for i, n in enumerate(given)]


def _smollm3(c: Config, total: int) -> list[int | None]:
    """Windows, if they are switched on, in the layers that do not rotate."""
    size = c.maybe("sliding_window")
    turns = _smollm3_rope(c, [None] * total)
    on = c.flag("use_sliding_window") and size is not None
    kinds = layer_types(c, total, lambda _, n: [SLIDING if on and not turns[i] else FULL for i in range(n)])
    if size is None and SLIDING in kinds:
        raise AttncalcError(c.path("sliding_window"), "must be a whole number where layers slide", got="null")
    return [size if kind == SLIDING else None for kind in kinds]


def _phi3_bias(c: Config) -> str:
    only_types(c, "default", "longrope", "su", "yarn")
    return ""


ATTENTION_BIAS = flag("attention_bias", "qkvo", "")

READERS = {
    "llama": Decoder(bias=ATTENTION_BIAS, ffn=_mlp_bias, ignored=("is_llama_config",)),
    "exaone": Decoder(bias=ATTENTION_BIAS, ffn=_mlp_bias),
    "mistral": Decoder(windows=window_everywhere),
    "ministral3": Decoder(windows=window_everywhere),
    "phi3": Decoder(
        bias=_phi3_bias,
        windows=window_everywhere,
        rope=1.0,
        expected=(("lm_head_bias", False), ("mlp_bias", False), ("attention_bias", False)),
        ignored=("full_attn_mod", "interpolate_factor"),
    ),
    "starcoder2": Decoder(
        bias=flag("use_bias", "qkvo", ""),
        windows=window_everywhere,
        ffn=_use_bias(gated=False),
        norm="layer_bias",
        expected=(("mlp_type", "default"), ("norm_type", "layer_norm")),
    ),
    "olmo2": Decoder(bias=ATTENTION_BIAS, qk_norm="full"),
    "olmo3": Decoder(nesting="allowed", bias=ATTENTION_BIAS, qk_norm="full", windows=by_layer_types(_every_4)),
    "cwm": Decoder(windows=by_layer_types(_first_of_4), expected=(("mlp_bias", False),)),
    "smollm3": Decoder(bias=ATTENTION_BIAS, ffn=_mlp_bias, windows=_smollm3, rotates=_smollm3_rope),
    "ernie4_5": Decoder(bias=flag("use_bias", "qkvo", ""), ffn=_use_bias(gated=True)),
    "exaone4": Decoder(
        qk_norm="head",
        windows=by_layer_types(_exaone4),
        rotates=no_rope_in_full_layers,
        ignored=("sliding_window_pattern",),
    ),
    "cohere": Decoder(
        bias=ATTENTION_BIAS,
        qk_norm=flag("use_qk_norm", "per_head", "none"),
        norm="layer",
        norms=1,
        ignored=("model_max_length",),
    ),
    "cohere2": Decoder(
        bias=ATTENTION_BIAS,
        windows=by_layer_types(_cohere2),
        rotates=no_rope_in_full_layers,
        norm="layer",
        norms=1,
        expected=(
            ("order_of_interleaved_layers", "local_attn_first"),
            ("position_embedding_type", "rope_gptj"),
            ("rotary_pct", 1.0),
            ("use_embedding_sharing", True),
            ("use_gated_activation", True),
            ("use_parallel_block", True),
        ),
        ignored=("use_parallel_embedding", "sliding_window_pattern", "layer_switch"),
    ),
    "glm4": Decoder(bias=flag("attention_bias", "qkv", ""), rope=0.5, norms=4),
}
