"""vLLM 0.33: a pool of equal blocks, shared by groups of layers.

Sources: vLLM 0.33 `v1/kv_cache_interface.py` (pages), `v1/core/kv_cache_planning.py` (groups), `platforms/interface.py`
(`_align_hybrid_block_size`), `model_executor/layers/mamba/mamba_utils.py` (states), `model_executor/layers/attention`
(`attention.py`, `mla_attention.py`), `model_executor/models/config.py` (formats of states),
`v1/attention/backends/mla` (formats of latents), `config/model.py` (heads of a GPU), `distributed/utils.py` (stages).
"""

from collections import Counter
from dataclasses import replace

from attncalc.allocation import Allocation, Request, own_form
from attncalc.attention.base import Attention
from attncalc.attention.csa import CSA
from attncalc.attention.gqa_index import IndexedGQA
from attncalc.cache import CacheTensor
from attncalc.dtypes import RECORDS, Formats, whole_bytes
from attncalc.engines import blocks, vllm_v4
from attncalc.engines.base import Execution
from attncalc.engines.blocks import Cache, Kind, Spec
from attncalc.engines.layered import on_one_replica
from attncalc.engines.logical import PROFILE as LOGICAL
from attncalc.engines.options import EngineOptions, check_since, read_version
from attncalc.engines.paged import BATCHED_TOKENS, Kept, paged
from attncalc.engines.serving import check_square, served
from attncalc.engines.stages import pipeline
from attncalc.errors import AttncalcError
from attncalc.model import LayerGroup, Model
from attncalc.ops import Ops
from attncalc.reach import Reach
from attncalc.workload import Workload

OLDEST, NEWEST = (0, 11), (0, 33)
BLOCK, LATENT_HYBRID_BLOCK, INDEXED_BLOCK, V4_BLOCK = 16, 128, 64, 256
"""Tokens of a block: of most kernels; of MLA beside states, at least; of sparse MLA; of DeepSeek-V4."""

V4 = frozenset(("csa", "hca", "tied-mqa"))
READ = (0, 32)
"""The first version whose files were read; older ones are known by what they printed: 0.11, 0.19 and 0.20."""
FIRST = {
    **dict.fromkeys(("mha", "gqa", "mqa"), OLDEST),
    "gdn": (0, 19),
    **dict.fromkeys(("mla", "dsa", "mamba", "mamba2"), READ),
}
"""The first version in which the rules for a variant are known; for others they are those of 0.33."""
UNEVEN = (0, 20)
"""The same for groups of layers that are not equally many."""
KINDS: dict[str, Kind] = {"window": "sliding", "chunk": "chunk"}
VARIANTS = (
    *("mha", "gqa", "mqa", "mfa", "gqa-concat", "gqa-index", "mla", "dsa", *sorted(V4)),
    *("kda", "gdn", "mamba", "mamba2", "lightning", "short-conv"),
)
HEAD_FORMATS = ("bf16", "fp16", "fp8", "fp8_e5m2", "nvfp4", *(f"{x}_per_token_head" for x in ("int8", "int4", "fp8")))
LATENT_FORMATS = ("bf16", "fp16", "fp8", "fp8_e5m2")
SPARSE_FORMATS = ("bf16", "fp16", "fp8", "fp8_ds_mla", "nvfp4_ds_mla")
V4_FORMATS = ("bf16", "fp8", "fp8_ds_mla")
"""Records with scales are those of kernels that select rows."""
INDEX_FORMATS = ("fp8", "fp4")

NEMOTRON = "nemotron_h"
"""Its states are in fp32, whether a configuration names the format (`mamba_ssm_cache_dtype`) or not."""
NAMES_STATE = ("qwen3_5_text", "qwen3_5_moe_text")
"""Their states have the format that the configuration names (`mamba_ssm_dtype`), fp32 in all published ones."""


