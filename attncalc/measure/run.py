"""Real layers beside their prediction."""

import math
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from attncalc.attention.base import input_size
from attncalc.attention.torch_base import Cache, CountOperations
from attncalc.errors import AttncalcError
from attncalc.measure.hardware import (
    TORCH_DTYPES,
    Peaks,
    allocated_bytes,
    check_device,
    free_bytes,
    measure_peaks,
    median_seconds,
)
from attncalc.measure.plan import CHECKED_CONTEXT, FILL_CHUNK, Case, Prediction, Settings, memory_needed, predict
from attncalc.units import both_bytes
from attncalc.workload import Workload

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}
"""Largest error against the reference path in the next wider dtype, relative to the largest reference value."""


class Measurement(NamedTuple):
    """What one case really had, needed and took; None where a device cannot tell."""

    case: Case
    predicted: Prediction
    path: str
    parameters: int
    cache_bytes: int
    cache_tensors: dict[str, tuple[int, ...]]
    cache_allocated_bytes: int | None
    flops: int
    seconds: float | None
    other_seconds: float | None
    other: Prediction
    max_abs_error: float | None
    max_relative_error: float | None
    tolerance: float

    @property
    def exact(self) -> bool:
        """Whether what must match exactly does."""
        shapes = {t.name: t.shape for t in self.predicted.cache}
        return (
            self.parameters == self.predicted.parameters
            and self.cache_bytes == self.predicted.cache_bytes
            and self.cache_tensors == shapes
            and self.flops == self.predicted.flops
        )

    @property
    def ok(self) -> bool:
        """Exact, and the error within its tolerance."""
        return self.exact and (self.max_relative_error is None or self.max_relative_error <= self.tolerance)

    def bound(self) -> str | None:
        """What the step is bound by, as its own time says.

        Another step of the same layer (half the prompt, twice the new tokens) has other FLOPs and other bytes, in
        different proportions; time follows one or the other. None where the proportions are too close to tell.
        """
        if not self.seconds or not self.other_seconds:
            return None
        growth = math.log(self.seconds / self.other_seconds)
        compute = math.log(self.predicted.flops / self.other.flops)
        memory = math.log(self.predicted.bytes_moved / self.other.bytes_moved)
        if abs(compute - memory) < 0.2:
            return None
        return "compute" if abs(growth - compute) < abs(growth - memory) else "memory"


def measure(
    cases: list[Case], settings: Settings, progress: Callable[[str], object]
) -> tuple[list[Measurement], Peaks | None]:
    """All cases in order; memory is predicted first, and what does not fit is refused before anything runs.

    Raises:
        AttncalcError: the device is not there, or a case does not fit into its memory.
    """
    check_device(settings.device)
    free = free_bytes(settings.device)
    for case in cases:
        needed = memory_needed(case, settings)
        if free is not None and needed > free:
            rule = (
                f"{case.layer.name} {case.layer.form} {case.phase} can need {both_bytes(needed)} on {settings.device}"
            )
            raise AttncalcError("measure", rule, got=f"{both_bytes(free)} free", hint="Lower --context or --batch")
    peaks = None
    if settings.device != "meta":
        progress("peaks of the device")
        peaks = measure_peaks(settings.device, settings.dtype, max(5, settings.repeat))
    made = []
    for i, case in enumerate(cases, 1):
        label = " ".join(filter(None, (case.layer.model, case.layer.name, case.layer.form, case.phase)))
        progress(f"{i} of {len(cases)}: {label}")
        torch.manual_seed(settings.seed)
        with torch.no_grad():
            made.append(_measure(case, settings))
    return made, peaks


def build(case: Case, path: str | None, device: str, dtype: torch.dtype) -> nn.Module:
    """The real layer of a case: class `Layer` in the module beside its specification."""
    attention = case.attention
    layer: Any = import_module(f"{type(attention).__module__}_torch").Layer
    if path is not None and path not in layer.paths(attention):
        known = ", ".join(layer.paths(attention))
        raise AttncalcError("--path", f"{case.layer.name} has no such path", got=path, hint=f"It has {known}")
    made: nn.Module = layer(
        attention, case.reach, case.layer.form, cached=case.cached, path=path, device=device, dtype=dtype
    )
    return made


