"""Rows of `measure`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attncalc.report import Column, Report, Row, Table, count_text, flops_text, number_text, ratio_text

if TYPE_CHECKING:
    from attncalc.measure.hardware import Peaks


def seconds_text(value: float | None) -> str:
    """`1.23 ms`."""
    if value is None:
        return "-"
    for scale, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def rate_text(value: float | None, unit: str) -> str:
    """`12.3 GFLOP/s`."""
    return "-" if value is None else f"{value / 1e9:,.3g} G{unit}"


def measure_report(
    inputs: Row, conventions: Row, rows: list[Row], peaks: "Peaks | None", notes: Sequence[str]
) -> Report:
    """`attncalc measure`."""
    shown = [r | {"name": _name(r), "same": _same(r)} for r in rows]
    several = len({r.get("model") for r in rows}) > 1
    lead = (*((Column("model", "model"),) if several else ()), Column("name", "layer"), Column("phase", "phase"))
    exact = (
        *lead,
        Column("measured_parameters", "parameters", count_text),
        Column("measured_cache_bytes", "cache, B", count_text),
        Column("measured_flops", "FLOPs", flops_text),
        Column("same", "is"),
    )
    tables = [Table("", exact, shown)]
    if peaks:
        timed = (
            *lead,
            Column("measured_seconds", "time", seconds_text),
            Column("time_ratio", "pred.", ratio_text),
            Column("share_of_peak_flops", "FLOPs", lambda v: f"{v:.0%}"),
            Column("share_of_peak_bytes", "bytes", lambda v: f"{v:.0%}"),
            Column("bound", "bound"),
            Column("max_relative_error", "error", lambda v: f"{v:.1e}"),
        )
        tables.append(Table("", timed, [r | {"bound": _bound(r)} for r in shown]))
    failed = sum(not r["ok"] for r in rows)
    text = [f"{len(rows) - failed} of {len(rows)} runs as predicted"]
    if peaks:
        gemm, copy = rate_text(peaks.flops_per_s, "FLOP/s"), rate_text(peaks.bytes_per_s, "B/s")
        text.append(f"peaks measured in this run: {gemm} in a large GEMM, {copy} in a large copy")
    return Report("measure", inputs, conventions, rows, tuple(tables), tuple(notes), tuple(text))


def _name(row: Row) -> str:
    form = "" if row["form"] == "direct" else f":{row['form']}"
    reach = "" if row["reach"] == "full" else f" {row['reach']}"
    return f"{row['variant']}{form}{reach}"


def _same(row: Row) -> str:
    pairs = ("parameters", "cache_bytes", "flops")
    wrong = [
        f"{p}: {number_text(row[f'predicted_{p}'])} predicted"
        for p in pairs
        if row[f"predicted_{p}"] != row[f"measured_{p}"]
    ]
    if wrong:
        return ", ".join(wrong)
    return "exact" if row["ok"] else "error too large"


def _bound(row: Row) -> str:
    if row["measured_bound"] is None:
        return f"{row['predicted_bound']}?"
    return f"{row['measured_bound']}{'' if row['measured_bound'] == row['predicted_bound'] else '!'}"
