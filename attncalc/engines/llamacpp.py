"""llama.cpp of 2026: cells for all slots at once, a window with a physical batch, a state for every slot.

Sources: ggml-org/llama.cpp `src/llama-context.cpp` (n_ctx_seq), `src/llama-kv-cache.cpp`, `src/llama-kv-cache-iswa.cpp`
(sliding layers), `src/llama-memory-recurrent.cpp`, `src/llama-hparams.cpp` (n_embd_r, n_embd_s); ggml block formats.
"""

import re
from dataclasses import replace
from typing import NamedTuple

from attncalc.allocation import Allocation, LayerCache, Request, Stage, own_form
from attncalc.attention.base import Attention
from attncalc.cache import CacheTensor, Tensor, growing
from attncalc.dtypes import Formats, whole_bytes
from attncalc.engines.base import Execution
from attncalc.engines.blocks import pad
from attncalc.engines.logical import PROFILE as LOGICAL
from attncalc.engines.options import EngineOptions, check_since
from attncalc.engines.serving import Ledger
from attncalc.engines.stages import pipeline, within
from attncalc.errors import AttncalcError, shown
from attncalc.model import LayerGroup, Model
from attncalc.ops import Ops
from attncalc.reach import Reach, ratio
from attncalc.workload import Workload

CELLS = 256
"""Cells come in multiples of this."""
UBATCH = 512
"""Tokens of a physical batch, where `--ubatch` does not say."""
OLDEST, KEYS_ALONE, NEWEST = (2025, 12), (2026, 1), (2026, 11)
"""Months whose rules are known (the newest was read), and the first in which MLA keeps no V of its own."""
WELL_KNOWN = ("mha", "gqa", "mqa", "mla")
"""Variants whose cells are known in all of these months; of states those of the newest were read."""

