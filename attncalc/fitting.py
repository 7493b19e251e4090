"""The command `fit`: options in, report out."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from attncalc.allocation import idle_options
from attncalc.capacity import Capacity, Memory, fit
from attncalc.commands import idle_notes, model_inputs, notes_of, one_conventions, under_engines
from attncalc.engines.log import FRACTION_OF_FREE
from attncalc.engines.options import EngineOptions
from attncalc.errors import AttncalcError
from attncalc.inputs import Options, Resolved, find_models, resolve
from attncalc.model import Model
from attncalc.report import Report
from attncalc.units import binary_bytes, parse_bytes, parse_count, parse_ratio

if TYPE_CHECKING:
    from fractions import Fraction

Row = dict[str, Any]
DEFAULT_FRACTION = "0.9"


@dataclass(frozen=True)
class MemoryOptions:
    """What a user said about the GPUs, as typed; None is not given."""

    device: str | None = None
    gpus: str | None = None
    memory_fraction: str | None = None
    reserve: str | None = None
    free_memory: str | None = None
    memory: str | None = None
    tp: str | None = None


def run(positional: list[str], options: list[str], engines: list[str], asked: Options, given: MemoryOptions) -> Report:
    """`attncalc fit`."""
    memory, inputs = _memory(given)
    asked = replace(asked, tp=str(_tensor_parallel(given, asked.engine)))
    named = find_models(positional, options)
    resolved = [resolve(asked, n.model) for n in named]

    def compute(model: Model, r: Resolved, engine: str, settings: EngineOptions) -> Capacity:
        w, c = r.workload, r.conventions
        mine = memory
        if memory.free is not None and engine not in FRACTION_OF_FREE:
            if given.memory_fraction is not None:
                rule = f"{engine} takes it of the whole memory, which --free-memory does not say"
                raise AttncalcError("--memory-fraction", rule, got=given.memory_fraction)
            mine = replace(memory, fraction=1)
        return fit(
            model,
            w.context,
            mine,
            batch=w.batch,
            engine=engine,
            form=c.form,
            tp=r.tp,
            mtp=asked.mtp,
            formats=c.formats,
            options=settings,
        )

    made, refused, used = under_engines(named, resolved, engines, asked.engine, compute)
    inputs = model_inputs(named, resolved, used) | _split(asked) | inputs
    del inputs["new_tokens"]
    if asked.engine.given:
        inputs["engine_options"] = asked.engine.record()
    notes = notes_of(resolved) + [note for c in made for note in _notes(c, memory)] + refused
    from attncalc.report.fit import fit_report

    return fit_report(inputs, one_conventions(resolved, [c.formats for c in made]), made, list(dict.fromkeys(notes)))


def _memory(given: MemoryOptions) -> tuple[Memory, Row]:
    """The memory of one GPU, and how it stands in `inputs`."""
    ways = {"--device": given.device, "--free-memory": given.free_memory, "--memory": given.memory}
    named = [name for name, value in ways.items() if value is not None]
    if not named:
        hint = "Give --device h100, --free-memory 60GB, or --memory 5.38GiB, the budget of the cache"
        raise AttncalcError("fit", "needs a memory", hint=hint)
    if len(named) > 1:
        raise AttncalcError(named[1], f"cannot be given beside {named[0]}")
    if given.memory is not None:
        for name, value in (("--memory-fraction", given.memory_fraction), ("--reserve", given.reserve)):
            if value is not None:
                raise AttncalcError(name, "cannot be given beside --memory, which is the budget itself", got=value)
        budget = parse_bytes(given.memory, "--memory")
        return Memory(cache=budget), {"memory_bytes": budget}
    fraction = _fraction(given.memory_fraction or DEFAULT_FRACTION)
    reserve = 0 if given.reserve is None else parse_bytes(given.reserve, "--reserve")
    shared: Row = {"memory_fraction": float(fraction), "reserve_bytes": reserve}
    if given.free_memory is not None:
        free = parse_bytes(given.free_memory, "--free-memory")
        return Memory(free=free, fraction=fraction, reserve=reserve), {"free_memory_bytes": free} | shared
    from attncalc.presets import load_device

    device = load_device(given.device or "")
    record = {"device": device.id, "device_memory_bytes": device.memory_bytes} | shared
    return Memory(total=device.memory_bytes, fraction=fraction, reserve=reserve), record


def _fraction(text: str) -> "Fraction":
    fraction = parse_ratio(text, "--memory-fraction")
    if not 0 < fraction <= 1:
        raise AttncalcError("--memory-fraction", "must be above 0 and at most 1", got=text)
    return fraction


def _stages(settings: EngineOptions) -> int:
    return 1 if settings.pp is None else settings.pp[0] if len(settings.pp) == 1 else len(settings.pp)


def _replicas(settings: EngineOptions) -> int:
    """Replicas on GPUs of their own; those of the attention alone lie within tp."""
    return 1 if settings.dp_attention else settings.dp or 1


def _tensor_parallel(given: MemoryOptions, settings: EngineOptions) -> int:
    """`--tp`; all of `--gpus` where neither it nor another split is given.

    Raises:
        AttncalcError: the splits do not use every GPU, or decode context parallelism does not divide tp.
    """
    gpus = None if given.gpus is None else parse_count(given.gpus, "--gpus")
    split = given.tp is not None or settings.pp is not None or _replicas(settings) > 1
    tp = parse_count(given.tp, "--tp") if given.tp is not None else 1 if split or gpus is None else gpus
    used = tp * _stages(settings) * _replicas(settings)
    if gpus is not None and used != gpus:
        rule = "must be the product of --tp, --pp and --dp"
        rest, left = divmod(gpus, used)
        hint = f"Give --tp {rest}" if given.tp is None and not left else ""
        raise AttncalcError("--gpus", rule, got=f"{gpus}, where they use {used}", hint=hint)
    for name, inner in (("--dcp", settings.dcp), ("--dp", settings.dp if settings.dp_attention else None)):
        if inner is not None and tp % inner:
            raise AttncalcError(name, f"must divide --tp, {tp}", got=inner)
    return tp


def _split(asked: Options) -> Row:
    settings, tp = asked.engine, int(asked.tp)
    pp, dp = _stages(settings), settings.dp or 1
    return {"pp": pp, "dp": dp, "dcp": settings.dcp or 1, "gpus": tp * pp * _replicas(settings)}


def _notes(made: Capacity, memory: Memory) -> list[str]:
    model, full = made.model, made.full
    notes = [model.partial_note] if model.partial_note else []
    notes += [f"{model.id}: {line}" for line in made.replicated]
    # A version changes the log, too.
    idle = (name for name in idle_options(model, made.engine, made.request) if name != "version")
    notes += idle_notes(model, made.engine, idle)
    if full.bytes_budget < 0:
        over = binary_bytes(-full.bytes_budget)
        weights = made.request.formats.weight
        notes.append(
            f"{model.id}: weights and reserve are {over} more than may be used of a GPU's memory; weights are counted "
            f"in {weights}, --weight-dtype names another format"
        )
    if made.sequences is None or (made.longest is None and not made.constant):
        notes.append(f"{model.id}: any is 2^53 or more, the most that is counted")
    if made.constant:
        notes.append(f"{model.id}: its cache does not grow with the tokens, so a sequence may have any length")
    if memory.cache is None:
        notes.append(f"{model.id}, {made.engine}: {_account(made, memory)}")
        notes.append(
            "not modelled: activations, graphs, buffers of communication, copies that an engine makes of weights, "
            "fragmentation; --reserve is for them"
        )
    return notes


def _account(made: Capacity, memory: Memory) -> str:
    """How the budget follows from the memory, in bytes."""
    fraction, full = f"{float(memory.fraction):g}", made.full
    less = f" - {full.bytes_weights:,} (weights)" if memory.free is None else ""
    less += f" - {memory.reserve:,} (reserve)" if memory.reserve else ""
    start = f"{memory.total if memory.free is None else memory.free:,}"
    if made.engine in FRACTION_OF_FREE:
        share = f"{fraction} * ({start}{less})" if less else f"{fraction} * {start}"
        return f"{share}, in blocks rounded up: {full.bytes_budget:,} B for the cache"
    share = f"{fraction} * {start}" if memory.free is None else start
    return f"{share}{less}: {full.bytes_budget:,} B for the cache"
