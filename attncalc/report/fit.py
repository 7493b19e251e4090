"""Rows of `fit`."""

from collections.abc import Sequence

from attncalc.capacity import Capacity
from attncalc.report import Column, Report, Row, Table, count_text, settings_of
from attncalc.report.cache import followed
from attncalc.units import decimal_bytes


def fit_result(made: Capacity) -> Row:
    """One model under one engine."""
    request, options = made.request, made.request.options
    return {
        "model": made.model.id,
        "engine": made.engine,
        "kv_dtype": made.formats.kv,
        "weight_dtype": made.formats.weight,
        "context": request.context,
        "batch": request.batch,
        "tp": request.tp,
        "dp": options.dp or 1,
        "bytes_budget": made.full.bytes_budget,
        "bytes_weights": made.full.bytes_weights,
        "tokens": made.tokens,
        "tokens_one_sequence": made.tokens_one_sequence,
        "sequences": made.sequences,
        "context_of_batch": made.context_of_batch,
        "limiting": made.limiting,
        "longest": made.longest,
        "bytes_used": made.bytes_used,
        "bytes_one_token_more": made.bytes_next,
        "blocks": made.log.blocks if made.log else None,
        "log_lines": list(made.log.lines) if made.log else [],
        **followed(made.engine, made.settings),
        "stages": [room._asdict() | {"layers": list(room.layers)} for room in made.rooms],
    }


LIMITS = {"memory": "memory", "model_maximum": "model", "slots": "slots", None: "nothing"}


def fit_report(inputs: Row, conventions: Row, made: Sequence[Capacity], notes: Sequence[str]) -> Report:
    """`attncalc fit`."""
    results = [fit_result(c) for c in made]
    title, lead = settings_of(results, "model", "context", "batch", "kv_dtype", "tp", "engine")
    # The longest context of a batch, where there is one.
    batches = (Column("context_of_batch", "of batch", any_text),) if inputs["batch"] > 1 else ()
    columns = (
        *lead,
        Column("bytes_weights", "weights", weights_text),
        Column("bytes_budget", "cache", budget_text),
        Column("tokens", "tokens", any_text),
        Column("tokens_one_sequence", "one seq.", any_text),
        *batches,
        Column("sequences", "sequences", any_text),
        Column("limiting", "limit", LIMITS.__getitem__),
    )
    text = tuple(f"{r['model']}, {r['engine']}: {line}" for r in results for line in r["log_lines"])
    return Report("fit", inputs, conventions, results, (Table(title, columns, results),), tuple(notes), text)


def weights_text(value: int | None) -> str:
    """Bytes, where they are known."""
    return "-" if value is None else decimal_bytes(value)


def budget_text(value: int) -> str:
    """What is left for the cache, or missing."""
    return decimal_bytes(value) if value >= 0 else f"-{decimal_bytes(-value)}"


def any_text(value: int | None) -> str:
    """A count; where there is no limit, any number."""
    return "any" if value is None else count_text(value)
