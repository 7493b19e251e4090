"""Mamba beside attention: Nemotron-H and Jamba. Source: transformers 5.24 `models/nemotron_h`, `models/jamba`."""

from collections.abc import Callable

from attncalc.errors import AttncalcError, shown
from attncalc.hf_config.config import Config
from attncalc.hf_config.decoder import check, check_groups, head_dim, kv_heads, layer_count
from attncalc.hf_config.layers import Layer, Row, dense, document, gqa, moe

MIXERS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
NEWER = {"linear_attention": "mamba", "full_attention": "attention"}


def _blocks(c: Config) -> list[str]:
    """layers_block_type, or the letters of hybrid_override_pattern; a number of layers must agree."""
    kinds: list[str] | None = None
    if not c.null("layers_block_type"):
        given = c.listed("layers_block_type")
        words = (*MIXERS.values(), *NEWER)
        kinds = [NEWER.get(word, word) for word in c.words("layers_block_type", len(given), words)]
    if not c.null("hybrid_override_pattern"):
        pattern = c.value("hybrid_override_pattern")
        if not isinstance(pattern, str) or not pattern or set(pattern) - set(MIXERS):
            rule = f"must be letters of {' '.join(MIXERS)}"
            raise AttncalcError(c.path("hybrid_override_pattern"), rule, got=shown(pattern))
        spelled = [MIXERS[letter] for letter in pattern]
        if kinds is not None and kinds != spelled:
            raise AttncalcError(c.path("hybrid_override_pattern"), "must say what layers_block_type says")
        kinds = spelled
    if not kinds:
        raise AttncalcError(c.path("layers_block_type"), "or hybrid_override_pattern must be given")
    if len(kinds) > 10_000:
        raise AttncalcError(c.path("layers_block_type"), "must have at most 10000 entries", got=len(kinds))
    c.only("num_hidden_layers", len(kinds))
    return kinds


def _nemotron_h(c: Config) -> Row:
    """A layer is a mixer or a feed-forward alone, with one norm; attention does not rotate."""
    kinds = _blocks(c)
    check(
        c,
        (
            ("attention_bias", False),
            ("mamba_proj_bias", False),
            ("sliding_window", None),
            ("tie_word_embeddings", False),  # its model class has two weights whatever this says
            ("mamba_ssm_cache_dtype", "float32"),
        ),
    )
    c.only("attention_head_dim", c.count("head_dim"))
    c.ignore("expand", "time_step_min", "time_step_max", "time_step_floor", "time_step_limit", "time_step_rank")
    c.ignore("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern", "residual_in_fp32")
    c.ignore("mamba_hidden_act", "mlp_hidden_act", "moe_shared_expert_overlap", "partial_rotary_factor")
    c.ignore("rope_scaling", "rope_parameters")
    attention = gqa(c.count("num_attention_heads"), kv_heads(c), c.count("head_dim"), rope_dim=0)
    mamba = {
        "variant": "mamba2",
        "num_heads": c.count("mamba_num_heads"),
        "head_dim": c.count("mamba_head_dim"),
        "n_groups": c.count("n_groups"),
        "state_size": c.count("ssm_state_size"),
        "conv_kernel": c.count("conv_kernel", minimum=2),
        "conv_bias": c.flag("use_conv_bias"),
        "bias": c.flag("use_bias"),
        "chunk_size": c.count("chunk_size"),
        "gated_norm": True,
    }
    mixers: dict[str, tuple[Row | None, Row | None]] = {"mamba": (mamba, None), "attention": (attention, None)}
    bias = c.flag("mlp_bias")
    if "mlp" in kinds:
        mixers["mlp"] = (None, dense(c.count("intermediate_size"), gated=False, bias=bias))
    if "moe" in kinds:
        c.only("mlp_bias", False)
        mixers["moe"] = (None, _experts(c))
    c.ignore("intermediate_size", "n_routed_experts", "n_shared_experts", "moe_intermediate_size", "moe_latent_size")
    c.ignore("moe_shared_expert_intermediate_size", "num_experts_per_tok")
    layers = [Layer(*mixers[kind], 1, None if mixers[kind][0] is None else "full") for kind in kinds]
    return document(c, layers)


def _experts(c: Config) -> Row:
    """The code of transformers has one shared feed-forward, whatever n_shared_experts says; other engines read it."""
    c.only("n_shared_experts", 1)
    shared = c.count("moe_shared_expert_intermediate_size")
    options: Row = {"gated": False, "shared_intermediate_size": shared, "router_correction": "buffer"}
    latent = c.maybe("moe_latent_size")
    if latent is not None:
        options["latent_size"] = latent
    sizes = c.count("n_routed_experts"), c.count("num_experts_per_tok"), c.count("moe_intermediate_size")
    check_groups(c, sizes[0])
    return moe(*sizes, **options)


def _jamba(c: Config) -> Row:
    """Attention and experts each in every n-th layer from an offset on; attention does not rotate."""
    total, hidden = layer_count(c), c.count("hidden_size")
    check(c, (("sliding_window", None),))
    c.ignore("use_mambapy", "use_associative_scan", "rope_scaling", "rope_parameters")
    attention = gqa(c.count("num_attention_heads"), kv_heads(c), head_dim(c), rope_dim=0)
    rank = -(-hidden // 16) if c.value("mamba_dt_rank") == "auto" else c.count("mamba_dt_rank")
    mamba = {
        "variant": "mamba",
        "inner_size": c.count("mamba_expand") * hidden,
        "state_size": c.count("mamba_d_state"),
        "dt_rank": rank,
        "conv_kernel": c.count("mamba_d_conv", minimum=2),
        "conv_bias": c.flag("mamba_conv_bias"),
        "bias": c.flag("mamba_proj_bias"),
        "norms": "rms",
    }
    size, number = c.count("intermediate_size"), c.count("num_experts")
    experts = moe(number, c.count("num_experts_per_tok", maximum=number), size) if number > 1 else dense(size)
    c.ignore("num_experts_per_tok")
    mixes, routes = _periodic(c, "attn_layer"), _periodic(c, "expert_layer")
    layers = [Layer(attention if mixes(i) else mamba, experts if routes(i) else dense(size), 2) for i in range(total)]
    return document(c, layers)


def _periodic(c: Config, name: str) -> Callable[[int], bool]:
    period = c.count(f"{name}_period")
    offset = c.count(f"{name}_offset", minimum=0, maximum=period - 1)
    return lambda i: i % period == offset


READERS = {"nemotron_h": _nemotron_h, "jamba": _jamba}