def owner_of(case: Case, path: str | None, device: str, dtype: torch.dtype) -> nn.Module | None:
    """The layer whose K and V a layer without its own reads; None where a layer has its own."""
    lender = case.lender
    return build(lender, path, device, dtype) if lender else None


def _measure(case: Case, settings: Settings) -> Measurement:
    dtype, device = TORCH_DTYPES[settings.dtype], settings.device
    layer, owner = build(case, settings.path, device, dtype), owner_of(case, settings.path, device, dtype)
    w = case.workload
    before = allocated_bytes(device)
    cache, x = _filled(layer, owner, case, w, device, dtype)
    with CountOperations() as counter:
        _counted(layer, case, device, dtype)(x, _fork(cache))
    flops = counter.total
    after = _fork(cache)
    layer(x, after)
    grown = allocated_bytes(device)
    kept = Cache() if owner else after  # what it reads, another layer keeps
    seconds = other_seconds = None
    other = _other(case)
    if device != "meta":
        seconds = median_seconds(lambda: layer(x, _fork(cache)), device, settings.repeat)
        other_cache, other_x = _filled(layer, owner, other, other.workload, device, dtype)
        other_seconds = median_seconds(lambda: layer(other_x, _fork(other_cache)), device, settings.repeat)
    absolute, relative = (None, None) if device == "meta" else _error(layer, case, settings)
    return Measurement(
        case=case,
        predicted=predict(case, settings),
        path=str(layer.path),
        parameters=sum(p.numel() for p in layer.parameters()) + sum(b.numel() for b in layer.buffers()),
        cache_bytes=kept.storage_bytes,
        cache_tensors={name: tuple(t.shape) for name, t in kept.tensors.items()},
        cache_allocated_bytes=None if before is None or grown is None or owner else grown - before,
        flops=flops,
        seconds=seconds,
        other_seconds=other_seconds,
        other=predict(other, settings),
        max_abs_error=absolute,
        max_relative_error=relative,
        tolerance=TOLERANCE[settings.dtype],
    )


def _counted(layer: nn.Module, case: Case, device: str, dtype: torch.dtype) -> nn.Module:
    """The layer, or its reference path where its own leaves out products that the dense count has."""
    if layer.path in getattr(layer, "counted", (layer.path,)):
        return layer
    made = build(case, "reference", device, dtype)
    made.load_state_dict(layer.state_dict())
    return made


