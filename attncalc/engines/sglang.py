"""SGLang 0.5.23: a pool of token pages for full layers, one for sliding layers, and slots of states.

Sources: SGLang 0.5.23 `srt/mem_cache/memory_pool.py` (MHATokenToKVPool, MLATokenToKVPool, DSATokenToKVPool, MambaPool),
`srt/mem_cache/swa_memory_pool.py`, `srt/model_executor/pool_configurator.py` (HybridSWAPoolConfigurator),
`srt/configs/model_config.py` (is_hybrid_swa_model, get_num_kv_heads), `srt/configs/mamba_utils.py`,
`srt/distributed/utils.py` (stages).
"""

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from attncalc.allocation import Allocation, LayerCache, Page, Pool, PoolGroup, Request, Stage, own_form
from attncalc.attention.base import Attention
from attncalc.cache import CacheTensor, Tensor
from attncalc.dtypes import Formats, whole_bytes
from attncalc.engines.base import Execution
from attncalc.engines.blocks import ceil_div
from attncalc.engines.layered import on_one_replica
from attncalc.engines.logical import PROFILE as LOGICAL
from attncalc.engines.options import EngineOptions
from attncalc.engines.serving import Ledger, check_square, served
from attncalc.engines.stages import pipeline, within
from attncalc.errors import AttncalcError
from attncalc.model import LayerGroup, Model
from attncalc.ops import Ops
from attncalc.reach import Reach, ratio
from attncalc.workload import Workload

if TYPE_CHECKING:
    from fractions import Fraction

PAGE, INDEXED_PAGE, PICKED_PAGE = 1, 64, 128
"""Tokens of a page; of sparse MLA, whose index keys lie in pages of 64; of MiniMax-M3, which picks blocks of 128."""
SWA_RATIO = (4, 5)
"""Tokens of the sliding pool for each of the full one, where `--swa-ratio` does not say."""

VARIANTS = ("mha", "gqa", "mqa", "mfa", "gqa-index", "mla", "dsa", "kda", "gdn", "mamba2", "short-conv")
HEAD_FORMATS = ("bf16", "fp16", "fp8", "fp8_e5m2", "mxfp8")
LATENT_FORMATS = ("bf16", "fp16", "fp8", "fp8_e5m2", "nvfp4")
SPARSE_FORMATS = ("bf16", "fp16", "fp8", "fp8_ds_mla")
PICKED_FORMATS = ("bf16", "fp16")
"""Where K and V have 8 bits, the format of index keys depends on the GPU."""
# Architectures whose sliding (or chunked) layers have a pool of their own; in others they hold the whole context.
SLIDING_POOL = ("gpt_oss", "mimo_v2_flash", "gemma4_text", "llama4_text", "laguna", "step3p5")
NOT_RUN = ("jamba", "zamba2")
STATE_POOLS = ("states", "drafts")
POOLS = ("full", "sliding", *STATE_POOLS)


class Part(NamedTuple):
    """Tensors of one layer that lie in one pool; `logical` are the same by definition."""

    pool: str
    tensors: tuple[CacheTensor, ...]
    logical: tuple[CacheTensor, ...]

    def row_bytes(self, formats: Formats) -> int:
        """Bytes of a token, or of a slot of states, in one layer."""
        if self.pool in STATE_POOLS:
            return sum(t.at(1, 1, formats).bytes for t in self.tensors)
        return whole_bytes(sum(t.row_bits(formats) for t in self.tensors), "--kv-dtype")


