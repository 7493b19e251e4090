"""Mellum, Flint, Kolibri 1 and LARA mini: experts in layers of several kinds. Source: transformers 5.24 `models/`."""

from typing import Any

from attncalc.hf_config.config import Config
from attncalc.hf_config.decoder import (
    FULL,
    SLIDING,
    Decoder,
    by_layer_types,
    every,
    flag,
    layer_count,
    layer_types,
    moe_layers,
    no_rope_in_full_layers,
    softmax,
)
from attncalc.hf_config.layers import Layer, Row, document, moe, window

LINEAR = "linear_attention"
BIAS = flag("attention_bias", "qkvo", "")


def _experts(c: Config, *, shared: bool = True, **options: Any) -> Row:
    """Experts beside a shared one, which has no gate."""
    if shared:
        options["shared_intermediate_size"] = c.count("shared_expert_intermediate_size")
    return moe(c.count("num_experts"), c.count("num_experts_per_tok"), c.count("moe_intermediate_size"), **options)


def _mellum(c: Config, total: int) -> list[Row]:
    kinds = c.words("mlp_layer_types", total, ("dense", "sparse"), null=["sparse"] * total)
    return moe_layers(c, total, lambda i: kinds[i] == "sparse", _experts(c, shared=False))


def _flint(c: Config, total: int) -> list[Row]:
    """Experts in every decoder_sparse_step-th layer that mlp_only_layers, by default the first two, does not name."""
    step = c.count("decoder_sparse_step")
    named = c.listed("mlp_only_layers", null=[0, 1])
    only = {c.whole(f"mlp_only_layers[{i}]", n, 0, 10_000) for i, n in enumerate(named)}
    return moe_layers(c, total, lambda i: i not in only and (i + 1) % step == 0, _experts(c))


def _flint_types(c: Config, total: int) -> list[str]:  # noqa: ARG001
    return [FULL if i < 2 or i % 4 == 1 or i == total - 1 else SLIDING for i in range(total)]


def _lara_types(c: Config, total: int) -> list[str]:  # noqa: ARG001
    period = (LINEAR, SLIDING, LINEAR, FULL, SLIDING)
    return [period[i % 5] for i in range(total)]


def _lara_mini(c: Config) -> Row:
    """Gated DeltaNet, attention with a window, and full attention, which does not rotate."""
    total = layer_count(c)
    kinds = layer_types(c, total, _lara_types, (LINEAR, SLIDING, FULL))
    plain = softmax(c, bias=BIAS(c), qk_norm="head")
    linear = {
        "variant": "gdn",
        "num_heads": c.count("linear_num_key_heads"),
        "num_v_heads": c.count("linear_num_value_heads"),
        "head_k_dim": c.count("linear_key_head_dim"),
        "head_v_dim": c.count("linear_value_head_dim"),
        "conv_kernel": c.count("linear_conv_kernel_dim", minimum=2),
        "gate": True,
        "chunk_size": 64,
    }
    size, experts = c.count("sliding_window"), _experts(c)
    made = {
        LINEAR: Layer(linear, experts, 2),
        SLIDING: Layer(plain, experts, 2, window(size)),
        FULL: Layer(plain | {"rope_dim": 0}, experts, 2),
    }
    return document(c, [made[kind] for kind in kinds])


READERS = {
    "mellum": Decoder(
        nesting="alone",
        bias=BIAS,
        qk_norm="head",
        windows=by_layer_types(lambda _, total: [FULL] * total),
        ffn=_mellum,
        ignored=("num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types"),
    ),
    "flint": Decoder(bias=BIAS, qk_norm="head", sinks=True, windows=by_layer_types(_flint_types), ffn=_flint),
    "kolibri1": Decoder(
        qk_norm="head",
        windows=by_layer_types(lambda _, total: every(5, total)),
        rotates=no_rope_in_full_layers,
        ffn=lambda c, total: [_experts(c, router_correction="buffer")] * total,
        norms=4,
    ),
    "lara_mini": _lara_mini,
}
