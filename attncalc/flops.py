"""What a step costs: FLOPs and bytes by operation, layer group and model."""

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from attncalc.allocation import Request, model_formats, own_form, run
from attncalc.attention.base import Step
from attncalc.axes import Dim, Weight
from attncalc.engines import check_options
from attncalc.engines import engine as find_engine
from attncalc.engines.options import EngineOptions, option
from attncalc.errors import AttncalcError, check_type
from attncalc.model import ExtraWeight, LayerGroup, Model
from attncalc.ops import (
    LAYER_NORM,
    RESIDUAL,
    RMS_NORM,
    SOFTCAP,
    Contraction,
    Ops,
    Part,
    Role,
    Rowwise,
    activation,
    product,
    weight,
)
from attncalc.units import parse_count
from attncalc.weights import matrix_bytes, norm_bytes
from attncalc.workload import Conventions, Workload

if TYPE_CHECKING:
    from attncalc.engines.base import Engine

STEP_OPTIONS = ("version", "draft_tokens")
"""Options of engines that decide which form a step executes."""
NORM_FLOPS = {
    "rms": RMS_NORM,
    "layer": LAYER_NORM - 1,
    "layer_bias": LAYER_NORM,
    "unweighted": LAYER_NORM - 2,
    "none": 0,
}


class LayerCost(NamedTuple):
    """One group of equal layers; `attention` and `ffn` are one layer's operations."""

    group: LayerGroup
    form: str
    attention: Ops
    ffn: Ops
    rowwise: tuple[Rowwise, ...]
    weight_bytes: int

    @property
    def layers(self) -> int:
        """How many layers the group has."""
        return len(self.group.indices)

    @property
    def contractions(self) -> tuple[Contraction, ...]:
        """Of one layer."""
        return self.attention.contractions + self.ffn.contractions

    @property
    def flops_attention(self) -> int:
        """Of all layers of the group."""
        return self.layers * sum(op.flops for op in self.attention.contractions)

    @property
    def flops_ffn(self) -> int:
        """Of all layers of the group."""
        return self.layers * sum(op.flops for op in self.ffn.contractions)

    @property
    def flops_elementwise(self) -> int:
        """Of all layers of the group, stated counts."""
        every = self.attention.rowwise + self.ffn.rowwise + self.rowwise
        return self.layers * sum(op.flops for op in every)


class StepCost(NamedTuple):
    """One step of a whole model on one GPU: all sequences, all new tokens."""

    model: Model
    engine: str
    workload: Workload
    conventions: Conventions
    tp: int
    layers: tuple[LayerCost, ...]
    head: Ops
    extra: tuple[tuple[ExtraWeight, Contraction], ...]
    outer_weight_bytes: int

    def _extra_flops(self, *places: str) -> int:
        return sum(op.flops * w.copies for w, op in self.extra if w.place in places)

    @property
    def flops_attention(self) -> int:
        """With projections."""
        return sum(layer.flops_attention for layer in self.layers) + self._extra_flops("attention")

    @property
    def flops_ffn(self) -> int:
        """With routers."""
        return sum(layer.flops_ffn for layer in self.layers) + self._extra_flops("ffn", "embedding")

    @property
    def flops_head(self) -> int:
        """Logits; the embedding is a look-up and costs none."""
        return sum(op.flops for op in self.head.contractions) + self._extra_flops("head")

    @property
    def total(self) -> int:
        """Attention, feed-forward and head."""
        return self.flops_attention + self.flops_ffn + self.flops_head

    @property
    def flops_elementwise(self) -> int:
        """Softmax, norms, rotation, gates, biases, residuals: stated counts, apart from the total."""
        return sum(layer.flops_elementwise for layer in self.layers) + sum(op.flops for op in self.head.rowwise)

    def _bytes(self, role: Role) -> int:
        formats = self.conventions.formats
        inner = sum(layer.layers * sum(op.bytes(formats)[role] for op in layer.contractions) for layer in self.layers)
        head = sum(op.bytes(formats)[role] for op in self.head.contractions)
        return inner + head + sum(w.copies * op.bytes(formats)[role] for w, op in self.extra)

    @property
    def bytes_weights(self) -> int:
        """Each weight once; of experts and tables what the tokens can reach."""
        return sum(layer.group.weight_copies * layer.weight_bytes for layer in self.layers) + self.outer_weight_bytes

    @property
    def bytes_cache_read(self) -> int:
        """What the operations need; a borrowed cache is read again."""
        return self._bytes("cache")

    @property
    def bytes_cache_write(self) -> int:
        """The record of every new token."""
        return self._bytes("cache_write")

    @property
    def bytes_activations(self) -> int:
        """Operands in and results out of every product; scores stay on chip."""
        return self._bytes("activation")

    @property
    def bytes_total(self) -> int:
        """All of the above."""
        return self.bytes_weights + self.bytes_cache_read + self.bytes_cache_write + self.bytes_activations