class Sizes(NamedTuple):
    """Tokens of a page; those of the sliding pool for each of the full one; the window that it must hold, or 0."""

    page: int
    share: "Fraction | int" = 1
    window: int = 0

    def pages(self, context: int, sequences: int) -> int:
        """Pages of the full pool: of every token, and enough for its share to hold every window."""
        every = sequences * ceil_div(context, self.page)
        needed = sequences * ceil_div(min(context, self.window), self.page)
        return max(every, -int(-needed // self.share))

    def taken(self, pool: str, context: int, sequences: int) -> int:
        """Pages, or slots, of a pool."""
        if pool in STATE_POOLS:
            return sequences
        pages = self.pages(context, sequences)
        return pages if pool == "full" else int(self.share * pages)

    def rows(self, pool: str, request: Request) -> int:
        """Tokens, or slots, of all sequences."""
        return self.taken(pool, request.context, request.batch) * (1 if pool in STATE_POOLS else self.page)

    def growth(self, pool: str, context: int) -> "Fraction | int":
        """Rows that the next token of one sequence adds, averaged over a page."""
        by_window = self.pages(context, 1) > ceil_div(context, self.page)
        each = ratio(self.share.denominator, self.share.numerator)
        full = (each if context < self.window else 0) if by_window else 1
        return full if pool == "full" else full * self.share


class Sglang:
    """Pages of tokens with one spare, slots of states with one spare; MLA absorbed in decode."""

    name = "sglang"
    follows = "sglang 0.5.23"
    options = ("block_size", "draft_tokens", "swa_ratio", "pp", "dp", "dp_attention")

    def formats(self, model: Model, formats: Formats) -> Formats:
        """States in fp32, index keys in fp8; fp8 rows of sparse MLA are records with scales."""
        variants = {g.attention.variant for g in model.groups if g.attention}
        kv, index = formats.kv, formats.index
        for found, known in (
            (variants & {"mha", "gqa", "mqa", "mfa"}, HEAD_FORMATS),
            (variants & {"mla"}, LATENT_FORMATS),
            (variants & {"dsa"}, SPARSE_FORMATS),
            (variants & {"gqa-index"}, PICKED_FORMATS),
        ):
            if found and kv not in known:
                rule = f"sglang keeps {' and '.join(sorted(found))} in {', '.join(known)}"
                raise AttncalcError("--kv-dtype", rule, got=kv)
        if "dsa" in variants:
            kv, index = "fp8_ds_mla" if kv == "fp8" else kv, index or "fp8"
            if index != "fp8":
                raise AttncalcError("--index-dtype", "sglang keeps index keys in fp8", got=index)
        if "gqa-index" in variants and index not in (None, kv):
            raise AttncalcError("--index-dtype", "sglang keeps these index keys in the model's format", got=index)
        return replace(formats, kv=kv, index=index)

    def execution(
        self, attention: Attention, workload: Workload, form: str | None, options: EngineOptions
    ) -> Execution:
        """MLA: absorbed up to 1 + draft tokens, else decompressed, earlier context expanded once in the step."""
        return served(self.name, attention, workload, form, options)

    def attended(self, model: Model, group: LayerGroup) -> Reach:
        """The layer's own reach."""
        return LOGICAL.attended(model, group)

    def stored(self, model: Model, group: LayerGroup, ops: Ops) -> Ops:
        """As the variant says."""
        return LOGICAL.stored(model, group, ops)

    def check(self, model: Model, request: Request) -> None:
        """Layers whose rules are known, in widths that it has."""
        for group in model.layer_groups(mtp=request.mtp):
            attention = group.attention
            if attention is None:
                if group.ffn and group.ffn.cache():
                    rule = f"sglang does not run {model.id}"
                    raise AttncalcError("--engine", rule, hint="A feed-forward keeps a state")
                continue
            if attention.variant not in VARIANTS or model.model_type in NOT_RUN:
                rule = "it is not known how sglang keeps this attention"
                raise AttncalcError("--engine", rule, got=attention.variant)
            check_square(self.name, attention)

    def allocate(self, model: Model, request: Request) -> Allocation:
        """Pools for all sequences of one replica, of the stage that holds most."""
        plain = attention_replica(request)
        here = replace(plain, formats=self.formats(model, request.formats))
        groups = model.layer_groups(mtp=here.mtp)
        parts = [self._parts(model, group, here) for group in groups]
        used = {part.pool for found in parts for part in found}
        names = [name for name in POOLS if name in used]
        if not names:
            raise AttncalcError("--engine", "sglang has no pool for it", got=f"{model.id}, which keeps nothing")
        sizes = pool_sizes(groups, names, here.options)
        stages = pipeline(here.options.pp, groups, model.num_layers, self.name, extra="last")
        widths = [[_width(groups, parts, name, here.formats, s) for name in names] for s in stages]
        spares = [sum(w * _spare(n, sizes) for w, n in zip(stage, names, strict=True)) for stage in widths]
        totals = [
            spare + sum(w * sizes.rows(n, here) for w, n in zip(stage, names, strict=True))
            for stage, spare in zip(widths, spares, strict=True)
        ]
        at = totals.index(max(totals))
        ledger, layers, logical = Ledger(), [], []
        for whole, found in zip(groups, parts, strict=True):
            if group := within(whole, stages[at]):
                logical.append(LOGICAL.layer(model, group, plain))
                layers.append(_layer(logical[-1], found, here, sizes))
                for part in found:
                    _explain(ledger, part, len(group.indices), plain, here, sizes)
        if here.options.dp_attention:
            alone = sum(LOGICAL.layer(model, layer.group, request).bytes for layer in logical)
            rule = "attention of whole sequences: each GPU holds those of its own, and shares heads with fewer"
            ledger.add(rule, sum(layer.bytes for layer in logical) - alone)
        ledger.add("one page of each pool, and one slot of states, is spare (slot 0)", spares[at])
        made = [_pool(groups, n, w, stages[at], parts, sizes) for n, w in zip(names, widths[at], strict=True)]
        return Allocation(
            model,
            self.name,
            here.context,
            request.batch,
            request.tp,
            here.formats,
            here.batch,
            tuple(layers),
            bytes_overhead=spares[at],
            reasons=ledger.reasons,
            replicated=LOGICAL.copies(model, tuple(logical), plain),
            options=request.options,
            pools=tuple(made),
            settings=replace(
                here.options, block_size=sizes.page, swa_ratio=sizes.share if "sliding" in names else None
            ),
            state_page_bytes=next((p.block_bytes for p in made if p.name == "states"), None),
            stages=tuple(
                Stage(tuple(sorted(s)), total, spare)
                for s, total, spare in zip(stages, totals, spares, strict=True)
                if s is not None
            ),
        )

    def _parts(self, model: Model, group: LayerGroup, request: Request) -> list[Part]:
        """What a layer of the group keeps, by pool."""
        attention = group.attention
        if attention is None:
            return []
        cached = self.execution(attention, request.workload, own_form(group, request.form), request.options).cached
        layout = attention.shard(request.tp).cache(group.reach, cached)
        rows = tuple(t for t in layout if t.reach is not None)
        states = tuple(t for t in layout if t.reach is None)
        bounded = group.reach.kind != "full"
        pool = "sliding" if bounded and model.model_type in SLIDING_POOL else "full"
        out = [Part(pool, rows, rows)] if rows else []
        if states:
            out.append(Part("states", states, states))
            if request.options.draft_tokens is not None:
                drafts = tuple(_of_drafts(t, attention.variant, request.options.draft_tokens) for t in states)
                out.append(Part("drafts", drafts, ()))
        return out


def attention_replica(request: Request) -> Request:
    """The request of the replica that holds most; `--dp-attention` shares the GPUs of `--tp` among the replicas.

    Raises:
        AttncalcError: the replicas do not divide the GPUs.
    """
    part = on_one_replica(request)
    if not request.options.dp_attention:
        return part
    dp = request.options.dp or 1
    if request.tp % dp:
        raise AttncalcError("--dp", f"must divide --tp {request.tp} with --dp-attention", got=dp)
    return replace(part, tp=request.tp // dp)


def pool_sizes(groups: tuple[LayerGroup, ...], names: list[str], options: EngineOptions) -> Sizes:
    """Pages, and `--swa-ratio` times the tokens in a sliding pool beside a full one.

    Raises:
        AttncalcError: pages that kernels do not have, a ratio without a sliding pool.
    """
    variants = {g.variant for g in groups}
    kernel = INDEXED_PAGE if "dsa" in variants else PICKED_PAGE if "gqa-index" in variants else PAGE
    page = options.block_size or kernel
    if kernel > 1 and page != kernel:
        raise AttncalcError("--block-size", f"must be {kernel}, a page of the indexer", got=page)
    if not {"full", "sliding"} <= set(names):
        if options.swa_ratio is not None:
            raise AttncalcError("--swa-ratio", "the model has no sliding pool beside a full one in sglang")
        return Sizes(page)
    share = ratio(*SWA_RATIO) if options.swa_ratio is None else options.swa_ratio
    return Sizes(page, share, max(g.reach.size for g in groups if g.reach.bounded))


def _of_drafts(state: CacheTensor, variant: str, drafts: int) -> CacheTensor:
    """What verifying D = 1 + drafts tokens keeps apart: a state for each, and the columns that their windows cover.

    Windows of W - 1 columns overlap in memory, D + W - 2 in all; KDA keeps D * (W - 1).
    """
    verified, name = 1 + drafts, f"draft_{state.name}"
    if state.name != "conv_state" or variant == "kda":
        return state._replace(name=name, rows=verified * state.rows)
    return state._replace(name=name, rows=verified + state.rows - 1)


def _width(
    groups: tuple[LayerGroup, ...], parts: list[list[Part]], name: str, formats: Formats, stage: frozenset[int] | None
) -> int:
    """Bytes of one row of a pool, in all layers of a stage."""
    return sum(
        len([i for i in group.indices if stage is None or i in stage]) * part.row_bytes(formats)
        for group, found in zip(groups, parts, strict=True)
        for part in found
        if part.pool == name
    )


def _spare(name: str, sizes: Sizes) -> int:
    """Rows of a pool that belong to no sequence."""
    return 1 if name in STATE_POOLS else sizes.page


def _pool(
    groups: tuple[LayerGroup, ...],
    name: str,
    width: int,
    stage: frozenset[int] | None,
    parts: list[list[Part]],
    sizes: Sizes,
) -> Pool:
    """One pool, for a search over lengths."""
    page = 0 if name in STATE_POOLS else sizes.page
    layers = sorted(
        i
        for group, found in zip(groups, parts, strict=True)
        if any(part.pool == name for part in found)
        for i in group.indices
        if stage is None or i in stage
    )
    group = PoolGroup(tuple(layers), page, lambda n: ceil_div(n, page) if page else 1)
    return Pool(name, (page or 1) * width, (group,), 1, lambda n, sequences: sizes.taken(name, n, sequences))


def _layer(logical: LayerCache, parts: list[Part], request: Request, sizes: Sizes) -> LayerCache:
    """One group of equal layers."""
    formats, tensors, pages = request.formats, list[Tensor](), []
    growth: int | Fraction = 0
    fixed = elements = 0
    for part in parts:
        rows, row = sizes.rows(part.pool, request), part.row_bytes(formats)
        names = tuple(t.name for t in part.tensors)
        if part.pool in STATE_POOLS:
            tensors += [t.at(request.context, request.batch, formats) for t in part.tensors]
            fixed += rows * row
            pages.append(Page(names, 0, row, 1))
            continue
        # The sliding pool need not hold equally many tokens of every sequence.
        batch = request.batch if rows % request.batch == 0 else 1
        for t in part.tensors:
            shape = (batch, t.heads.size, rows // batch, t.width.size)
            name, held = formats.of(t.kind, t.width.size).name, whole_bytes(rows * t.row_bits(formats), t.name)
            tensors.append(Tensor(t.name, shape, name, held))
            elements += t.heads.size * t.width.size
        growth += 8 * row * sizes.growth(part.pool, request.context)
        pages.append(Page(names, sizes.page, sizes.page * row, ceil_div(rows, sizes.page * request.batch)))
    return logical._replace(
        tensors=tuple(tensors), elements_per_token=elements, growth_bits=growth, bytes_fixed=fixed, pages=tuple(pages)
    )


def _explain(ledger: Ledger, part: Part, layers: int, plain: Request, here: Request, sizes: Sizes) -> None:
    """Every step from the logical bytes of a part to the engine's."""
    asked, own = (
        layers * sum(t.at(here.context, here.batch, r.formats).bytes for t in part.logical) for r in (plain, here)
    )
    names = " and ".join(t.name for t in part.tensors)
    formats = "/".join(dict.fromkeys(here.formats.of(t.kind, t.width.size).name for t in part.tensors))
    ledger.add(f"{names}: kept in the engine's own format, {formats}", own - asked)
    held = layers * sizes.rows(part.pool, here) * part.row_bytes(here.formats)
    bounded = any(isinstance(t.reach, Reach) and t.reach.bounded for t in part.logical)
    if part.pool == "drafts":
        ledger.add("states and columns of the tokens that a step verifies are kept apart", held - own)
    elif part.pool == "sliding":
        times = f"{sizes.share} times " if sizes.share != 1 else ""
        ledger.add(f"the sliding pool holds {times}the tokens of the full one, whatever the window", held - own)
    elif sizes.pages(here.context, here.batch) > here.batch * ceil_div(here.context, sizes.page):
        ledger.add("the full pool is as large as the windows in its share, the sliding pool, demand", held - own)
    elif bounded:
        ledger.add("sliding layers of this architecture hold the whole context, as full ones", held - own)
    else:
        ledger.add(f"a sequence takes whole pages of {sizes.page} tokens", held - own)


PROFILE = Sglang()
