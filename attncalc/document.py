"""Preset documents: plain data in, immutable objects out, nothing repaired and nothing assumed.

`Fields` reads one mapping and knows its path, so that every refusal names the field. A specification class is
read from its own dataclass fields: no second list of names to keep in step. Every field must be given; what a model
does not have is written as null, false, none or [], so that no dropped line can pass for a default. `notes` and
`partial`, which change no number, may be absent, and so may `joined`: without it the layers would be named twice, which
is refused.
"""

from dataclasses import fields, replace
from importlib import import_module
from math import prod
from typing import Any, Literal, TypeVar

from attncalc.attention import variant_class
from attncalc.attention.base import Attention
from attncalc.dtypes import check_kv_format
from attncalc.errors import AttncalcError, shown
from attncalc.ffn import FFN
from attncalc.fields import Fields, read_spec
from attncalc.model import MTP, ExtraWeight, Joined, LayerGroup, Model, Norm
from attncalc.reach import FULL, Reach
from attncalc.units import MAX_COUNT

T = TypeVar("T")
MAX_LAYERS = 10_000
FFNS = {
    "dense": ("attncalc.ffn", "Dense"),
    "moe": ("attncalc.ffn", "MoE"),
    "latent_moe": ("attncalc.latent_moe", "LatentMoE"),
    "channel_mix": ("attncalc.channel_mix", "ChannelMix"),
}
Status = Literal["verified", "verified_secondhand", "document", "own"]


def read_indices(node: Fields, total: int) -> tuple[int, ...]:
    """Layer numbers: `all`, an index, Python slices, or several: `"0:3, 5, 7::6"`."""
    text = node.get("indices", str)
    if text == "all":
        return tuple(range(total))
    out: list[int] = []
    for part in text.split(","):
        words = [w.strip() for w in part.split(":")]
        if (
            words == [""]
            or len(words) > 3
            or any(w and not (w.isascii() and w.isdigit() and len(w) < 7) for w in words)
        ):
            rule = "must be `all`, indices or slices such as '0:3, 5::6'"
            raise AttncalcError(node.path("indices"), rule, got=shown(text))
        if len(words) == 1 and words[0]:
            numbers = range(int(words[0]), int(words[0]) + 1)
        else:
            start, stop, step = [*words, "", ""][:3]
            if step and not int(step):
                raise AttncalcError(node.path("indices"), "a slice's step must be at least 1", got=shown(text))
            numbers = range(int(start or 0), int(stop or total), int(step or 1))
        if not numbers or numbers[-1] >= total:
            rule = f"must name layers from 0 to {total - 1}"
            raise AttncalcError(node.path("indices"), rule, got=shown(part.strip()))
        out += numbers
    if len(set(out)) < len(out):
        raise AttncalcError(node.path("indices"), "must name each layer once", got=shown(text))
    return tuple(sorted(out))


def read_reach(node: Fields) -> Reach:
    """`reach: full`, or `{window: 128}`, or `{chunk: 8192}`."""
    if node.is_text("reach"):
        if node.get("reach", str) != "full":
            raise AttncalcError(
                node.path("reach"), "must be full, {window: W} or {chunk: C}", got=node.get("reach", str)
            )
        return FULL
    inner = node.child("reach")
    if inner.names() not in (("window",), ("chunk",)):
        raise AttncalcError(node.path("reach"), "must be full, {window: W} or {chunk: C}", got=", ".join(inner.names()))
    kind: Literal["window", "chunk"] = "chunk" if inner.absent("window") else "window"
    size = inner.positive(kind)
    inner.finish()
    return Reach(kind, size)


def read_attention(node: Fields, hidden_size: int, *, own_kv: bool) -> Attention:
    """An attention by its `variant`."""
    name = node.get("variant", str)
    cls = variant_class(name, node.path("variant"))
    given: dict[str, Any] = {"hidden_size": hidden_size}
    names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    if "own_kv" in names:
        given["own_kv"] = own_kv
    elif not own_kv:
        raise AttncalcError(node.path("variant"), "cannot read another layer's cache", got=name)
    spec = read_spec(cls, node, **given)
    if spec.variant != name:
        raise AttncalcError(node.path("variant"), f"these dimensions make {spec.variant}", got=name)
    return spec


def read_ffn(node: Fields, hidden_size: int) -> FFN:
    """A feed-forward by its `kind`."""
    module, name = FFNS[node.get("kind", Literal["dense", "moe", "latent_moe", "channel_mix"])]
    made: FFN = read_spec(getattr(import_module(module), name), node, hidden_size=hidden_size)
    return made


