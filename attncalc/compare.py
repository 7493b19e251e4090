"""Attention layers side by side at equal dimensions: cache, score GEMM, FLOPs, intensity."""

from typing import TYPE_CHECKING, NamedTuple

from attncalc.attention import variant_class
from attncalc.attention.base import Attention, HeadShape, Step, cached_form, check_form
from attncalc.attention.dsa import DSA
from attncalc.cache import CacheTensor, growing, total_bytes
from attncalc.device import Device
from attncalc.errors import AttncalcError, shown
from attncalc.model import LayerGroup
from attncalc.ops import Contraction
from attncalc.reach import FULL, Reach
from attncalc.search import largest
from attncalc.workload import Conventions, Workload

if TYPE_CHECKING:
    from fractions import Fraction


from attncalc.dimensions import BUILD, OPTIONS, REACHES, Dimensions

# The products between a query and what is cached; projections are the rest.
CORE = (
    *("score", "value", "state_update", "chunk_kk", "chunk_qk", "chunk_w", "chunk_u", "chunk_value"),
    "gate_score",
    *(f"{branch}_{name}" for branch in ("compress", "select", "window") for name in ("score", "value")),
)
SCORES = ("score", "compress_score", "select_score", "window_score")


class Layer(NamedTuple):
    """One layer of a comparison."""

    name: str
    attention: Attention
    reach: Reach
    form: str
    model: str | None = None
    indices: tuple[int, ...] = ()


def layers_of(name: str, dimensions: Dimensions, form: str | None) -> list[Layer]:
    """The layer of a variant, `mla:absorbed` or `mla`: then one for each of its forms."""
    variant, _, wanted = name.partition(":")
    variant_class(variant)
    if variant not in BUILD:
        raise AttncalcError("variant", f"{variant} has no dimensions to compare at")
    try:
        attention = BUILD[variant](dimensions)
    except AttncalcError as error:
        option = OPTIONS.get(f"{variant}.{error.where}") or OPTIONS.get(error.where, error.where)
        raise AttncalcError(option, error.rule, got=error.got, hint=error.hint) from None
    wanted, reach = wanted or form or "", REACHES.get(variant, FULL)
    if ":" in name and not wanted:
        raise AttncalcError("variant", "must name a form after the colon", got=shown(name))
    if wanted and (wanted in attention.forms or ":" in name):
        return [Layer(variant, attention, reach, check_form(attention, wanted))]
    return [Layer(variant, attention, reach, f) for f in attention.forms]


def layers_of_groups(model: str, groups: tuple[LayerGroup, ...], form: str | None) -> list[Layer]:
    """The distinct attention layers of a model, each in all its forms or in the one asked for."""
    found: dict[tuple[Attention, Reach], list[int]] = {}
    for group in groups:
        if group.attention:
            found.setdefault((group.attention, group.reach), []).extend(group.indices)
    return [
        Layer(attention.variant, attention, reach, f, model, tuple(sorted(indices)))
        for (attention, reach), indices in found.items()
        for f in ((form,) if form in attention.forms else attention.forms)
        if f
    ]


class LayerFigures(NamedTuple):
    """What the comparison shows of a layer; FLOPs are one layer's, whole batch, all new tokens."""

    layer: Layer
    shape: HeadShape
    cache: tuple[CacheTensor, ...]
    cache_elements: "int | Fraction"
    cache_bits_per_token: "int | Fraction"
    cache_bytes_constant: int
    mha_elements: "int | Fraction"
    score: Contraction | None
    score_flops: int
    core_flops: int
    core_bytes: int
    flops_attention: int
    parameters: int
    expand_from: int | None
    sparse_from: int | None

    def bound(self, device: Device, dtype: str) -> str:
        """`compute` or `memory`: core FLOPs over peak against core bytes over bandwidth."""
        compute = self.core_flops * device.bandwidth_bytes_per_s
        memory = self.core_bytes * device.peak(dtype)
        return "compute" if compute > memory else "memory"


def measure_layer(layer: Layer, workload: Workload, conventions: Conventions, tp: int = 1) -> LayerFigures:
    """All figures of one layer on one GPU."""
    attention, formats = layer.attention.shard(tp), conventions.formats
    cached = cached_form(attention, layer.form)
    step = Step(workload, layer.reach, conventions.count)
    ops = attention.ops(step, layer.form, cached=cached).contractions
    # A layer whose tokens meet in no other product has the convolution as its core.
    core = [op for op in ops if op.name in CORE] or [op for op in ops if op.name == "conv"]
    layout = attention.cache(layer.reach, cached)
    record = growing(layout, workload.context)
    constant = tuple(t.at(workload.context, 1, formats) for t in layout if t.reach is None)
    mha = attention.with_kv_heads(attention.query_heads())
    sparse_from = None
    if isinstance(attention, DSA) and conventions.count == "causal":  # dense scores all keys, at any length
        sparse_from = attention.sparse_beats_dense_from(workload, layer.form)
    return LayerFigures(
        layer=layer,
        shape=attention.heads(layer.form),
        cache=layout,
        cache_elements=sum(t.elements_per_token for t in record),
        cache_bits_per_token=sum(t.bits_per_token(formats) for t in record),
        cache_bytes_constant=total_bytes(constant),
        mha_elements=sum(t.elements_per_token for t in mha.cache(layer.reach, mha.forms[0])) if mha else 0,
        score=next((op for op in core if op.name == "score"), None),
        score_flops=sum(op.flops for op in core if op.name in SCORES),
        core_flops=sum(op.flops for op in core),
        core_bytes=sum(sum(op.bytes(formats).values()) for op in core),
        flops_attention=sum(op.flops for op in ops),
        parameters=sum(w.elements for w in attention.weights(layer.form) if not w.buffer),
        expand_from=expand_from_new_tokens(attention, layer.reach, workload, conventions),
        sparse_from=sparse_from,
    )


def expand_from_new_tokens(
    attention: Attention, reach: Reach, workload: Workload, conventions: Conventions
) -> int | None:
    """The smallest number of new tokens for which expanding costs fewer FLOPs than absorbing; None if there is none.

    absorbed(T) - expanded(T) = 2*B*H*(T*L*(P+V) + N(T)*(2L-P-V) - S*L*(P+V)) grows with T where 2L > P + V, and
    is never positive elsewhere, so bisection finds the first T at which it is.
    """
    if "absorbed" not in attention.forms or reach.kind != "full":
        return None
    kept = attention.forms[0]

    def saved(new_tokens: int) -> int:
        step = Step(Workload(workload.context, new_tokens, workload.batch), reach, conventions.count)
        absorbed, expanded = (
            sum(op.flops for op in attention.ops(step, form, cached=kept).contractions)
            for form in ("absorbed", "expanded")
        )
        return absorbed - expanded

    if saved(workload.context) <= 0:
        return None
    return largest(lambda n: saved(n) <= 0, 0, workload.context) + 1