FORMATS = ("fp32", "bf16", "fp16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "q1_0")
VARIANTS = ("mha", "gqa", "mqa", "mla", "kda", "gdn", "mamba", "mamba2", "rwkv7", "short-conv")


class Context(NamedTuple):
    """How the cells of a context are divided: `slots` sequences in `streams` of `cells` each (one, where unified)."""

    slots: int
    streams: int
    cells: int
    ubatch: int

    def held(self, reach: Reach) -> int:
        """Cells of a stream in one layer: all, or pad(min(cells, W * sequences of the stream + ubatch), 256)."""
        if reach.kind == "full":
            return self.cells
        return pad(min(self.cells, reach.size * (self.slots // self.streams) + self.ubatch), CELLS)


def divided(request: Request) -> Context:
    """`--slots` share the context, as `--parallel` does `--ctx-size`; without it, every sequence has the whole one.

    Raises:
        AttncalcError: there are slots and a batch, or more slots than cells.
    """
    options, batch = request.options, request.batch
    ubatch = options.ubatch or UBATCH
    if options.slots is None:
        if options.kv_unified:
            return Context(batch, 1, pad(batch * request.context, CELLS), ubatch)
        return Context(batch, batch, pad(request.context, CELLS), ubatch)
    if batch > 1:
        raise AttncalcError("--slots", "divides --context among the slots, so that --batch cannot be given too")
    cells = pad(request.context, CELLS)
    if options.kv_unified:
        return Context(options.slots, 1, cells, ubatch)
    if options.slots > cells:
        raise AttncalcError("--slots", f"must not exceed the {cells} cells of the context", got=options.slots)
    return Context(options.slots, options.slots, pad(cells // options.slots, CELLS), ubatch)


def read_month(text: str | None) -> tuple[int, int]:
    """`2026-01` as numbers; the newest where none is given.

    Raises:
        AttncalcError: it is no month, or one whose rules are not known.
    """
    if text is None:
        return NEWEST
    found = re.fullmatch(r"(\d{4})-(0[1-9]|1[0-2])", text.strip(), re.ASCII)
    if not found:
        raise AttncalcError("--engine-version", "llamacpp takes a month such as 2026-01", got=shown(text))
    month = int(found[1]), int(found[2])
    if not OLDEST <= month <= NEWEST:
        raise AttncalcError("--engine-version", "llamacpp is known from 2025-12 to 2026-11", got=shown(text))
    return month


class LlamaCpp:
    """MLA absorbed, its keys alone in the cache; states in f32; layers are divided among GPUs, heads are not."""

    name = "llamacpp"
    follows = "llama.cpp of 2026"
    options = ("version", "slots", "ubatch", "kv_unified", "pp")

    def formats(self, model: Model, formats: Formats) -> Formats:  # noqa: ARG002
        """Block formats of ggml for K and V, f32 for all that is constant."""
        for name in formats.kv.split("/"):
            if name not in FORMATS:
                raise AttncalcError("--kv-dtype", f"llamacpp keeps K and V in {', '.join(FORMATS)}", got=name)
        if formats.state not in (None, "fp32"):
            raise AttncalcError("--state-dtype", "llamacpp keeps states in fp32", got=formats.state)
        return replace(formats, state="fp32", conv="fp32")

    def execution(
        self,
        attention: Attention,
        workload: Workload,
        form: str | None,
        options: EngineOptions,  # noqa: ARG002
    ) -> Execution:
        """MLA is absorbed in every step; state layers compute prompts in chunks, if they have them."""
        own = attention.default_form(workload) if "chunked" in attention.forms else attention.forms[0]
        if form is not None and form != own:
            raise AttncalcError("--form", f"llamacpp computes {attention.variant} {own} in such a step", got=form)
        return Execution(own, attention.forms[0])

    def attended(self, model: Model, group: LayerGroup) -> Reach:
        """The layer's own reach."""
        return LOGICAL.attended(model, group)

    def stored(self, model: Model, group: LayerGroup, ops: Ops) -> Ops:
        """As the variant says."""
        return LOGICAL.stored(model, group, ops)

    def check(self, model: Model, request: Request) -> None:
        """Variants that it keeps, in a month whose rules are known, and no split of heads."""
        if request.tp > 1:
            raise AttncalcError("--tp", "llamacpp divides layers among GPUs, not heads", hint="Give --pp")
        text = request.options.version
        month = read_month(text)
        for group in model.layer_groups(mtp=request.mtp):
            if group.attention and group.variant not in VARIANTS:
                raise AttncalcError("--engine", "it is not known how llamacpp keeps this attention", got=group.variant)
            if group.attention and group.variant not in WELL_KNOWN:
                check_since(self.name, group.variant, month, NEWEST, text, "-")

    def allocate(self, model: Model, request: Request) -> Allocation:
        """The layers one by one, of the largest part where they are divided."""
        here = replace(request, formats=self.formats(model, request.formats))
        context, month = divided(request), read_month(request.options.version)
        groups = model.layer_groups(mtp=request.mtp)
        stages = pipeline(request.options.pp, groups, model.num_layers, self.name)
        made = [
            tuple(_Layer(part, here, context, month) for g in groups if (part := within(g, stage))) for stage in stages
        ]
        held = [sum(layer.cache.bytes for layer in stage) for stage in made]
        ledger, largest = Ledger(), made[held.index(max(held))]
        for layer in largest:
            layer.explain(ledger, request)
        return Allocation(
            model,
            self.name,
            request.context,
            request.batch,
            request.tp,
            here.formats,
            context.slots,
            tuple(layer.cache for layer in largest),
            reasons=ledger.reasons,
            options=request.options,
            settings=replace(
                request.options,
                version=request.options.version or "-".join(f"{part:02d}" for part in month),
                ubatch=context.ubatch,
            ),
            stages=tuple(Stage(tuple(sorted(s)), n) for s, n in zip(stages, held, strict=True) if s is not None),
        )


class _Layer:
    """What one of a group's layers keeps for all slots."""

    def __init__(self, group: LayerGroup, request: Request, context: Context, month: tuple[int, int]) -> None:
        self.group, self.request, self.context = group, request, context
        self.layout, self.copied = self._layout(month)
        self.tensors = tuple(self._tensor(t) for t in self.layout)
        elements = sum(t.elements_per_token for t in growing(self.layout, request.context))
        grown = [t for t in self.layout if t.reach is not None and self._grows()]
        self.cache = LayerCache(
            group,
            group.attention.forms[0] if group.attention else "none",
            self.tensors,
            ratio(elements.numerator, elements.denominator),
            sum(t.row_bits(request.formats) for t in grown),
            sum(made.bytes for t, made in zip(self.layout, self.tensors, strict=True) if t.reach is None),
        )

    def _layout(self, month: tuple[int, int]) -> tuple[tuple[CacheTensor, ...], CacheTensor | None]:
        """The variant's tensors, and the copy of the latent that MLA had as V."""
        group, copied = self.group, None
        layout: tuple[CacheTensor, ...] = ()
        if group.attention:
            form = own_form(group, self.request.form)
            runs = PROFILE.execution(group.attention, self.request.workload, form, self.request.options)
            layout = group.attention.cache(group.reach, runs.cached)
            latent = next((t for t in layout if t.kind == "latent"), None)
            if latent and month < KEYS_ALONE:
                copied = latent._replace(name="v", kind="value")
                layout = (*layout, copied)
        return layout + (group.ffn.cache() if group.ffn else ()), copied

    def _grows(self) -> bool:
        """Whether more tokens of a sequence need more cells, padding aside."""
        reach, c = self.group.reach, self.context
        return reach.kind == "full" or self.request.context < reach.size * (c.slots // c.streams) + c.ubatch

    def _tensor(self, t: CacheTensor) -> Tensor:
        c, formats = self.context, self.request.formats
        if t.reach is None:
            return t.at(1, c.slots, formats)
        cells = c.held(self.group.reach)
        bits = c.streams * cells * t.row_bits(formats)
        name = formats.of(t.kind, t.width.size).name
        return Tensor(t.name, (c.streams, t.heads.size, cells, t.width.size), name, whole_bytes(bits, t.name))

    def explain(self, ledger: Ledger, asked: Request) -> None:
        """Why its bytes differ from the logical ones."""
        layers, c = len(self.group.indices), self.context
        for t, made in zip(self.layout, self.tensors, strict=True):
            if t is self.copied:
                ledger.add("until 2026 MLA kept its latent a second time, as V", layers * made.bytes)
                continue
            plain = t.at(asked.context, asked.batch, asked.formats).bytes
            own = t.at(asked.context, asked.batch, self.request.formats).bytes
            ledger.add(f"{t.name} is kept in {made.dtype}", layers * (own - plain))
            rule = f"cells are padded to {CELLS}" + (", of every slot" if c.slots > 1 else "")
            if t.reach is None:
                rule = "every slot has a state, used or not"
            elif self.group.reach.kind != "full":
                rule = f"a sliding layer holds its window and {c.ubatch} tokens of a batch, padded to {CELLS} cells"
            ledger.add(rule, layers * (made.bytes - own))


PROFILE = LlamaCpp()
