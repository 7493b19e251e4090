"""Layers with a constant state, alone, amid attention or beside it. Source: transformers 5.24 `models/`."""

from attncalc.errors import AttncalcError
from attncalc.hf_config.config import Config
from attncalc.hf_config.decoder import FULL, check, layer_count, softmax
from attncalc.hf_config.layers import Layer, Row, dense, document, moe

LINEAR = "linear_attention"
LEGACY = {"mamba": LINEAR, "attention": FULL}
_UNUSED = (
    "mamba_expand",
    "time_step_min",
    "time_step_max",
    "time_step_floor",
    "time_step_scale",
    "time_step_init_scheme",
    "residual_in_fp32",
    "use_mambapy",
    "use_associative_scan",
    "num_logits_to_keep",
    "z_loss_coefficient",
)


def kinds_of_layers(c: Config, total: int, derived: list[str]) -> list[str]:
    """`layer_types` by their new names, or where it is absent or null what the architecture derives."""
    given = c.words("layer_types", total, (LINEAR, FULL, *LEGACY), absent=derived, null=derived)
    return [LEGACY.get(kind, kind) for kind in given]


def inner_size(c: Config, name: str) -> int:
    """`expand` times the hidden size."""
    return c.count(name, maximum=64) * c.count("hidden_size")


def _auto(c: Config, name: str, derived: int) -> int:
    """The field, or where it says auto what the architecture derives."""
    return derived if c.value(name) == "auto" else c.count(name)


