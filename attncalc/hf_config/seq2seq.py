"""Decoders of encoder-decoder models as causal language models: BART and its relatives, Whisper.

`BartForCausalLM` has the decoder alone. Without the states of an encoder its cross-attention is not run and keeps
nothing; its weights are there. Source: transformers 5.24 `models/`.
"""

from collections.abc import Callable
from typing import Any

from attncalc.hf_config.config import Config
from attncalc.hf_config.layers import Row, weight
from attncalc.hf_config.plain import Plain, field, norm_weights

OWN_FIELDS = ("is_encoder_decoder",)
"""Checked here: the causal language model has no encoder, whatever its configuration says."""


NOTE = (
    "the decoder alone: without the states of an encoder its cross-attention computes and keeps nothing; its weights "
    "count as parameters and as read"
)


def _cross_attention(bias: Callable[[Config], str] | str = "qkvo") -> Callable[[Config], list[Row]]:
    """A second attention in each layer, over the states of an encoder, and its norm."""

    def rows(c: Config) -> list[Row]:
        total, D = c.count("decoder_layers"), c.count("d_model")
        letters = bias(c) if callable(bias) else bias
        shapes: dict[str, tuple[int, ...]] = {f"encoder_attn.{p}_proj.weight": (D, D) for p in "qkvo"}
        shapes |= {f"encoder_attn.{p}_proj.bias": (D,) for p in letters}
        shapes |= {f"encoder_attn_layer_norm.{part}": (D,) for part in ("weight", "bias")}
        return [weight(name, shape, range(total), total, place="attention") for name, shape in shapes.items()]

    return rows


def _embedding_norm(c: Config) -> list[Row]:
    return norm_weights(c, "layernorm_embedding", c.count("d_model"))


def _norm_if_any(c: Config) -> list[Row]:
    return _embedding_norm(c) if c.flag("layernorm_embedding") else []


def _bias(c: Config) -> str:
    return "qkvo" if c.flag("use_bias") else ""


def _bart(*extra: Callable[[Config], list[Row]], bias: Callable[[Config], str] | str = "qkvo", **options: Any) -> Plain:
    common: Row = {
        "bias": bias,
        "positions": 2,
        "final_norm": False,
        "hidden_size": field("d_model"),
        "layer_count": field("decoder_layers", maximum=10_000),
        "heads": "decoder_attention_heads",
        "notes": (NOTE,),
        "expected": (("is_encoder_decoder", (True, False)),),
    }
    ignored = (
        "encoder_layers",
        "encoder_ffn_dim",
        "encoder_attention_heads",
        "encoder_layerdrop",
        "decoder_layerdrop",
        "num_hidden_layers",
        "num_attention_heads",
        "scale_embedding",
        "is_decoder",
        "normalize_before",
        "add_bias_logits",
        "add_final_layer_norm",
        "normalize_embedding",
        "static_position_embeddings",
        "extra_pos_embeddings",
    )
    common["ignored"] = ignored + options.pop("ignored", ())
    common["expected"] += options.pop("expected", ())
    return Plain(field("decoder_ffn_dim"), extra=(_cross_attention(bias), *extra), **(common | options))


READERS = {
    "bart": _bart(_embedding_norm),
    "plbart": _bart(_embedding_norm),
    "mbart": _bart(_embedding_norm, final_norm=True),
    "mvp": _bart(_embedding_norm, expected=(("use_prompt", False),), ignored=("prompt_length", "prompt_mid_dim")),
    "pegasus": _bart(positions=0, final_norm=True),
    "blenderbot": _bart(positions=0, final_norm=True),
    "blenderbot-small": _bart(_embedding_norm, positions=0),
    "bigbird_pegasus": _bart(
        _embedding_norm,
        bias=_bias,
        positions=0,
        tie=False,
        ignored=("attention_type", "block_size", "num_random_blocks", "tie_word_embeddings"),
    ),
    "trocr": _bart(_norm_if_any, expected=(("use_learned_position_embeddings", True),)),
    "whisper": _bart(
        bias="qvo",
        positions=0,
        final_norm=True,
        max_positions="max_target_positions",
        ignored=(
            "num_mel_bins",
            "max_source_positions",
            "use_weighted_layer_sum",
            "classifier_proj_size",
            "apply_spec_augment",
            "mask_time_prob",
            "mask_time_length",
            "mask_time_min_masks",
            "mask_feature_prob",
            "mask_feature_length",
            "mask_feature_min_masks",
            "median_filter_width",
            "num_key_value_heads",
        ),
    ),
}
