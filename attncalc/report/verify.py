"""Rows of `verify`."""

from attncalc.report import Column, Report, Row, Table


def verify_report(inputs: Row, rows: list[Row]) -> Report:
    """`attncalc verify`."""
    columns = (
        Column("claim", "claim"),
        Column("says", "says"),
        Column("expected", "expected", _short),
        Column("observed", "observed", _short),
        Column("error", "error", lambda v: f"{v:.1e}" if v else "0"),
        Column("verdict", ""),
    )
    shown = [r | {"verdict": "ok" if r["ok"] else "FAILED", "says": _folded(r["text"])} for r in rows]
    failed = sum(not r["ok"] for r in rows)
    text = (f"{len(rows) - failed} of {len(rows)} proven",)
    return Report("verify", inputs, {"dtype": "fp64", "k": 1024}, rows, (Table("", columns, shown),), (), text)


def _folded(text: str) -> str:
    from textwrap import fill

    return fill(text, 34)


def _short(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
