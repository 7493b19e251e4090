"""DeepSeek-V4: compressed attention, hyper-connections, experts by a table in the first layers.

Source: transformers 5.24 `models/deepseek_v4`.
"""

from attncalc.errors import AttncalcError
from attncalc.hf_config.config import Config
from attncalc.hf_config.decoder import check, layer_count
from attncalc.hf_config.layers import Layer, Row, document, moe, weight

RATIOS = {0: "tied-mqa", 4: "csa", 128: "hca"}
TYPES = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def _ratios(c: Config, total: int) -> list[int]:
    """layer_types, or compress_ratios, of which entries beyond the layers are those of prediction layers."""
    if not c.null("layer_types"):
        c.ignore("compress_ratios")
        return [TYPES[kind] for kind in c.words("layer_types", total, TYPES)]
    if c.null("compress_ratios"):
        derived = [128] * min(total, 2) + [4 if i % 2 else 128 for i in range(max(total - 2, 0))]
        c.words("layer_types", total, TYPES, null=[next(k for k, v in TYPES.items() if v == r) for r in derived])
        return derived
    given = c.listed("compress_ratios")
    extra = c.count("num_nextn_predict_layers", minimum=0, maximum=64)
    if not total <= len(given) <= total + extra:
        rule = f"must have an entry for each of the {total} layers and at most {extra} more"
        raise AttncalcError(c.path("compress_ratios"), rule, got=len(given))
    for i, ratio in enumerate(given):
        if c.whole(f"compress_ratios[{i}]", ratio, 0) not in RATIOS:
            raise AttncalcError(c.path(f"compress_ratios[{i}]"), "must be 0, 4 or 128", got=ratio)
    return given[:total]


def _attention(c: Config, ratio: int) -> Row:
    width = c.count("head_dim")
    if not c.null("qk_rope_head_dim"):
        rope = c.count("qk_rope_head_dim", maximum=width)
    else:
        rope = int(width * c.number("partial_rotary_factor", null=64 / 512))
    picks = ratio == 4
    return {
        "variant": RATIOS[ratio],
        "num_heads": c.count("num_attention_heads"),
        "head_dim": width,
        "rope_dim": rope,
        "q_lora_rank": c.count("q_lora_rank"),
        "o_groups": c.count("o_groups"),
        "o_lora_rank": c.count("o_lora_rank"),
        "compress_ratio": ratio,
        "index_heads": c.count("index_n_heads") if picks else 0,
        "index_head_dim": c.count("index_head_dim") if picks else 0,
        "index_topk": c.count("index_topk") if picks else 0,
    }


def _hyper_connections(c: Config, total: int) -> list[Row]:
    """Around attention and feed-forward of each layer, and once at the end: n streams, 2 n + n * n mixing values."""
    n, hidden = c.count("hc_mult"), c.count("hidden_size")
    mix, out = 2 * n + n * n, []
    for name, place in (("attn_hc", "attention"), ("ffn_hc", "ffn")):
        out += [
            weight(f"{name}.fn", (mix, n * hidden), range(total), total, operation="linear", place=place),
            weight(f"{name}.base", (mix,), range(total), total, place=place),
            weight(f"{name}.scale", (3,), range(total), total, place=place),
        ]
    return [
        *out,
        weight("hc_head.hc_fn", (n, n * hidden), operation="linear"),
        weight("hc_head.hc_base", (n,)),
        weight("hc_head.hc_scale", (1,)),
    ]


def _read(c: Config) -> Row:
    total = layer_count(c)
    check(c, (("num_key_value_heads", 1), ("attention_bias", False), ("mlp_bias", False), ("compress_rates", None)))
    c.ignore("rope_parameters", "rope_scaling", "hc_sinkhorn_iters", "swiglu_limit", "num_nextn_predict_layers")
    size, top_k = c.count("moe_intermediate_size"), c.count("num_experts_per_tok")
    shared = size * c.count("n_shared_experts", minimum=0)
    experts = moe(c.count("n_routed_experts"), top_k, size, shared_intermediate_size=shared)
    hashed = _hashed(c, total)
    reach = {"window": c.count("sliding_window")}
    layers = [
        Layer(_attention(c, ratio), experts | {"router_correction": "none" if by_table else "buffer"}, 2, reach)
        for ratio, by_table in zip(_ratios(c, total), hashed, strict=True)
    ]
    extra = _hyper_connections(c, total)
    if any(hashed):
        table = (c.count("vocab_size", maximum=2**24), top_k)
        where = [i for i, by_table in enumerate(hashed) if by_table]
        extra.append(weight("gate.tid2eid", table, where, total, place="embedding", buffer=True))
    return document(c, layers, extra_weights=extra)


def _hashed(c: Config, total: int) -> list[bool]:
    """mlp_layer_types, or the first num_hash_layers, 3 by default: experts by a table of token ids."""
    if not c.null("mlp_layer_types"):
        c.ignore("num_hash_layers")
        return [kind == "hash_moe" for kind in c.words("mlp_layer_types", total, ("hash_moe", "moe"))]
    first = c.count("num_hash_layers", minimum=0, maximum=total, absent=min(3, total))
    return [i < first for i in range(total)]


READERS = {"deepseek_v4": _read}