def step_cost(
    model: Model,
    context: int,
    new_tokens: int = 1,
    *,
    batch: int = 1,
    engine: str = "logical",
    tp: int = 1,
    conventions: Conventions | None = None,
    options: EngineOptions | None = None,
) -> StepCost:
    """FLOPs and bytes of one step, of a model and a split whose cache the engine can allocate.

    Raises:
        AttncalcError: the engine, the form, the formats, the options or the split do not fit the model.
    """
    workload, tp = Workload(context, new_tokens, batch), parse_count(tp, "tp")
    conventions = Conventions(formats=model_formats(model)) if conventions is None else conventions
    check_type(conventions, Conventions, "conventions", "must be Conventions", 'Write Conventions(count="dense")')
    profile, options = find_engine(engine), EngineOptions() if options is None else options
    check_options(profile, options)
    for name in options.given:
        if name not in STEP_OPTIONS:
            raise AttncalcError(option(name), "changes the bytes of a cache, and nothing that flops counts")
    formats, form, mtp = conventions.formats, conventions.form, conventions.mtp
    run(model, engine, Request(context, batch, formats, form, tp, mtp, options, new_tokens))
    conventions = replace(conventions, formats=profile.formats(model, formats))
    groups = model.layer_groups(mtp=conventions.mtp)
    layers = tuple(layer_cost(model, profile, g, workload, conventions, tp, options) for g in groups)
    extra, extra_bytes = _extra(model, workload, conventions, tp)
    head, outer = _head(model, workload, conventions, tp)
    return StepCost(model, engine, workload, conventions, tp, layers, head, extra, outer + extra_bytes)


def layer_cost(
    model: Model,
    profile: "Engine",
    group: LayerGroup,
    workload: Workload,
    conventions: Conventions,
    tp: int,
    options: EngineOptions,
) -> LayerCost:
    """One group of equal layers, split over `tp` GPUs."""
    attention = group.attention.shard(tp) if group.attention else None
    ffn = group.ffn.shard(tp) if group.ffn else None
    none, form, weights = Ops((), ()), "none", list[Weight]()
    attention_ops = ffn_ops = none
    if attention:
        wish = own_form(group, conventions.form)
        form, cached = profile.execution(attention, workload, wish, options)
        step = Step(workload, profile.attended(model, group), conventions.count)
        attention_ops = profile.stored(model, group, attention.ops(step, form, cached=cached))
        weights += attention.weights(form)
    if ffn:
        ffn_ops = ffn.ops(workload)
        weights += ffn.read_weights(workload)
    axes = {
        "b": Dim(workload.batch, "batch"),
        "t": Dim(workload.new_tokens, "new_tokens"),
        "D": Dim(model.hidden_size, "hidden_size"),
    }
    rowwise = [Rowwise("norm", "b t D", group.norms * NORM_FLOPS[model.norm], axes)] if group.norms else []
    if model.vocab_size is not None:
        blocks = (attention is not None) + (ffn is not None)
        rowwise.append(Rowwise("residual", "b t D", blocks * RESIDUAL, axes))
    formats = conventions.formats
    held = sum(matrix_bytes(w.sizes, formats, w.kind) for w in weights)
    held += norm_bytes(model, group.norms, formats)
    return LayerCost(group, form, attention_ops, ffn_ops, tuple(rowwise), held)


def _head(model: Model, workload: Workload, conventions: Conventions, tp: int) -> tuple[Ops, int]:
    if model.vocab_size is None:
        return Ops((), ()), 0
    counted = workload.new_tokens if conventions.head_tokens == "all" else 1
    vocabulary = -(-model.vocab_size // tp)
    axes = {
        "b": Dim(workload.batch, "batch"),
        "t": Dim(counted, "new_tokens" if conventions.head_tokens == "all" else "1"),
        "D": Dim(model.hidden_size, "hidden_size"),
        "V": Dim(vocabulary, "vocab_size"),
    }
    logits = product("lm_head", activation("x", "b t D"), weight("lm_head", "V D"), activation("logits", "b t V"), axes)
    logits_of = [logits]
    if conventions.mtp and model.mtp:
        # Each MTP layer has logits of its own, by the head that the main model has read already.
        read = Part("lm_head", "V D", "on_chip", "weight")
        layers = sum(len(g.indices) for g in model.mtp.groups)
        x, out = activation("x", "b t D"), activation("logits", "b t V")
        logits_of += [product("mtp_lm_head", x, read, out, axes)] * layers
    formats = conventions.formats
    held = matrix_bytes((vocabulary, model.hidden_size), formats)
    held += norm_bytes(model, int(model.final_norm), formats)
    if not model.tie_word_embeddings:  # a tied table is read whole by the head
        rows = min(vocabulary, workload.batch * workload.new_tokens)
        held += matrix_bytes((rows, model.hidden_size), formats)
    rowwise = []
    if model.final_norm:
        every = axes | {"t": Dim(workload.new_tokens, "new_tokens")}
        rowwise.append(Rowwise("final_norm", "b t D", NORM_FLOPS[model.norm], every))
    if model.final_logit_softcap:
        rowwise.append(Rowwise("final_softcap", "b t V", SOFTCAP, axes))
    return Ops(tuple(logits_of), tuple(rowwise)), held


def _extra(
    model: Model, workload: Workload, conventions: Conventions, tp: int
) -> tuple[tuple[tuple[ExtraWeight, Contraction], ...], int]:
    ops, held = [], 0
    for w in model.extras(mtp=conventions.mtp):
        shape = w.shape
        if w.place == "head":  # split as the vocabulary is
            shape = (-(-shape[0] // tp), *shape[1:])
        if w.place == "embedding":
            shape = (min(shape[0], workload.batch * workload.new_tokens), *shape[1:])
        held += w.copies * matrix_bytes(shape, conventions.formats, "weight" if len(shape) > 1 else "vector")
        if w.operation != "none":
            axes = {
                "b": Dim(workload.batch, "batch"),
                "t": Dim(workload.new_tokens, "new_tokens"),
                "n": Dim(2, "uses"),
                "o": Dim(shape[0], f"{w.name} rows"),
                "i": Dim(prod(shape[1:]), f"{w.name} columns"),
            }
            rows = "b n t" if w.operation == "linear_twice" else "b t"
            x, y = activation("x", f"{rows} i"), activation("y", f"{rows} o")
            ops.append((w, product(w.name, x, weight(w.name, "o i"), y, axes)))
    return tuple(ops), held
