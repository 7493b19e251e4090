"""A report as text: table, JSON, CSV or Markdown. The only importer of rich, and only for tables."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attncalc.errors import AttncalcError, shown
from attncalc.report import Report, Table

WIDTH = 80
NARROWEST = 40
"""A terminal that says it is narrower gets tables of `WIDTH`, and wraps them itself."""
FORMATS = ("table", "json", "csv", "markdown")


SUFFIXES = {".json": "json", ".csv": "csv", ".md": "markdown"}


def chosen_format(name: str | None, json: bool, output: str | None = None) -> str:
    """`--format`, or `--json` for short, or what the suffix of the output file says, or a table."""
    if json and name not in (None, "json"):
        raise AttncalcError("--json", "is --format json, so another format cannot be given too", got=shown(name))
    if name is not None and name not in FORMATS:
        raise AttncalcError("--format", f"must be one of {', '.join(FORMATS)}", got=shown(name))
    if json or name is not None:
        return name or "json"
    return SUFFIXES.get(Path(output).suffix.lower(), "table") if output is not None else "table"


def deliver(report: Report, form: str, output: str | None) -> None:
    """Print the report, or write it to a file.

    Raises:
        AttncalcError: it cannot be written.
    """
    if form == "table" and output is None and sys.stdout is not None and sys.stdout.isatty():
        _printed(lambda: _print_table(report))
    else:
        deliver_text(text_of(report, form), output)


def deliver_text(text: str, output: str | None) -> None:
    """Print a text, or write it to a file.

    Raises:
        AttncalcError: it cannot be written.
    """
    if output is not None:
        _write_file(Path(output), text.encode("utf-8", "backslashreplace"))
        return
    if sys.stdout is None:
        raise AttncalcError("output", "standard output is closed")
    _printed(lambda: sys.stdout.write(text))


def _printed(write: Callable[[], object]) -> None:
    try:
        write()
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        silence_stdout()
        raise AttncalcError("output", "cannot be written", got=error.strerror or "an error") from None


def silence_stdout() -> None:
    """Let nothing more go to a standard output that takes nothing, so that the interpreter's last flush is quiet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _write_file(path: Path, data: bytes) -> None:
    # A regular file is replaced whole or not at all; a pipe or device is written to.
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            part.write_bytes(data)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "a path that no file can have"
        raise AttncalcError("--output", f"cannot write {shown(str(path))}", got=reason) from None


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
    def cell(value: Any) -> Any:
        return "; ".join(map(str, value)) if isinstance(value, (list, tuple)) else value

    def nested(value: Any) -> bool:
        return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))

    return {k: cell(v) for k, v in row.items() if not nested(v) and not k.endswith("_text")}


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
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if console.width < NARROWEST:
        console = Console(highlight=False, markup=False, emoji=False, width=WIDTH)
    _draw(report, console)


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
        console.print(fill(line, WIDTH, subsequent_indent="  ") if report.wrapped else line)
    notes = (*report.notes, *_convention_notes(report))
    if notes:
        console.print()
    for note in notes:
        console.print(fill(f"note: {note}", WIDTH, subsequent_indent="  "), style="dim")


def _rich_table(table: Table) -> Any:
    from rich import box
    from rich.table import Table as RichTable

    try:
        "─".encode(getattr(sys.stdout, "encoding", None) or "utf-8")
        lines = box.SIMPLE_HEAD
    except UnicodeEncodeError:
        lines = box.ASCII2
    drawn = RichTable(box=lines, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), collapse_padding=True)
    for column in table.columns:
        number = any(isinstance(row[column.key], (int, float)) for row in table.rows)
        drawn.add_column(column.header, justify="right" if number else "left", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(column.text(row[column.key]) for column in table.columns))
    return drawn


def _each(value: str | list[str]) -> str:
    """A format, or those of several results, each once."""
    return value if isinstance(value, str) else " or ".join(dict.fromkeys(value))


def _convention_notes(report: Report) -> tuple[str, ...]:
    c = report.conventions
    if "count" not in c:
        return ()
    states = any(r.get("bytes_fixed") or r.get("cache_bytes_constant") for r in report.results)
    kept = f"cache {_each(c['kv_dtype'])}"
    if c["index_dtype"] != c["kv_dtype"]:
        kept += f", index keys {_each(c['index_dtype'])}"
    if states:
        kept += f", constant states {_each(c['state_dtype'])}, convolution states {_each(c['conv_dtype'])}"
    if report.command == "cache":
        return (kept,)
    if report.command == "fit":
        return (f"weights {c['weight_dtype']} (every matrix, embedding and head too), {kept}",)
    pairs = "exact attended pairs" if c["count"] == "causal" else "every new token with every key present"
    apart = "softmax, norms, rotation and gates apart"
    chip = "scores on chip, where the value product finds what score has read"
    notes = (
        f"2 FLOPs per multiply-add, {pairs}; {apart}; {chip}",
        f"weights {c['weight_dtype']}, activations {c['activation_dtype']}, {kept}",
    )
    if report.command != "flops":
        return notes
    logits = "every new token" if c["head_tokens"] == "all" else "the last token of each sequence"
    return (*notes, f"weights of min(experts, tokens * top_k) experts in a layer; logits of {logits}")
