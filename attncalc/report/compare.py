"""Rows of `compare`."""

from collections.abc import Sequence

from attncalc.compare import LayerFigures
from attncalc.device import Device
from attncalc.report import (
    Column,
    Report,
    Row,
    Table,
    count_text,
    exact,
    exact_bytes,
    flops_text,
    gemm_text,
    number_text,
    ratio_text,
    settings_of,
)
from attncalc.units import decimal_bytes


def compare_result(f: "LayerFigures", device: "Device | None", dtype: str) -> Row:
    """One layer."""
    constant_only = f.cache_elements == 0
    gemm = f.score.gemm if f.score else None
    row: Row = {
        "variant": f.layer.name,
        "form": f.layer.form,
        "reach": f.layer.reach.text,
        "q_heads": f.shape.q_heads,
        "kv_heads": f.shape.kv_heads,
        "head_dim_k": f.shape.head_dim_k,
        "head_dim_v": f.shape.head_dim_v,
        "cache_elements_per_token_per_layer": exact(f.cache_elements),
        "cache_bytes_per_token_per_layer": exact_bytes(f.cache_bits_per_token),
        "cache_bytes_constant": f.cache_bytes_constant,
        "cache_ratio_to_mha": None if constant_only else float(f.mha_elements / f.cache_elements),
        "score_gemm": {k: gemm[k] for k in ("m", "n", "k")} | {"gemm_batch": gemm["gemm_batch"]} if gemm else None,
        "score_flops": f.score_flops,
        "core_flops": f.core_flops,
        "flops_attention": f.flops_attention,
        "intensity": f.core_flops / f.core_bytes if f.core_bytes else None,
        "parameters": f.parameters,
        "expand_from_new_tokens": f.expand_from,
        "sparse_beats_dense_from": f.sparse_from,
    }
    if f.layer.model:
        row = {"model": f.layer.model, "indices": list(f.layer.indices)} | row
    if device:
        peak, bandwidth = device.ridge(dtype)
        row |= {"bound": f.bound(device, dtype), "ridge": peak / bandwidth}
    return row


def compare_report(
    inputs: Row,
    conventions: Row,
    figures: "Sequence[LayerFigures]",
    device: "Device | None",
    dtype: str,
    notes: Sequence[str],
) -> Report:
    """`attncalc compare`."""
    results = [compare_result(f, device, dtype) for f in figures]
    rows = [r | _compare_text(r) for r in results]
    cache_columns = (
        Column("name", "variant"),
        Column("kv_heads", "KV", count_text),
        Column("widths", "K/V"),
        Column("cache_elements_per_token_per_layer", "elem./token", number_text),
        *(
            (Column("cache_bytes_constant", "constant", lambda v: decimal_bytes(v) if v else "-"),)
            if any(r["cache_bytes_constant"] for r in results)
            else ()
        ),
        Column("cache_ratio_to_mha", "MHA is", ratio_text),
        Column("gemm", "score M x N x K"),
    )
    cost_columns = (
        Column("name", "variant"),
        Column("score_flops", "scores", flops_text),
        Column("core_flops", "core", flops_text),
        Column("flops_attention", "whole layer", flops_text),
        Column("intensity", "core FLOP/B", number_text),
        *((Column("bound", "core bound"),) if device else ()),
        Column("parameters", "parameters", count_text),
    )
    kv_dtype = conventions["kv_dtype"]
    cache = kv_dtype if isinstance(kv_dtype, str) else " or ".join(dict.fromkeys(kv_dtype))
    title, _ = settings_of([inputs | {"kv_dtype": cache}], "new_tokens", "context", "batch", "kv_dtype", "tp")
    tables = (Table(f"one layer, {title}", cache_columns, rows), Table("", cost_columns, rows))
    text = tuple(
        f"{r['name']}: expanding K and V costs fewer FLOPs than absorbing from "
        f"{r['expand_from_new_tokens']:,} new tokens"
        for r in rows
        if r["expand_from_new_tokens"] and r["form"] == "absorbed"
    )
    text += tuple(
        f"{r['name']}: indexer and core cost fewer FLOPs than a core over all keys from a context of "
        f"{r['sparse_beats_dense_from']:,} tokens (finding the top k of the scores counts 0)"
        for r in rows
        if r["sparse_beats_dense_from"]
    )
    if device:
        peak, bandwidth = device.ridge(dtype)
        bound = (
            f"bound: {device.name} turns at {peak / bandwidth:.4g} FLOP/B, its dense {dtype} peak over its bandwidth"
        )
        text = (*text, bound)
    return Report("compare", inputs, conventions, results, tables, tuple(notes), text)


def _compare_text(row: Row) -> Row:
    name = row["variant"] if row["form"] == "direct" else f"{row['variant']}:{row['form']}"
    if "model" in row:
        reach = "" if row["reach"] == "full" else f" {row['reach']}"
        name = f"{row['model']} {name}{reach}"
    gemm = gemm_text(row["score_gemm"]) if row["score_gemm"] else "-"
    return {"name": name, "widths": f"{row['head_dim_k']}/{row['head_dim_v']}", "gemm": gemm}
