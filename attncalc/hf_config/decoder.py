"""Decoders of softmax attention: one description each, of what config.json does not say.

A rule is a value, or a function of the configuration that reads the fields which decide it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from attncalc.errors import AttncalcError
from attncalc.hf_config.config import Config
from attncalc.hf_config.layers import Layer, Row, dense, document, gqa, window
from attncalc.hf_config.rope import rotated

Rule = Any
Windows = Callable[[Config, int], list[int | None]]
FFNs = Callable[[Config, int], list[Row]]


def resolve(rule: Rule, c: Config) -> Any:
    """The value of a rule."""
    return rule(c) if callable(rule) else rule


def flag(name: str, true: Any = True, false: Any = False) -> Callable[[Config], Any]:
    """One of two values, by a field."""
    return lambda c: true if c.flag(name) else false


def divided(c: Config, hidden_size: str = "hidden_size", heads: str = "num_attention_heads") -> int:
    """hidden_size / heads, for architectures that define a head so."""
    size, count = c.count(hidden_size), c.count(heads)
    if size % count:
        raise AttncalcError(c.path(heads), f"must divide {hidden_size} {size} where head_dim is not given", got=count)
    return size // count


def head_dim(c: Config) -> int:
    """The field; hidden_size / heads where it is absent, or null in a class that has it so by default."""
    if "head_dim" not in c.facts.defaults:
        return c.count("head_dim", absent=None if c.has("head_dim") else divided(c))
    if c.facts.defaults["head_dim"] is None and c.null("head_dim"):
        return c.count("head_dim", null=divided(c))
    return c.count("head_dim")


def kv_heads(c: Config) -> int:
    """The field, or all heads where it is null."""
    return c.count("num_key_value_heads", null=c.count("num_attention_heads"))


def no_windows(c: Config, total: int) -> list[int | None]:  # noqa: ARG001
    """Every layer attends to all tokens."""
    return [None] * total


def window_everywhere(c: Config, total: int) -> list[int | None]:
    """`sliding_window` in every layer, or null."""
    return [c.maybe("sliding_window")] * total


FULL, SLIDING = "full_attention", "sliding_attention"


def by_layer_types(pattern: Callable[[Config, int], list[str]]) -> Windows:
    """`layer_types`, or where it is null what the architecture derives; `sliding_window` in the sliding layers."""

    def windows(c: Config, total: int) -> list[int | None]:
        kinds = layer_types(c, total, pattern)
        size = c.maybe("sliding_window")
        if size is None and SLIDING in kinds:
            raise AttncalcError(c.path("sliding_window"), "must be a whole number where layers slide", got="null")
        return [size if kind == SLIDING else None for kind in kinds]

    return windows


def layer_types(
    c: Config, total: int, pattern: Callable[[Config, int], list[str]], known: tuple[str, ...] = (FULL, SLIDING)
) -> list[str]:
    """`layer_types`, or where it is absent or null what the architecture derives."""
    if c.null("layer_types"):
        derived = pattern(c, total)
        return c.words("layer_types", total, known, absent=derived, null=derived)
    return c.words("layer_types", total, known)


def every(n: int, total: int, last: str = FULL, others: str = SLIDING) -> list[str]:
    """Layers n, 2n, ... (from 1) are `last`."""
    return [others if (i + 1) % n else last for i in range(total)]


def gated(c: Config, total: int) -> list[Row]:
    """A gated feed-forward of intermediate_size in every layer."""
    return [dense(c.count("intermediate_size"))] * total


class Decoder(NamedTuple):
    """What the code of an architecture fixes.

    `rope`: the rotated part of a head where the configuration names none; None: all of it, and no field changes that.
    `softcaps`: the fields final_logit_softcapping and attn_logit_softcapping exist. `expected`: fields of which this
    value alone is understood. `ignored`: fields without effect here.
    """

    bias: Rule = ""
    qk_norm: Rule = "none"
    rope: Rule = None
    windows: Windows = no_windows
    ffn: FFNs = gated
    norm: str = "rms"
    norms: int = 2
    sinks: bool = False
    softcaps: bool = False
    head_dim: Callable[[Config], int] = head_dim
    kv_heads: Callable[[Config], int] = kv_heads
    expected: tuple[tuple[str, Any], ...] = ()
    ignored: tuple[str, ...] = ()

    def __call__(self, c: Config) -> Row:
        """The document."""
        total = c.count("num_hidden_layers", maximum=10_000)
        for name, value in self.expected:
            c.only(name, value)
        c.ignore(*self.ignored)
        width = self.head_dim(c)
        softcap = self.softcaps and c.given_number("attn_logit_softcapping")
        attention = gqa(
            c.count("num_attention_heads"),
            self.kv_heads(c),
            width,
            rope_dim=rotated(c, width, part=resolve(self.rope, c)),
            bias=resolve(self.bias, c),
            qk_norm=resolve(self.qk_norm, c),
            sinks=self.sinks,
            logit_softcap=softcap,
        )
        layers = [
            Layer(attention, ffn, self.norms, window(size))
            for size, ffn in zip(self.windows(c, total), self.ffn(c, total), strict=True)
        ]
        final = self.softcaps and c.given_number("final_logit_softcapping")
        return document(c, layers, norm=self.norm, softcap=final)
