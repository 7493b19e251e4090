"""Decoders with experts in most layers. Source: transformers 5.24 `models/`; zai-org/GLM-4.5 for glm4_shared_moe."""

from typing import Any

from attncalc.errors import AttncalcError, shown
from attncalc.hf_config.composite import text_model
from attncalc.hf_config.config import Config
from attncalc.hf_config.decoder import (
    FULL,
    SLIDING,
    Decoder,
    by_layer_types,
    check,
    every,
    first_dense,
    flag,
    kv_heads,
    layer_count,
    layer_types,
    moe_layers,
    shared_experts,
    window_everywhere,
)
from attncalc.hf_config.layers import Layer, Row, dense, document, gqa, moe, window
from attncalc.hf_config.rope import rotated

DENSE, SPARSE = "dense", "sparse"


def _experts(c: Config, number: str = "num_local_experts", size: str = "intermediate_size", **options: Any) -> Row:
    return moe(c.count(number), c.count("num_experts_per_tok"), c.count(size), **options)


def _mixtral(c: Config, total: int) -> list[Row]:
    return [_experts(c)] * total


def _gpt_oss(c: Config, total: int) -> list[Row]:
    c.only("experts_per_token", c.count("num_experts_per_tok"))
    return [_experts(c, bias=True, router_bias=True)] * total


def _glm4_moe(c: Config, total: int) -> list[Row]:
    return moe_layers(c, total, first_dense(c, total), shared_experts(c, router_correction="buffer"))


def _solar(c: Config, total: int) -> list[Row]:
    return [shared_experts(c, router_correction="buffer")] * total


def _ernie(c: Config, total: int) -> list[Row]:
    """Experts in every moe_layer_interval-th layer from the start index to the end index, -1 for the last."""
    start = c.count("moe_layer_start_index", minimum=0, maximum=total)
    end = c.count("moe_layer_end_index", minimum=-1, maximum=total)
    interval = c.count("moe_layer_interval")
    last = total - 1 if end == -1 else end
    size, shared = c.count("moe_intermediate_size"), c.count("moe_num_shared_experts", minimum=0)
    experts = moe(
        c.count("moe_num_experts"),
        c.count("moe_k"),
        size,
        shared_intermediate_size=size * shared,
        router_correction="parameter",
    )
    return moe_layers(c, total, lambda i: (i + 1) % interval == 0 and start <= i <= last, experts)


def _laguna(c: Config) -> Row:
    """Heads by layer, a gate for each head or value, and a window in the sliding layers, which rotate all of a head."""
    total = layer_count(c)
    check(c, (("moe_apply_router_weight_on_input", False), ("decoder_sparse_step", 1)))
    gate = _gate(c, total)
    kinds = layer_types(c, total, lambda _, n: [FULL] * n)
    heads = c.listed("num_attention_heads_per_layer", total, null=[c.count("num_attention_heads")] * total)
    mlp = c.words("mlp_layer_types", total, (DENSE, SPARSE), null=[DENSE] + [SPARSE] * (total - 1))
    c.ignore("mlp_only_layers", "moe_routed_scaling_factor", "moe_router_logit_softcapping")
    shared = c.count("shared_expert_intermediate_size")
    size = "moe_intermediate_size"
    experts = _experts(c, "num_experts", size, shared_intermediate_size=shared, router_correction="parameter")
    ffns = moe_layers(c, total, lambda i: mlp[i] == SPARSE, experts)
    width, kv = c.count("head_dim"), c.count("num_key_value_heads")
    defaults = {FULL: 0.5 if c.null("rope_parameters") else 1.0, SLIDING: 1.0}
    turned = {kind: rotated(c, width, kind, part=defaults[kind], nesting="alone") for kind in dict.fromkeys(kinds)}
    bias = "qkvo" if c.flag("attention_bias") else ""
    size_of = c.count("sliding_window")
    layers = []
    for i, (kind, ffn) in enumerate(zip(kinds, ffns, strict=True)):
        number = c.whole(f"num_attention_heads_per_layer[{i}]", heads[i])
        attention = gqa(number, kv, width, rope_dim=turned[kind], bias=bias, qk_norm="head", gate=gate)
        layers.append(Layer(attention, ffn, 2, window(size_of if kind == SLIDING else None)))
    return document(c, layers)


def _gate(c: Config, total: int) -> str:
    """`gating`: true or per-head for a gate of each head, per-element for one of each value."""
    value = c.value("gating")
    if value is not True and value not in ("per-head", "per-element"):
        raise AttncalcError(c.path("gating"), "must be true, per-head or per-element", got=shown(value))
    gate = "full" if value == "per-element" else "head"
    if not c.null("gating_types"):
        c.only("gating_types", ["per_head" if gate == "head" else "per_element"] * total)
    return gate


def _minimax_m2(c: Config) -> Row:
    total = layer_count(c)
    check(
        c,
        (
            ("use_qk_norm", True),
            ("qk_norm_type", "per_layer"),
            ("shared_intermediate_size", 0),
            ("use_routing_bias", True),
            ("attn_type_list", [1] * total),
        ),
    )
    c.ignore("num_mtp_modules", "mtp_transformer_layers", "use_mtp")
    attention = _partly_rotated(c, qk_norm="full")
    layers = [Layer(attention, _experts(c, router_correction="buffer"), 2)] * total
    return document(c, layers)