def read_groups(
    nodes: list[Fields], hidden_size: int, total: int, norm: Norm, first: int = 0
) -> tuple[LayerGroup, ...]:
    """Groups that name every layer exactly once, and those that join them."""
    groups, owner = [], dict[int, Fields]()
    for node in nodes:
        indices = read_indices(node, total)
        joined = _joined(node, len(indices))
        for i in indices:
            if (i in owner) != (joined is not None):
                rule = "must name layers of groups before it, which it joins" if joined else "must name each layer once"
                hint = "" if joined else "A second block of a layer is a group that is `joined`"
                raise AttncalcError(node.path("indices"), rule, got=i, hint=hint)
            owner[i] = node
        sources = _cache_sources(node, len(indices))
        attention, reach = None, FULL
        if node.stated("attention"):
            attention = read_attention(node.child("attention"), hidden_size, own_kv=not sources)
            reach = read_reach(node)
            try:
                attention.cache(reach, attention.forms[0])
            except AttncalcError as error:
                raise AttncalcError(node.path("reach"), error.rule, got=error.got) from None
        elif node.stated("reach") or sources:
            raise AttncalcError(node.path("reach"), "must be null, as cache_from, where there is no attention")
        ffn = read_ffn(node.child("ffn"), hidden_size) if node.stated("ffn") else None
        if attention is None and ffn is None:
            raise AttncalcError(node.where, "a layer needs attention, ffn or both")
        norms = node.get("norms", int)
        if norms and norm == "none":
            raise AttncalcError(node.path("norms"), "must be 0 where norm is none", got=norms)
        node.finish()
        shifted = tuple(first + i for i in indices)
        groups.append(LayerGroup(shifted, attention, ffn, norms, reach, sources, joined))
    missing = [i for i in range(total) if i not in owner]
    if missing:
        raise AttncalcError(
            nodes[0].where.rpartition("[")[0] if nodes else "layers", f"no group names layer {missing[0]}"
        )
    return tuple(groups)


def _joined(node: Fields, count: int) -> Joined | None:
    """`joined: {weight_copies: null}`: blocks in layers of other groups. Absent: layers of their own.

    It may be absent, since the same layers in a second group without it are refused.
    """
    if node.absent("joined"):
        return None
    inner = node.child("joined")
    copies = inner.positive("weight_copies") if inner.stated("weight_copies") else None
    if copies is not None and copies > count:
        raise AttncalcError(inner.path("weight_copies"), f"must not exceed the {count} layers joined", got=copies)
    inner.finish()
    return Joined(copies)


def _cache_sources(node: Fields, count: int) -> tuple[int, ...]:
    if not node.stated("cache_from"):
        return ()
    sources = node.items("cache_from")
    if len(sources) != count:
        rule = f"must name one layer for each of the {count} of this group"
        raise AttncalcError(node.path("cache_from"), rule, got=f"{len(sources)}")
    for i in sources:
        if not isinstance(i, int) or isinstance(i, bool) or i < 0:
            raise AttncalcError(node.path("cache_from"), "must be layer numbers", got=shown(i))
    return tuple(i for i in sources if isinstance(i, int))


def read_extra(node: Fields, total: int) -> ExtraWeight:
    """A named extra weight, in all of the layers that `indices` names, or once."""
    copies = len(read_indices(node, total)) if node.stated("indices") else 1
    shape = node.items("shape")
    if not shape or any(not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_COUNT for n in shape):
        raise AttncalcError(node.path("shape"), "must be a list of whole numbers", got=shown(shape))
    if len(shape) > 8 or prod(n for n in shape if isinstance(n, int)) > MAX_COUNT:
        raise AttncalcError(node.path("shape"), "must have at most 8 axes and 2^53 elements", got=f"{len(shape)} axes")
    node.text("name")
    return read_spec(ExtraWeight, node, copies=copies, shape=tuple(shape))


def read_model(data: object, where: str) -> Model:
    """The model that a preset document describes.

    Raises:
        AttncalcError: a field is missing, unknown, of the wrong type, or contradicts another.
    """
    top = Fields(data, where)
    hidden_size, total = top.positive("hidden_size"), top.positive("num_hidden_layers")
    if total > MAX_LAYERS:
        raise AttncalcError(top.path("num_hidden_layers"), f"must be at most {MAX_LAYERS}", got=total)
    norm: Norm = top.get("norm", Norm)
    groups = read_groups(top.children("layers"), hidden_size, total, norm)
    mtp = _mtp(top, hidden_size, total, norm) if top.stated("mtp") else None
    _check_sources(top, groups + (mtp.groups if mtp else ()))
    _check_indexers(top, groups)
    extra_weights = tuple(read_extra(n, total) for n in top.children("extra_weights"))
    _check_extra(top, extra_weights)
    model = Model(
        id=top.text("id"),
        hf_id=top.optional_text("hf_id"),
        model_type=top.optional_text("model_type"),
        source=_source(top.child("source")),
        notes=_texts(top, "notes"),
        partial=_texts(top, "partial"),
        hidden_size=hidden_size,
        vocab_size=top.positive("vocab_size") if top.stated("vocab_size") else None,
        tie_word_embeddings=top.get("tie_word_embeddings", bool),
        norm=norm,
        final_norm=top.get("final_norm", bool),
        final_logit_softcap=top.get("final_logit_softcap", bool),
        max_position_embeddings=top.positive("max_position_embeddings")
        if top.stated("max_position_embeddings")
        else None,
        kv_cache_dtype=_declared_format(top),
        groups=groups,
        mtp=mtp,
        extra_weights=extra_weights,
        path=where,
    )
    _check_whole(top, model)
    top.finish()
    return model


