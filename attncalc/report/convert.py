"""Rows of `convert`."""

from collections.abc import Sequence

from attncalc.report import Column, Report, Row, Table, count_text, flops_text, number_text


def convert_report(inputs: Row, conventions: Row, row: Row, notes: Sequence[str]) -> Report:
    """`attncalc convert`: before and after, the construction, the proof."""
    sides = (Column("what", ""), Column("before", str(row["from"])), Column("after", str(row["to"])))
    lines: list[Row] = [
        {"what": "query heads", "before": count_text(row["q_heads"]), "after": count_text(row["q_heads"])},
        _line(row, "KV heads", "kv_heads"),
        _line(row, "K width", "head_dim_k"),
        _line(row, "V width", "head_dim_v"),
        _line(row, "cache, elements per token", "cache_elements_per_token_per_layer"),
        _line(row, "core FLOPs", "core_flops"),
        _line(row, "layer FLOPs", "flops_attention"),
        _line(row, "parameters", "parameters"),
    ]
    proof = (
        Column("text", "proven"),
        Column("expected", "expected", _short),
        Column("observed", "observed", _short),
        Column("error", "error", lambda v: f"{v:.1e}" if v else "0"),
        Column("verdict", ""),
    )
    proofs = [p | {"verdict": "ok" if p["ok"] else "FAILED"} for p in row["proofs"]]
    on = row["proven_on"]
    title = (
        f"random weights in float64: hidden size {on['hidden_size']}, {on['num_heads']} heads, "
        f"{on['num_kv_heads']} KV heads of {on['head_dim']}"
    )
    ratio = number_text(row["core_flops_ratio"])
    verdict = f"exact, not cheaper: the same cache, {ratio} times the core FLOPs, until the latent is truncated"
    text = (*row["construction"], f"{verdict}, and then it is no longer exact")
    tables = (
        Table(f"one layer, 1 new, {inputs['context']:,} tokens, absorbed", sides, lines),
        Table(title, proof, proofs),
    )
    return Report("convert", inputs, conventions, [row], tables, tuple(notes), text)


def _line(row: Row, what: str, key: str) -> Row:
    text = flops_text if "flops" in key else count_text
    return {"what": what, "before": text(row[f"{key}_before"]), "after": text(row[f"{key}_after"])}


def _short(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"
