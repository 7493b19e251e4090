"""Hugging Face transformers 5.24: what its cache objects keep, and the form that its modules execute.

Sources: transformers 5.24.0 `cache_utils.py` (DynamicSlidingWindowLayer), `masking_utils.py`,
`models/deepseek_v3/modeling_deepseek_v3.py`, `models/deepseek_v32`, `models/glm_moe_dsa`,
`models/mimo_v2_flash`, `models/falcon`, `models/gpt_neo`, `models/recurrent_gemma`, `models/inkling`.
"""

from dataclasses import replace

from attncalc.allocation import Request
from attncalc.attention.base import Attention
from attncalc.attention.csa import CSA
from attncalc.cache import CacheTensor
from attncalc.dtypes import Formats
from attncalc.engines import transformers_v4
from attncalc.engines.base import Execution
from attncalc.engines.layered import Layered
from attncalc.engines.options import EngineOptions, check_since, read_version
from attncalc.errors import AttncalcError
from attncalc.model import LayerGroup, Model
from attncalc.ops import Contraction, Ops, Part, Term
from attncalc.reach import FULL, Reach
from attncalc.workload import Workload

DTYPES = ("fp32", "bf16", "fp16")
FLOAT_CONVOLUTIONS = ("gqa-conv", "conv")
"""Inkling convolves in fp32, and so keeps its columns."""


def _one_less(reach: Reach) -> Reach:
    if reach.kind == "full":
        return reach
    return Reach("window", reach.size - 1)


def _moved(op: Contraction, rules: list[tuple[str, str, str]]) -> Contraction:
    """The operation with an axis of some cache tensors replaced: (tensor, axis, what it is stored as)."""

    def part(p: Part) -> Part:
        for name, axis, stored in rules:
            if p.name == name and p.role in ("cache", "cache_write"):
                p = p._replace(shape=" ".join(stored if a == axis else a for a in p.shape.split()))
        return p

    def side(t: Term) -> Term:
        return Term(t.shape, tuple(part(p) for p in t.parts))

    return op._replace(left=side(op.left), right=side(op.right), out=side(op.out))


OLDEST, LATENT, NEWEST = (5, 0), (5, 15), (5, 24)
"""The versions whose cache is known, and the first that keeps latents."""
WELL_KNOWN = ("mha", "gqa", "mqa", "mla")
"""Variants whose cache is known in all of these versions; of others that of the newest was read."""
OWN_CACHE = ("falcon", "gpt_neo", "mimo_v2_flash")
"""Architectures of such variants whose modules keep something else."""


def _keeps_latents(options: EngineOptions) -> bool:
    return read_version(options.version, "transformers", OLDEST, NEWEST) >= LATENT


