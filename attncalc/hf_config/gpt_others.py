"""GPT-NeoX, GPT-Neo, BLOOM, MPT, OPT and other decoders before Llama. Source: transformers 5.24 `models/`."""

from collections.abc import Callable
from typing import Any

from attncalc.errors import AttncalcError
from attncalc.hf_config.config import Config
from attncalc.hf_config.decoder import Rule, check, resolve
from attncalc.hf_config.layers import Row, weight
from attncalc.hf_config.plain import Plain, bias_of_head, field, four_times, norm_weights, or_four_times
from attncalc.hf_config.rope import rotated


def _rope_part(part: Rule) -> Callable[[Config, int], int]:
    """`partial_rotary_factor` of a head, or what the architecture takes where none is given."""
    return lambda c, width: rotated(c, width, part=resolve(part, c))


def _rotary_pct(default: float) -> Callable[[Config], float]:
    return lambda c: c.number("rotary_pct", absent=default)


def _gpt_neo_windows(c: Config, total: int) -> list[int | None]:
    """`attention_types`: [[kinds, repeats], ...], each kind a layer; `local` ones have a window of `window_size`."""
    kinds: list[Any] = []
    for i, item in enumerate(c.listed("attention_types", null=[[["global", "local"], 12]])):
        if not (isinstance(item, list) and len(item) == 2 and isinstance(item[0], list)):
            raise AttncalcError(c.path(f"attention_types[{i}]"), "must be a list of kinds and a number")
        kinds += item[0] * c.whole(f"attention_types[{i}][1]", item[1], 0, 10_000)
    if len(kinds) != total:
        raise AttncalcError(c.path("attention_types"), f"must name {total} layers", got=len(kinds))
    if c.has("attention_layers"):  # what the class derives, and writes into a file
        c.only("attention_layers", kinds)
    size = c.count("window_size")
    known: dict[Any, int | None] = {"global": None, "local": size}
    for kind in kinds:
        if not isinstance(kind, str) or kind not in known:
            raise AttncalcError(c.path("attention_types"), "must name global or local layers", got=repr(kind))
    return [known[kind] for kind in kinds]


def _bigcode_kv_heads(c: Config) -> int:
    """num_key_value_heads has no effect: multi_query alone decides."""
    return 1 if c.flag("multi_query") else c.count("num_attention_heads")


def _codegen_rope(c: Config, width: int) -> int:
    return c.count("rotary_dim", maximum=width)


def _bloom_hidden_size(c: Config) -> int:
    """The older name prevails where it is given."""
    if c.null("n_embed"):
        return c.count("hidden_size")
    c.ignore("hidden_size")
    return c.count("n_embed")


def _opt_final_norm(c: Config) -> bool:
    removed = c.flag("_remove_final_layer_norm")
    return c.flag("do_layer_norm_before") and not removed


def _opt_projection(c: Config) -> list[Row]:
    size = c.count("hidden_size")
    if not c.null("word_embed_proj_dim"):
        c.only("word_embed_proj_dim", size)
    return []


def _japanese_bias(c: Config) -> list[Row]:
    """The last layer alone adds one to the output of attention."""
    return [weight("dense_bias", (c.count("hidden_size"),), place="attention")]


def _japanese_width(c: Config) -> int:
    return c.count("hidden_size") * c.count("intermediate_multiple_size")


_MPT_ATTENTION = {
    "attn_type": "multihead_attention",
    "prefix_lm": False,
    "qk_ln": False,
    "alibi": True,
    "attn_uses_sequence_id": False,
}
_MPT_WITHOUT_EFFECT = ("model_type", "attn_impl", "clip_qkv", "softmax_scale", "alibi_bias_max", "fused_qkv")


def _mpt_attention(c: Config) -> list[Row]:
    """The fields of `attn_config` are understood with the values that transformers computes."""
    if not c.null("attn_config"):
        inner = c.inner("attn_config")
        check(inner, tuple(_MPT_ATTENTION.items()))
        inner.ignore(*_MPT_WITHOUT_EFFECT)
        inner.finish()
    return []


