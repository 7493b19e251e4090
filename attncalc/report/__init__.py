"""Results as plain rows: the one place that decides keys, columns and how a value reads. Ratios become floats here."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from attncalc import __version__
from attncalc.reach import ratio

if TYPE_CHECKING:
    from fractions import Fraction

Row = dict[str, Any]


class Column(NamedTuple):
    """A column of a table: the key of its value, its header, and how a person reads the value."""

    key: str
    header: str
    text: Callable[[Any], str] = str


class Table(NamedTuple):
    """Rows and the columns that are shown of them; CSV and Markdown hold the first table of a report.

    One that is not `shown` is for CSV and Markdown alone: the report has a text that reads better.
    """

    title: str
    columns: tuple[Column, ...]
    rows: Sequence[Row]
    shown: bool = True


class Report(NamedTuple):
    """Everything that a command says, before it is drawn."""

    command: str
    inputs: Row
    conventions: Row
    results: list[Row]
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    wrapped: bool = True

    def record(self) -> Row:
        """The JSON object."""
        return {
            "schema": 1,
            "attncalc": __version__,
            "command": self.command,
            "inputs": self.inputs,
            "conventions": self.conventions,
            "results": self.results,
            "notes": list(self.notes),
        }


def exact(value: "int | Fraction") -> int | float | str:
    """A number if a double holds it, else `"p/q"`."""
    if isinstance(value, int):
        return value
    if value.denominator == 1:
        return value.numerator
    near = float(value)
    return near if near == value else f"{value.numerator}/{value.denominator}"


def indices_text(indices: Iterable[int]) -> str:
    """Layer numbers as a person writes them: `0-2, 5, 11-47 step 6`; without a short pattern `54 of 0-116`."""
    every = sorted(indices)
    rest, out = every, []
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 1
        run = 1
        while run < len(rest) and rest[run] - rest[run - 1] == step:
            run += 1
        if run == 2 and step > 1:  # two far layers are no pattern
            run = 1
        first, last = rest[0], rest[run - 1]
        out.append(f"{first}" if run == 1 else f"{first}-{last}" + (f" step {step}" if step > 1 else ""))
        rest = rest[run:]
    text = ", ".join(out)
    return text if len(text) <= MAX_INDICES else f"{len(every)} of {every[0]}-{every[-1]}"


MAX_INDICES = 40
"""Characters of a column of layer numbers; JSON names every layer."""


def count_text(value: int | None) -> str:
    """Thousands separated; a dash for None."""
    return "-" if value is None else f"{value:,}"


def number_text(value: float | str | None) -> str:
    """A count, or a short decimal."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if value < 9_999.5 else f"{value:,.0f}"


def ratio_text(value: float | None) -> str:
    """`56.9x`."""
    from attncalc.units import significant

    return "-" if value is None else f"{significant(value)}x"


def bytes_text(value: int | None) -> str:
    """Bytes in both units."""
    from attncalc.units import both_bytes

    return "-" if value is None else both_bytes(value)


def elements_text(value: float | str | None) -> str:
    """A record, or that layers differ."""
    return "differs" if value is None else f"{number_text(value)} elements"


def flops_text(value: int) -> str:
    """FLOPs, scaled."""
    from attncalc import units

    return units.flops_text(value)


# How a person reads a setting, and the header of its column where rows differ in it.
SETTINGS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "model": ("model", str),
    "phase": ("phase", str),
    "new_tokens": ("new", lambda v: f"{v:,} new"),
    "context": ("tokens", lambda v: f"{v:,} tokens"),
    "batch": ("batch", lambda v: f"batch {v:,}"),
    "kv_dtype": ("cache", lambda v: f"{v} cache"),
    "tp": ("tp", lambda v: "" if v == 1 else f"one GPU of tp {v}"),
    "engine": ("engine", str),
}


def settings_of(rows: Sequence[Row], *names: str) -> tuple[str, tuple[Column, ...]]:
    """A title of the settings that all rows share, and a column for each in which they differ."""
    shared, columns = [], []
    for name in names:
        header, text = SETTINGS[name]
        if len({row[name] for row in rows}) == 1:
            shared.append(text(rows[0][name]))
        else:
            columns.append(Column(name, header, count_text if isinstance(rows[0][name], int) else str))
    return ", ".join(filter(None, shared)), tuple(columns)


def gemm_text(op: Row) -> str:
    """`8 of 16 x 131072 x 128`."""
    batch = f"{op['gemm_batch']} of " if op["gemm_batch"] > 1 else ""
    return f"{batch}{op['m']} x {op['n']} x {op['k']}"


def exact_or_none(value: "int | Fraction | None") -> int | float | str | None:
    """`exact`, where there is a number."""
    return None if value is None else exact(value)


def exact_bytes(bits: "int | Fraction") -> int | float | str:
    """Bits as bytes, whole or not."""
    return exact(ratio(bits.numerator, 8 * bits.denominator))
