"""Rows of `verify`."""

from attncalc.report import Column, Report, Row, Table


def verify_report(inputs: Row, rows: list[Row]) -> Report:
    """`attncalc verify`."""
    columns = (
        Column("claim", "claim"),
        Column("says_text", "says"),
        Column("expected", "expected", _short),
        Column("observed", "observed", _short),
        Column("error", "error", lambda v: f"{v:.1e}" if v else "0"),
        Column("verdict_text", ""),
    )
    shown = [r | {"verdict_text": _verdict(r), "says_text": _folded(r["text"])} for r in rows]
    failed = sum(not r["ok"] for r in rows)
    text = (f"{len(rows) - failed} of {len(rows)} proven",)
    notes = (
        "identities in float64, within 1e-11 of the largest expected value; where two things must differ, they do",
        (
            "expected and observed are numbers, shapes, or norms of what two routes give; documents 000 to 004 are "
            "articles whose claims are tested: README"
        ),
    )
    return Report("verify", inputs, {"dtype": "fp64", "k": 1024}, rows, (Table("", columns, shown),), notes, text)


def _verdict(row: Row) -> str:
    if not row["ok"]:
        return "FAILED"
    return "differs" if row["must_differ"] else "ok"


def _folded(text: str) -> str:
    from textwrap import fill

    return fill(text, 34)


def _short(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