def _mpt_width(c: Config) -> int:
    """The factor is fixed in the code of transformers, whatever `expansion_ratio` says."""
    c.only("expansion_ratio", 4)
    return four_times(c)


READERS = {
    "gpt_neox": Plain(
        field("intermediate_size"),
        bias=lambda c: "qkvo" if c.flag("attention_bias") else "",
        rope=_rope_part(_rotary_pct(0.25)),
        expected=(("partial_rotary_factor", None), ("head_dim", None)),
        ignored=("use_parallel_residual", "is_decoder"),
    ),
    "gpt_neox_japanese": Plain(
        _japanese_width,
        bias="",
        ffn_bias=False,
        rope=_rope_part(_rotary_pct(1.0)),
        extra=(_japanese_bias,),
        expected=(("partial_rotary_factor", None), ("head_dim", None)),
        ignored=("is_decoder",),
    ),
    "gpt_neo": Plain(or_four_times("intermediate_size"), bias="o", windows=_gpt_neo_windows, positions=0),
    "gpt_bigcode": Plain(
        or_four_times("n_inner"),
        kv_heads=_bigcode_kv_heads,
        positions=0,
        expected=(("add_cross_attention", False),),
        ignored=(
            "num_key_value_heads",
            "inference_runner",
            "max_batch_size",
            "max_sequence_length",
            "pad_key_length",
            "pre_allocate_kv_cache",
            "validate_runner_input",
        ),
    ),
    "codegen": Plain(
        or_four_times("n_inner"), bias="", rope=_codegen_rope, norms=1, extra=(bias_of_head,), ignored=("n_ctx",)
    ),
    "bloom": Plain(
        lambda c: 4 * _bloom_hidden_size(c),
        max_positions=None,
        hidden_size=_bloom_hidden_size,
        expected=(("n_inner", None),),
        extra=(lambda c: norm_weights(c, "word_embeddings_layernorm", _bloom_hidden_size(c)),),
        ignored=(
            "apply_residual_connection_post_layernorm",
            "slow_but_exact",
            "seq_length",
            "bias_dropout_fusion",
            "masked_softmax_fusion",
            "offset_alibi",
            "skip_bias_add",
            "skip_bias_add_qkv",
        ),
    ),
    "mpt": Plain(
        _mpt_width,
        bias="",
        ffn_bias=False,
        norm="layer",
        max_positions="max_seq_len",
        extra=(_mpt_attention,),
        expected=(("no_bias", True), ("norm_type", "low_precision_layernorm")),
        ignored=(
            "learned_pos_emb",
            "init_device",
            "embedding_fraction",
            "logit_scale",
            "emb_pdrop",
            "init_config",
            "verbose",
        ),
    ),
    "opt": Plain(
        field("ffn_dim"),
        bias=lambda c: "qkvo" if c.flag("enable_bias") else "",
        ffn_bias=lambda c: c.flag("enable_bias"),
        norm=lambda c: "layer_bias" if c.flag("layer_norm_elementwise_affine") else "unweighted",
        final_norm=_opt_final_norm,
        positions=2,
        extra=(_opt_projection,),
        ignored=("layerdrop",),
    ),
    "persimmon": Plain(
        field("intermediate_size"),
        rope=_rope_part(0.5),
        qk_norm=lambda c: "head_bias" if c.flag("qk_layernorm") else "none",
        expected=(("head_dim", None),),
    ),
    "xglm": Plain(
        field("ffn_dim"), expected=(("add_cross_attention", False),), ignored=("scale_embedding", "layerdrop")
    ),
    "ctrl": Plain(field("dff"), extra=(bias_of_head,), ignored=("n_ctx", "from_tf")),
    "biogpt": Plain(field("intermediate_size"), positions=2, ignored=("scale_embedding", "layerdrop")),
}
