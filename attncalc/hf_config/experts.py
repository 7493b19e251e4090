"""More decoders of softmax attention with experts. Source: transformers 5.24 `models/`."""

from collections.abc import Callable

from attncalc.errors import AttncalcError
from attncalc.hf_config.config import Config
from attncalc.hf_config.decoder import (
    FULL,
    SLIDING,
    Decoder,
    by_layer_types,
    check,
    divided,
    every,
    first_dense,
    flag,
    layer_count,
    layer_types,
    moe_layers,
    shared_experts,
    softmax,
    window_everywhere,
)
from attncalc.hf_config.functions import check_activation
from attncalc.hf_config.layers import Layer, Row, dense, document, gqa, moe, window
from attncalc.hf_config.plain import bias_of_head
from attncalc.hf_config.qwen import sparse_layers
from attncalc.hf_config.rope import rotated

DENSE, SPARSE = "dense", "sparse"
BIAS = flag("attention_bias", "qkvo", "")


def experts(number: str, size: str = "intermediate_size", top_k: str = "num_experts_per_tok") -> Callable[..., Row]:
    """Experts whose number, width and choice stand in these fields."""
    return lambda c, **options: moe(c.count(number), c.count(top_k), c.count(size), **options)


def everywhere(row: Callable[[Config], Row]) -> Callable[[Config, int], list[Row]]:
    """The same feed-forward in every layer."""
    return lambda c, total: [row(c)] * total


def mlp_layer_types(c: Config, total: int, derived: list[str]) -> list[bool]:
    """Which layers have experts: `mlp_layer_types`, or where it is absent or null what the architecture derives."""
    given = c.words("mlp_layer_types", total, (DENSE, SPARSE), absent=derived, null=derived)
    return [kind == SPARSE for kind in given]


LOCAL = experts("num_local_experts")


def _granite(c: Config) -> Row:
    """A shared feed-forward beside the experts, unless its width is 0."""
    return LOCAL(c, shared_intermediate_size=c.count("shared_intermediate_size", minimum=0))


def _granite_rope(c: Config, windows: list[int | None]) -> list[bool]:
    """layer_rope_theta: 0 or null where a layer does not rotate."""
    if c.null("layer_rope_theta"):
        return [True] * len(windows)
    given = c.listed("layer_rope_theta", len(windows))
    for i, theta in enumerate(given):
        if theta is not None and (not isinstance(theta, (int, float)) or isinstance(theta, bool)):
            raise AttncalcError(c.path(f"layer_rope_theta[{i}]"), "must be a number or null", got=str(theta)[:40])
    return [bool(theta) for theta in given]


def _qwen2_moe_windows(c: Config, total: int) -> list[int | None]:
    """use_sliding_window switches `sliding_window` on, in every other layer of the first max_window_layers."""
    first, on, size = c.count("max_window_layers", minimum=0), c.flag("use_sliding_window"), c.value("sliding_window")
    kinds = layer_types(c, total, lambda _, n: [FULL if i % 2 or i >= first or not on else SLIDING for i in range(n)])
    if SLIDING not in kinds:
        return [None] * total
    if not on:
        raise AttncalcError(c.path("use_sliding_window"), "must be true where layers slide", got="false")
    return [c.whole("sliding_window", size) if kind == SLIDING else None for kind in kinds]


def _qwen2_moe(c: Config, total: int) -> list[Row]:
    return sparse_layers(c, total, shared=True)


def _dots1_types(c: Config, total: int) -> list[str]:
    """Windows from layer max_window_layers on."""
    first = total if c.value("sliding_window") is None else c.count("max_window_layers", minimum=0)
    return [SLIDING if i >= first else FULL for i in range(total)]


def _dots1(c: Config, total: int) -> list[Row]:
    return moe_layers(c, total, first_dense(c, total), shared_experts(c, router_correction="buffer"))


def _exaone_moe_types(c: Config, total: int) -> list[str]:
    """Every sliding_window_pattern-th layer attends to all tokens."""
    if c.value("sliding_window") is None:
        raise AttncalcError(c.path("layer_types"), "must be given where sliding_window is null", got="null")
    return every(c.count("sliding_window_pattern"), total)


