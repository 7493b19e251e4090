"""What is measured, and what is predicted of it. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from attncalc.attention.base import Attention, HeadShape, Step, cached_form
from attncalc.attention.csa import CSA
from attncalc.attention.dsa import DSA, INDEXER, MAX_ELEMENTS
from attncalc.cache import Tensor, total_bytes
from attncalc.compare import Layer, layers_of, layers_of_groups
from attncalc.dimensions import Dimensions, dimensions_like, known_variants, shown_attention
from attncalc.dtypes import Formats
from attncalc.errors import AttncalcError, shown
from attncalc.model import Model
from attncalc.ops import Contraction
from attncalc.reach import Count, Reach
from attncalc.workload import Workload

VARIANTS = known_variants()
DEVICES = ("cpu", "cuda", "mps", "meta")
DTYPES = ("fp64", "fp32", "bf16", "fp16")
BRANCHES_OF = {"nsa": 3, "moba": 1, "gqa-index": 2, "gqa-conv": 2}
"""Variants whose layers have no fused kernel, and how many score matrices they make."""
BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}

# A whole default run ends within a minute on two CPU cores; a GPU gets DeepSeek-V3's dimensions.
SMALL = Dimensions(1024, 16, 4, 64, 64, 256, 384, 64, 32)
DEFAULT_CONTEXT = {"cpu": 128, "cuda": 8192, "mps": 2048, "meta": 8192}
DEFAULT_DTYPE = {"cpu": "fp32", "cuda": "bf16", "mps": "fp32", "meta": "bf16"}
DEFAULT_REPEAT = {"cpu": 3, "cuda": 30, "mps": 10, "meta": 0}
CHECKED_CONTEXT = 256
"""Tokens at which a layer is compared with its reference path, whose scores go through memory."""


@dataclass(frozen=True)
class Settings:
    """How to measure; everything is resolved."""

    device: str
    dtype: str
    context: int
    batch: int
    new_tokens: int
    repeat: int
    seed: int
    path: str | None

    @property
    def formats(self) -> Formats:
        """Everything in the dtype of the layer, recurrent states in fp32 (fp64 where that is the dtype)."""
        wide = "fp32" if self.dtype != "fp64" else "fp64"
        return Formats(kv=self.dtype, weight=self.dtype, activation=self.dtype, conv=self.dtype, state=wide)


@dataclass(frozen=True)
class Case:
    """One layer in one form and one phase."""

    layer: Layer
    workload: Workload
    phase: str

    @property
    def attention(self) -> Attention:
        """The specification."""
        return self.layer.attention

    @property
    def reach(self) -> Reach:
        """Which tokens a query attends to."""
        return self.layer.reach

    @property
    def lender(self) -> "Case | None":
        """The layer whose K and V this one reads, of its own dimensions; None where it has its own."""
        if getattr(self.attention, "own_kv", True):
            return None
        own = replace(self.attention, own_kv=True)  # type: ignore[type-var]
        return Case(self.layer._replace(attention=own), self.workload, self.phase)

    @property
    def cached(self) -> str:
        """The form whose tensors are kept: K and V only where the form itself is decompressed."""
        return cached_form(self.attention, self.layer.form)

    @property
    def heads(self) -> HeadShape:
        """Widths of the kernel."""
        return self.attention.heads(self.layer.form)


class Prediction(NamedTuple):
    """What the specification says of one step of one layer; FLOPs as a counter sees them, every pair."""

    parameters: int
    cache: tuple[Tensor, ...]
    ops: tuple[Contraction, ...]
    formats: Formats

    @property
    def cache_bytes(self) -> int:
        """Of all tensors."""
        return total_bytes(self.cache)

    @property
    def flops(self) -> int:
        """Of all products."""
        return sum(op.flops for op in self.ops)

    @property
    def bytes_moved(self) -> int:
        """Weights, cache and activations of all products; scores on chip."""
        return sum(self._bytes(op) for op in self.ops)

    def _bytes(self, op: Contraction) -> int:
        return sum(op.bytes(self.formats).values())

    def seconds(self, flops_per_s: float, bytes_per_s: float) -> float:
        """Sum over the operations of the longer of compute and memory time: nothing overlaps."""
        return sum(max(op.flops / flops_per_s, self._bytes(op) / bytes_per_s) for op in self.ops)

    def bound(self, flops_per_s: float, bytes_per_s: float) -> str:
        """What most of that time is spent on."""
        times = [(op.flops / flops_per_s, self._bytes(op) / bytes_per_s) for op in self.ops]
        compute = sum(c for c, m in times if c > m)
        return "compute" if compute * 2 > sum(max(c, m) for c, m in times) else "memory"


def predict(case: Case, settings: Settings) -> Prediction:
    """The prediction for one case."""
    attention, formats = case.attention, settings.formats
    return Prediction(
        parameters=sum(w.elements for w in attention.weights(case.layer.form)),
        cache=tuple(
            t.at(case.workload.context, case.workload.batch, formats) for t in attention.cache(case.reach, case.cached)
        ),
        ops=_executed(case, settings),
        formats=formats,
    )


def _executed(case: Case, settings: Settings) -> tuple[Contraction, ...]:
    """All pairs are computed and some masked; where a layer gathers, its core has the selected pairs alone."""
    attention, form = case.attention, case.layer.form

    def counted(count: Count) -> tuple[Contraction, ...]:
        return attention.ops(Step(case.workload, case.reach, count), form, cached=case.cached).contractions

    every = counted("dense")
    if settings.path == "reference" or not isinstance(attention, DSA):
        return every
    if not attention.gathers(case.workload, form):
        return every
    return tuple(d if d.name in INDEXER else c for c, d in zip(counted("causal"), every, strict=True))


def memory_needed(case: Case, settings: Settings) -> int:
    """Bytes that measuring the case can take at most: weights, twice the cache, activations, scores, the reference.

    Twice the cache, since a step may write a new copy. Scores count where no kernel is known to keep them on chip: on
    the reference path, which is all there is with sinks or a softcap, and where keys and values differ in width,
    which a CPU computes in blocks of queries. The reference that gives the error holds the weights in 8 bytes.
    """
    made, width = predict(case, settings), BYTES[settings.dtype]
    lent = memory_needed(case.lender, settings) if case.lender else 0
    largest = max(op.bytes(made.formats)["activation"] + op.bytes(made.formats)["cache_write"] for op in made.ops)
    attention, shape, w = case.attention, case.heads, case.workload
    branches = BRANCHES_OF.get(attention.variant, 0)
    slow = (
        settings.path == "reference"
        or branches
        or isinstance(attention, CSA)
        or any(getattr(attention, x, False) for x in ("sinks", "logit_softcap"))
    )
    rows = min(w.context, max(w.new_tokens, FILL_CHUNK))
    if not slow and settings.device == "cpu":
        rows = min(rows, QUERY_BLOCK)
    fused = not slow and shape.head_dim_k == shape.head_dim_v
    keys = case.reach.keys(rows, w.context, "dense") if shape.kv_heads else 0
    if isinstance(attention, CSA):  # in blocks of queries, over window rows and entries alike
        rows = min(rows, attention.score_block)
        keys += w.context // attention.compress_ratio if attention.compress_ratio else 0
    scores = 0 if fused else max(1, branches) * w.batch * shape.q_heads * rows * keys * (4 + 4 + width)
    if isinstance(attention, DSA):
        scores += _selection_memory(attention, w)
    # Keys of a chunk decayed for each query of it, [C, C, K] for each head, in fp32, twice.
    decayed = w.batch * shape.q_heads * getattr(attention, "chunk_size", 0) ** 2 * shape.head_dim_k * 8
    return made.parameters * (width + 8) + 2 * made.cache_bytes + 4 * largest + scores + decayed + lent


QUERY_BLOCK = 128
"""As in the layers: queries whose scores a CPU keeps in memory at once."""


def _selection_memory(attention: DSA, w: Workload) -> int:
    """Index scores of one turn with their relu and product in fp32, the chosen positions, and masks over all keys."""
    rows = max(w.new_tokens, min(FILL_CHUNK, w.context))
    one = w.batch * attention.index_n_heads * w.context
    turn = max(one, min(one * rows, MAX_ELEMENTS))
    kept = min(attention.index_topk, w.context)
    return 3 * 4 * turn + w.batch * rows * (2 * 8 * kept + 4 * w.context)


FILL_CHUNK = 512
"""Tokens of one step while a cache is filled before a decode step is measured."""


def cases(names: Sequence[str], models: Sequence[Model], settings: Settings, form: str | None) -> list[Case]:
    """Every layer that was asked for, in each of its forms, as a prompt and as a step after it.

    Without names: the layers of the models, or every variant. With both: the named variants at a model's dimensions,
    or as the model itself has them.
    """
    layers: list[Layer] = []
    if models and not names:
        for model in models:
            layers += layers_of_groups(model.id, model.groups, form)
    else:
        for name in names or VARIANTS:
            layers += _named(name, models[0] if models else None, settings, form)
    prompt = Workload(settings.context, settings.context, settings.batch)
    step = Workload(settings.context, settings.new_tokens, settings.batch)
    return [
        Case(layer, workload, phase) for layer in layers for phase, workload in (("prefill", prompt), ("decode", step))
    ]


def _named(name: str, model: Model | None, settings: Settings, form: str | None) -> list[Layer]:
    if model is None:
        return layers_of(name, Dimensions() if settings.device in ("cuda", "meta") else SMALL, form)
    variant, _, wanted = name.partition(":")
    own = [g for g in model.groups if g.attention and g.attention.variant == variant]
    if own:
        return layers_of_groups(model.id, tuple(own), wanted or form)
    first = shown_attention(model)
    if first is None:
        raise AttncalcError("--model", "must name a model with attention", got=shown(model.id))
    return layers_of(name, dimensions_like(first), form)
