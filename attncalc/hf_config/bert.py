"""BERT, RoBERTa and their relatives as decoders, and ModernBERT's decoder. Source: transformers 5.24 `models/`.

They decode where `is_decoder` is true; else they attend to both sides and keep nothing, which is not understood.
"""

from typing import Any

from attncalc.errors import AttncalcError
from attncalc.hf_config.config import MAX_VOCABULARY, Config
from attncalc.hf_config.decoder import FULL, SLIDING, divided, flag, layer_count, layer_types
from attncalc.hf_config.layers import Layer, Row, dense, document, gqa, weight, window
from attncalc.hf_config.plain import Plain, bias_of_head, field, norm_weights
from attncalc.hf_config.rope import rotated


def _decodes(c: Config) -> list[Row]:
    if not c.flag("is_decoder", absent=False):
        rule = "must be true: else the model attends to both sides and keeps no cache"
        raise AttncalcError(c.path("is_decoder"), rule, got="false")
    return []


def _untied_bias(c: Config) -> list[Row]:
    """Where the head has weights of its own, they have a bias of their own too."""
    tied = c.flag("tie_word_embeddings")
    return (
        [] if tied else [weight("lm_head.decoder.bias", (c.count("vocab_size", maximum=MAX_VOCABULARY),), place="head")]
    )


def _embedding_norm(c: Config) -> list[Row]:
    return norm_weights(c, "embeddings.norm")


def _token_types(c: Config) -> list[Row]:
    shape = (c.count("type_vocab_size"), c.count("hidden_size"))
    return [weight("token_type_embeddings.weight", shape, place="embedding")]


def _task_types(c: Config) -> list[Row]:
    """ERNIE's table of tasks."""
    shape = (c.count("task_type_vocab_size"), c.count("hidden_size"))
    return [weight("task_type_embeddings.weight", shape, place="embedding")] if c.flag("use_task_id") else []


def _transform(c: Config) -> list[Row]:
    """The head: a square matrix with bias, a norm, and a bias of the logits beside the embedding's weights."""
    D = c.count("hidden_size")
    return [
        weight("transform.weight", (D, D), operation="linear", place="head"),
        weight("transform.bias", (D,), place="head"),
        weight("transform.norm.weight", (D,), place="head"),
        weight("transform.norm.bias", (D,), place="head"),
        *bias_of_head(c),
    ]


def _glyphs(c: Config) -> list[Row]:
    """RoCBERT's tables of pronunciations and shapes, beside which a token's own is mapped to the hidden size."""
    sound, shape, D = c.count("pronunciation_embed_dim"), c.count("shape_embed_dim"), c.count("hidden_size")
    return [
        weight("pronunciation_embed.weight", (c.count("pronunciation_vocab_size"), sound), place="embedding"),
        weight("shape_embed.weight", (c.count("shape_vocab_size"), shape), place="embedding"),
        weight("map_inputs_layer.weight", (D, D + sound + shape), operation="linear"),
        weight("map_inputs_layer.bias", (D,)),
    ]


def _bert(*extra: Any, expected: tuple[tuple[str, Any], ...] = (), final_norm: bool = False) -> Plain:
    return Plain(
        field("intermediate_size"),
        final_norm=final_norm,
        positions=0,
        extra=(_decodes, *extra, _untied_bias),
        expected=expected,
        ignored=("position_embedding_type", "gradient_checkpointing"),
    )


_USUAL = (_token_types, _embedding_norm, _transform)


def _modern_bert(c: Config) -> Row:
    """A window of half of local_attention in the sliding layers; the first layer has no norm before its attention."""
    total = layer_count(c)
    step = c.count("global_attn_every_n_layers", absent=3)
    kinds = layer_types(c, total, lambda _, n: [SLIDING if i % step else FULL for i in range(n)])
    size = c.count("local_attention", minimum=2) // 2
    if c.has("sliding_window"):  # what the class derives, and writes into a file
        c.only("sliding_window", size)
    width, heads = divided(c), c.count("num_attention_heads")
    bias, ffn_bias = flag("attention_bias", "qkvo", "")(c), c.flag("mlp_bias")
    norm_bias, D = c.flag("norm_bias"), c.count("hidden_size")
    made = {
        kind: gqa(heads, heads, width, rope_dim=rotated(c, width, kind, nesting="allowed"), bias=bias)
        for kind in dict.fromkeys(kinds)
    }
    ffn = dense(c.count("intermediate_size"), bias=ffn_bias)
    layers = [
        Layer(made[kind], ffn, 2 if i else 1, window(size if kind == SLIDING else None)) for i, kind in enumerate(kinds)
    ]
    parts = ("weight", "bias") if norm_bias else ("weight",)
    extra = [weight(f"embeddings.norm.{part}", (D,)) for part in parts]
    extra.append(weight("head.dense.weight", (D, D), operation="linear", place="head"))
    extra += [weight("head.dense.bias", (D,), place="head")] if c.flag("classifier_bias") else []
    extra += [weight(f"head.norm.{part}", (D,), place="head") for part in parts]
    extra += bias_of_head(c) if c.flag("decoder_bias") else []
    c.ignore("classifier_activation", "mlp_dropout", "global_rope_theta", "local_rope_theta")
    return document(c, layers, norm="layer_bias" if norm_bias else "layer", extra_weights=extra)


READERS = {
    "bert": _bert(*_USUAL),
    "camembert": _bert(*_USUAL),
    "data2vec-text": _bert(*_USUAL),
    "roberta": _bert(*_USUAL),
    "xlm-roberta": _bert(*_USUAL),
    "ernie": _bert(*_USUAL, _task_types),
    "roberta-prelayernorm": _bert(*_USUAL, final_norm=True),
    "xlm-roberta-xl": _bert(_token_types, _transform, final_norm=True),
    "bert-generation": _bert(_embedding_norm, bias_of_head),
    "roc_bert": _bert(
        *_USUAL,
        _glyphs,
        expected=(("enable_pronunciation", True), ("enable_shape", True), ("concat_input", True)),
    ),
    "modernbert-decoder": _modern_bert,
}
