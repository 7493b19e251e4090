"""Qwen 2, 3, 3-Next and 3.5, their experts and their models of several modalities. Source: transformers 5.24."""

from attncalc.errors import AttncalcError
from attncalc.hf_config.composite import text_model
from attncalc.hf_config.config import Config
from attncalc.hf_config.decoder import (
    FULL,
    SLIDING,
    Decoder,
    check,
    every,
    flag,
    gated,
    layer_count,
    layer_types,
    moe_layers,
    softmax,
)
from attncalc.hf_config.layers import Layer, Row, document, moe

LINEAR = "linear_attention"


def switched_windows(c: Config, total: int) -> list[int | None]:
    """use_sliding_window switches `sliding_window` on, from layer max_window_layers on."""
    size = c.maybe("sliding_window") if c.flag("use_sliding_window") else None
    first = total if size is None else c.count("max_window_layers", minimum=0)
    c.ignore("sliding_window", "max_window_layers")
    kinds = layer_types(c, total, lambda _, n: [SLIDING if i >= first else FULL for i in range(n)])
    if size is None and SLIDING in kinds:
        raise AttncalcError(c.path("use_sliding_window"), "must be true where layers slide", got="false")
    return [size if kind == SLIDING else None for kind in kinds]


def _all_windows(c: Config, total: int) -> list[int | None]:
    size = c.maybe("sliding_window") if c.flag("use_sliding_window") else None
    c.ignore("sliding_window")
    return [size] * total


def _experts(c: Config, *, shared: bool) -> Row:
    options: Row = {}
    if shared:
        options = {"shared_intermediate_size": c.count("shared_expert_intermediate_size"), "shared_gate": True}
    return moe(c.count("num_experts"), c.count("num_experts_per_tok"), c.count("moe_intermediate_size"), **options)


def sparse_layers(c: Config, total: int, *, shared: bool) -> list[Row]:
    """Experts in every decoder_sparse_step-th layer that mlp_only_layers does not name."""
    step = c.count("decoder_sparse_step")
    named = c.listed("mlp_only_layers", null=[])
    only = {c.whole(f"mlp_only_layers[{i}]", n, 0, total - 1) for i, n in enumerate(named)}
    return moe_layers(c, total, lambda i: i not in only and (i + 1) % step == 0, _experts(c, shared=shared))


def _qwen3_moe(c: Config, total: int) -> list[Row]:
    return sparse_layers(c, total, shared=False)


def _hybrid(c: Config, ffns: list[Row]) -> Row:
    """Gated DeltaNet in all but each full_attention_interval-th layer, whose attention has an output gate."""
    total = len(ffns)
    check(
        c,
        (
            ("attention_bias", False),  # a gate in the same matrix has a bias too, which is not counted
            ("attn_output_gate", True),
            ("use_sliding_window", False),
            ("mamba_ssm_dtype", "float32"),
        ),
    )
    kinds = layer_types(c, total, _interval, (LINEAR, FULL))
    c.ignore("full_attention_interval", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    full = softmax(c, rope=0.25, qk_norm="head", gate="full")
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
    layers = [Layer(full if kind == FULL else linear, ffn, 2) for kind, ffn in zip(kinds, ffns, strict=True)]
    return document(c, layers)


def _interval(c: Config, total: int) -> list[str]:
    return every(c.count("full_attention_interval", absent=4), total, FULL, LINEAR)


def _qwen3_next(c: Config) -> Row:
    return _hybrid(c, sparse_layers(c, layer_count(c), shared=True))


def _qwen3_5(c: Config) -> Row:
    check(c, (("mlp_only_layers", []),))
    return _hybrid(c, gated(c, layer_count(c)))


def _qwen3_5_moe(c: Config) -> Row:
    check(c, (("mlp_only_layers", []),))
    return _hybrid(c, [_experts(c, shared=True)] * layer_count(c))


BIAS = flag("attention_bias", "qkvo", "")

READERS = {
    "qwen2": Decoder(bias="qkv", windows=switched_windows),
    "qwen3": Decoder(bias=BIAS, qk_norm="head", windows=switched_windows),
    "qwen3_moe": Decoder(
        bias=BIAS, qk_norm="head", windows=_all_windows, ffn=_qwen3_moe, ignored=("max_window_layers",)
    ),
    "qwen3_vl_text": Decoder(bias=BIAS, qk_norm="head"),
    "qwen3_vl_moe_text": Decoder(bias=BIAS, qk_norm="head", ffn=_qwen3_moe),
    "qwen3_vl": text_model("qwen3_vl_text"),
    "qwen3_vl_moe": text_model("qwen3_vl_moe_text"),
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "qwen3_5": text_model("qwen3_5_text"),
    "qwen3_5_moe": text_model("qwen3_5_moe_text"),
}
