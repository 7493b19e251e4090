"""Engines that keep each layer's tensors by themselves, without pages: what `logical` and `transformers` share."""

from dataclasses import replace
from math import lcm

from attncalc.allocation import Allocation, LayerCache, Reason, Request, Stage, own_form, replicated
from attncalc.attention.base import Attention
from attncalc.cache import CacheTensor, growing
from attncalc.dtypes import Formats
from attncalc.engines.base import Execution
from attncalc.engines.options import EngineOptions
from attncalc.engines.stages import pipeline, within
from attncalc.model import LayerGroup, Model
from attncalc.ops import Ops
from attncalc.reach import Reach, ratio
from attncalc.workload import Workload


class Layered:
    """Each layer keeps the variant's own tensors in its own reach; a subclass says where its engine differs."""

    name: str
    follows: str
    options: tuple[str, ...] = ()

    def check(self, model: Model, request: Request) -> None:
        """Every model runs."""

    def formats(self, model: Model, formats: Formats) -> Formats:  # noqa: ARG002
        """Every format is possible."""
        return formats

    def execution(
        self, attention: Attention, workload: Workload, form: str | None, options: EngineOptions
    ) -> Execution:
        """How a step runs, and the form whose tensors it keeps."""
        raise NotImplementedError

    def attended(self, model: Model, group: LayerGroup) -> Reach:  # noqa: ARG002
        """The layer's own reach."""
        return group.reach

    def cache(self, model: Model, group: LayerGroup, form: str, tp: int) -> tuple[CacheTensor, ...]:  # noqa: ARG002
        """The tensors that one layer keeps on one of `tp` GPUs; the group is whole."""
        return group.attention.shard(tp).cache(group.reach, form) if group.attention else ()

    def stored(self, model: Model, group: LayerGroup, ops: Ops) -> Ops:  # noqa: ARG002
        """As the variant says."""
        return ops

    def settings(self, options: EngineOptions) -> EngineOptions:
        """The options with the engine's own defaults."""
        return options

    def rule(self, model: Model, group: LayerGroup, request: Request) -> str:  # noqa: ARG002
        """Why this group's cache differs from the logical one; empty if it does not."""
        return ""

    def layer(self, model: Model, group: LayerGroup, request: Request) -> LayerCache:
        """One group of equal layers."""
        cached, layout = "none", tuple[CacheTensor, ...]()
        if group.attention:
            form = own_form(group, request.form)
            cached = self.execution(group.attention, request.workload, form, request.options).cached
            layout = self.cache(model, group, cached, request.tp)
        if group.ffn:
            layout += group.ffn.shard(request.tp).cache()
        tensors = tuple(t.at(request.context, request.batch, request.formats) for t in layout)
        growth = sum(t.growth_bits(request.context, request.formats) for t in layout)
        fixed = sum(made.bytes for t, made in zip(layout, tensors, strict=True) if t.reach is None)
        elements = sum(t.elements_per_token for t in growing(layout, request.context))
        each = ratio(elements.numerator, elements.denominator)
        period = lcm(*(t.reach.period for t in layout if t.reach))
        return LayerCache(group, cached, tensors, each, growth, fixed, period=period)

    def allocate(self, model: Model, request: Request) -> Allocation:
        """The layers of the largest stage, one by one."""
        from attncalc.engines.logical import PROFILE as LOGICAL

        asked, request = request.formats, replace(request, formats=self.formats(model, request.formats))
        groups = model.layer_groups(mtp=request.mtp)
        stages = pipeline(request.options.pp, groups, model.num_layers, self.name)
        here = on_one_replica(request)
        made = [tuple(self.layer(model, g, here) for whole in groups if (g := within(whole, s))) for s in stages]
        held = [sum(layer.bytes for layer in stage) for stage in made]
        layers = made[held.index(max(held))]
        reasons: dict[str, int] = {}
        for layer in layers:
            rule = self.rule(model, layer.group, here)
            if rule:
                ideal = LOGICAL.layer(model, layer.group, replace(here, formats=asked))
                reasons[rule] = reasons.get(rule, 0) + layer.bytes - ideal.bytes
        return Allocation(
            model,
            self.name,
            request.context,
            request.batch,
            request.tp,
            request.formats,
            here.batch,
            layers,
            reasons=tuple(Reason(rule, difference) for rule, difference in reasons.items() if difference),
            replicated=self.copies(model, layers, here),
            options=request.options,
            settings=self.settings(request.options),
            stages=tuple(Stage(tuple(sorted(s)), n) for s, n in zip(stages, held, strict=True) if s is not None),
        )

    def copies(self, model: Model, layers: tuple[LayerCache, ...], request: Request, dcp: int = 1) -> tuple[str, ...]:
        """What the split repeats; `dcp` GPUs share the tokens of what would be copies.

        Layers are named where a tensor of others is divided, or repeated otherwise.
        """
        if request.tp == 1:
            return ()
        found: dict[str, dict[str, list[LayerGroup]]] = {}
        for layer in layers:
            whole = self.layer(model, layer.group, replace(request, tp=1)).tensors
            for pair in zip(whole, layer.tensors, strict=True):
                line = "".join(replicated([pair], request.tp, dcp))
                found.setdefault(pair[1].name, {}).setdefault(line, []).append(layer.group)
        return tuple(
            line if len(lines) == 1 else f"in {_layers(groups)}, {line}"
            for lines in found.values()
            for line, groups in lines.items()
            if line
        )


def _layers(groups: list[LayerGroup]) -> str:
    """How many layers of every variant, and between which numbers."""
    found: dict[str, set[int]] = {}
    for group in groups:
        found.setdefault(group.variant, set()).update(group.indices)
    ranges = ((len(i), name, f"{min(i)} to {max(i)}" if len(i) > 1 else f"{min(i)}") for name, i in found.items())
    return " and ".join(f"{n} layer{'s' * (n > 1)} of {name} ({where})" for n, name, where in ranges)


def on_one_replica(request: Request) -> Request:
    """The request of one of `dp` replicas, the one that holds most sequences."""
    dp = request.options.dp or 1
    return replace(request, batch=-(-request.batch // dp)) if dp > 1 else request
