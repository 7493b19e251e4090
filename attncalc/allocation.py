"""Cache bytes of a model: per token, per layer, per sequence, on the GPU that holds most."""

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from attncalc.cache import CacheTensor, Tensor, growing, total_bytes
from attncalc.dtypes import Formats
from attncalc.engines import engine as find_engine
from attncalc.errors import AttncalcError, shown
from attncalc.model import LayerGroup, Model
from attncalc.reach import FULL, Reach, ratio
from attncalc.units import parse_count
from attncalc.workload import Workload

if TYPE_CHECKING:
    from fractions import Fraction

    from attncalc.engines.base import Engine


class LayerCache(NamedTuple):
    """The cache of one group of equal layers; `tensors` are one layer's."""

    group: LayerGroup
    cached: str
    tensors: tuple[Tensor, ...]
    elements_per_token: "int | Fraction"
    growth_bits: "int | Fraction"
    bytes_fixed: int

    @property
    def layers(self) -> int:
        """How many layers the group has."""
        return len(self.group.indices)

    @property
    def bytes(self) -> int:
        """Of all layers of the group."""
        return self.layers * total_bytes(self.tensors)


class Reason(NamedTuple):
    """A rule of an engine, and the bytes by which it differs from the logical cache."""

    rule: str
    bytes: int


class Allocation(NamedTuple):
    """What a model keeps for `batch` sequences of `context` tokens, on the GPU that holds most."""

    model: Model
    engine: str
    context: int
    batch: int
    tp: int
    formats: Formats
    layers: tuple[LayerCache, ...]
    bytes_overhead: int = 0
    reasons: tuple[Reason, ...] = ()
    replicated: tuple[str, ...] = ()

    @property
    def bytes_total(self) -> int:
        """Sum of the layers and the overhead."""
        return sum(layer.bytes for layer in self.layers) + self.bytes_overhead

    @property
    def bytes_per_sequence(self) -> int:
        """Without the overhead."""
        return (self.bytes_total - self.bytes_overhead) // self.batch

    @property
    def bytes_fixed(self) -> int:
        """Of tensors that are constant from the first token."""
        return sum(layer.layers * layer.bytes_fixed for layer in self.layers)

    @property
    def bytes_per_token(self) -> "int | Fraction":
        """What the next token of one sequence adds at this context; full windows add nothing.

        Averaged over one period where a row stands for several tokens.
        """
        bits = sum(layer.layers * layer.growth_bits for layer in self.layers)
        return ratio(bits.numerator, 8 * bits.denominator)

    @property
    def elements_per_token(self) -> "int | Fraction":
        """One token's records in all layers that still grow at this context."""
        elements = sum(layer.layers * layer.elements_per_token for layer in self.layers if layer.growth_bits)
        return ratio(elements.numerator, elements.denominator)

    @property
    def elements_per_token_per_layer(self) -> "int | Fraction | None":
        """One token's record in a layer that stores tokens; None where layers differ."""
        found = {layer.elements_per_token for layer in self.layers if layer.elements_per_token}
        return found.pop() if len(found) == 1 else None


class Baseline(NamedTuple):
    """The same model with other KV heads in every layer that stores keys; `reason` says why there is none."""

    name: str
    allocation: Allocation | None
    reason: str = ""


def allocate(
    model: Model,
    context: int,
    *,
    batch: int = 1,
    engine: str = "logical",
    form: str | None = None,
    tp: int = 1,
    mtp: bool = False,
    formats: Formats | None = None,
) -> Allocation:
    """The cache of `model`.

    Raises:
        AttncalcError: the engine, the form, the formats or the split do not fit the model.
    """
    profile, formats = find_engine(engine), formats or model_formats(model)
    if not isinstance(formats, Formats):
        raise AttncalcError("formats", "must be a Formats", got=shown(formats), hint='Write Formats(kv="fp8")')
    workload, tp = Workload(context=context, batch=batch), parse_count(tp, "tp")
    profile.check_formats(formats)
    check_form_known(model, form)
    groups = model.layer_groups(mtp=mtp)
    layers = tuple(_layer(model, profile, g, workload, form, tp, formats) for g in groups)
    if formats.index is not None and not any(t.name == "index_k" for layer in layers for t in layer.tensors):
        raise AttncalcError("--index-dtype", f"no layer of {model.id} keeps index keys", got=formats.index)
    reasons: dict[str, int] = {}
    for layer in layers:
        rule = profile.rule(model, layer.group)
        if rule:
            logical = _layer(model, find_engine("logical"), layer.group, workload, form, tp, formats)
            reasons[rule] = reasons.get(rule, 0) + layer.bytes - logical.bytes
    made = tuple(Reason(rule, difference) for rule, difference in reasons.items() if difference)
    copies = _replicated(model, profile, groups, workload, form, tp, formats) if tp > 1 else ()
    return Allocation(model, engine, context, batch, tp, formats, layers, reasons=made, replicated=copies)