def _beside_shared(c: Config, correction: str) -> Row:
    """num_experts of moe_intermediate_size, and num_shared_experts that are one feed-forward together."""
    shared = c.count("moe_intermediate_size") * c.count("num_shared_experts")
    options = {"shared_intermediate_size": shared, "router_correction": correction}
    return experts("num_experts", "moe_intermediate_size")(c, **options)


def _exaone_moe(c: Config, total: int) -> list[Row]:
    first = c.count("first_k_dense_replace", minimum=0)
    sparse = mlp_layer_types(c, total, [DENSE if i < first else SPARSE for i in range(total)])
    return moe_layers(c, total, lambda i: sparse[i], _beside_shared(c, "buffer"))


def _hy_v3(c: Config, total: int) -> list[Row]:
    sparse = mlp_layer_types(c, total, [SPARSE if i else DENSE for i in range(total)])
    return moe_layers(c, total, lambda i: sparse[i], _beside_shared(c, "buffer"))


def _aria(c: Config) -> Row:
    """Shared experts are one feed-forward together."""
    shared = c.count("intermediate_size") * c.count("moe_num_shared_experts")
    return experts("moe_num_experts", top_k="moe_topk")(c, shared_intermediate_size=shared)


def _olmoe(c: Config) -> Row:
    """Its QK-norms have the width of the hidden size, so that no other head_dim fits."""
    c.only("head_dim", divided(c))
    return OLMOE(c)


def _dbrx(c: Config) -> Row:
    """One matrix for q, k and v, experts in every layer; two mappings inside, for attention and experts."""
    heads, width = c.count("num_attention_heads"), divided(c)
    attention, ffn = c.inner("attn_config"), c.inner("ffn_config")
    kv = attention.count("kv_n_heads", absent=1)
    c.only("num_key_value_heads", kv)
    attention.number("rope_theta")  # not used, but asked for
    attention.ignore("clip_qkv", "attn_pdrop", "model_type")
    sizes = ffn.count("moe_num_experts", absent=4), ffn.count("moe_top_k", absent=1)
    row = moe(*sizes, ffn.count("ffn_hidden_size", absent=3584))
    if not ffn.null("ffn_act_fn"):
        act = ffn.inner("ffn_act_fn", how="ignored")
        check_activation(act, "name", act.value("name"))
        act.finish()
    ffn.ignore("moe_jitter_eps", "moe_loss_weight", "moe_normalize_expert_weights", "model_type")
    ffn.only("hidden_size", c.count("hidden_size"), 6144)  # overwritten by d_model
    for inner in (attention, ffn):
        inner.only("is_encoder_decoder", False)
        inner.finish()
    row_of_layer = Layer(gqa(heads, kv, width, rope_dim=rotated(c, width)), row, 2)
    check(c, (("tie_word_embeddings", False),))
    return document(c, [row_of_layer] * layer_count(c), norm="layer")


def _afmoe(c: Config) -> Row:
    """A gate on the output, four norms, RoPE in the windows alone, the first layers dense."""
    total = layer_count(c)
    kinds = layer_types(c, total, lambda c, n: every(c.count("global_attn_every_n_layers"), n))
    c.ignore("global_attn_every_n_layers", "mup_enabled")
    size = c.count("sliding_window") if SLIDING in kinds else c.maybe("sliding_window")
    first = c.count("num_dense_layers", minimum=0)
    ffns = moe_layers(c, total, lambda i: i >= first, _beside_shared(c, "parameter"))
    rotating = softmax(c, bias="qkvo" if c.flag("attention_bias") else "", qk_norm="head", gate="full")
    layers = [
        Layer(
            rotating if kind == SLIDING else rotating | {"rope_dim": 0},
            ffn,
            4,
            window(size if kind == SLIDING else None),
        )
        for kind, ffn in zip(kinds, ffns, strict=True)
    ]
    return document(c, layers)


