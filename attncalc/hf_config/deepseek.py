"""Models with multi-head latent attention: DeepSeek V2 to V3.2, GLM, Kimi K2, MiniCPM3, Mistral 4.

Sources: transformers 5.24 `models/`; moonshotai/Kimi-K2-Instruct `configuration_deepseek.py` for kimi_k2.
"""

from collections.abc import Callable
from typing import Any

from attncalc.errors import AttncalcError
from attncalc.hf_config.composite import text_model
from attncalc.hf_config.config import Config, Facts
from attncalc.hf_config.decoder import (
    divided,
    first_dense,
    layer_count,
    layer_types,
    moe_layers,
    mtp_count,
    shared_experts,
)
from attncalc.hf_config.layers import Layer, Row, dense, document, mtp

DENSE, SPARSE = "dense", "sparse"
IGNORED = ("qk_head_dim", "ep_size", "rope_parameters", "rope_scaling", "head_dim")


def mla(c: Config, *, variant: str = "mla", v_head_dim: int | None = None, **options: object) -> Row:
    """Latent attention by the fields that all of these share; RoPE turns its own part of a head, whatever its type."""
    heads = c.count("num_attention_heads")
    if c.has("num_key_value_heads") or c.declares("num_key_value_heads"):
        c.only("num_key_value_heads", heads, None)  # the code expands K and V to all heads, and fails on others
    c.ignore(*IGNORED)
    return {
        "variant": variant,
        "num_heads": heads,
        "q_lora_rank": c.maybe("q_lora_rank"),
        "kv_lora_rank": c.count("kv_lora_rank"),
        "qk_nope_head_dim": c.count("qk_nope_head_dim", minimum=0),
        "qk_rope_head_dim": c.count("qk_rope_head_dim", minimum=0),
        "v_head_dim": v_head_dim or c.count("v_head_dim"),
        "rotated": True,
        "gate": "none",
        "bias": c.flag("attention_bias", **({} if c.declares("attention_bias") else {"absent": False})),
        "latent_norm": True,
        **options,
    }


def _deepseek(correction: str) -> Callable[[Config], Row]:
    """The first layers dense, then experts; V3's router has a correction that picks experts, V2's has none."""

    def read(c: Config) -> Row:
        total = layer_count(c)
        if correction == "buffer" and not c.null("head_dim"):
            c.only("head_dim", c.count("qk_rope_head_dim", minimum=0))
        attention = mla(c)
        c.only("mlp_bias", False)
        ffns = moe_layers(c, total, first_dense(c, total), shared_experts(c, router_correction=correction))
        layers = [Layer(attention, ffn, 2) for ffn in ffns]
        return document(c, layers, mtp=mtp(c, layers[-1], mtp_count(c)))

    return read


def _mlp_types(c: Config, total: int, dense_layers: int) -> list[Row]:
    derived = [DENSE] * dense_layers + [SPARSE] * (total - dense_layers)
    c.only("moe_layer_freq", 1)
    kinds = c.words("mlp_layer_types", total, (DENSE, SPARSE), null=derived)
    experts = shared_experts(c, router_correction="buffer")
    return moe_layers(c, total, lambda i: kinds[i] == SPARSE, experts)


def _glm4_moe_lite(c: Config) -> Row:
    total = layer_count(c)
    c.only("first_k_dense_replace", 1)
    layers = [Layer(mla(c), ffn, 2) for ffn in _mlp_types(c, total, 1)]
    return document(c, layers, mtp=mtp(c, layers[-1], mtp_count(c)))


def _sparse(c: Config, own: list[bool]) -> Row:
    """Latent attention over the keys that an indexer picks; layers without their own take the last selection."""
    total = len(own)
    layer_types(c, total, lambda _, n: ["indexed_attention"] * n, ("indexed_attention", "deepseek_sparse_attention"))
    c.only("mlp_bias", False)
    index = {name: c.count(name) for name in ("index_n_heads", "index_head_dim", "index_topk")}
    dense_layers = c.count("first_k_dense_replace", minimum=0, maximum=total)
    attention = mla(c, variant="dsa")
    layers = [
        Layer(attention | index | {"own_indexer": mine}, ffn, 2)
        for mine, ffn in zip(own, _mlp_types(c, total, dense_layers), strict=True)
    ]
    makers = [layer for layer, mine in zip(layers, own, strict=True) if mine]
    if not makers:
        raise AttncalcError(c.path("indexer_types"), "must give at least one layer an indexer")
    return document(c, layers, mtp=mtp(c, makers[-1], mtp_count(c)))