def _replicated(
    model: Model,
    profile: "Engine",
    groups: tuple[LayerGroup, ...],
    workload: Workload,
    form: str | None,
    tp: int,
    formats: Formats,
) -> tuple[str, ...]:
    """What a split does not divide by `tp`, in words."""
    found: dict[str, str] = {}
    for group in groups:
        whole = _layer(model, profile, group, workload, form, 1, formats).tensors
        part = _layer(model, profile, group, workload, form, tp, formats).tensors
        for all_heads, one in zip(whole, part, strict=True):
            if one.bytes * tp > all_heads.bytes:
                times, rest = divmod(tp * one.bytes, all_heads.bytes)
                found[one.name] = f"{one.name} is held {times} times over by the {tp} GPUs"
                if rest:  # in parts: a convolution state of split heads and repeated groups
                    found[one.name] = (
                        f"{one.name} takes {tp * one.bytes:,} B on {tp} GPUs, {all_heads.bytes:,} B on one"
                    )
    return tuple(found.values())


def model_formats(model: Model) -> Formats:
    """bf16, whatever the weights are, unless the checkpoint declares a KV scheme."""
    return Formats(kv=model.kv_cache_dtype or "bf16")


def check_form_known(model: Model, form: str | None) -> None:
    """Refuse a form that no layer has; a hybrid's other layers keep their own."""
    variants = {g.attention.variant: g.attention for g in model.groups if g.attention}
    if form is not None and not any(form in a.forms for a in variants.values()):
        known = sorted({f for a in variants.values() for f in a.forms})
        rule = f"no layer of {model.id} has this form"
        raise AttncalcError("--form", rule, got=form, hint=f"It has {', '.join(known)}")


def own_form(group: LayerGroup, form: str | None) -> str | None:
    """The wished form, where the group's variant has it."""
    return form if group.attention and form in group.attention.forms else None


def _layer(
    model: Model,
    profile: "Engine",
    group: LayerGroup,
    workload: Workload,
    form: str | None,
    tp: int,
    formats: Formats,
) -> LayerCache:
    cached, layout = "none", tuple[CacheTensor, ...]()
    if group.attention:
        cached = profile.execution(group.attention, workload, own_form(group, form)).cached
        layout = profile.cache(model, group, cached, tp)
    if group.ffn:
        layout += group.ffn.shard(tp).cache()
    tensors = tuple(t.at(workload.context, workload.batch, formats) for t in layout)
    growth = sum(t.growth_bits(workload.context, formats) for t in layout)
    fixed = sum(made.bytes for t, made in zip(layout, tensors, strict=True) if t.reach is None)
    elements = sum(t.elements_per_token for t in growing(layout, workload.context))
    return LayerCache(group, cached, tensors, ratio(elements.numerator, elements.denominator), growth, fixed)


def baselines(allocation: Allocation, *, mtp: bool = False) -> tuple[Baseline, ...]:
    """The same heads as MHA, GQA-8 and MQA: context, formats, engine, windows and split stay.

    Widths are the layer's own; an MLA layer counts as K of qk_nope_head_dim and V of v_head_dim.
    """
    return tuple(_baseline(allocation, name, n, mtp=mtp) for name, n in (("mha", 0), ("gqa-8", 8), ("mqa", 1)))


def _baseline(allocation: Allocation, name: str, kv_heads: int, *, mtp: bool) -> Baseline:
    model = allocation.model
    try:
        groups = tuple(_with_kv_heads(g, kv_heads) for g in model.groups)
        changed = replace(model, groups=groups)
        if mtp and model.mtp:
            mtp_groups = tuple(_with_kv_heads(g, kv_heads) for g in model.mtp.groups)
            changed = replace(changed, mtp=model.mtp._replace(groups=mtp_groups))
        made = allocate(
            changed,
            allocation.context,
            batch=allocation.batch,
            engine=allocation.engine,
            tp=allocation.tp,
            mtp=mtp,
            formats=replace(allocation.formats, index=None),  # K and V of heads have no index keys
        )
    except AttncalcError as error:
        return Baseline(name, None, str(error))
    return Baseline(name, made)


def _with_kv_heads(group: LayerGroup, kv_heads: int) -> LayerGroup:
    """The group with K and V of so many heads; what keeps entries of the whole context attends to all of it then."""
    attention = group.attention
    kept = attention.cache(group.reach, attention.forms[0]) if attention else ()
    if attention is None or not kept:
        return group
    heads = attention.query_heads()
    if kv_heads and heads % kv_heads:
        raise AttncalcError("", f"{kv_heads} KV heads do not divide {heads} query heads")
    changed = attention.with_kv_heads(kv_heads or heads)
    if changed is None:
        return group
    whole = any(isinstance(t.reach, Reach) and t.reach.kind == "compressed" for t in kept)
    return group._replace(attention=changed, reach=FULL if whole else group.reach)
