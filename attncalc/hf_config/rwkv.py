"""RWKV-7. Sources: SmerkyG/RWKV7-Goose `configuration_rwkv7.py`; arXiv 2503.14456, which sets ranks by hidden size."""

from attncalc.errors import AttncalcError
from attncalc.hf_config.config import Config, Facts
from attncalc.hf_config.decoder import layer_count
from attncalc.hf_config.layers import Layer, Row, document, weight

RANKS = {
    "decay_rank": ("lora_rank_decay", 1.8, 0.5),
    "a_rank": ("lora_rank_iclr", 1.8, 0.5),
    "v_rank": ("lora_rank_value_residual_mix", 1.3, 0.5),
    "gate_rank": ("lora_rank_gate", 0.6, 0.8),
}
"""Rank of a low-rank projection: its field, and a factor and an exponent of the hidden size, to a multiple of 32."""


def _rwkv7(c: Config) -> Row:
    """Ranks that are null are those of the paper for the hidden size; the first layer has no value residual."""
    hidden, width = c.count("hidden_size"), c.count("head_size")
    if hidden % width:
        raise AttncalcError(c.path("head_size"), f"must divide hidden_size {hidden}", got=width)
    c.only("attention_hidden_size", hidden)
    ranks = {
        name: c.count(field, null=max(32, round(factor * hidden**power / 32) * 32))
        for name, (field, factor, power) in RANKS.items()
    }
    attention = {
        "variant": "rwkv7",
        "num_heads": hidden // width,
        "head_k_dim": width,
        "head_v_dim": width,
        **ranks,
    }
    ffn = {"kind": "channel_mix", "intermediate_size": c.count("intermediate_size", null=4 * hidden)}
    later = Layer(attention, ffn, 2)
    layers = [Layer(attention | {"v_rank": None}, ffn, 2)] + [later] * (layer_count(c) - 1)
    extra = [weight(f"pre_norm.{part}", (hidden,)) for part in ("weight", "bias")]
    return document(c, layers, norm="layer_bias", max_position_embeddings=None, extra_weights=extra)


READERS = {"rwkv7": _rwkv7}

_NULL = ("intermediate_size", *(field for field, _, _ in RANKS.values()))
FACTS = {
    "rwkv7": Facts(dict.fromkeys(_NULL), frozenset(_NULL), architectures=("Rwkv7ForCausalLM",)),
}