class Vllm:
    """Paged, with the hybrid manager unless it is switched off; MLA absorbed in decode, decompressed in prefill."""

    name = "vllm"
    follows = "vllm 0.33"
    options = (
        *("version", "block_size", "max_batched_tokens", "prefix_caching", "no_hybrid_manager"),
        *("draft_tokens", "pp", "dcp", "dp"),
    )

    def formats(self, model: Model, formats: Formats) -> Formats:
        """Its own formats of states (the model's; fp32 for KDA, or where its configuration says so) and index keys."""
        attentions = [g.attention for g in model.groups if g.attention]
        variants = {a.variant for a in attentions}
        heads = variants & {"mha", "gqa", "mqa", "mfa", "gqa-concat", "gqa-index"}
        kv, index = formats.kv, formats.index
        if kv == "fp8" and variants & {"dsa", *V4}:
            kv = "fp8_ds_mla"  # FlashMLA has no other fp8 for selected rows
        for found, known in (
            (variants & {"mla"}, LATENT_FORMATS),
            (variants & {"dsa"}, SPARSE_FORMATS),
            (variants & V4, V4_FORMATS),
            (heads, HEAD_FORMATS),
        ):
            if found and kv not in known:
                rule = f"vllm keeps {' and '.join(sorted(found))} in {', '.join(known)}"
                raise AttncalcError("--kv-dtype", rule, got=kv)
        widths = [a.heads(a.forms[0]) for a in attentions if a.variant in heads]
        if kv == "nvfp4" and any(w.head_dim_k != w.head_dim_v for w in widths):
            raise AttncalcError("--kv-dtype", "vllm keeps K and V of one width in nvfp4", got=model.id)
        if variants & {"dsa", "csa"}:
            index = index or "fp8"
            if index not in INDEX_FORMATS:
                rule = f"vllm keeps index keys in {' or '.join(INDEX_FORMATS)}"
                raise AttncalcError("--index-dtype", rule, got=index)
        if "gqa-index" in variants:
            index = index or "bf16"
            if index not in ("bf16", "fp16"):
                raise AttncalcError("--index-dtype", "vllm keeps these index keys in the model's format", got=index)
        state = formats.state
        if state is None and variants & {"gdn", "mamba", "mamba2", "lightning"}:
            state = "fp32" if model.model_type == NEMOTRON or _names_state(model) else "bf16"
        if "kda" in variants and state not in (None, "fp32", "bf16"):
            raise AttncalcError("--state-dtype", "vllm keeps the state of KDA in fp32 or bf16", got=state)
        return replace(formats, kv=kv, index=index, state=state)

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
        """Layers whose rules are known, in this version, and a split that vLLM makes."""
        text = request.options.version
        version = read_version(text, self.name, OLDEST, NEWEST)
        groups = model.layer_groups(mtp=request.mtp)
        for group in groups:
            check_runs(model, group, request)
            if group.attention:
                check_since(self.name, group.variant, version, FIRST.get(group.variant, NEWEST), text)
        kinds = Counter(g.reach.kind for g in groups if g.attention for _ in g.indices)
        if len(kinds) > 1 and "full" in kinds:
            uneven = len(set(kinds.values())) > 1
            what = f"{' and '.join(sorted(kinds))} layers side by side"
            check_since(self.name, what, version, UNEVEN if uneven else FIRST["gqa"], text)
        if "chunk" in kinds:
            check_since(self.name, "chunked layers", version, NEWEST, text)

    def allocate(self, model: Model, request: Request) -> Allocation:
        """Blocks of all groups for every sequence, and the one that belongs to none."""
        plain = on_one_replica(request)
        here = replace(plain, formats=self.formats(model, request.formats))
        options, groups = here.options, model.layer_groups(mtp=here.mtp)
        kept = self._kept(groups, here)
        if not kept:
            raise AttncalcError("--engine", "vllm has no pool for it", got=f"{model.id}, which keeps nothing")
        caches = [Cache(k.spec, i, owner) for owner, k in enumerate(kept) for i in groups[k.place].indices]
        if options.no_hybrid_manager:
            caches = blocks.promote(caches)
        made = blocks.grouped(caches, packed=any(isinstance(g.attention, CSA) for g in groups))
        cut = pipeline(options.pp, groups, model.num_layers, self.name, extra="before_last")
        stages = [stage for stage in cut if stage is not None]
        tokens = max(k.spec.block_tokens for k in kept) or options.block_size
        settings = replace(
            options,
            version=options.version or ".".join(map(str, NEWEST)),
            block_size=tokens,
            max_batched_tokens=options.max_batched_tokens or BATCHED_TOKENS,
        )
        return paged(self.name, model, request, plain, here, kept, made, stages)._replace(settings=settings)

    def _kept(self, groups: tuple[LayerGroup, ...], request: Request) -> list[Kept]:
        """Every cache of every group, with its page."""
        options, formats = request.options, request.formats
        layouts = []
        for place, group in enumerate(groups):
            if group.attention:
                form = own_form(group, request.form)
                cached = self.execution(group.attention, request.workload, form, options).cached
                layouts.append((place, group.attention.shard(request.tp).cache(group.reach, cached)))
        tokens, state_page = block_and_state(groups, [layout for _, layout in layouts], request)
        out: list[Kept] = []
        for place, layout in layouts:
            group = groups[place]
            if isinstance(group.attention, CSA):
                out += vllm_v4.caches(place, group, layout, formats, tokens)
                continue
            states = tuple(t for t in layout if t.reach is None)
            if states:
                longer = tuple(_longer(t, options) for t in states)
                copies = 1 + (options.draft_tokens or 0) + _checkpoints(group, options)
                spec = Spec("state", 0, _bytes(longer, formats), state_page, states=copies)
                out.append(Kept(place, spec, longer, states))
            for role, latent, part in _parts(layout):
                content = whole_bytes(tokens * sum(t.row_bits(formats) for t in part), "--kv-dtype")
                kind, size = KINDS.get(group.reach.kind, "full"), group.reach.size
                spec = Spec(kind, tokens, content, content, 0 if kind == "full" else size, latent=latent, role=role)
                out.append(Kept(place, spec, part, part))
        return out


