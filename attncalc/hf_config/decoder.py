"""Decoders of softmax attention: one description each, of what config.json does not say.

A rule is a value, or a function of the configuration that reads the fields which decide it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from attncalc.errors import AttncalcError
from attncalc.hf_config.config import Config
from attncalc.hf_config.layers import Layer, Row, dense, document, gqa, moe, mtp, window
from attncalc.hf_config.rope import Nesting, rotated

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
    """The field, or all heads where it is null; heads are divided by it."""
    heads = c.count("num_attention_heads")
    number = c.count("num_key_value_heads", null=heads)
    if heads % number:
        raise AttncalcError(c.path("num_key_value_heads"), f"must divide num_attention_heads {heads}", got=number)
    return number


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


def no_rope_in_full_layers(c: Config, windows: list[int | None]) -> list[bool]:
    """Only layers with a window rotate; where no layer can have one (`sliding_window` null), all do."""
    return [size is not None or c.null("sliding_window") for size in windows]


def moe_layers(c: Config, total: int, sparse: Callable[[int], bool], experts: Row) -> list[Row]:
    """Experts where `sparse` says so, else a gated feed-forward of intermediate_size."""
    kinds = [sparse(i) for i in range(total)]
    plain = experts if all(kinds) else dense(c.count("intermediate_size"))
    c.ignore("intermediate_size")
    return [experts if kind else plain for kind in kinds]


def shared_experts(c: Config, **options: Any) -> Row:
    """Experts as DeepSeek names them: n_routed_experts of moe_intermediate_size beside n_shared_experts."""
    size = c.count("moe_intermediate_size")
    shared = size * c.count("n_shared_experts", minimum=0)
    experts, top_k = c.count("n_routed_experts"), c.count("num_experts_per_tok")
    if options.get("router_correction") == "buffer":
        check_groups(c, experts)
    return moe(experts, top_k, size, shared_intermediate_size=shared, **options)


def check_groups(c: Config, experts: int, names: tuple[str, str] = ("n_group", "topk_group")) -> None:
    """Refuse groups of experts that the code of the router fails on: it picks `topk_group` of them by two experts."""
    groups, picked = names
    number: int | None = None
    if c.has(groups):
        number = c.count(groups)
        if experts % number or experts // number < 2:
            rule = f"must divide the {experts} experts into groups of 2 or more"
            raise AttncalcError(c.path(groups), rule, got=number)
    if c.has(picked):
        c.count(picked, maximum=number or experts)


def first_dense(c: Config, total: int) -> Callable[[int], bool]:
    """Experts from layer first_k_dense_replace on; a moe_layer_freq other than 1 is not understood."""
    c.only("moe_layer_freq", 1)
    first = c.count("first_k_dense_replace", minimum=0, maximum=total)
    return lambda i: i >= first


class Decoder(NamedTuple):
    """What the code of an architecture fixes.

    `rope`: the rotated part of a head where the configuration names none; None: all of it, and no field changes that.
    `nesting`: whether settings of RoPE are keyed by kind of layer. `rotates`: which layers rotate at all. `extras`:
    weights that are no part of layers, embedding or head. `softcaps`: the fields final_logit_softcapping and
    attn_logit_softcapping exist; `final_softcap`: the first alone. `mtp`: layers of prediction like the last one, as
    num_nextn_predict_layers says. `expected`: fields of which this value, or one of these, is understood. `ignored`:
    fields without effect here. `model_type`: of the model, if the file has another name for it.
    """

    bias: Rule = ""
    qk_norm: Rule = "none"
    rope: Rule = None
    nesting: Nesting = ""
    rotates: Callable[[Config, list[int | None]], list[bool]] = lambda c, windows: [True] * len(windows)  # noqa: ARG005
    windows: Windows = no_windows
    ffn: FFNs = gated
    norm: str = "rms"
    norms: Rule = 2
    extras: FFNs = lambda c, total: []  # noqa: ARG005
    sinks: bool = False
    softcaps: bool = False
    final_softcap: bool = False
    mtp: bool = False
    expected: tuple[tuple[str, Any], ...] = ()
    ignored: tuple[str, ...] = ()
    model_type: str = ""

    def __call__(self, c: Config) -> Row:
        """The document."""
        total = layer_count(c)
        check(c, self.expected)
        c.ignore(*self.ignored)
        softcap = self.softcaps and c.given_number("attn_logit_softcapping")
        plain = softmax(
            c,
            rope=resolve(self.rope, c),
            nesting=self.nesting,
            bias=resolve(self.bias, c),
            qk_norm=resolve(self.qk_norm, c),
            sinks=self.sinks,
            logit_softcap=softcap,
        )
        windows = self.windows(c, total)
        attentions = [plain if turns else plain | {"rope_dim": 0} for turns in self.rotates(c, windows)]
        ffns, norms = self.ffn(c, total), resolve(self.norms, c)
        layers = [
            Layer(attention, ffn, norms, window(size))
            for attention, ffn, size in zip(attentions, ffns, windows, strict=True)
        ]
        final = self.softcaps or self.final_softcap
        rest: Row = {"softcap": final and c.given_number("final_logit_softcapping")}
        rest["extra_weights"] = self.extras(c, total)
        if self.mtp:
            rest["mtp"] = mtp(c, layers[-1], mtp_count(c))
        named = {"model_type": self.model_type} if self.model_type else {}
        return named | document(c, layers, norm=self.norm, **rest)


def layer_count(c: Config) -> int:
    """num_hidden_layers."""
    return c.count("num_hidden_layers", maximum=10_000)


def mtp_count(c: Config) -> int:
    """num_nextn_predict_layers; none where neither the file nor the class has it."""
    absent = {} if c.declares("num_nextn_predict_layers") else {"absent": 0}
    return c.count("num_nextn_predict_layers", minimum=0, maximum=64, **absent)


def check(c: Config, expected: tuple[tuple[str, Any], ...]) -> None:
    """Refuse fields with another value than expected."""
    for name, value in expected:
        c.only(name, *(value if isinstance(value, tuple) else (value,)))


def softmax(c: Config, *, rope: float | None = None, nesting: Nesting = "", **options: Any) -> Row:
    """Softmax attention by the fields that most architectures share."""
    width = head_dim(c)
    rope_dim = rotated(c, width, part=rope, nesting=nesting)
    return gqa(c.count("num_attention_heads"), kv_heads(c), width, rope_dim=rope_dim, **options)
