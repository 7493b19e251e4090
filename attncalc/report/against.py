"""Rows of `measure --against`."""

from collections.abc import Sequence

from attncalc.report import Column, Report, Row, Table, count_text, flops_text, number_text


def against_report(inputs: Row, conventions: Row, rows: list[Row], notes: Sequence[str]) -> Report:
    """`attncalc measure --against transformers`."""
    shown = [r | {"same": _same(r)} for r in rows]
    columns = (
        Column("model", "model"),
        Column("phase", "phase"),
        Column("context", "tokens", count_text),
        Column("measured_parameters", "parameters", count_text),
        Column("measured_cache_bytes", "cache, B", count_text),
        Column("measured_flops", "FLOPs", lambda v: "-" if v is None else flops_text(v)),
        Column("same", "is"),
    )
    tables = [Table("", columns, shown)]
    layout = (
        Column("count", "tensors", count_text),
        Column("tensor", "of"),
        Column("shape", "shape", lambda v: " x ".join(str(n) for n in v)),
        Column("dtype", "dtype"),
    )
    tables += [
        Table(f"{r['model']}: kept after {r['context']:,} tokens", layout, r["cache_tensors"])
        for r in rows
        if r["phase"] == "prefill"
    ]
    compared = [r for r in rows if r["ok"] is not None]
    text = [f"{sum(r['ok'] for r in compared)} of {len(rows)} steps as predicted"]
    named = dict.fromkeys(f"{r['model']}: not compared: {what}" for r in rows for what in r["not_compared"])
    return Report("measure", inputs, conventions, rows, tuple(tables), (*named, *notes), tuple(text))


def _same(row: Row) -> str:
    if row["ok"] is None:
        return "not estimated"
    pairs = (("parameters", "parameters"), ("cache_bytes", "cache"), ("flops", "FLOPs"))
    wrong = [
        f"{name}: {number_text(row[f'predicted_{key}'])} predicted"
        for key, name in pairs
        if None not in (row[f"predicted_{key}"], row[f"measured_{key}"])
        and row[f"predicted_{key}"] != row[f"measured_{key}"]
    ]
    return ", ".join(wrong) if wrong else "exact"