def _names_state(model: Model) -> bool:
    """Whether the configuration names fp32 for the state; one that was read and does not leaves the model's format."""
    if model.model_type not in NAMES_STATE:
        return False
    log = model.reading.log if model.reading else ()
    return not any(access.field.endswith("mamba_ssm_dtype") and access.how == "defaulted" for access in log)


def check_runs(model: Model, group: LayerGroup, request: Request) -> None:
    """Refuse variants whose rules are not known, and splits that vLLM does not make."""
    attention, dcp = group.attention, request.options.dcp or 1
    if attention is None:
        if group.ffn and group.ffn.cache():
            raise AttncalcError("--engine", f"vllm does not run {model.id}", hint="A feed-forward keeps a state")
        return
    if attention.variant not in VARIANTS:
        raise AttncalcError("--engine", "it is not known how vllm keeps this attention", got=attention.variant)
    check_square("vllm", attention)
    if request.options.draft_tokens and attention.variant == "mamba":
        raise AttncalcError("--draft-tokens", "vllm does not draft for mamba")
    if dcp > 1:
        if request.tp % dcp:
            raise AttncalcError("--dcp", f"must divide --tp {request.tp}", got=dcp)
        if group.reach.kind != "full" or isinstance(attention, CSA):
            raise AttncalcError("--dcp", "vllm does not divide the tokens of sliding layers", got=dcp)
        kv_heads = attention.heads(attention.forms[0]).kv_heads
        if kv_heads and dcp > max(1, request.tp // kv_heads):
            rule = f"must be at most {max(1, request.tp // kv_heads)}, the copies of a KV head on {request.tp} GPUs"
            raise AttncalcError("--dcp", rule, got=dcp)


def block_and_state(
    groups: tuple[LayerGroup, ...], layouts: list[tuple[CacheTensor, ...]], request: Request
) -> tuple[int, int]:
    """Tokens of an attention block, and bytes of a state page, for one kernel block size and all layers.

    bs = align * ceil(state / (align * bytes of a token)), align = max(kernel block, --block-size), the state page
    padded to bs * bytes of a token. Records with scales are sized as 576 B here, as vLLM does.
    """
    variants = {g.attention.variant for g in groups if g.attention}
    kernel = V4_BLOCK if variants & V4 else INDEXED_BLOCK if "dsa" in variants else BLOCK
    # Blocks that an indexer picks are pages.
    kernel = max(kernel, *(g.attention.block_size for g in groups if isinstance(g.attention, IndexedGQA)), 0)
    wanted = request.options.block_size or kernel
    if wanted % kernel:
        raise AttncalcError("--block-size", f"must be a multiple of {kernel}, a block of the kernels", got=wanted)
    states = [tuple(_longer(t, request.options) for t in layout if t.reach is None) for layout in layouts]
    state = 0 if variants & V4 else max((_bytes(part, request.formats) for part in states), default=0)
    sized = replace(request.formats, kv="fp8") if request.formats.kv in RECORDS else request.formats
    rows = {sum(t.row_bits(sized) for t in part) for layout in layouts for _, _, part in _parts(layout)}
    if not state or not rows:
        return wanted, state
    if len(rows) > 1:
        rule = "vllm sizes blocks beside states by one kind of attention layer, and this model has several"
        raise AttncalcError("--engine", rule)
    align = max(wanted, LATENT_HYBRID_BLOCK if "mla" in variants else 0)
    token = whole_bytes(rows.pop(), "--kv-dtype")
    tokens = align * -(-state // (align * token))
    return tokens, tokens * token


def _bytes(states: tuple[CacheTensor, ...], formats: Formats) -> int:
    """Bytes of the states of one sequence in one layer."""
    return sum(t.at(1, 1, formats).bytes for t in states)


def _longer(state: CacheTensor, options: EngineOptions) -> CacheTensor:
    """Draft tokens lengthen the columns of a convolution."""
    drafts = (options.draft_tokens or 0) if state.name == "conv_state" else 0
    return state._replace(rows=state.rows + drafts)


def _checkpoints(group: LayerGroup, options: EngineOptions) -> int:
    """States that prefix caching keeps beside the running one: a checkpoint at the end of a block.

    Since 0.33 Mamba-2 keeps one inside a prefill, too. FlashInfer's kernels of GDN and FlashKDA would, which are not
    modelled: states are those of the FLA kernels.
    """
    if not options.prefix_caching:
        return 0
    version = read_version(options.version, "vllm", OLDEST, NEWEST)
    return 2 if group.variant == "mamba2" and version >= NEWEST else 1


def _parts(layout: tuple[CacheTensor, ...]) -> list[tuple[str, bool, tuple[CacheTensor, ...]]]:
    """Caches with pages of their own: K and V, or the latent record; and index keys."""
    rows = tuple(t for t in layout if t.reach is not None)
    index = tuple(t for t in rows if t.kind == "index")
    main = tuple(t for t in rows if t.kind != "index")
    latent = any(t.kind == "latent" for t in main)
    return [part for part in (("", latent, main), ("index", True, index)) if part[2]]


PROFILE = Vllm()
