"""A report as text: table, JSON, CSV or Markdown. The only importer of rich, and only for tables."""

import sys
from pathlib import Path
from typing import Any

from attncalc.errors import AttncalcError, shown
from attncalc.report import Report, Table

WIDTH = 80
FORMATS = ("table", "json", "csv", "markdown")


def chosen_format(name: str | None, json: bool) -> str:
    """`--format`, or `--json` for short."""
    if json and name not in (None, "json"):
        raise AttncalcError("--json", "is --format json, so another format cannot be given too", got=shown(name))
    if name is not None and name not in FORMATS:
        raise AttncalcError("--format", f"must be one of {', '.join(FORMATS)}", got=shown(name))
    return "json" if json else name or "table"


def deliver(report: Report, form: str, output: str | None) -> None:
    """Print the report, or write it to a file.

    Raises:
        AttncalcError: the file cannot be written.
    """
    if output is None:
        if form == "table":
            _print_table(report)
        else:
            sys.stdout.write(text_of(report, form))
        return
    try:
        Path(output).write_text(text_of(report, form), encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "a path that no file can have"
        raise AttncalcError("--output", f"cannot write {shown(output)}", got=reason) from None


def text_of(report: Report, form: str) -> str:
    """The report as text without colour."""
    if form == "json":
        import json

        return json.dumps(report.record(), indent=2, ensure_ascii=False) + "\n"
    if form == "csv":
        return _csv(report)
    if form == "markdown":
        return _markdown(report)
    return _plain(report)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if not isinstance(v, (dict, list, tuple)) and not k.endswith("_text")}


def _csv(report: Report) -> str:
    import csv
    from io import StringIO

    out = StringIO()
    rows = [_flat(row) for row in report.tables[0].rows]
    writer = csv.DictWriter(out, list(dict.fromkeys(k for row in rows for k in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _markdown(report: Report) -> str:
    table = report.tables[0]
    lines = ["| " + " | ".join(c.header or " " for c in table.columns) + " |"]
    lines.append("|" + "|".join(" --- " for _ in table.columns) + "|")
    for row in table.rows:
        cells = (c.text(row[c.key]).replace("|", "\\|").replace("\n", "<br>") for c in table.columns)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _print_table(report: Report) -> None:
    if sys.stdout.isatty():
        from rich.console import Console

        _draw(report, Console(highlight=False, markup=False, emoji=False))
    else:
        sys.stdout.write(_plain(report))


def _plain(report: Report) -> str:
    """The tables at their natural width, without colour and without spaces at line ends."""
    from io import StringIO

    from rich.console import Console

    out = StringIO()
    _draw(report, Console(file=out, highlight=False, markup=False, emoji=False, width=4096, color_system=None))
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def _draw(report: Report, console: Any) -> None:
    from textwrap import fill

    for i, table in enumerate(t for t in report.tables if t.rows and t.shown):
        if i:
            console.print()
        if table.title:
            console.print(table.title, style="bold")
        console.print(_rich_table(table))
    if report.text:
        console.print()
    for line in report.text:
        console.print(line if report.command == "explain" else fill(line, WIDTH, subsequent_indent="  "))
    notes = (*report.notes, *_convention_notes(report))
    if notes:
        console.print()
    for note in notes:
        console.print(fill(f"note: {note}", WIDTH, subsequent_indent="  "), style="dim")


def _rich_table(table: Table) -> Any:
    from rich import box
    from rich.table import Table as RichTable

    drawn = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True)
    for column in table.columns:
        number = any(isinstance(row[column.key], (int, float)) for row in table.rows)
        drawn.add_column(column.header, justify="right" if number else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(column.text(row[column.key]) for column in table.columns))
    return drawn


def _convention_notes(report: Report) -> tuple[str, ...]:
    c = report.conventions
    if "count" not in c:
        return ()
    if report.command == "cache":
        return ()
    pairs = "exact attended pairs" if c["count"] == "causal" else "every new token with every key present"
    return (
        f"2 FLOPs per multiply-add, {pairs}; softmax, norms, rotation and gates apart; scores on chip",
        f"weights {c['weight_dtype']}, activations {c['activation_dtype']}, cache {c['kv_dtype']}",
    )
