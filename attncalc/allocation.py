"""Cache bytes of a model: per token, per layer, per sequence, on the GPU that holds most."""

from dataclasses import dataclass, field, replace
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

from attncalc.cache import Tensor, total_bytes
from attncalc.dtypes import Formats
from attncalc.engines import check_options
from attncalc.engines import engine as find_engine
from attncalc.engines.options import EngineOptions
from attncalc.errors import AttncalcError, check_type
from attncalc.model import LayerGroup, Model
from attncalc.reach import FULL, Reach, ratio
from attncalc.units import parse_count
from attncalc.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from fractions import Fraction


@dataclass(frozen=True)
class Request:
    """What is to be allocated: `batch` sequences of `context` tokens, on one of `tp` GPUs, under one engine.

    `new_tokens`: of the step that is asked about; what is kept after it does not depend on them.
    """

    context: int
    batch: int = 1
    formats: Formats = field(default_factory=Formats)
    form: str | None = None
    tp: int = 1
    mtp: bool = False
    options: EngineOptions = field(default_factory=EngineOptions)
    new_tokens: int = 1

    @property
    def workload(self) -> Workload:
        """The step after which the tokens are kept."""
        return Workload(self.context, self.new_tokens, self.batch)


class Page(NamedTuple):
    """A layer's part of a block: the tensors in it, the tokens (0 of a state) and bytes, and blocks of a sequence."""

    tensors: tuple[str, ...]
    block_tokens: int
    bytes: int
    blocks: int


class LayerCache(NamedTuple):
    """The cache of one group of equal layers; `tensors` are one layer's, `padding` its bytes beyond them.

    `period`: tokens after which the bytes are never fewer than before; 1 where they never fall.
    """

    group: LayerGroup
    cached: str
    tensors: tuple[Tensor, ...]
    elements_per_token: "int | Fraction"
    growth_bits: "int | Fraction"
    bytes_fixed: int
    padding: int = 0
    pages: tuple[Page, ...] = ()
    period: int = 1

    @property
    def layers(self) -> int:
        """How many layers the group has."""
        return len(self.group.indices)

    @property
    def bytes(self) -> int:
        """Of all layers of the group."""
        return self.layers * (total_bytes(self.tensors) + self.padding)


class Stage(NamedTuple):
    """What one stage of a pipeline holds."""

    layers: tuple[int, ...]
    bytes_total: int
    bytes_overhead: int = 0


class Reason(NamedTuple):
    """A rule of an engine, and the bytes by which it differs from the logical cache."""

    rule: str
    bytes: int


class PoolGroup(NamedTuple):
    """Layers that share a block table: the tokens of a block, and the blocks that a sequence of n tokens takes."""

    layers: tuple[int, ...]
    block_tokens: int
    blocks: "Callable[[int], int]"


class Pool(NamedTuple):
    """Equal blocks on one GPU: `block_bytes` for one block of any group, in all of its layers.

    A sequence of n tokens takes the sum of its groups' blocks; `spare_blocks` belong to no sequence. `total` says how
    many blocks a pool keeps for so many sequences of n tokens, where that is another number (a sliding pool of SGLang,
    which holds a share of the full one's tokens).
    """

    name: str
    block_bytes: int
    groups: tuple[PoolGroup, ...]
    spare_blocks: int = 0
    total: "Callable[[int, int], int] | None" = None

    def held(self, context: int, sequences: int) -> int:
        """Blocks of so many sequences, and the spare ones."""
        used = self.total(context, sequences) if self.total else sequences * self.blocks(context)
        return used + self.spare_blocks

    def blocks(self, context: int) -> int:
        """Of one sequence."""
        return sum(group.blocks(context) for group in self.groups)


class Allocation(NamedTuple):
    """What a model keeps for `batch` sequences of `context` tokens, on the GPU that holds most.

    `batch` counts all sequences of the request, `sequences` those of this GPU: fewer, where replicas share them, and
    more where slots share the context of one.
    `pools` are empty where an engine allocates tensors and no blocks. `settings` are the options with the engine's
    own defaults.
    """

    model: Model
    engine: str
    context: int
    batch: int
    tp: int
    formats: Formats
    sequences: int
    layers: tuple[LayerCache, ...]
    bytes_overhead: int = 0
    reasons: tuple[Reason, ...] = ()
    replicated: tuple[str, ...] = ()
    options: EngineOptions = EngineOptions()
    pools: tuple[Pool, ...] = ()
    state_page_bytes: int | None = None
    settings: EngineOptions = EngineOptions()
    stages: tuple[Stage, ...] = ()

    @property
    def shares(self) -> tuple[str, ...]:
        """Whose part this is, where GPUs share layers or sequences: in words."""
        out = []
        if self.stages:
            largest = max(self.stages, key=lambda stage: stage.bytes_total)
            out.append(f"numbers are of the pipeline stage that holds most, {len(largest.layers)} layers")
        if self.sequences < self.batch:
            out.append(f"numbers are of the replica that holds most, {self.sequences} of {self.batch} sequences")
        return tuple(out)

    @property
    def bytes_total(self) -> int:
        """Sum of the layers and the overhead."""
        return sum(layer.bytes for layer in self.layers) + self.bytes_overhead

    @property
    def period(self) -> int:
        """Tokens after which the bytes are never fewer than before."""
        return lcm(*(layer.period for layer in self.layers))

    @property
    def bytes_per_sequence(self) -> "int | Fraction":
        """Without the overhead; sequences that share a pool need not divide its bytes."""
        return ratio(self.bytes_total - self.bytes_overhead, self.sequences)

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
    options: EngineOptions | None = None,
) -> Allocation:
    """The cache of `model`.

    Raises:
        AttncalcError: the engine, the form, the formats, the options or the split do not fit the model.
    """
    formats = model_formats(model) if formats is None else formats
    options = EngineOptions() if options is None else options
    return run(model, engine, Request(context, batch, formats, form, parse_count(tp, "tp"), mtp, options))


