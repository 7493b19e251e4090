"""From groups of caches to an allocation: blocks, tensors that lie in them, and the reason for every byte."""

from typing import TYPE_CHECKING, NamedTuple

from attncalc.allocation import Allocation, LayerCache, Page, Pool, PoolGroup, Request, Stage
from attncalc.cache import CacheTensor, Tensor
from attncalc.dtypes import whole_bytes
from attncalc.engines.blocks import Group, Spec
from attncalc.engines.logical import PROFILE as LOGICAL
from attncalc.engines.serving import Ledger
from attncalc.engines.stages import within
from attncalc.model import Model
from attncalc.reach import ratio

if TYPE_CHECKING:
    from fractions import Fraction

BATCHED_TOKENS = 2048
"""Tokens of a step, where `--max-batched-tokens` does not say."""


class Kept(NamedTuple):
    """One cache of every layer of a group: the group's place, how it is managed, and what lies in it.

    `tensors` have a row for `rows_every` tokens; a state has them once. `logical` are the same by definition.
    """

    place: int
    spec: Spec
    tensors: tuple[CacheTensor, ...]
    logical: tuple[CacheTensor, ...]
    rows_every: int = 1


class _Held(NamedTuple):
    """A cache as it is allocated: its final page, the blocks of one sequence, the tokens of a block."""

    kept: Kept
    spec: Spec
    blocks: int

    def tensors(self, request: Request) -> tuple[Tensor, ...]:
        """Of one layer."""
        if self.spec.kind == "state":
            return tuple(t.at(request.context, request.batch, request.formats) for t in self.kept.tensors)
        rows = self.blocks * self.spec.block_tokens // self.kept.rows_every

        def filled(t: CacheTensor) -> Tensor:
            shape = (request.batch, t.heads.size, rows, t.width.size)
            bits = request.batch * rows * t.row_bits(request.formats)
            return Tensor(t.name, shape, request.formats.of(t.kind, t.width.size).name, whole_bytes(bits, t.name))

        return tuple(filled(t) for t in self.kept.tensors)

    @property
    def bytes(self) -> int:
        """Of one sequence in one layer."""
        return self.blocks * self.spec.page


def paged(
    engine: str,
    model: Model,
    request: Request,
    plain: Request,
    here: Request,
    kept: list[Kept],
    groups: list[Group],
    stages: "list[frozenset[int]]",
) -> Allocation:
    """What `here` takes on the GPU that holds most: of the largest stage, with the engine's own formats.

    `request` is the whole one, `plain` one replica's with the formats that were asked for.
    """
    in_flight, dcp = here.options.max_batched_tokens or BATCHED_TOKENS, here.options.dcp or 1
    taken = [group.blocks(here.context, in_flight, dcp) for group in groups]
    final = {
        c.owner: _Held(kept[c.owner], c.spec, n) for group, n in zip(groups, taken, strict=True) for c in group.caches
    }
    widths = [max(group.bytes(s) for group in groups) for s in stages]
    stage = stages[widths.index(max(widths))] if stages else None
    ledger, layers, logical_layers = Ledger(), [], []
    for place, whole in enumerate(model.layer_groups(mtp=here.mtp)):
        group = within(whole, stage)
        if group is None:
            continue
        held = [h for _, h in sorted(final.items()) if h.kept.place == place]
        logical_layers.append(LOGICAL.layer(model, group, plain))
        layers.append(_layer(logical_layers[-1], held, here, in_flight, dcp))
        for h in held:
            _explain(ledger, h, len(group.indices), plain, here, in_flight, dcp)
    block, unused = _unused(groups, taken, stage)
    ledger.add(
        "every block has the bytes of the widest group; groups of fewer layers leave the rest empty (phantom layers)",
        here.batch * unused,
    )
    ledger.add("one block of the pool belongs to no sequence (the null block)", block)
    pool = Pool(
        "blocks",
        block,
        tuple(
            PoolGroup(
                tuple(sorted({c.layer for c in group.caches if stage is None or c.layer in stage})),
                group.block_tokens,
                lambda n, group=group: group.blocks(n, in_flight, dcp),  # type: ignore[misc]
            )
            for group in groups
        ),
        spare_blocks=1,
    )
    states = {h.spec.page for h in final.values() if h.spec.kind == "state"}
    return Allocation(
        model,
        engine,
        here.context,
        request.batch,
        here.tp,
        here.formats,
        here.batch,
        tuple(layers),
        bytes_overhead=here.batch * unused + block,
        reasons=ledger.reasons,
        replicated=LOGICAL.copies(model, tuple(logical_layers), plain, dcp),
        options=request.options,
        pools=(pool,),
        state_page_bytes=max(states, default=None),
        stages=tuple(_stage(s, *_unused(groups, taken, s), sum(taken), here.batch) for s in stages),
    )


