"""Rows of `models`, `variants` and `devices`."""

from collections.abc import Sequence
from typing import Any

from attncalc.device import Device
from attncalc.model import Model
from attncalc.report import Column, Report, Row, Table, count_text, indices_text
from attncalc.report.cache import stored_as
from attncalc.units import decimal_bytes


def model_result(model: "Model", *, mtp: bool) -> Row:
    """One model: sizes, parts, groups, source."""
    parts = model.parameter_parts(mtp=mtp)
    groups = model.layer_groups(mtp=mtp)
    return {
        "model": model.id,
        "hf_id": model.hf_id,
        "model_type": model.model_type,
        "source": model.source,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
        "num_hidden_layers": model.num_layers,
        "max_position_embeddings": model.max_position_embeddings,
        "kv_cache_dtype": model.kv_cache_dtype,
        "tie_word_embeddings": model.tie_word_embeddings,
        "mtp_layers": sum(len(g.indices) for g in model.mtp.groups) if model.mtp else None,
        "parameters_total": model.parameters(mtp=mtp),
        "parameters_active": model.active_parameters(mtp=mtp),
        "parameters_attention": parts["attention"],
        "parameters_by_part": {k: v for k, v in parts.items() if k != "buffers"},
        "buffers_total": parts["buffers"],
        "read_by": model.reading.reader if model.reading else None,
        "defaulted": model.reading.defaulted if model.reading else [],
        "fields": [a._asdict() | {"value": _finite(a.value)} for a in model.reading.log] if model.reading else [],
        "layers": [
            {
                "indices": list(g.indices),
                "variant": g.variant,
                "reach": g.reach.text,
                "attention": _spec(g.attention),
                "ffn": _spec(g.ffn),
            }
            for g in groups
        ],
        "partial": list(model.partial),
        "notes": list(model.notes),
    }


def _finite(value: Any) -> Any:
    """A value of a configuration without the numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not abs(value) < float("inf") else value


def _spec(spec: object) -> Row | None:
    from dataclasses import asdict, is_dataclass

    return asdict(spec) if is_dataclass(spec) and not isinstance(spec, type) else None


def models_report(models: "Sequence[Model]", *, single: bool, mtp: bool) -> Report:
    """`attncalc models`, with or without names."""
    results = [model_result(m, mtp=mtp) for m in models]
    rows = [r | {"stored_as": stored_as(m)} for r, m in zip(results, models, strict=True)]
    columns = (
        Column("model", "model"),
        Column("stored_as", "attention"),
        Column("num_hidden_layers", "layers", count_text),
        Column("parameters_total", "parameters", count_text),
        Column("parameters_active", "active", count_text),
    )
    tables = [Table("", columns, rows)]
    text: list[str] = []
    if single:
        for result in results:
            tables.append(Table(result["model"], _GROUP_COLUMNS, [_group_row(g) for g in result["layers"]]))
            source = result["source"]
            text.append(f"{result['model']}: {source['where']}, {source['date']}, {source['status']}")
            text += [f"{result['model']}: {note}" for note in result["notes"]]
            fields = [f for f in result["fields"] if f["how"] != "ignored"]
            tables.append(Table(f"{result['model']}: fields", _FIELD_COLUMNS, fields))
            ignored = [f["field"] for f in result["fields"] if f["how"] == "ignored"]
            if ignored:
                text.append(f"{result['model']}: fields without effect: {', '.join(ignored)}")
            if result["buffers_total"]:
                text.append(f"{result['model']}: buffers, not counted as parameters: {result['buffers_total']:,}")
    return Report(
        "models",
        {"models": [m.id for m in models], "mtp": mtp},
        {"mtp": mtp},
        results,
        tuple(tables),
        tuple(m.partial_note for m in models if m.partial_note),
        tuple(text),
    )


_GROUP_COLUMNS = (
    Column("layers", "layers"),
    Column("variant", "attention"),
    Column("reach", "reach"),
    Column("dimensions", "dimensions"),
)


def _short(value: object) -> str:
    """A value of a configuration in a cell."""
    if isinstance(value, (list, dict)) and value:
        return f"{len(value)} entries"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


_FIELD_COLUMNS = (
    Column("field", "field"),
    Column("value", "value", _short),
    Column("how", "how"),
)


def _group_row(group: Row) -> Row:
    def text(spec: Row | None) -> str:
        from textwrap import fill

        kept = {k: v for k, v in (spec or {}).items() if k != "hidden_size" and v not in (None, False, "", "none", 0)}
        return fill(", ".join(f"{k} {v}" if v is not True else k for k, v in kept.items()), 52)

    dimensions = "\n".join(filter(None, (text(group["attention"]), text(group["ffn"]))))
    return {
        "layers": indices_text(group["indices"]),
        "variant": group["variant"],
        "reach": group["reach"],
        "dimensions": dimensions,
    }


def variants_report(rows: list[Row]) -> Report:
    """`attncalc variants`."""
    columns = (
        Column("variant", "variant"),
        Column("what", "what"),
        Column("forms", "forms", "\n".join),
    )
    return Report("variants", {}, {}, rows, (Table("", columns, rows),))


def devices_report(devices: "Sequence[Device]") -> Report:
    """`attncalc devices`."""
    results: list[Row] = [
        {
            "device": d.id,
            "aliases": list(d.aliases),
            "name": d.name,
            "memory_bytes": d.memory_bytes,
            "bandwidth_bytes_per_s": d.bandwidth_bytes_per_s,
            "dense_flops_per_s": d.peaks,
            "source": d.source,
        }
        for d in devices
    ]
    rows = [r | {"bf16": r["dense_flops_per_s"].get("bf16")} for r in results]
    columns = (
        Column("device", "device"),
        Column("name", "name"),
        Column("memory_bytes", "memory", decimal_bytes),
        Column("bandwidth_bytes_per_s", "bandwidth", lambda v: f"{v / 10**9:,.0f} GB/s"),
        Column("bf16", "dense bf16", lambda v: f"{v / 10**12:,.0f} TFLOP/s" if v else "-"),
    )
    return Report("devices", {}, {}, results, (Table("", columns, rows),))