def run(model: Model, engine: str, request: Request) -> Allocation:
    """What an engine makes of a request: the one place that says whether it can.

    Raises:
        AttncalcError: the engine, the form, the formats, the options or the split do not fit the model.
    """
    profile, formats = find_engine(engine), request.formats
    check_type(formats, Formats, "formats", "must be Formats", 'Write Formats(kv="fp8")')
    check_options(profile, request.options)
    _ = request.workload  # refuses what are no counts
    check_form_known(model, request.form)
    known = kinds(model)
    for kind, what in KEPT_APART.items():
        wished = getattr(formats, kind)
        if wished is not None and kind not in known:
            raise AttncalcError(f"--{kind}-dtype", f"no layer of {model.id} keeps {what}", got=wished)
    profile.check(model, request)
    return profile.allocate(model, request)


def idle_options(model: Model, engine: str, request: Request) -> tuple[str, ...]:
    """Options that were set and without which the same bytes are allocated: this model has no use for them."""

    def held(options: EngineOptions) -> object:
        made = run(model, engine, replace(request, options=options))
        blocks = tuple((pool.block_bytes, pool.held(made.context, made.sequences)) for pool in made.pools)
        return made.layers, made.bytes_overhead, made.sequences, made.stages, blocks

    return tuple(n for n in request.options.given if same(held, request.options, request.options.without(n)))


def same(compute: "Callable[[EngineOptions], object]", one: EngineOptions, other: EngineOptions) -> bool:
    """Whether both options give the same; what cannot be computed with the other is not the same."""
    try:
        return compute(one) == compute(other)
    except AttncalcError:
        return False


KEPT_APART = {"index": "index keys", "state": "states", "conv": "columns of a convolution"}
"""Kinds of tensors that have a format of their own."""


def kinds(model: Model) -> frozenset[str]:
    """The kinds of tensors that the layers keep, MTP layers too."""
    groups = model.groups + (model.mtp.groups if model.mtp else ())
    layouts = [g.attention.cache(g.reach, form) for g in groups if g.attention for form in g.attention.forms]
    layouts += [g.ffn.cache() for g in groups if g.ffn]
    return frozenset(t.kind for layout in layouts for t in layout)


def replicated(pairs: "Iterable[tuple[Tensor, Tensor]]", tp: int, dcp: int = 1) -> tuple[str, ...]:
    """What a split does not divide by `tp`, in words; each pair is a tensor of one GPU and of one of `tp`.

    `dcp` GPUs share the tokens of what would be copies; a state has no tokens.
    """
    found: dict[str, str] = {}
    for all_heads, part in pairs:
        shared = dcp if not part.name.endswith("state") else 1
        one = part._replace(bytes=-(-part.bytes // shared))
        if one.bytes * tp > all_heads.bytes:
            times, rest = divmod(tp * one.bytes, all_heads.bytes)
            found[one.name] = f"{one.name} is held {times} times over by the {tp} GPUs"
            if rest:  # in parts: a convolution state of split heads and repeated groups
                found[one.name] = f"{one.name} takes {tp * one.bytes:,} B on {tp} GPUs, {all_heads.bytes:,} B on one"
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
            formats=_of_what_is_kept(changed, allocation.formats),  # K and V of heads have no index keys
            options=allocation.options,
        )
    except AttncalcError as error:
        return Baseline(name, None, str(error))
    return Baseline(name, made)


def _of_what_is_kept(model: Model, formats: Formats) -> Formats:
    """The formats without those of tensors that no layer keeps."""
    known = kinds(model)
    index, state, conv = (getattr(formats, kind) if kind in known else None for kind in KEPT_APART)
    return replace(formats, index=index, state=state, conv=conv)


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