class Transformers(Layered):
    """Windows keep W - 1 tokens, chunks count as windows, MLA keeps the latent and expands it in each step.

    Up to 5.14 MLA kept K and V of every head (`--engine-version 5.14`). DSA keeps an index key in each layer with an
    indexer, and masks a core over all keys (`--count dense`).
    """

    name = "transformers"
    follows = "transformers 5.24"
    options = ("version", "pp")

    def check(self, model: Model, request: Request) -> None:
        """A version whose rules for every layer are known."""
        text = request.options.version
        version = read_version(text, self.name, OLDEST, NEWEST)
        for group in model.layer_groups(mtp=request.mtp):
            if group.attention and (group.variant not in WELL_KNOWN or model.model_type in OWN_CACHE):
                what = model.model_type if model.model_type in OWN_CACHE else group.variant
                check_since(self.name, str(what), version, NEWEST, text)

    def formats(self, model: Model, formats: Formats) -> Formats:
        """A cache has the dtype of the computation, index keys too; what is convolved in fp32 is kept so.

        The state of lightning attention has the dtype of the computation too, of all others it is fp32.
        """
        if formats.kv not in DTYPES:
            rule = f"transformers keeps its cache in {', '.join(DTYPES)}"
            raise AttncalcError("--kv-dtype", rule, got=formats.kv)
        if formats.index not in (None, formats.kv):
            rule = "transformers keeps index keys in the dtype of its cache"
            raise AttncalcError("--index-dtype", rule, got=formats.index)
        if formats.conv is None and any(g.variant in FLOAT_CONVOLUTIONS for g in model.groups):
            formats = replace(formats, conv="fp32")
        if formats.state is None and any(g.variant == "lightning" for g in model.groups):
            formats = replace(formats, state=formats.kv)
        return formats

    def settings(self, options: EngineOptions) -> EngineOptions:
        """The newest version, where none is named."""
        return replace(options, version=options.version or ".".join(map(str, NEWEST)))

    def execution(
        self, attention: Attention, workload: Workload, form: str | None, options: EngineOptions
    ) -> Execution:
        """MLA: expanded, from a cached latent; state layers: prompts in chunks, if they have them."""
        own, cached = attention.forms[0], attention.forms[0]
        if "expanded" in attention.forms:
            own = "expanded"
            if not _keeps_latents(options):
                own = cached = "decompressed"
        if "chunked" in attention.forms:
            own = attention.default_form(workload)
        if form is not None and form != own:
            raise AttncalcError("--form", f"transformers computes {attention.variant} {own}", got=form)
        return Execution(own, cached)

    def attended(self, model: Model, group: LayerGroup) -> Reach:
        """MiMo-V2 counts its window without the current token; a chunk is masked exactly.

        GPT-Neo masks its local layers over all keys, all of which it keeps.

        Raises:
            AttncalcError: the window is one token, of which `[-(window - 1):]` is the whole tensor.
        """
        if model.model_type == "gpt_neo":
            return FULL
        if model.model_type == "mimo_v2_flash" and group.reach.kind == "window":
            return Reach("window", group.reach.size + 1)
        if group.reach.kind in ("window", "chunk") and group.reach.size == 1:
            raise AttncalcError("--engine", "transformers cannot keep a window of one token")
        return group.reach

    def cache(self, model: Model, group: LayerGroup, form: str, tp: int) -> tuple[CacheTensor, ...]:
        """The layer's tensors; Falcon broadcasts K and V to all query heads, a convolution keeps `kernel` columns."""
        if group.attention is None:
            return ()
        attention = group.attention.shard(tp)
        if self._broadcasts(model, group):
            attention = attention.with_kv_heads(attention.query_heads()) or attention
        kept = _one_less(self.attended(model, group))
        if isinstance(attention, CSA):
            return transformers_v4.layout(attention, kept)
        layout = attention.cache(kept, form)
        more = int(self._keeps_kernel(group))
        return tuple(t._replace(rows=t.rows + more) if t.name == "conv_state" else t for t in layout)

    def stored(self, model: Model, group: LayerGroup, ops: Ops) -> Ops:
        """Broadcast K and V move for every query head; a convolution state moves with all of its columns."""
        rules = [("conv_state", "u", "w")] if self._keeps_kernel(group) else []
        if self._broadcasts(model, group):
            rules += [("k", "g", "g j"), ("v", "g", "g j")]
        return Ops(tuple(_moved(op, rules) for op in ops.contractions), ops.rowwise)

    def rule(self, model: Model, group: LayerGroup, request: Request) -> str:
        """Why this group's cache differs from the logical one."""
        if group.attention and "expanded" in group.attention.forms and not _keeps_latents(request.options):
            return "up to 5.14 MLA keeps K and V of every head instead of the latent"
        if self._broadcasts(model, group):
            return "Falcon broadcasts K and V to all query heads before caching"
        if isinstance(group.attention, CSA):
            return transformers_v4.rule(group.attention)
        if group.reach.kind == "window" and model.model_type == "gpt_neo":
            return "GPT-Neo keeps and computes all keys in its local layers, and masks those outside the window"
        if group.reach.kind == "window" and model.model_type == "mimo_v2_flash":
            return "MiMo-V2's window leaves out the current token: as many are kept, one more is attended"
        if group.variant in FLOAT_CONVOLUTIONS:
            kept = "a sliding layer keeps window - 1 tokens, and " if group.reach.kind == "window" else ""
            return f"{kept}a convolution of Inkling keeps as many columns as its kernel, in fp32"
        if group.reach.kind == "window":
            return "a sliding layer keeps window - 1 tokens, without the current one"
        layout = group.attention.cache(group.reach, group.attention.forms[0]) if group.attention else ()
        if self._keeps_kernel(group) and any(t.name == "conv_state" for t in layout):
            return "a convolution state keeps as many columns as its kernel, one more than it needs"
        if group.reach.kind == "chunk":
            return "a chunked layer is kept as a sliding one: chunk - 1 tokens"
        return ""

    @staticmethod
    def _keeps_kernel(group: LayerGroup) -> bool:
        """All convolutions but RecurrentGemma's keep as many columns as their kernel."""
        return group.variant != "rg-lru"

    @staticmethod
    def _broadcasts(model: Model, group: LayerGroup) -> bool:
        return model.model_type == "falcon" and group.variant == "gqa"


PROFILE = Transformers()
