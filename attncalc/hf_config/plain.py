"""Decoders before Llama: a K and V head for each query head, a feed-forward without gate, LayerNorm with bias.

One description each, of what config.json does not say. Source: transformers 5.24 `models/`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from attncalc.errors import AttncalcError
from attncalc.hf_config.config import MAX_POSITIONS, MAX_VOCABULARY, Config
from attncalc.hf_config.decoder import Rule, check, layer_count, resolve
from attncalc.hf_config.layers import Layer, Row, dense, document, gqa, weight, window

Size = Callable[[Config], int]


def field(name: str, **options: Any) -> Size:
    """A whole number."""
    return lambda c: c.count(name, **options)


def four_times(c: Config) -> int:
    """4 * hidden_size."""
    return 4 * c.count("hidden_size")


def or_four_times(name: str) -> Size:
    """A field, or 4 * hidden_size where it is null."""
    return lambda c: c.count(name, null=four_times(c))


def norm_weights(c: Config, name: str, width: int | None = None) -> list[Row]:
    """A LayerNorm with bias outside the layers, of hidden_size unless another width is given."""
    shape = (c.count("hidden_size") if width is None else width,)
    return [weight(f"{name}.weight", shape), weight(f"{name}.bias", shape)]


def bias_of_head(c: Config) -> list[Row]:
    """A bias of the logits."""
    return [weight("lm_head.bias", (c.count("vocab_size", maximum=MAX_VOCABULARY),), place="head")]


class Plain(NamedTuple):
    """What the code of an architecture fixes.

    `width`: of the feed-forward. `rope`: rotated values of a head, by its width. `positions`: rows of a table of
    learned positions beyond the largest number of positions; None: there is no table. `extra`: weights that are no part
    of layers, embedding or head. `tie`: whether embedding and head are one weight, where no field says it. `expected`:
    fields of which this value, or one of these, is understood. `ignored`: fields without effect here.
    """

    width: Size
    bias: Rule = "qkvo"
    ffn_bias: Rule = True
    kv_heads: Size | None = None
    rope: Callable[[Config, int], int] | None = None
    qk_norm: Rule = "none"
    windows: Callable[[Config, int], list[int | None]] | None = None
    norm: Rule = "layer_bias"
    norms: Rule = 2
    final_norm: Rule = True
    positions: int | None = None
    max_positions: str | None = "max_position_embeddings"
    extra: tuple[Callable[[Config], list[Row]], ...] = ()
    hidden_size: Size = field("hidden_size")
    layer_count: Size = layer_count
    heads: str = "num_attention_heads"
    tie: bool | None = None
    notes: tuple[str, ...] = ()
    expected: tuple[tuple[str, Any], ...] = ()
    ignored: tuple[str, ...] = ()

    def __call__(self, c: Config) -> Row:
        """The document."""
        check(c, self.expected)
        c.ignore(*self.ignored)
        total, heads = self.layer_count(c), c.count(self.heads)
        hidden_size = self.hidden_size(c)
        if hidden_size % heads:
            raise AttncalcError(c.path(self.heads), f"must divide the hidden size {hidden_size}", got=heads)
        width = hidden_size // heads
        if self.kv_heads is None and c.has("num_key_value_heads") and not c.declares("num_key_value_heads"):
            c.only("num_key_value_heads", heads, None)
        attention = gqa(
            heads,
            heads if self.kv_heads is None else self.kv_heads(c),
            width,
            rope_dim=0 if self.rope is None else self.rope(c, width),
            bias=resolve(self.bias, c),
            qk_norm=resolve(self.qk_norm, c),
        )
        ffn = dense(self.width(c), gated=False, bias=resolve(self.ffn_bias, c))
        windows = [None] * total if self.windows is None else self.windows(c, total)
        layers = [Layer(attention, ffn, resolve(self.norms, c), window(size)) for size in windows]
        longest = None if self.max_positions is None else c.count(self.max_positions, maximum=MAX_POSITIONS)
        extra = [row for rows in self.extra for row in rows(c)]
        if self.positions is not None and longest is not None:
            shape = (longest + self.positions, hidden_size)
            extra.insert(0, weight("embed_positions.weight", shape, place="embedding"))
        if self.tie is not None:
            c.tie = self.tie
        noted = {"notes": list(self.notes)} if self.notes else {}
        return noted | document(
            c,
            layers,
            hidden_size=hidden_size,
            norm=resolve(self.norm, c),
            final_norm=resolve(self.final_norm, c),
            max_position_embeddings=longest,
            extra_weights=extra,
        )
