"""What every attention variant answers, and the step that it is asked about.

Symbols used throughout: B batch, T new tokens, S context (new tokens included), D hidden size, H query heads,
G KV heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, Self

from attncalc.axes import Dim, Weight
from attncalc.cache import CacheTensor
from attncalc.errors import AttncalcError
from attncalc.ops import SOFTMAX, Contraction, Ops, Part, Rowwise, Term, term
from attncalc.reach import FULL, Count, Reach
from attncalc.workload import Workload


@dataclass(frozen=True)
class Step:
    """One step of one layer: the workload, what its queries reach, and how pairs are counted."""

    workload: Workload
    reach: Reach = FULL
    count: Count = "causal"

    @property
    def axes(self) -> dict[str, Dim]:
        """b, t (new tokens) and s (keys that the step reads)."""
        w = self.workload
        keys = self.reach.keys(w.new_tokens, w.context, self.count)
        keys_label = {"full": "context", "compressed": "entries"}.get(self.reach.kind, "keys")
        return {"b": Dim(w.batch, "batch"), "t": Dim(w.new_tokens, "new_tokens"), "s": Dim(keys, keys_label)}

    @property
    def pairs(self) -> int:
        """(query, key) pairs of one sequence and head."""
        return self.reach.pairs(self.workload.new_tokens, self.workload.context, self.count)

    def coupled(
        self, name: str, left: Term | Part, right: Term | Part, out: Term | Part, axes: Mapping[str, Dim]
    ) -> Contraction:
        """A product between new tokens and keys, of which only the attended pairs count."""
        formula = self.reach.pairs_formula(self.count)
        return Contraction(name, term(left), term(right), term(out), axes, self.pairs, formula)

    def softmax(self, axes: Mapping[str, Dim], heads: str) -> Rowwise:
        """The softmax over the attended pairs of the axes `heads`."""
        formula = self.reach.pairs_formula(self.count)
        return Rowwise("softmax", f"b {heads}", SOFTMAX, axes, self.pairs, formula)


class CoreCount(NamedTuple):
    """What somebody counts for the core of a layer: a convention, its formula, values and source."""

    name: str
    formula: str
    symbols: Mapping[str, int]
    flops: int
    where: str
    source: str


class HeadShape(NamedTuple):
    """How a form looks to an attention kernel."""

    q_heads: int
    kv_heads: int | None
    head_dim_k: int
    head_dim_v: int


class Attention(Protocol):
    """A variant's specification: a frozen dataclass whose fields are its dimensions, and nothing else.

    `form` is how the same weights are computed; a variant with one form ignores it. All methods are pure.
    """

    forms: ClassVar[tuple[str, ...]]
    source: ClassVar[str]

    @property
    def hidden_size(self) -> int:
        """D."""

    @property
    def variant(self) -> str:
        """The id in the registry."""

    def default_form(self, workload: Workload) -> str:
        """The form that a good implementation would take for this workload."""

    def weights(self, form: str) -> tuple[Weight, ...]:
        """Parameters by name and shape."""

    def cache(self, reach: Reach, form: str) -> tuple[CacheTensor, ...]:
        """What one layer keeps for each sequence."""

    def ops(self, step: Step, form: str, *, cached: str) -> Ops:
        """What one layer computes; `cached` is the form whose tensors are kept."""

    def heads(self, form: str) -> HeadShape:
        """Heads and widths that the form's attention kernel sees."""

    def shard(self, tp: int) -> Self:
        """The part of one of `tp` GPUs that holds most.

        Raises:
            AttncalcError: no engine could split the heads so.
        """

    def with_kv_heads(self, kv_heads: int) -> "Attention | None":
        """The same heads as an attention that caches `kv_heads` K and V heads; None where none is cached."""

    def query_heads(self) -> int:
        """Query heads, the KV heads of an MHA of the same size."""


def input_size(spec: Attention) -> int:
    """Width of what a layer reads: D, or `input_size` where it reads more than the hidden state."""
    size: int = getattr(spec, "input_size", spec.hidden_size)
    return size


def cached_form(spec: Attention, form: str) -> str:
    """The form whose tensors are kept: K and V only where the form itself is decompressed."""
    return form if form == "decompressed" else spec.forms[0]


def check_form(spec: Attention, form: str) -> str:
    """`form`, if the variant has it."""
    if form not in spec.forms:
        rule = f"{spec.variant} has no such form"
        raise AttncalcError("--form", rule, got=form, hint=f"It has {', '.join(spec.forms)}")
    return form


def check_tp(tp: int, heads: int, kv_heads: int | None = None, what: str = "KV heads") -> None:
    """Refuse a split that no engine could run: H % tp == 0, and G % tp == 0 or tp % G == 0; `what` the G are."""
    if heads % tp:
        raise AttncalcError("--tp", f"must divide the {heads} query heads", got=tp)
    if kv_heads and kv_heads % tp and tp % kv_heads:
        raise AttncalcError("--tp", f"must divide the {kv_heads} {what} or be a multiple of them", got=tp)


def require(spec: object, *names: str, minimum: int = 1) -> None:
    """Refuse dimensions that are not whole numbers of at least `minimum`."""
    for name in names:
        value = getattr(spec, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise AttncalcError(name, f"must be a whole number of at least {minimum}", got=repr(value))
