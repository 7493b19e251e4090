"""Attention variants: one file each, its torch layer beside it.

The registry is a literal table, imported on use: starting the program must not load twenty modules.
"""

from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, cast

from attncalc.errors import AttncalcError, shown, suggestion

if TYPE_CHECKING:
    from attncalc.attention.base import Attention


class Entry(NamedTuple):
    """Where a variant is, and what it is in a few words."""

    module: str
    name: str
    about: str


_HERE = "attncalc.attention"
VARIANTS = {
    "mha": Entry(f"{_HERE}.gqa", "GQA", "softmax attention, a KV head for each query head"),
    "gqa": Entry(f"{_HERE}.gqa", "GQA", "softmax attention, a KV head for a group of heads"),
    "mqa": Entry(f"{_HERE}.gqa", "GQA", "softmax attention, one KV head for all"),
    "gqa-concat": Entry(f"{_HERE}.gqa_concat", "ConcatGQA", "GQA over hidden state and embedding, concatenated"),
    "gqa-conv": Entry(f"{_HERE}.gqa_conv", "ConvGQA", "GQA, K and V convolved, a bias by distance"),
    "mla": Entry(f"{_HERE}.mla", "MLA", "one cached latent and one RoPE key for all heads"),
    "mla-split": Entry(f"{_HERE}.mla_split", "MLASplit", "cached latents for K and V apart, no RoPE key"),
    "gta": Entry(f"{_HERE}.gta", "GTA", "V is a group's one state, K is it beside a RoPE key"),
    "gla": Entry(f"{_HERE}.gla", "GLA", "a cached latent for a group of heads, one RoPE key"),
    "mfa": Entry(f"{_HERE}.mfa", "MFA", "MQA of wide heads, low-rank query"),
    "tpa": Entry(f"{_HERE}.tpa", "TPA", "cached factors over heads and over widths"),
    "dsa": Entry(f"{_HERE}.dsa", "DSA", "MLA over the top k keys that an indexer selects"),
    "gqa-index": Entry(f"{_HERE}.gqa_index", "IndexedGQA", "blocks for each KV head, picked by an indexer"),
    "nsa": Entry(f"{_HERE}.nsa", "NSA", "compressed entries, picked blocks, a window, gated"),
    "moba": Entry(f"{_HERE}.moba", "MoBA", "a few blocks of tokens, chosen by their mean key"),
    "csa": Entry(f"{_HERE}.csa", "CSA", "window, and indexed entries of 4 tokens each (V4)"),
    "hca": Entry(f"{_HERE}.csa", "CSA", "window, and all entries of 128 tokens each (V4)"),
    "tied-mqa": Entry(f"{_HERE}.csa", "CSA", "one KV head whose row is K and V, in a window (V4)"),
    "kda": Entry(f"{_HERE}.kda", "KDA", "delta rule, decay per key channel, constant state"),
    "gdn": Entry(f"{_HERE}.gdn", "GDN", "delta rule, decay per value head, constant state"),
    "mamba2": Entry(f"{_HERE}.mamba2", "Mamba2", "state space, one decay per head, constant state"),
    "mamba": Entry(f"{_HERE}.mamba", "Mamba", "state space, decay per state value, constant state"),
    "rwkv7": Entry(f"{_HERE}.rwkv7", "RWKV7", "delta rule, token shift, constant state"),
    "rg-lru": Entry(f"{_HERE}.rg_lru", "RGLRU", "gated recurrence, one state value per channel"),
    "short-conv": Entry(f"{_HERE}.short_conv", "ShortConv", "gated convolution over a few tokens (LFM2)"),
    "conv": Entry(f"{_HERE}.residual_conv", "ResidualConv", "convolution over a few tokens, beside its input"),
    "lightning": Entry(f"{_HERE}.lightning", "Lightning", "linear attention, fixed decay per head"),
    "retnet": Entry(f"{_HERE}.retnet", "RetNet", "retention: rotated q and k, fixed decay per head"),
    "linear-state": Entry(f"{_HERE}.linear_state", "LinearState", "one s x s state with elementwise decay"),
}


def variant_class(name: str, where: str = "variant") -> "type[Attention]":
    """The specification class of a variant id.

    Raises:
        AttncalcError: the id is not known; the nearest one is suggested.
    """
    if name not in VARIANTS:
        hint = suggestion(name, VARIANTS, f"Known: {', '.join(VARIANTS)}")
        raise AttncalcError(where, "unknown attention variant", got=shown(name), hint=hint)
    entry = VARIANTS[name]
    return cast("type[Attention]", getattr(import_module(entry.module), entry.name))
