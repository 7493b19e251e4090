"""Pipeline stages: which layers each GPU of a pipeline holds."""

from collections.abc import Collection, Iterable

from attncalc.errors import AttncalcError
from attncalc.model import LayerGroup


def stage_sizes(pp: tuple[int, ...], layers: int, engine: str, *, extra: str = "") -> tuple[int, ...]:
    """The layers of each stage: as named, or divided evenly where `pp` is one number.

    `extra`: where an engine puts what is left over: `last` (one more in each of the last stages), or `before_last`
    (the same, the last stage left out).

    Raises:
        AttncalcError: the stages do not add up to the layers, or do not divide them and the engine has no rule.
    """
    if len(pp) > 1:
        if sum(pp) != layers:
            raise AttncalcError("--pp", f"must add up to {layers} layers", got=f"{sum(pp)}")
        return pp
    stages = pp[0]
    if stages > layers:
        raise AttncalcError("--pp", f"must be at most {layers}, the layers", got=stages)
    each, left = divmod(layers, stages)
    if left and not extra:
        rule = f"{engine} has no rule of its own for {layers} layers in {stages} stages"
        raise AttncalcError("--pp", rule, hint=f"Name the layers of each stage, such as --pp {each + left},{each}")
    end = stages - int(extra == "before_last")
    return tuple(each + int(end - left <= i < end) for i in range(stages))


def stage_layers(layers: Collection[int], sizes: tuple[int, ...]) -> list[frozenset[int]]:
    """The layers of every stage, of all `layers`; those behind the last (of MTP) lie on the last stage."""
    out, first = [], 0
    for i, size in enumerate(sizes):
        last = first + size if i + 1 < len(sizes) else max(layers) + 1
        out.append(frozenset(n for n in layers if first <= n < last))
        first += size
    return out


def pipeline(
    pp: tuple[int, ...] | None, groups: Iterable[LayerGroup], layers: int, engine: str, *, extra: str = ""
) -> list[frozenset[int] | None]:
    """The layers of every stage, of groups with MTP layers or without; None alone where there is no pipeline.

    Raises:
        AttncalcError: the stages do not fit the layers, or a layer reads the cache of another stage.
    """
    if not pp:
        return [None]
    groups = tuple(groups)
    sizes = stage_sizes(pp, layers, engine, extra=extra)
    stages = stage_layers({i for g in groups for i in g.indices}, sizes)
    sources = {i: source for g in groups if g.cache_from for i, source in zip(g.indices, g.cache_from, strict=True)}
    for stage in stages:
        for index in sorted(stage & sources.keys()):
            if sources[index] not in stage:
                rule = f"layer {index} reads the cache of a layer of its own stage"
                raise AttncalcError("--pp", rule, got=f"layer {sources[index]}")
    return [*stages]


def within(group: LayerGroup, stage: Collection[int] | None) -> LayerGroup | None:
    """The part of a group that lies on a stage; all of it where there is one stage, None where nothing does."""
    if stage is None:
        return group
    kept = [i for i, index in enumerate(group.indices) if index in stage]
    if not kept:
        return None
    sources = tuple(group.cache_from[i] for i in kept) if group.cache_from else ()
    return group._replace(indices=tuple(group.indices[i] for i in kept), cache_from=sources)
