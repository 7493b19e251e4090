"""Rows of `cache`."""

from collections.abc import Sequence
from typing import Any

from attncalc.allocation import Allocation, Baseline, LayerCache, Page
from attncalc.cache import Tensor
from attncalc.engines import engine
from attncalc.engines.options import EngineOptions
from attncalc.model import Model
from attncalc.report import (
    Column,
    Report,
    Row,
    Table,
    bytes_text,
    elements_text,
    exact,
    exact_or_none,
    indices_text,
    number_text,
    ratio_text,
    settings_of,
)


def cache_result(made: "Allocation", compared: "Sequence[Baseline]") -> Row:
    """One model under one engine."""
    row: Row = {
        "model": made.model.id,
        "engine": made.engine,
        "kv_dtype": made.formats.kv,
        "context": made.context,
        "batch": made.batch,
        "tp": made.tp,
        "bytes_total": made.bytes_total,
        "bytes_overhead": made.bytes_overhead,
        "bytes_per_sequence": exact(made.bytes_per_sequence),
        "bytes_fixed": made.bytes_fixed,
        "bytes_per_token": exact(made.bytes_per_token),
        "elements_per_token": exact(made.elements_per_token),
        "elements_per_token_per_layer": exact_or_none(made.elements_per_token_per_layer),
        "layers": [_layer_row(layer) for layer in made.layers],
        "baselines": {b.name: _baseline_row(b, made) for b in compared},
        "reasons": [{"rule": r.rule, "bytes": r.bytes} for r in made.reasons],
    }
    row |= followed(made.engine, made.settings)
    if made.stages:
        row["stages"] = [stage._asdict() | {"layers": list(stage.layers)} for stage in made.stages]
    if made.pools:
        row |= _pool_row(made)
    return row


def followed(name: str, settings: EngineOptions) -> Row:
    """The engine's version, and every option that it has with its value."""
    profile = engine(name)
    return {"follows": profile.follows, "engine_options": settings.every(profile.options)}


def _pool_row(made: "Allocation") -> Row:
    """Blocks and pages; lists where an engine has several pools."""

    def common(values: list[Any]) -> Any:
        return values[0] if len(values) == 1 else values

    pools = made.pools
    tokens = [list(dict.fromkeys(g.block_tokens for g in p.groups if g.block_tokens)) for p in pools]
    return {
        "block_tokens": common([common(t) for t in tokens]),
        "block_bytes": common([p.block_bytes for p in pools]),
        "blocks": common([p.held(made.context, made.sequences) for p in pools]),
        "state_page_bytes": made.state_page_bytes,
    }


def _layer_row(layer: "LayerCache") -> Row:
    group = layer.group
    row: Row = {
        "indices": list(group.indices),
        "num_layers": layer.layers,
        "variant": group.variant,
        "cached": layer.cached,
        "reach": group.reach.text,
        "elements_per_token": exact(layer.elements_per_token),
        "bytes": layer.bytes,
        "tensors": [_tensor_row(t) for t in layer.tensors],
    }
    if layer.pages:
        row["bytes_padding"] = layer.layers * layer.padding
        row["pages"] = [_page_row(page) for page in layer.pages]
    if group.cache_from:
        row["cache_from"] = list(group.cache_from)
    return row


def _page_row(page: "Page") -> Row:
    return {
        "tensors": list(page.tensors),
        "block_tokens": page.block_tokens or None,
        "page_bytes": page.bytes,
        "blocks_per_sequence": page.blocks,
    }


def _tensor_row(tensor: "Tensor") -> Row:
    return {"name": tensor.name, "shape": list(tensor.shape), "dtype": tensor.dtype, "bytes": tensor.bytes}


def _baseline_row(baseline: "Baseline", made: "Allocation") -> Row | None:
    other = baseline.allocation
    if other is None:
        return None
    return {
        "elements_per_token_per_layer": exact_or_none(other.elements_per_token_per_layer),
        "bytes_per_token": exact(other.bytes_per_token),
        "bytes_total": other.bytes_total,
        "ratio": other.bytes_total / made.bytes_total if made.bytes_total else None,
    }


def stored_as(model: "Model") -> str:
    """The variants whose caches a model keeps: `mla`, `gqa, window 128 + full`."""
    variants = dict.fromkeys(g.variant for g in model.groups if g.attention)
    return " + ".join(variants)


def cache_report(
    inputs: Row,
    conventions: Row,
    made: "Sequence[tuple[Allocation, Sequence[Baseline]]]",
    notes: Sequence[str],
) -> Report:
    """`attncalc cache`."""
    results = [cache_result(a, b) for a, b in made]
    rows: list[Row] = []
    layer_rows: list[Row] = []
    for (allocation, _), result in zip(made, results, strict=True):
        shared = {k: result[k] for k in ("model", "engine", "kv_dtype", "context", "batch", "tp")}
        keys = ("elements_per_token_per_layer", "bytes_per_token", "bytes_total")
        rows.append(shared | {"stored_as": stored_as(allocation.model)} | {k: result[k] for k in keys} | {"ratio": 1.0})
        rows += [
            shared | {"stored_as": f"as {name}"} | row for name, row in result["baselines"].items() if row is not None
        ]
        layer_rows += [shared | {"layers": indices_text(r["indices"])} | r | _tensors(r) for r in result["layers"]]
    title, lead = settings_of(rows, "model", "context", "batch", "kv_dtype", "tp", "engine")
    columns: tuple[Column, ...] = (
        *lead,
        Column("stored_as", "stored as"),
        Column("elements_per_token_per_layer", "per token, layer", elements_text),
        Column("bytes_per_token", "next token, B", number_text),
        Column("bytes_total", "cache", bytes_text),
        Column("ratio", "ratio", ratio_text),
    )
    if len({r["engine"] for r in results}) > 1:
        rows, columns = _side_by_side(results, lead)
    layer_columns = (
        *lead,
        Column("layers", "layers"),
        Column("variant", "attention"),
        Column("reach", "reach"),
        Column("tensors_text", "tensors of one layer"),
        Column("bytes", "all of them", bytes_text),
    )
    tables = (Table(title, columns, rows), Table("", layer_columns, layer_rows))
    return Report("cache", inputs, conventions, results, tables, tuple(notes))


def _side_by_side(results: "Sequence[Row]", lead: tuple[Column, ...]) -> tuple[list[Row], tuple[Column, ...]]:
    """Engines instead of other heads: each against the logical cache, from which its reasons lead to it."""
    logical = [r["bytes_total"] - sum(reason["bytes"] for reason in r["reasons"]) for r in results]
    rows = [r | {"ratio": r["bytes_total"] / n if n else None} for r, n in zip(results, logical, strict=True)]
    columns = (
        *lead,
        Column("bytes_per_token", "next token, B", number_text),
        Column("bytes_total", "cache", bytes_text),
        Column("bytes_overhead", "of it overhead, B", number_text),
        Column("ratio", "to logical", ratio_text),
    )
    return rows, columns


def _tensors(row: Row) -> Row:
    def text(t: Row) -> str:
        return f"{t['name']} [{', '.join(map(str, t['shape']))}]"

    borrowed = f"reads {indices_text(set(row['cache_from']))}" if row.get("cache_from") else "none"
    return {"tensors_text": "\n".join(text(t) for t in row["tensors"]) or borrowed}
