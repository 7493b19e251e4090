"""Decoders before Llama: plain feed-forwards, LayerNorm with bias, one norm for both halves of a layer.

Source: transformers 5.24 `models/gpt2`, `gptj`, `phi`, `falcon`; microsoft/phi-2 `configuration_phi.py` for phi-msft.
"""

from attncalc.errors import AttncalcError
from attncalc.hf_config.config import Config, Facts
from attncalc.hf_config.decoder import check, divided, layer_count, softmax
from attncalc.hf_config.layers import Layer, Row, dense, document, gqa, weight


def _inner(c: Config) -> int:
    """n_inner, or four times the hidden size where it is null."""
    return c.count("n_inner", null=4 * c.count("hidden_size"))


def _head_bias(c: Config) -> list[Row]:
    return [weight("lm_head.bias", (c.count("vocab_size", maximum=2**24),), place="head")]


def _gpt2(c: Config) -> Row:
    heads, width = c.count("num_attention_heads"), divided(c)
    c.ignore("n_ctx", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn")
    attention = gqa(heads, heads, width, rope_dim=0, bias="qkvo")
    layers = [Layer(attention, dense(_inner(c), gated=False, bias=True), 2)] * layer_count(c)
    positions = (c.count("max_position_embeddings", maximum=2**24), c.count("hidden_size"))
    return document(c, layers, norm="layer_bias", extra_weights=[weight("wpe.weight", positions, place="embedding")])


def _gptj(c: Config) -> Row:
    heads, width = c.count("num_attention_heads"), divided(c)
    check(c, (("rotary", True),))
    c.ignore("rope_scaling")
    attention = gqa(heads, heads, width, rope_dim=c.count("rotary_dim", maximum=width))
    layers = [Layer(attention, dense(_inner(c), gated=False, bias=True), 1)] * layer_count(c)
    return document(c, layers, norm="layer_bias", extra_weights=_head_bias(c))


def _phi(c: Config) -> Row:
    qk_norm = "head_bias" if c.flag("qk_layernorm") else "none"
    attention = softmax(c, rope=0.5, bias="qkvo", qk_norm=qk_norm)
    layers = [Layer(attention, dense(c.count("intermediate_size"), gated=False, bias=True), 1)] * layer_count(c)
    return document(c, layers, norm="layer_bias", extra_weights=_head_bias(c))


def _phi_msft(c: Config) -> Row:
    heads, width = c.count("num_attention_heads"), divided(c)
    check(c, (("img_processor", None),))
    c.ignore("flash_rotary", "fused_dense")
    kv = c.count("n_head_kv", absent=None, null=heads)
    attention = gqa(heads, kv, width, rope_dim=c.count("rotary_dim", maximum=width), bias="qkvo")
    layers = [Layer(attention, dense(_inner(c), gated=False, bias=True), 1)] * layer_count(c)
    return {"model_type": "phi"} | document(c, layers, norm="layer_bias", extra_weights=_head_bias(c))


def _falcon(c: Config) -> Row:
    """Attention and feed-forward beside each other: one norm, or one for each in the newer form; else one after."""
    heads, width = c.count("num_attention_heads"), divided(c)
    check(c, (("alibi", False), ("apply_residual_connection_post_layernorm", False)))
    for name, own in (("n_head", "num_attention_heads"), ("n_layer", "num_hidden_layers")):
        c.only(name, c.value(own))
    newer, beside = c.flag("new_decoder_architecture"), c.flag("parallel_attn")
    if newer:
        kv, norms = c.count("num_kv_heads", null=heads), c.count("num_ln_in_parallel_attn", maximum=2, null=2)
        if kv == 1 < heads:
            rule = "must be above 1 where new_decoder_architecture is true: one head is cached as in the older form"
            raise AttncalcError(c.path("num_kv_heads"), rule, got=kv)
        c.ignore("multi_query")
    else:
        kv, norms = (1 if c.flag("multi_query") else heads), (1 if beside else 2)
        c.only("num_ln_in_parallel_attn", None, 1)
        if not c.flag("multi_query"):
            c.only("num_kv_heads", None, heads)
        c.ignore("num_kv_heads")
    if newer and not beside:
        c.only("parallel_attn", True)
    bias = c.flag("bias")
    inner = c.count("ffn_hidden_size", null=4 * c.count("hidden_size"))
    c.ignore("rope_scaling", "rope_parameters")
    attention = gqa(heads, kv, width, bias="qkvo" if bias else "")
    layers = [Layer(attention, dense(inner, gated=False, bias=bias), norms)] * layer_count(c)
    return document(c, layers, norm="layer_bias")


READERS = {"gpt2": _gpt2, "gpt-sw3": _gpt2, "gptj": _gptj, "phi": _phi, "phi-msft": _phi_msft, "falcon": _falcon}

FACTS = {
    "phi-msft": Facts(
        defaults={"n_inner": None, "n_head_kv": None, "tie_word_embeddings": False},
        nullable=frozenset({"n_inner", "n_head_kv"}),
        names={
            "n_positions": ["max_position_embeddings"],
            "n_embd": ["hidden_size"],
            "n_head": ["num_attention_heads"],
            "n_layer": ["num_hidden_layers"],
        },
        architectures=("PhiForCausalLM",),
    )
}