def _partly_rotated(c: Config, **options: Any) -> Row:
    """rotary_dim values of a head are rotated, and partial_rotary_factor must not say otherwise; else all are."""
    width, stated = c.count("head_dim"), None
    if c.has("rotary_dim") or c.declares("rotary_dim"):
        stated = c.count("rotary_dim", maximum=width)
    turned = rotated(c, width, part=1.0 if stated is None else stated / width)
    if stated is not None and turned != stated:
        rule = f"must rotate the {stated} values of a head that rotary_dim says"
        raise AttncalcError(c.path("partial_rotary_factor"), rule, got=f"{turned} values")
    return gqa(c.count("num_attention_heads"), kv_heads(c), width, rope_dim=turned, **options)


def _minimax_m3(c: Config) -> Row:
    """Sparse layers pick blocks of keys for each KV head by an indexer; the first layers attend to all."""
    total = layer_count(c)
    check(
        c,
        (
            ("use_qk_norm", True),
            ("qk_norm_type", "per_head"),
            ("attention_output_gate", False),
            ("use_routing_bias", True),
            ("use_gemma_norm", True),
            ("n_shared_experts", 1),
        ),
    )
    c.ignore("num_mtp_modules", "num_nextn_predict_layers", "swiglu_alpha", "swiglu_limit")
    full = _partly_rotated(c, qk_norm="head")
    sparse, index = _sparse_layers(c, total)
    picked = {
        "variant": "gqa-index",
        **{k: full[k] for k in ("num_heads", "num_kv_heads", "head_dim", "v_head_dim", "rope_dim")},
        **index,
    }
    frequency = c.listed("moe_layer_freq", total, absent=[1] * total)
    mlp = [SPARSE if c.whole(f"moe_layer_freq[{i}]", n, 0, 1) else DENSE for i, n in enumerate(frequency)]
    if not c.null("mlp_layer_types"):
        mlp = c.words("mlp_layer_types", total, (DENSE, SPARSE))
    inner = c.count("dense_intermediate_size")
    shared = c.count("shared_intermediate_size", minimum=0)
    experts = _experts(c, router_correction="buffer", shared_intermediate_size=shared)
    layers = [
        Layer(picked if s else full, experts if kind == SPARSE else dense(inner), 2)
        for s, kind in zip(sparse, mlp, strict=True)
    ]
    return document(c, layers)


def _sparse_layers(c: Config, total: int) -> tuple[list[bool], Row]:
    """Which layers are sparse, and their indexer: one of its heads for each KV head."""
    if c.null("sparse_attention_config"):
        return _flat_sparse_layers(c, total)
    s = c.inner("sparse_attention_config")
    check(s, (("use_sparse_attention", True), ("sparse_score_type", "max"), ("sparse_init_block", 0)))
    s.only("sparse_num_index_heads", c.count("num_key_value_heads"))
    given = s.listed("sparse_attention_freq", total)
    sparse = [s.whole(f"sparse_attention_freq[{i}]", n, 0, 1) == 1 for i, n in enumerate(given)]
    s.only("sparse_disable_index_value", given)
    index = {
        "index_dim": s.count("sparse_index_dim"),
        "block_size": s.count("sparse_block_size"),
        "blocks": s.count("sparse_topk_blocks"),
        "local_blocks": s.count("sparse_local_block", minimum=0),
    }
    s.finish()
    return sparse, index


def _flat_sparse_layers(c: Config, total: int) -> tuple[list[bool], Row]:
    """The same by the fields of transformers' own class, where the file has no sparse_attention_config."""
    kinds = layer_types(c, total, lambda _, n: [FULL] * n, (FULL, "minimax_m3_sparse"))
    index = {
        "index_dim": c.count("index_head_dim"),
        "block_size": c.count("index_block_size"),
        "blocks": c.count("index_topk_blocks"),
        "local_blocks": c.count("index_local_blocks", minimum=0),
    }
    sparse = [kind != FULL for kind in kinds]
    if any(sparse):
        c.only("index_n_heads", c.count("num_key_value_heads"))
    c.ignore("index_n_heads")
    return sparse, index


BIAS = flag("attention_bias", "qkvo", "")
GLM4_MOE = Decoder(
    bias=flag("attention_bias", "qkv", ""),
    qk_norm=flag("use_qk_norm", "head", "none"),
    rope=0.5,
    ffn=_glm4_moe,
    mtp=True,
    model_type="glm4_moe",
)

READERS = {
    "mixtral": Decoder(windows=window_everywhere, ffn=_mixtral),
    "gpt_oss": Decoder(
        bias=BIAS,
        windows=by_layer_types(lambda _, total: every(2, total)),
        ffn=_gpt_oss,
        sinks=True,
        ignored=("initial_context_length", "swiglu_limit", "swiglu_alpha"),
    ),
    "glm4_moe": GLM4_MOE,
    "glm4_shared_moe": GLM4_MOE,
    "solar_open": Decoder(bias=flag("attention_bias", "qkv", ""), ffn=_solar),
    "ernie4_5_moe": Decoder(ffn=_ernie, expected=(("use_bias", False),), ignored=("moe_norm_min",)),
    "laguna": _laguna,
    "minimax_m2": _minimax_m2,
    "minimax_m3_vl_text": _minimax_m3,
    "minimax_m3_vl": text_model(
        "minimax_m3_vl_text",
        ignored=(
            "image_grid_pinpoints",
            "img_token_compression_config",
            "multimodal_projector_bias",
            "num_reward_heads",
            "process_image_mode",
            "projector_hidden_act",
            "projector_hidden_size",
            "vision_feature_layer",
            "vision_feature_select_strategy",
        ),
    ),
}
OWN_ACTIVATIONS = {"minimax_m3_vl": ("swigluoai",), "minimax_m3_vl_text": ("swigluoai",)}