def mamba2(c: Config, inner: int, **options: object) -> Row:
    """Mamba-2 by the fields that begin with `mamba_`, of an inner width of `inner`."""
    heads = c.count("mamba_n_heads")
    if inner % heads:
        raise AttncalcError(c.path("mamba_n_heads"), f"must divide the inner width {inner}", got=heads)
    if _auto(c, "mamba_d_head", inner // heads) != inner // heads:
        rule = f"must be auto or {inner // heads}, the inner width {inner} over mamba_n_heads {heads}"
        raise AttncalcError(c.path("mamba_d_head"), rule, got=str(c.value("mamba_d_head"))[:40])
    c.ignore(*_UNUSED)
    fields = "mamba_n_groups mamba_d_state mamba_d_conv mamba_conv_bias mamba_proj_bias mamba_chunk_size"
    return _mamba2_row(c, heads, inner // heads, fields) | options


def _mamba2_row(c: Config, heads: int, width: int, fields: str) -> Row:
    """`fields`: the names of groups, state size, kernel, its bias, the projections' bias and the chunk size."""
    groups, state, kernel, conv_bias, bias, chunk = fields.split()
    return {
        "variant": "mamba2",
        "num_heads": heads,
        "head_dim": width,
        "n_groups": c.count(groups),
        "state_size": c.count(state),
        "conv_kernel": c.count(kernel, minimum=2),
        "conv_bias": c.flag(conv_bias),
        "bias": c.flag(bias),
        "chunk_size": c.count(chunk),
        "gated_norm": True,
    }


def _bias(c: Config) -> str:
    return "qkvo" if c.flag("attention_bias") else ""


def _alternating(c: Config, field: str, kinds: list[str], attention: Row, ffn: Row) -> Row:
    """Mamba-2 and attention, of which `field` says where; transformers runs no model of Mamba-2 alone."""
    if FULL not in kinds:
        raise AttncalcError(c.path(field), "must give at least one layer attention: the architecture's own code fails")
    mixer = mamba2(c, inner_size(c, "mamba_expand"))
    return document(c, [Layer(mixer if kind == LINEAR else attention, ffn, 2) for kind in kinds])


def _bamba(c: Config) -> Row:
    """Mamba-2 but in attn_layer_indices, whose attention rotates half of a head whatever is given."""
    total = layer_count(c)
    named = c.listed("attn_layer_indices", null=[])
    full = {c.whole(f"attn_layer_indices[{i}]", n, 0, total - 1) for i, n in enumerate(named)}
    attention = softmax(c, rope=0.5, bias=_bias(c))
    if attention["rope_dim"] != attention["head_dim"] // 2:
        raise AttncalcError(c.path("partial_rotary_factor"), "must be absent or 0.5 in this architecture")
    ffn = dense(c.count("intermediate_size"), bias=c.flag("mlp_bias"))
    return _alternating(c, "attn_layer_indices", [FULL if i in full else LINEAR for i in range(total)], attention, ffn)


def _granite(c: Config) -> Row:
    """Experts and a shared feed-forward in every layer, or the latter alone; RoPE where it is switched on."""
    check(c, (("normalization_function", "rmsnorm"),))
    c.ignore("init_method")
    attention = softmax(c, bias=_bias(c))
    if c.value("position_embedding_type") != "rope":
        attention["rope_dim"] = 0
    number, shared = c.count("num_local_experts", minimum=0), c.count("shared_intermediate_size", minimum=0)
    if number:
        ffn = moe(number, c.count("num_experts_per_tok"), c.count("intermediate_size"), shared_intermediate_size=shared)
    else:
        ffn = dense(c.whole("shared_intermediate_size", shared))
        c.ignore("intermediate_size", "num_experts_per_tok")
    total = layer_count(c)
    return _alternating(c, "layer_types", kinds_of_layers(c, total, [LINEAR] * total), attention, ffn)


def _falcon_h1(c: Config) -> Row:
    """Attention and Mamba-2 beside each other in every layer."""
    given = c.value("mamba_d_ssm")
    inner = inner_size(c, "mamba_expand") if given is None else c.whole("mamba_d_ssm", given)
    check(c, (("projectors_bias", c.flag("mamba_proj_bias")),))
    c.ignore("mamba_norm_before_gate", "mamba_use_mlp", "lm_head_multiplier", "mlp_multipliers", "key_multiplier")
    c.ignore("attention_out_multiplier", "attention_in_multiplier", "mlp_expansion_factor")
    c.ignore("ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier")
    mixer = mamba2(c, inner, gated_norm=c.flag("mamba_rms_norm"))
    ffn = dense(c.count("intermediate_size"), bias=c.flag("mlp_bias"))
    made = document(c, [Layer(softmax(c, bias=_bias(c)), ffn, 2)] * layer_count(c))
    beside = {"indices": "all", "joined": {"weight_copies": None}, "reach": "full", "cache_from": None}
    made["layers"].append({**beside, "attention": mixer, "ffn": None, "norms": 0})
    return made


def _mamba2(c: Config) -> Row:
    """Mamba-2 alone: no feed-forward and no limit of positions."""
    inner = inner_size(c, "expand")
    heads, width = c.count("num_heads"), c.count("head_dim")
    if heads * width != inner:
        rule = f"must be {inner} over num_heads, expand * hidden_size"
        raise AttncalcError(c.path("head_dim"), rule, got=width)
    check(c, (("rms_norm", True), ("intermediate_size", inner)))
    c.ignore("time_step_rank", "norm_before_gate", *_UNUSED)
    fields = "n_groups state_size conv_kernel use_conv_bias use_bias chunk_size"
    return _without_positions(c, _mamba2_row(c, heads, width, fields))


def _mamba(c: Config, norms: str = "none") -> Row:
    """Mamba alone. A given intermediate_size prevails over expand * hidden_size."""
    hidden, total = c.count("hidden_size"), layer_count(c)
    inner = c.count("intermediate_size", absent=inner_size(c, "expand"))
    check(c, (("n_layer", total), ("d_model", hidden), ("d_inner", inner), ("rms_norm", True), ("ssm_cfg", {})))
    c.ignore("fused_add_norm", "pad_vocab_size_multiple", *_UNUSED)
    mixer = {
        "variant": "mamba",
        "inner_size": inner,
        "state_size": c.count("state_size"),
        "dt_rank": _auto(c, "time_step_rank", -(-hidden // 16)),
        "conv_kernel": c.count("conv_kernel", minimum=2),
        "conv_bias": c.flag("use_conv_bias"),
        "bias": c.flag("use_bias"),
        "norms": norms,
    }
    return _without_positions(c, mixer)


def _falcon_mamba(c: Config) -> Row:
    """Mamba whose dt, B and C pass norms without weights."""
    c.ignore("use_falcon_mambapy")
    return _mamba(c, norms="unweighted")


def _without_positions(c: Config, mixer: Row) -> Row:
    return document(c, [Layer(mixer, None, 1)] * layer_count(c), max_position_embeddings=None)


def _olmo_hybrid(c: Config) -> Row:
    """Gated DeltaNet in three of four layers; two norms before the halves, after them in attention."""
    total = layer_count(c)
    derived = [FULL if i % 4 == 3 else LINEAR for i in range(total)]
    if FULL not in derived:
        derived[-1] = FULL
    kinds = kinds_of_layers(c, total, derived)
    if len(set(kinds)) < 2:
        raise AttncalcError(c.path("layer_types"), f"must hold both {LINEAR} and {FULL}")
    if not c.null("rope_parameters"):
        rope = c.inner("rope_parameters")
        if rope.has("rope_theta") and rope.null("rope_theta"):
            raise AttncalcError(rope.path("rope_theta"), "must be a number: without it no head rotates")
    heads = c.count("num_attention_heads")
    keys, values = c.count("linear_num_key_heads", null=heads), c.count("linear_num_value_heads", null=heads)
    width = c.count("linear_key_head_dim", null=3 * c.count("hidden_size") // (4 * keys))
    linear = {
        "variant": "gdn",
        "num_heads": keys,
        "num_v_heads": values,
        "head_k_dim": width,
        "head_v_dim": c.count("linear_value_head_dim", null=2 * width),
        "conv_kernel": c.count("linear_conv_kernel_dim", minimum=2),
        "gate": True,
        "chunk_size": 64,
    }
    c.ignore("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
    c.ignore("linear_allow_neg_eigval")
    attention = softmax(c, bias=_bias(c), qk_norm="full")
    ffn = dense(c.count("intermediate_size"))
    return document(c, [Layer(attention if kind == FULL else linear, ffn, 2) for kind in kinds])


def _minimax(c: Config) -> Row:
    """Lightning attention in every other layer, experts in all."""
    total = layer_count(c)
    kinds = kinds_of_layers(c, total, [LINEAR if i % 2 else FULL for i in range(total)])
    if FULL not in kinds:
        raise AttncalcError(c.path("layer_types"), "must give at least one layer attention: the code fails")
    check(c, (("sliding_window", None),))
    c.ignore("full_attn_alpha_factor", "full_attn_beta_factor", "linear_attn_alpha_factor", "linear_attn_beta_factor")
    c.ignore("mlp_alpha_factor", "mlp_beta_factor")
    full = softmax(c)
    width = full["head_dim"]
    size = c.count("block_size")
    linear = {"variant": "lightning", "num_heads": full["num_heads"], "head_dim": width, "chunk_size": size}
    ffn = moe(c.count("num_local_experts"), c.count("num_experts_per_tok"), c.count("intermediate_size"))
    return document(c, [Layer(full if kind == FULL else linear, ffn, 2) for kind in kinds])


READERS = {
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "falcon_mamba": _falcon_mamba,
    "granitemoehybrid": _granite,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "minimax": _minimax,
    "olmo_hybrid": _olmo_hybrid,
}