def _unused(groups: list[Group], taken: list[int], stage: frozenset[int] | None) -> tuple[int, int]:
    """Bytes of a block, and those that the blocks of one sequence leave empty."""
    block = max(group.bytes(stage) for group in groups)
    return block, sum(n * (block - group.bytes(stage)) for group, n in zip(groups, taken, strict=True))


def _stage(layers: frozenset[int], block: int, unused: int, blocks: int, batch: int) -> Stage:
    """What one stage holds, with the null block."""
    return Stage(tuple(sorted(layers)), (batch * blocks + 1) * block, batch * unused + block)


def _layer(logical: LayerCache, held: list[_Held], request: Request, in_flight: int, dcp: int) -> LayerCache:
    """One group of equal layers."""
    tensors = tuple(t for h in held for t in h.tensors(request))
    rows = [h for h in held if h.spec.kind != "state"]
    growing = [h for h in rows if h.spec.grows(request.context, in_flight)]
    growth: int | Fraction = sum(
        ratio(8 * h.spec.page, h.spec.block_tokens * (dcp if h.spec.kind == "full" else 1)) for h in growing
    )
    elements: int | Fraction = sum(
        ratio(t.heads.size * t.width.size, h.kept.rows_every) for h in growing or rows for t in h.kept.tensors
    )
    fixed = sum(request.batch * h.bytes for h in held if h.spec.kind == "state")
    padding = request.batch * sum(h.bytes for h in held) - sum(t.bytes for t in tensors)
    return logical._replace(
        tensors=tensors,
        elements_per_token=ratio(elements.numerator, elements.denominator),
        growth_bits=growth,
        bytes_fixed=fixed,
        padding=padding,
        pages=tuple(
            Page(tuple(t.name for t in h.kept.tensors), h.spec.block_tokens, h.spec.page, h.blocks) for h in held
        ),
    )


def _explain(ledger: Ledger, held: _Held, layers: int, plain: Request, here: Request, in_flight: int, dcp: int) -> None:
    """Every step from the logical bytes of a cache to the engine's."""
    spec, times = held.spec, layers * here.batch

    def logical(formats_of: Request) -> int:
        return layers * sum(t.at(here.context, here.batch, formats_of.formats).bytes for t in held.kept.logical)

    asked, own = logical(plain), logical(here)
    names = " and ".join(dict.fromkeys(t.name for t in held.kept.tensors))
    formats = "/".join(dict.fromkeys(t.dtype for t in held.tensors(here)))
    ledger.add(f"{names}: kept in the engine's own format, {formats}", own - asked)
    content = times * held.blocks * spec.content
    if spec.kind == "state":
        once = times * spec.content
        ledger.add("draft tokens lengthen the columns of a convolution", once - own)
        rule = f"a state page is padded to {spec.page:,} B, the page of an attention block"
        ledger.add(rule, times * (spec.page - spec.content))
        rule = "a sequence holds more state pages than one: of drafts, and of prefix caching"
        ledger.add(rule, times * (held.blocks - 1) * spec.page)
        return
    ledger.add(_rule(held, in_flight, dcp), content - own)
    ledger.add(f"pages are padded to {spec.page:,} B", times * held.blocks * spec.page - content)


def _rule(held: _Held, in_flight: int, dcp: int) -> str:
    """Why a sequence's blocks hold other tokens than the definition needs."""
    spec, asked = held.spec, held.kept.spec
    tokens = f"blocks of {spec.block_tokens} tokens"
    if spec.kind == "sliding":
        return (
            f"a sliding layer holds its window and {in_flight:,} scheduled tokens in {tokens}, and one block more,"
            " as the window may begin inside one"
        )
    if spec.kind == "chunk":
        return f"a chunked layer holds its chunk and {in_flight:,} scheduled tokens in {tokens}"
    if asked.kind != "full":
        return f"without the hybrid manager sliding and chunked layers hold the whole context, in {tokens}"
    if dcp > 1:
        return f"decode context parallelism divides the tokens among {dcp} GPUs, in whole {tokens}"
    return f"a sequence takes whole {tokens}"