def _other(case: Case) -> Case:
    """A prompt of half the length; a step with twice the new tokens at the same context."""
    w = case.workload
    if case.phase == "prefill":
        n = max(1, w.context // 2)
        return Case(case.layer, Workload(n, n, w.batch), case.phase)
    return Case(case.layer, Workload(w.context, min(w.context, 2 * w.new_tokens), w.batch), case.phase)


def _filled(
    layer: nn.Module, owner: nn.Module | None, case: Case, w: Workload, device: str, dtype: torch.dtype
) -> tuple[Cache, Tensor]:
    """A cache as it stands before the step, made by the layer itself, and the step's input [B, T, D].

    Where another layer owns the cache, that layer makes it, and runs the step before the one that reads it.
    """
    width = input_size(case.attention)
    cache = Cache(capacity=w.context, lends=owner is not None)
    chunk = w.context if device == "meta" else FILL_CHUNK
    for start in range(0, w.context - w.new_tokens, chunk):
        n = min(chunk, w.context - w.new_tokens - start)
        (owner or layer)(torch.randn(w.batch, n, width, device=device, dtype=dtype), cache)
    x = torch.randn(w.batch, w.new_tokens, width, device=device, dtype=dtype)
    if owner:
        owner(x, cache)
    return cache, x


def _fork(cache: Cache) -> Cache:
    """The same cache for one more run: tensors are shared, what a step replaces is replaced in the copy alone."""
    made = Cache(cache.length, cache.capacity, dict(cache.buffers), dict(cache.parts), set(cache.reserved))
    made.lends, made.present = cache.lends, dict(cache.present)
    return made


def _error(layer: nn.Module, case: Case, settings: Settings) -> tuple[float, float]:
    """Largest difference to the reference path in a wider dtype with the same weights, and its share.

    At no more than `CHECKED_CONTEXT` tokens: the reference keeps all scores in memory.
    """
    device, dtype = settings.device, TORCH_DTYPES[settings.dtype]
    wide = torch.float32 if device == "mps" else torch.float64
    reference = build(case, "reference", device, wide)
    reference.load_state_dict({k: v.to(wide) for k, v in layer.state_dict().items()})
    owner, wide_owner = owner_of(case, settings.path, device, dtype), owner_of(case, "reference", device, wide)
    if owner and wide_owner:
        wide_owner.load_state_dict({k: v.to(wide) for k, v in owner.state_dict().items()})
    context = min(case.workload.context, CHECKED_CONTEXT)
    new_tokens = context if case.phase == "prefill" else min(case.workload.new_tokens, context)
    x = torch.randn(1, context, input_size(case.attention), device=device, dtype=dtype)
    outputs = []
    for module, lender, values in ((layer, owner, x), (reference, wide_owner, x.to(wide))):
        cache = Cache(lends=lender is not None)
        for part in (values[:, : context - new_tokens], values[:, context - new_tokens :]):
            if part.shape[1]:
                if lender:
                    lender(part, cache)
                out = module(part, cache)
        outputs.append(out.to(wide))
    got, expected = outputs
    error = float((got - expected).abs().max())
    return error, error / float(expected.abs().max())


def rows(made: list[Measurement], peaks: Peaks | None, settings: Settings) -> Iterator[dict[str, Any]]:
    """One row for each case, as the JSON has it."""
    for m in made:
        p, seconds = m.predicted, m.seconds
        row: dict[str, Any] = {
            "variant": m.case.layer.name,
            "form": m.case.layer.form,
            "phase": m.case.phase,
            "path": m.path,
            "reach": m.case.reach.text,
            "dtype": settings.dtype,
            "device": settings.device,
            "batch": m.case.workload.batch,
            "context": m.case.workload.context,
            "new_tokens": m.case.workload.new_tokens,
            "predicted_parameters": p.parameters,
            "measured_parameters": m.parameters,
            "predicted_cache_bytes": p.cache_bytes,
            "measured_cache_bytes": m.cache_bytes,
            "measured_cache_allocated_bytes": m.cache_allocated_bytes,
            "cache_tensors": {name: list(shape) for name, shape in m.cache_tensors.items()},
            "predicted_flops": p.flops,
            "measured_flops": m.flops,
            "predicted_bytes_moved": p.bytes_moved,
            "predicted_seconds": p.seconds(peaks.flops_per_s, peaks.bytes_per_s) if peaks else None,
            "measured_seconds": seconds,
            "achieved_flops_per_s": m.flops / seconds if seconds else None,
            "achieved_bytes_per_s": p.bytes_moved / seconds if seconds else None,
            "predicted_bound": p.bound(peaks.flops_per_s, peaks.bytes_per_s) if peaks else None,
            "measured_bound": m.bound(),
            "max_abs_error": m.max_abs_error,
            "max_relative_error": m.max_relative_error,
            "ok": m.ok,
        }
        if peaks and seconds:
            row["time_ratio"] = seconds / row["predicted_seconds"]
            row["share_of_peak_flops"] = row["achieved_flops_per_s"] / peaks.flops_per_s
            row["share_of_peak_bytes"] = row["achieved_bytes_per_s"] / peaks.bytes_per_s
        if m.case.layer.model:
            row = {"model": m.case.layer.model, "indices": list(m.case.layer.indices)} | row
        yield row
