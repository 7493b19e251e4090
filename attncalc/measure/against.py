"""What another implementation keeps and computes, beside the estimate of it. Imports no torch.

Cache bytes and parameters are compared for every model; FLOPs for the layers whose attention is products alone, which
is what torch's counter sees: softmax attention and MLA.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attncalc.errors import AttncalcError
from attncalc.model import LayerGroup, Model
from attncalc.workload import Conventions

if TYPE_CHECKING:
    from attncalc.measure.reference import Reference, Step

COUNTED = ("mha", "gqa", "mqa", "mla")
"""Variants whose core is score and value products and nothing that a counter of products leaves out."""
DENSE = Conventions(count="dense")


def rows(model: Model | None, name: str, reference: "Reference", context: int, batch: int) -> list[dict[str, Any]]:
    """Two rows, of a prefill of `context` tokens and of one decode step after it; predictions are None without a model.

    `not_compared` names what one of both cannot tell; `ok` is None where nothing could be compared.
    """
    run = reference.run(context, batch)
    return [
        _row(model, name, reference, step, phase, batch)
        for phase, step in (("prefill", run.prefill), ("decode", run.decode))
    ]


def _row(
    model: Model | None, name: str, reference: "Reference", step: "Step", phase: str, batch: int
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": name,
        "model_type": reference.model_type,
        "phase": phase,
        "batch": batch,
        "context": step.context,
        "new_tokens": step.new_tokens,
        "predicted_parameters": None,
        "measured_parameters": reference.parameters,
        "predicted_cache_bytes": None,
        "measured_cache_bytes": step.cache_bytes,
        "cache_tensors": [
            {"tensor": t.tensor, "shape": list(t.shape), "dtype": t.dtype, "count": t.count} for t in step.cache
        ],
        "predicted_flops": None,
        "measured_flops": step.total,
        "flops_layers": None,
        "not_compared": [],
    }
    if model is None:
        return row | {"not_compared": ["parameters", "cache bytes", "FLOPs"], "ok": None}
    row["predicted_parameters"] = model.parameters()
    try:
        row["predicted_cache_bytes"] = model.cache(step.context, batch=batch, engine="transformers").bytes_total
    except AttncalcError as error:
        row["not_compared"].append(f"cache bytes: {error}")
    row |= _flops(model, step, batch, row["not_compared"])
    pairs = [(row[f"predicted_{key}"], row[f"measured_{key}"]) for key in ("parameters", "cache_bytes", "flops")]
    return row | {"ok": all(p == m for p, m in pairs if p is not None and m is not None)}


def _flops(model: Model, step: "Step", batch: int, not_compared: list[str]) -> dict[str, Any]:
    """Predicted and measured FLOPs, of all layers or of those that can be compared."""
    if step.flops is None:
        not_compared.append("FLOPs: transformers keeps the state of this model in a cache of its own")
        return {}
    left_out = uncounted(model.groups)
    for variant, indices in left_out.items():
        rule = "their core is not of products alone, which is what torch's counter sees"
        not_compared.append(f"FLOPs of {len(indices)} {variant} layers: {rule}")
    skipped = {i for indices in left_out.values() for i in indices}
    every = {i for g in model.groups if g.attention for i in g.indices}
    if not every - skipped:
        return {}
    try:
        cost = model.flops(step.context, step.new_tokens, batch=batch, engine="transformers", conventions=DENSE)
    except AttncalcError as error:
        not_compared.append(f"FLOPs: {error}")
        return {}
    if not skipped:
        return {"predicted_flops": cost.flops_attention, "measured_flops": step.total, "flops_layers": sorted(every)}
    compared = every - skipped
    predicted = sum(
        layer.flops_attention // layer.layers * len(compared & set(layer.group.indices)) for layer in cost.layers
    )
    measured = sum(flops for i, flops in step.flops.items() if i in compared)
    return {"predicted_flops": predicted, "measured_flops": measured, "flops_layers": sorted(compared)}


def uncounted(groups: Sequence[LayerGroup]) -> Mapping[str, list[int]]:
    """Layers by their variant in which some attention is more than products."""
    out: dict[str, list[int]] = {}
    for group in groups:
        if group.attention and group.variant not in COUNTED:
            out.setdefault(group.variant, []).extend(group.indices)
    return out