def _cohere2_moe(c: Config) -> Row:
    """Attention and feed-forward beside each other; RoPE in windows, and in dense layers where these have none."""
    total = layer_count(c)
    first = c.count("first_k_dense_replace", minimum=0, absent=0)
    prefix, rest = c.count("prefix_dense_sliding_window_pattern"), c.count("sliding_window_pattern")
    kinds = layer_types(c, total, lambda _, n: every(prefix, first) + every(rest, n - first))
    sparse = mlp_layer_types(c, total, [DENSE if i < first else SPARSE for i in range(total)])
    size = c.count("sliding_window") if SLIDING in kinds else c.maybe("sliding_window")
    shared = c.count("intermediate_size") * c.count("num_shared_experts", minimum=0)
    row = experts("num_experts")(c, shared_intermediate_size=shared)
    plain = row if all(sparse) else dense(c.count("prefix_dense_intermediate_size", null=c.count("intermediate_size")))
    c.ignore("prefix_dense_intermediate_size", "shared_expert_combination_strategy", "expert_selection_fn")
    rotating = softmax(c, bias="qkvo" if c.flag("attention_bias") else "")
    layers = []
    for kind, has_experts in zip(kinds, sparse, strict=True):
        turned = kind == SLIDING or (not has_experts and prefix == 1)
        attention = rotating if turned else rotating | {"rope_dim": 0}
        layers.append(Layer(attention, row if has_experts else plain, 1, window(size if kind == SLIDING else None)))
    return document(c, layers, norm="layer" if c.null("rms_norm_eps") else "rms")


OLMOE = Decoder(bias=BIAS, qk_norm="full", ffn=everywhere(experts("num_experts")), ignored=("clip_qkv",))


def _hunyuan(c: Config) -> Row:
    """Experts in every layer beside a feed-forward as wide as one; moe_topk is a number, or one for each layer."""
    if c.value("head_dim") is None:
        raise AttncalcError(c.path("head_dim"), "must be given: the architecture's own code fails")
    return HUNYUAN(c)


def _hunyuan_experts(c: Config, total: int) -> list[Row]:
    number, width, top_k = c.count("num_experts"), c.count("intermediate_size"), c.value("moe_topk")
    each = c.listed("moe_topk", total) if isinstance(top_k, list) else [c.count("moe_topk")] * total
    chosen = [c.whole(f"moe_topk[{i}]", n) for i, n in enumerate(each)]
    return [moe(number, n, width, shared_intermediate_size=width) for n in chosen]


HUNYUAN = Decoder(bias=BIAS, qk_norm="head", ffn=_hunyuan_experts)

READERS = {
    "qwen2_moe": Decoder(bias=flag("qkv_bias", "qkv", ""), windows=_qwen2_moe_windows, ffn=_qwen2_moe),
    "olmoe": _olmoe,
    "flex_olmo": Decoder(bias=BIAS, qk_norm="full", ffn=everywhere(experts("num_experts"))),
    "hunyuan_v1_moe": _hunyuan,
    "granitemoe": Decoder(bias=BIAS, ffn=everywhere(LOCAL)),
    "granitemoeshared": Decoder(bias=BIAS, ffn=everywhere(_granite)),
    "granitemoe_swa": Decoder(
        bias=BIAS,
        windows=by_layer_types(lambda _, n: [SLIDING if i % 4 else FULL for i in range(n)]),
        rotates=_granite_rope,
        ffn=everywhere(_granite),
        sinks=True,
    ),
    "phimoe": Decoder(
        bias=BIAS,
        windows=window_everywhere,
        ffn=everywhere(LOCAL),
        norm="layer_bias",
        extras=lambda c, _: bias_of_head(c) if c.flag("lm_head_bias") else [],
        ignored=("input_jitter_noise",),
    ),
    "dots1": Decoder(bias=BIAS, qk_norm="head", windows=by_layer_types(_dots1_types), ffn=_dots1),
    "exaone_moe": Decoder(
        qk_norm="head",
        windows=by_layer_types(_exaone_moe_types),
        rotates=lambda c, windows: [size is not None or c.value("sliding_window") is None for size in windows],
        ffn=_exaone_moe,
        ignored=("sliding_window_pattern",),
    ),
    "hy_v3": Decoder(
        bias=BIAS,
        qk_norm="head",
        ffn=_hy_v3,
        expected=(("mlp_bias", False),),
        ignored=("enable_moe_fp32_combine", "router_scaling_factor"),
    ),
    "aria_text": Decoder(bias=BIAS, ffn=everywhere(_aria), expected=(("mlp_bias", False),)),
    "sarvam_moe": Decoder(
        bias=flag("attention_bias", "qkv", ""),
        qk_norm=flag("use_qk_norm", "head", "none"),
        rope=1.0,
        ffn=_dots1,
        mtp=True,
    ),
    "dbrx": _dbrx,
    "afmoe": _afmoe,
    "cohere2_moe": _cohere2_moe,
}
