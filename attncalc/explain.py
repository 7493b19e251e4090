"""Every number unfolded: formula, substituted values, result, source. Made from the objects that give the numbers."""

import re
from collections.abc import Mapping
from typing import Any

from attncalc.attention.base import Attention, Step
from attncalc.attention.kda import KDA
from attncalc.axes import Weight, letters, parenthesised
from attncalc.cache import CacheTensor
from attncalc.ops import Contraction, Rowwise
from attncalc.reach import Reach
from attncalc.workload import Conventions, Workload

Row = dict[str, Any]


def explain_layer(
    place: str,
    attention: Attention,
    reach: Reach,
    form: str,
    cached: str,
    workload: Workload,
    conventions: Conventions,
) -> list[Row]:
    """Cache, parameters and operations of one layer, one row for each number; and how others count a core."""
    step = Step(workload, reach, conventions.count)
    ops = attention.ops(step, form, cached=cached)
    rows = [
        *(_cache_row(t, workload, conventions) for t in attention.cache(reach, cached)),
        *(_weight_row(w) for w in attention.weights(form)),
        *(_op_row(op, step) for op in ops.contractions),
        *(_op_row(op, step) for op in ops.rowwise),
    ]
    out = [{"of": place, "source": attention.source} | row for row in rows]
    if isinstance(attention, KDA):
        for c in attention.core_counts(workload):
            row = _row(c.name, c.formula, c.symbols, c.flops, "FLOPs by this convention", [c.where])
            out.append({"of": f"{place}, its core by every convention", "source": c.source} | row)
    return out


def substitute(formula: str, symbols: Mapping[str, int]) -> str:
    """The formula with every symbol replaced by its value, longest names first."""
    names = sorted(symbols, key=len, reverse=True)
    if not names:
        return formula
    pattern = "|".join(re.escape(n) for n in names)
    return re.sub(rf"\(({pattern})\)|(?<![\w])({pattern})(?![\w])", lambda m: str(symbols[m[1] or m[2]]), formula)


def _cache_row(tensor: CacheTensor, workload: Workload, conventions: Conventions) -> Row:
    made = tensor.at(workload.context, workload.batch, conventions.formats)
    row_format = conventions.formats.of(tensor.kind, tensor.width.size)
    tokens = tensor.tokens(workload.context)
    stored = "tokens" if tensor.reach is not None and tensor.reach.tokens_per_row == 1 else "rows"
    symbols = {"batch": workload.batch, stored: tokens, tensor.width.label: tensor.width.size}
    heads = ""
    if tensor.heads.label:
        symbols[tensor.heads.label] = tensor.heads.size
        heads = f" * {tensor.heads.label}"
    bits = row_format.row(tensor.width.size)
    simple = row_format.scale_bits == row_format.row_bits == 0 and row_format.bits % 8 == 0
    if simple:
        formula = f"batch * {stored}{heads} * {parenthesised(tensor.width.label)} * {row_format.bits // 8}"
    else:
        symbols = {k: v for k, v in symbols.items() if k != tensor.width.label} | {"row_bits": bits}
        formula = f"batch * {stored}{heads} * row_bits / 8"
    where = [f"{row_format.name}: {row_format.text}"]
    if tensor.reach is not None and tensor.reach.stored_formula:
        where.append(f"{stored} = {tensor.reach.stored_formula}")
    if not simple:
        where.append(f"row_bits = {bits} for {tensor.width.label} = {tensor.width.size}")
    return _row(f"cache {tensor.name}", formula, symbols, made.bytes, "B", where)


def _weight_row(weight: Weight) -> Row:
    symbols = {weight.axes[a].label: weight.axes[a].size for a in letters(weight.shape)}
    shape = " x ".join(map(str, weight.sizes))
    return _row(weight.name, weight.formula, symbols, weight.elements, "parameters", [f"shape {shape}"])


def _op_row(op: Contraction | Rowwise, step: Step) -> Row:
    where = []
    if op.pairs is not None:
        w = step.workload
        where.append(f"pairs = {op.pairs_formula}; T = {w.new_tokens}, S = {w.context}")
    if isinstance(op, Contraction):
        gemm = op.gemm
        where.insert(0, f"{op.expression}; GEMM {gemm['m']} x {gemm['n']} x {gemm['k']}, {gemm['gemm_batch']} of them")
    unit = "FLOPs" if isinstance(op, Contraction) else "elementwise FLOPs, a stated count"
    return _row(op.name, op.formula, op.symbols, op.flops, unit, where)


def _row(name: str, formula: str, symbols: Mapping[str, int], result: int, unit: str, where: list[str]) -> Row:
    values = substitute(formula, symbols)
    return {
        "name": name,
        "formula": formula,
        "symbols": dict(symbols),
        "values": values,
        "result": result,
        "unit": unit,
        "where": where,
    }