def _deepseek_v32(c: Config) -> Row:
    return _sparse(c, [True] * layer_count(c))


def _glm_moe_dsa(c: Config) -> Row:
    """indexer_types, or a pattern of F and S, or every index_topk_freq-th layer from an offset on."""
    total = layer_count(c)
    words = {"full": True, "shared": False, "F": True, "S": False}
    kinds: list[Any]
    if not c.null("indexer_types"):
        kinds = c.words("indexer_types", total, ("full", "shared"))
    elif not c.null("index_topk_pattern"):
        pattern = c.value("index_topk_pattern")
        kinds = list(pattern) if isinstance(pattern, str) else c.listed("index_topk_pattern", total)
        if len(kinds) != total or any(not isinstance(k, str) or k not in words for k in kinds):
            raise AttncalcError(c.path("index_topk_pattern"), f"must be {total} letters F or S", got=repr(pattern)[:60])
    else:
        freq = c.count("index_topk_freq", absent=1)
        offset = c.count("index_skip_topk_offset", minimum=0, absent=2)
        kinds = ["full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(total)]
    c.ignore("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset", "index_share_for_mtp_iteration")
    c.ignore("indexer_rope_interleave", "moe_router_dtype")
    return _sparse(c, [words[k] for k in kinds])


def _minicpm3(c: Config) -> Row:
    width = c.count("v_head_dim", null=divided(c))
    c.only("mlp_bias", False)
    layers = [Layer(mla(c, v_head_dim=width), dense(c.count("intermediate_size")), 2)] * layer_count(c)
    return document(c, layers)


def _youtu(c: Config) -> Row:
    return document(c, [Layer(mla(c), dense(c.count("intermediate_size")), 2)] * layer_count(c))


def _sarvam(c: Config) -> Row:
    """DeepSeek-V3; q_head_dim is another name of what is derived."""
    c.ignore("q_head_dim")
    return _deepseek("buffer")(c)


def _axk1(c: Config) -> Row:
    """A third norm in layers with experts, after them."""
    total = layer_count(c)
    first = c.count("first_k_dense_replace", minimum=0, absent=1)
    freq = c.count("moe_layer_freq", absent=1)
    derived = [SPARSE if i >= first and i % freq == 0 else DENSE for i in range(total)]
    kinds = c.words("mlp_layer_types", total, (DENSE, SPARSE), absent=derived, null=derived)
    ffns = moe_layers(c, total, lambda i: kinds[i] == SPARSE, shared_experts(c, router_correction="buffer"))
    attention = mla(c)
    layers = [Layer(attention, ffn, 3 if kind == SPARSE else 2) for kind, ffn in zip(kinds, ffns, strict=True)]
    return document(c, layers)


READERS = {
    "axk1": _axk1,
    "sarvam_mla": _sarvam,
    "youtu": _youtu,
    "deepseek_v2": _deepseek("none"),
    "deepseek_v3": _deepseek("buffer"),
    "kimi_k2": _deepseek("buffer"),
    "kimi_k25": text_model(
        "kimi_k2", "deepseek_v3", ignored=("use_unified_vision_chunk", "video_placeholder", "projection_hidden_size")
    ),
    "deepseek_v32": _deepseek_v32,
    "glm_moe_dsa": _glm_moe_dsa,
    "glm4_moe_lite": _glm4_moe_lite,
    "mistral4": _deepseek("none"),
    "mistral3": text_model(
        "mistral",
        "ministral3",
        "mistral4",
        ignored=(
            "projector_hidden_act",
            "vision_feature_layer",
            "multimodal_projector_bias",
            "spatial_merge_size",
        ),
    ),
    "minicpm3": _minicpm3,
}

FACTS = {
    "kimi_k2": Facts(
        defaults={"attention_bias": False, "tie_word_embeddings": False, "num_nextn_predict_layers": 0},
        architectures=("DeepseekV3ForCausalLM",),
    )
}