def _kept(group: LayerGroup) -> list[tuple[str, int, int]]:
    """What the layers of a group would keep if they kept it themselves."""
    attention = group.attention
    if attention is None:
        return []
    own = replace(attention, own_kv=True) if group.cache_from else attention  # type: ignore[type-var]
    return [(t.name, t.heads.size, t.width.size) for t in own.cache(FULL, own.forms[0])]


def _declared_format(top: Fields) -> str | None:
    name = top.optional_text("kv_cache_dtype")
    if name is not None:
        check_kv_format(name, top.path("kv_cache_dtype"))
    return name


def _check_extra(top: Fields, extra: tuple[ExtraWeight, ...]) -> None:
    for i, w in enumerate(extra):
        where = top.path(f"extra_weights[{i}]")
        if w.name in {x.name for x in extra[:i]}:
            raise AttncalcError(where, "every name must be given once", got=shown(w.name))
        if w.operation != "none" and (len(w.shape) != 2 or w.place == "embedding"):
            raise AttncalcError(
                where, "a linear weight must have two axes and a place that computes", got=shown(w.name)
            )


def _check_whole(top: Fields, model: Model) -> None:
    """Layers alone have neither embedding nor head, and nothing that belongs to them."""
    if model.vocab_size is not None:
        return
    for name in ("tie_word_embeddings", "final_norm", "final_logit_softcap"):
        if getattr(model, name):
            raise AttncalcError(top.path(name), "must be false where vocab_size is null", got="true")
    if any(w.place in ("head", "embedding") for w in model.extra_weights):
        raise AttncalcError(top.path("extra_weights"), "must not be of a head or embedding where vocab_size is null")


def _mtp(top: Fields, hidden_size: int, total: int, norm: Norm) -> MTP:
    node = top.child("mtp")
    count = node.positive("num_layers")
    groups = read_groups(node.children("layers"), hidden_size, count, norm, first=total)
    mtp = MTP(groups, tuple(read_extra(n, count) for n in node.children("extra_weights")))
    node.finish()
    return mtp


def _check_sources(top: Fields, groups: tuple[LayerGroup, ...]) -> None:
    for group in groups:
        for index, source in zip(group.indices, group.cache_from, strict=False):
            owners = [g for g in groups if source in g.indices and g.attention and not g.cache_from]
            if not owners or source >= index:
                rule = f"layer {index} must read an earlier layer with a cache of its own"
                raise AttncalcError(top.path("layers"), rule, got=f"cache_from {source}")
            if not any(_kept(g) == _kept(group) and g.reach.covers(group.reach) for g in owners):
                rule = f"layer {index} must read K and V of its own heads, widths and reach"
                raise AttncalcError(top.path("layers"), rule, got=f"cache_from {source}")


def _check_indexers(top: Fields, groups: tuple[LayerGroup, ...]) -> None:
    """A layer that reuses a selection needs an earlier layer that selects."""
    own = {i: own for g in groups if (own := getattr(g.attention, "own_indexer", None)) is not None for i in g.indices}
    first = min((i for i, has in own.items() if has), default=MAX_LAYERS)
    for index, has in sorted(own.items()):
        if not has and index < first:
            rule = f"layer {index} has no indexer and none before it to reuse"
            raise AttncalcError(top.path("layers"), rule, got="own_indexer false")


def _texts(top: Fields, name: str) -> tuple[str, ...]:
    out = []
    for i, item in enumerate([] if top.absent(name) else top.items(name)):
        if not isinstance(item, str) or not item.isprintable() or not item:
            raise AttncalcError(top.path(f"{name}[{i}]"), "must be printable text", got=shown(item))
        out.append(item)
    return tuple(out)


def _source(node: Fields) -> dict[str, Any]:
    out = {"where": node.text("where"), "date": node.text("date")}
    out["status"] = node.get("status", Status)
    node.finish()
    return out
