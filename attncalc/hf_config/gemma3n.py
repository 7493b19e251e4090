"""Gemma 3n: several residual streams (AltUp), low-rank LAuReL blocks, embeddings for each layer, shared caches.

The mixing of the streams and the choice of the largest gate values are in no count. Source: transformers 5.24
`models/gemma3n`.
"""

from attncalc.errors import AttncalcError
from attncalc.hf_config.composite import text_model
from attncalc.hf_config.config import Config
from attncalc.hf_config.decoder import SLIDING, every, flag, kv_heads, layer_count, layer_types
from attncalc.hf_config.layers import Layer, Row, dense, document, gqa, weight, window
from attncalc.hf_config.rope import rotated


def _text(c: Config) -> Row:
    total = layer_count(c)
    kinds = layer_types(c, total, lambda _, n: every(5, n))
    width, size = c.count("head_dim"), c.count("sliding_window")
    bias = flag("attention_bias", "qkvo", "")(c)
    ffns = _ffns(c, total)
    shared = c.count("num_kv_shared_layers", minimum=0, maximum=total)
    layers = []
    for i, kind in enumerate(kinds):
        attention = gqa(
            c.count("num_attention_heads"),
            kv_heads(c),
            width,
            rope_dim=rotated(c, width, kind, nesting="allowed"),
            bias=bias,
            qk_norm="head",
            v_norm=True,
        )
        source = _source(c, kinds[: total - shared], kind) if i >= total - shared else None
        layers.append(Layer(attention, ffns[i], 6, window(size if kind == SLIDING else None), source))
    c.ignore("activation_sparsity_pattern", "altup_coef_clip", "altup_active_idx", "altup_correct_scale")
    softcap = c.given_number("final_logit_softcapping")
    return document(c, layers, softcap=softcap, extra_weights=_extra(c, total))


def _source(c: Config, own: list[str], kind: str) -> int:
    """The last layer of this kind that has a cache of its own."""
    if kind not in own:
        rule = f"leaves no {kind} layer whose cache the others could read"
        raise AttncalcError(c.path("num_kv_shared_layers"), rule, got=c.count("num_kv_shared_layers"))
    return len(own) - 1 - own[::-1].index(kind)


def _ffns(c: Config, total: int) -> list[Row]:
    """`intermediate_size`: one for all layers, or a list."""
    value = c.value("intermediate_size")
    sizes = c.listed("intermediate_size", total) if isinstance(value, list) else [value] * total
    return [dense(c.whole("intermediate_size", size)) for size in sizes]


def _extra(c: Config, total: int) -> list[Row]:
    D, streams, every_layer = c.count("hidden_size"), c.count("altup_num_inputs", minimum=2), range(total)
    latent, rank = c.count("hidden_size_per_layer_input"), c.count("laurel_rank")
    vocab_size = c.count("vocab_size_per_layer_input", maximum=2**24)

    def linear(name: str, *shape: int, operation: str = "linear") -> Row:
        return weight(name, shape, every_layer, total, operation=operation)

    out = [
        weight("embed_tokens_per_layer", (vocab_size, total * latent), place="embedding"),
        weight("per_layer_model_projection", (total * latent, D), operation="linear"),
        weight("per_layer_projection_norm", (latent,)),
        linear("per_layer_input_gate", latent, D),
        linear("per_layer_projection", D, latent),
    ]
    for name in ("altup_projections", "altup_unembed_projections"):
        out += [weight(f"{name}.{i}", (D, D), operation="linear") for i in range(streams - 1)]
    return [
        *out,
        linear("altup.modality_router", streams, D, operation="linear_twice"),
        linear("altup.prediction_coefs", streams**2, streams),
        linear("altup.correction_coefs", streams, streams),
        linear("altup.router_norm", D, operation="none"),
        linear("altup.correct_output_scale", D, operation="none"),
        linear("laurel.linear_left", rank, D),
        linear("laurel.linear_right", D, rank),
    ]


READERS = {"gemma3n_text": _text, "gemma3n": text_model("gemma3n_text", ignored=("audio_soft_tokens_per_image",))}
