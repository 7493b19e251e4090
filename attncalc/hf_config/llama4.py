"""Llama 4 and the text model of Llama 3.2 Vision. Source: transformers 5.24 `models/llama4`, `models/mllama`."""

from collections.abc import Callable

from attncalc.hf_config.composite import text_model
from attncalc.hf_config.config import Config
from attncalc.hf_config.decoder import FULL, check, divided, kv_heads, layer_count, layer_types
from attncalc.hf_config.layers import Layer, Row, dense, document, gqa, moe, weight
from attncalc.hf_config.rope import rotated

CHUNKED = "chunked_attention"


def _llama4(c: Config) -> Row:
    """Layers that rotate attend within chunks and may have a QK-norm without weight; the others attend to all."""
    total = layer_count(c)
    interval = c.count("no_rope_layer_interval")
    derived = [int((i + 1) % interval != 0) for i in range(total)]
    given = (
        derived if c.null("no_rope_layers") or c.value("no_rope_layers") == [] else c.listed("no_rope_layers", total)
    )
    turns = [c.whole(f"no_rope_layers[{i}]", n, 0, 1) == 1 for i, n in enumerate(given)]
    chunk = c.maybe("attention_chunk_size")
    kinds = layer_types(
        c, total, lambda _, n: [CHUNKED if turns[i] and chunk is not None else FULL for i in range(n)], (CHUNKED, FULL)
    )
    if chunk is None and CHUNKED in kinds:
        chunk = c.count("attention_chunk_size")
    width = c.count("head_dim")
    normed, bias = c.flag("use_qk_norm"), "qkvo" if c.flag("attention_bias") else ""
    heads, kv, rope = c.count("num_attention_heads"), kv_heads(c), rotated(c, width)
    ffns = _ffns(c, total)
    c.ignore("attn_temperature_tuning", "floor_scale", "attn_scale")
    layers = []
    for turn, kind, ffn in zip(turns, kinds, ffns, strict=True):
        norm = "unweighted" if normed and turn else "none"
        attention = gqa(heads, kv, width, rope_dim=rope if turn else 0, bias=bias, qk_norm=norm)
        layers.append(Layer(attention, ffn, 2, {"chunk": chunk} if kind == CHUNKED else "full"))
    return document(c, layers)


def _ffns(c: Config, total: int) -> list[Row]:
    """moe_layers, or every interleave_moe_layer_step-th; the others are dense and of intermediate_size_mlp."""
    step = c.count("interleave_moe_layer_step")
    given = c.listed("moe_layers", null=list(range(step - 1, total, step)))
    sparse = {c.whole(f"moe_layers[{i}]", n, 0, total - 1) for i, n in enumerate(given)}
    size = c.count("intermediate_size")
    experts = moe(c.count("num_local_experts"), c.count("num_experts_per_tok"), size, shared_intermediate_size=size)
    inner = c.count("intermediate_size_mlp")
    return [experts if i in sparse else dense(inner) for i in range(total)]


def _mllama(c: Config) -> Row:
    """Text alone passes by the layers that read an image; their weights and those of 8 more tokens are there."""
    every_layer = layer_count(c)
    given = c.listed("cross_attention_layers", null=[3, 8, 13, 18, 23, 28, 33, 38])
    cross = len({c.whole(f"cross_attention_layers[{i}]", n, 0, every_layer - 1) for i, n in enumerate(given)})
    width, kv = divided(c), kv_heads(c)
    heads, hidden, inner = c.count("num_attention_heads"), c.count("hidden_size"), c.count("intermediate_size")
    attention = gqa(heads, kv, width, rope_dim=rotated(c, width))
    layers = [Layer(attention, dense(inner), 2)] * (every_layer - cross)
    shapes = {
        "q_proj": (heads * width, hidden),
        "k_proj": (kv * width, hidden),
        "v_proj": (kv * width, hidden),
        "o_proj": (hidden, heads * width),
        "q_norm": (width,),
        "k_norm": (width,),
    }
    extra = [weight(f"cross_attn.{name}", (cross, *shape), place="attention") for name, shape in shapes.items()]
    shapes = {
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
        "norms": (2, hidden),
        "gates": (2,),
    }
    extra += [weight(f"cross_layers.{name}", (cross, *shape)) for name, shape in shapes.items()]
    extra.append(weight("embed_tokens.more", (8, hidden), place="embedding"))
    note = f"text alone: {cross} of {every_layer} layers read an image and are passed by; only their weights count"
    return document(c, layers, notes=[note], extra_weights=extra if cross else extra[-1:])


def _untied(read: Callable[[Config], Row]) -> Callable[[Config], Row]:
    """The model classes have two weights whatever the field says."""

    def refusing(c: Config) -> Row:
        check(c, (("tie_word_embeddings", False),))
        return read(c)

    return refusing


READERS = {
    "llama4_text": _llama4,
    "llama4": text_model("llama4_text", tied_inside=True),
    "mllama_text_model": _untied(_mllama),
    "mllama": _untied(text_model("mllama_text_model")),
}
