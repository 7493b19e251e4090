"""LFM2 and LFM3: gated short convolutions and attention by layer. Source: transformers 5.24 `models/`."""

from attncalc.errors import AttncalcError
from attncalc.hf_config.config import Config
from attncalc.hf_config.decoder import FULL, SLIDING, check, head_dim, kv_heads, layer_count, layer_types, softmax
from attncalc.hf_config.layers import Layer, Row, dense, document, gqa, moe, window
from attncalc.hf_config.rope import rotated

CONV = "conv"


def _conv(c: Config) -> Row:
    """As many channels as the hidden size."""
    return {
        "variant": "short-conv",
        "inner_size": c.count("hidden_size"),
        "conv_kernel": c.count("conv_L_cache", minimum=2),
        "bias": c.flag("conv_bias"),
    }


def _tied(c: Config) -> bool:
    """`tie_embedding`, an older name, prevails."""
    tied = c.flag("tie_word_embeddings")
    return c.flag("tie_embedding") if c.has("tie_embedding") else tied


def _older(c: Config) -> None:
    """Fields of published files that the code does not read: they must say what it does."""
    hidden = c.count("hidden_size")
    check(c, (("block_dim", hidden), ("conv_dim", hidden), ("conv_dim_out", hidden)))
    check(c, (("num_heads", c.count("num_attention_heads")), ("block_use_swiglu", True), ("use_pos_enc", True)))
    c.ignore("block_use_xavier_init", "conv_use_xavier_init", "theta")


def _lfm2(c: Config) -> Row:
    """The feed-forward's width is two thirds of the field, rounded up to a multiple, unless that is switched off."""
    total = layer_count(c)
    _older(c)
    named = list(range(total)) if c.null("full_attn_idxs") else c.listed("full_attn_idxs")
    kinds = layer_types(c, total, lambda _, n: [FULL if i in named else CONV for i in range(n)], (CONV, FULL))
    field = "block_ff_dim" if c.has("block_ff_dim") else "intermediate_size"
    width = c.count(field)
    c.ignore("intermediate_size")
    multiple, factor = c.count("block_multiple_of"), c.value("block_ffn_dim_multiplier")
    if c.flag("block_auto_adjust_ff_dim"):
        width = 2 * width // 3
        if factor is not None:
            width = int(c.number("block_ffn_dim_multiplier") * width)
            width = c.whole(field, multiple * -(-width // multiple))
    return _alternating(c, kinds, [dense(width)] * total)


def _lfm2_moe(c: Config) -> Row:
    """Experts but in the first layers; layer_types has no default."""
    total = layer_count(c)
    _older(c)
    if c.null("layer_types"):
        raise AttncalcError(c.path("layer_types"), "must be given")
    kinds = c.words("layer_types", total, (CONV, FULL))
    first, correction = c.count("num_dense_layers", minimum=0), "buffer" if c.flag("use_expert_bias") else "none"
    sizes = c.count("num_experts"), c.count("num_experts_per_tok"), c.count("moe_intermediate_size")
    experts, plain = moe(*sizes, router_correction=correction), dense(c.count("intermediate_size"))
    return _alternating(c, kinds, [plain if i < first else experts for i in range(total)])


def _alternating(c: Config, kinds: list[str], ffns: list[Row]) -> Row:
    mixers = {CONV: _conv(c), FULL: softmax(c, qk_norm="head")}
    layers = [Layer(mixers[kind], ffn, 2) for kind, ffn in zip(kinds, ffns, strict=True)]
    return document(c, layers, tie_word_embeddings=_tied(c))


def _lfm3(c: Config) -> Row:
    """Full and sliding attention, which turn half and all of a head; a gate for each head, norms before and after."""
    total = layer_count(c)
    derived = [FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i else CONV for i in range(total)]
    kinds = layer_types(c, total, lambda *_: derived, (CONV, FULL, SLIDING))
    size = c.count("sliding_window") if SLIDING in kinds else c.maybe("sliding_window")
    width, part = head_dim(c), 0.5 if c.null("rope_parameters") else 1.0
    turned = {
        FULL: rotated(c, width, FULL, part=part, nesting="required"),
        SLIDING: rotated(c, width, SLIDING, part=1.0, nesting="required"),
    }
    norms = 4 if c.flag("use_sandwich_norm") else 2
    gate, bias = "head" if c.flag("use_attention_gate") else "none", "qkvo" if c.flag("attention_bias") else ""
    heads, conv, ffn = c.count("num_attention_heads"), _conv(c), dense(c.count("intermediate_size"))
    layers = []
    for kind in kinds:
        if kind == CONV:
            layers.append(Layer(conv, ffn, norms))
            continue
        options = {"rope_dim": turned[kind], "bias": bias, "qk_norm": "head", "gate": gate}
        attention = gqa(heads, kv_heads(c), width, **options)
        layers.append(Layer(attention, ffn, norms, window(size if kind == SLIDING else None)))
    return document(c, layers)


READERS = {"lfm2": _lfm2, "lfm2_moe": _lfm2_moe, "lfm3": _lfm3}
