"""Rows of `flops`."""

from collections.abc import Sequence

from attncalc.flops import LayerCost, StepCost
from attncalc.ops import Contraction, Rowwise
from attncalc.report import (
    Column,
    Report,
    Row,
    Table,
    count_text,
    flops_text,
    gemm_text,
    indices_text,
    number_text,
    settings_of,
)
from attncalc.workload import Conventions


def op_row(op: "Contraction", conventions: "Conventions") -> Row:
    """One operation of one layer."""
    moved, gemm = op.bytes(conventions.formats), op.gemm
    total = sum(moved.values())
    return {
        "name": op.name,
        "expression": op.expression,
        "axes": {a: op.axes[a].size for a in dict.fromkeys(op.expression.replace(",", " ").replace("->", " ").split())},
        "pairs": op.pairs,
        "flops": op.flops,
        "m": gemm["m"],
        "n": gemm["n"],
        "k": gemm["k"],
        "gemm_batch": gemm["gemm_batch"],
        "bytes_weights": moved["weight"],
        "bytes_cache": moved["cache"] + moved["cache_write"],
        "bytes_activations": moved["activation"],
        "intensity": op.flops / total if total else None,
    }


def flops_result(cost: "StepCost") -> Row:
    """One model under one engine."""
    w = cost.workload
    return {
        "model": cost.model.id,
        "engine": cost.engine,
        "phase": w.phase,
        "batch": w.batch,
        "new_tokens": w.new_tokens,
        "context": w.context,
        "tp": cost.tp,
        "partial": list(cost.model.partial),
        "flops_total": cost.total,
        "flops_attention": cost.flops_attention,
        "flops_ffn": cost.flops_ffn,
        "flops_head": cost.flops_head,
        "flops_elementwise": cost.flops_elementwise,
        "bytes_weights": cost.bytes_weights,
        "bytes_cache_read": cost.bytes_cache_read,
        "bytes_cache_write": cost.bytes_cache_write,
        "bytes_activations": cost.bytes_activations,
        "intensity": cost.total / cost.bytes_total if cost.bytes_total else None,
        "layers": [_layer_cost_row(layer, cost.conventions) for layer in cost.layers],
        "head": [op_row(op, cost.conventions) for op in cost.head.contractions],
        "head_elementwise": [_rowwise_row(op) for op in cost.head.rowwise],
        "extra": [op_row(op, cost.conventions) | {"copies": weight.copies} for weight, op in cost.extra],
    }


def _layer_cost_row(layer: "LayerCost", conventions: "Conventions") -> Row:
    every = layer.attention.rowwise + layer.ffn.rowwise + layer.rowwise
    return {
        "indices": list(layer.group.indices),
        "num_layers": layer.layers,
        "variant": layer.group.variant,
        "form": layer.form,
        "reach": layer.group.reach.text,
        "flops": layer.flops_attention + layer.flops_ffn,
        "flops_attention": layer.flops_attention,
        "flops_ffn": layer.flops_ffn,
        "flops_elementwise": layer.flops_elementwise,
        "ops": [op_row(op, conventions) for op in layer.contractions],
        "elementwise": [_rowwise_row(op) for op in every],
    }


def _rowwise_row(op: Rowwise) -> Row:
    return {"name": op.name, "formula": op.formula, "flops": op.flops}


def flops_report(inputs: Row, conventions: Row, costs: "Sequence[StepCost]", notes: Sequence[str]) -> Report:
    """`attncalc flops`."""
    results = [flops_result(c) for c in costs]
    op_rows, sums = [], []
    names = ("model", "engine", "phase", "batch", "new_tokens", "context", "tp")
    for cost, result in zip(costs, results, strict=True):
        shared = {k: result[k] for k in names}
        shared["kv_dtype"] = cost.conventions.formats.kv
        groups = [
            (indices_text(r["indices"]), len(r["indices"]), r["variant"], r["form"], r["ops"]) for r in result["layers"]
        ]
        groups += [("head", 1, "", "", result["head"]), ("extra", 1, "", "", result["extra"])]
        op_rows += [
            shared
            | {"layers": where, "num_layers": count, "variant": variant, "form": form}
            | op
            | {"gemm": gemm_text(op)}
            for where, count, variant, form, ops in groups
            for op in ops
        ]
        parts = ("flops_attention", "flops_ffn", "flops_head", "flops_total", "flops_elementwise")
        sums += [shared | {"part": p.removeprefix("flops_"), "value": result[p], "kind": "FLOPs"} for p in parts]
        moved = ("bytes_weights", "bytes_cache_read", "bytes_cache_write", "bytes_activations")
        words = {k: k.removeprefix("bytes_").replace("_", " ") for k in moved}
        sums += [shared | {"part": words[k], "value": result[k], "kind": "bytes"} for k in moved]
    title, lead = settings_of(op_rows, "model", "phase", "new_tokens", "context", "batch", "kv_dtype", "tp", "engine")
    columns = (
        *lead,
        Column("layers", "layers"),
        Column("name", "operation"),
        Column("gemm", "GEMM M x N x K"),
        Column("flops", "FLOPs, one layer", flops_text),
        Column("intensity", "FLOP/B", number_text),
    )
    sum_columns = (
        *lead,
        Column("part", "whole step"),
        Column("value", "exact", count_text),
        Column("kind", ""),
    )
    tables = (Table(title, columns, op_rows), Table("", sum_columns, sums))
    forms = {
        f"{result['model']}: {r['variant']} computed {r['form']}": None
        for result in results
        for r in result["layers"]
        if r["form"] not in ("direct", "none")
    }
    text = (
        *forms,
        *(f"{r['model']}, {r['engine']}: {number_text(r['intensity'])} FLOP/B over all bytes" for r in results),
    )
    return Report("flops", inputs, conventions, results, tables, tuple(notes), text)
