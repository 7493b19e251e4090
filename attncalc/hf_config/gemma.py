"""Gemma 1 to 4. Source: transformers 5.24 `models/gemma*`."""

from attncalc.errors import AttncalcError
from attncalc.hf_config.composite import text_model
from attncalc.hf_config.config import Config
from attncalc.hf_config.decoder import (
    FULL,
    SLIDING,
    Decoder,
    Windows,
    by_layer_types,
    check,
    every,
    flag,
    kv_heads,
    layer_count,
    layer_types,
)
from attncalc.hf_config.layers import Layer, Row, dense, document, gqa, moe, weight, window
from attncalc.hf_config.rope import rotated

BIAS = flag("attention_bias", "qkvo", "")
CAUSAL = (("use_bidirectional_attention", (None, False)),)


def _alternating(n: int | None) -> Windows:
    """A full layer after every n - 1 with a window; None: as sliding_window_pattern says, or 6."""
    return by_layer_types(
        lambda c, total: every(c.count("sliding_window_pattern", absent=6) if n is None else n, total)
    )


def _gemma3(c: Config, total: int) -> list[int | None]:
    """Transformers saves the pattern that it took under another name, beside the list that it made of it."""
    if c.null("layer_types"):
        c.only("_sliding_window_pattern", 6)  # no field of the class: another would be derived all the same
    else:
        c.ignore("_sliding_window_pattern")
    return _alternating(None)(c, total)


def _gemma2(c: Config, total: int) -> list[int | None]:
    if not c.null("sliding_window_size"):
        c.only("sliding_window_size", c.maybe("sliding_window"))
    return _alternating(2)(c, total)


def _gemma4(c: Config) -> Row:
    """Full layers have heads of global_head_dim, may share K and V weights, and the last layers read earlier caches."""
    total = layer_count(c)
    check(c, (("use_bidirectional_attention", (None, "vision")), ("expert_intermediate_size", None)))
    kinds = layer_types(c, total, lambda _, n: every(6, n))
    kinds[-1] = FULL  # as the class has it
    size, first_shared = c.count("sliding_window"), total - c.count("num_kv_shared_layers", minimum=0, maximum=total)
    attentions = {SLIDING: _attention(c, SLIDING), FULL: _attention(c, FULL)}
    latent = c.count("hidden_size_per_layer_input", minimum=0) if c.declares("hidden_size_per_layer_input") else 0
    experts = c.declares("enable_moe_block") and c.flag("enable_moe_block")
    norms = 4 + (latent > 0) + 3 * experts
    wide = 2 if c.flag("use_double_wide_mlp") else 1
    inner = c.count("intermediate_size")
    layers = []
    for i, kind in enumerate(kinds):
        source = None
        if i >= first_shared:
            earlier = [j for j in range(first_shared) if kinds[j] == kind]
            if not earlier:
                rule = f"leaves no {kind} layer whose cache layer {i} could read"
                raise AttncalcError(c.path("num_kv_shared_layers"), rule, got=total - first_shared)
            source = earlier[-1]
        size_here = inner * (wide if source is not None else 1)
        ffn = _experts(c, size_here) if experts else dense(size_here)
        layers.append(Layer(attentions[kind], ffn, norms, window(size if kind == SLIDING else None), source))
    extra = _extra(c, total, latent, experts=experts)
    return document(c, layers, softcap=c.given_number("final_logit_softcapping"), extra_weights=extra)


def _attention(c: Config, kind: str) -> Row:
    shared = c.flag("attention_k_eq_v")
    heads, kv, width = c.count("num_attention_heads"), kv_heads(c), c.count("head_dim")
    part = 1.0
    if kind == FULL:
        width = c.count("global_head_dim", absent=512)
        if shared:
            kv = c.count("num_global_key_value_heads", absent=None, null=kv)
        c.ignore("num_global_key_value_heads")
        part = 0.25 if c.null("rope_parameters") else 1.0
    return gqa(
        heads,
        kv,
        width,
        rope_dim=rotated(c, width, kind, part=part, nesting="alone"),
        bias=BIAS(c),
        qk_norm="head",
        v_norm=True,
        shared_kv_weight=shared and kind == FULL,
    )


def _experts(c: Config, shared: int) -> Row:
    """Experts beside the dense feed-forward, which every token passes too."""
    sizes = c.count("num_experts"), c.count("top_k_experts"), c.count("moe_intermediate_size")
    return moe(*sizes, shared_intermediate_size=shared)


def _extra(c: Config, total: int, latent: int, *, experts: bool) -> list[Row]:
    hidden, every_layer = c.count("hidden_size"), range(total)
    out = []
    if latent:
        out = [
            weight(
                "embed_tokens_per_layer",
                (c.count("vocab_size_per_layer_input", maximum=2**24), total * latent),
                place="embedding",
            ),
            weight("per_layer_model_projection", (total * latent, hidden), operation="linear"),
            weight("per_layer_projection_norm", (latent,)),
            weight("per_layer_input_gate", (latent, hidden), every_layer, total, operation="linear"),
            weight("per_layer_projection", (hidden, latent), every_layer, total, operation="linear"),
        ]
    else:
        c.ignore("vocab_size_per_layer_input")
    out.append(weight("layer_scalar", (1,), every_layer, total, buffer=True))
    if experts:
        out.append(weight("router.scale", (hidden,), every_layer, total))
        out.append(weight("router.per_expert_scale", (c.count("num_experts"),), every_layer, total))
    else:
        c.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
    return out


READERS = {
    "gemma": Decoder(bias=BIAS, expected=CAUSAL),
    "gemma2": Decoder(bias=BIAS, windows=_gemma2, norms=4, softcaps=True, expected=CAUSAL),
    "gemma3_text": Decoder(
        nesting="allowed",
        bias=BIAS,
        qk_norm="head",
        windows=_gemma3,
        norms=4,
        softcaps=True,
        expected=CAUSAL,
        ignored=("sliding_window_pattern",),
    ),
    "gemma3": text_model("gemma3_text"),
    "gemma4_text": _gemma4,
    "gemma4": text_model("gemma4_text"),
    "gemma4_unified_text": _gemma4,
    "gemma4_unified": text_model("gemma4_unified_text"),
}
