"""From what a user typed to what is computed, with every default resolved, so that it can be reported."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from attncalc.dtypes import ALIASES, Formats
from attncalc.engines.options import EngineOptions
from attncalc.errors import AttncalcError, shown
from attncalc.model import Model
from attncalc.presets import find_model, load, revision
from attncalc.reach import Count
from attncalc.units import parse_count
from attncalc.workload import Conventions, Workload

DEFAULT_CONTEXT = 131_072


@dataclass(frozen=True, repr=False, eq=False)
class Options:
    """Options as typed; None is not given."""

    context: str | None = None
    batch: str = "1"
    new_tokens: str | None = None
    phase: str | None = None
    kv_dtype: str | None = None
    weight_dtype: str = "bf16"
    activation_dtype: str = "bf16"
    state_dtype: str | None = None
    index_dtype: str | None = None
    form: str | None = None
    tp: str = "1"
    count: str = "causal"
    mtp: bool = False
    logits: str = "all"
    engine: EngineOptions = field(default_factory=EngineOptions)


class Named(NamedTuple):
    """A model, the name that it was asked by, and the rule that found it."""

    given: str
    found_by: str
    model: Model
    revision: str | None = None
    """The commit of a file from Hugging Face."""


def named_record(named: Named) -> dict[str, Any]:
    """How a model was found, as it stands in JSON; and which reader read its configuration, if it has one."""
    record = {"given": named.given, "model": named.model.id, "found_by": named.found_by}
    record |= {"revision": named.revision} if named.revision else {}
    return record | ({"read_by": named.model.reading.reader} if named.model.reading else {})


class Resolved(NamedTuple):
    """What is computed for one model."""

    workload: Workload
    conventions: Conventions
    tp: int
    notes: tuple[str, ...]


def find_models(positional: list[str], options: list[str]) -> list[Named]:
    """All models that were named; one bad name and nothing is computed."""
    names = positional + options
    if not names:
        raise AttncalcError("--model", "name at least one model", hint="`attncalc models` lists all")
    named = []
    for name in names:
        path, found_by = find_model(name)
        named.append(Named(name, found_by, load(path), revision(path)))
    return named


def split_count(text: str) -> int:
    """`--tp`."""
    return parse_count(text, "--tp")


def count_convention(text: str) -> Count:
    """`--count`."""
    if text == "causal":
        return "causal"
    if text == "dense":
        return "dense"
    raise AttncalcError("--count", "must be causal or dense", got=shown(text))


def dtype_name(text: str) -> str:
    """A format name, or two as K/V, in its canonical spelling."""
    return "/".join(ALIASES.get(part, part) for part in text.strip().lower().split("/"))


def resolve(options: Options, model: Model | None) -> Resolved:
    """Workload and conventions for one model, or for none (`compare` without a model)."""
    notes = []
    limit = model.max_position_embeddings if model else None
    if options.context is None:
        context = min(DEFAULT_CONTEXT, limit or DEFAULT_CONTEXT)
    else:
        context = parse_count(options.context, "--context")
        if model and limit and context > limit:
            notes.append(f"{model.id}: {context:,} tokens are above its published maximum of {limit:,}")
    if model and model.reading and model.reading.defaulted_sizes:
        sizes = ", ".join(model.reading.defaulted_sizes)
        notes.append(f"{model.id}: not in its config.json, so the default of its architecture's own code: {sizes}")
    batch, new_tokens = parse_count(options.batch, "--batch"), _new_tokens(options, context)
    declared = model.kv_cache_dtype if model else None
    if declared and options.kv_dtype is None and model:
        notes.append(f"{model.id}: its checkpoint declares a {declared} cache")
    formats = Formats(
        kv=dtype_name(declared or "bf16" if options.kv_dtype is None else options.kv_dtype),
        weight=dtype_name(options.weight_dtype),
        activation=dtype_name(options.activation_dtype),
        state=None if options.state_dtype is None else dtype_name(options.state_dtype),
        index=None if options.index_dtype is None else dtype_name(options.index_dtype),
    )
    conventions = Conventions(count_convention(options.count), options.form, options.logits, options.mtp, formats)
    return Resolved(Workload(context, new_tokens, batch), conventions, split_count(options.tp), tuple(notes))


def _new_tokens(options: Options, context: int) -> int:
    if options.phase not in (None, "prefill", "decode"):
        raise AttncalcError("--phase", "must be prefill or decode", got=shown(options.phase))
    if options.phase and options.new_tokens is not None:
        raise AttncalcError("--phase", "sets the new tokens, so --new-tokens cannot be given too")
    if options.new_tokens is None:
        return context if options.phase == "prefill" else 1
    new_tokens = parse_count(options.new_tokens, "--new-tokens")
    if new_tokens > context:
        rule = f"must not exceed the context of {context} tokens, which counts the new ones"
        raise AttncalcError("--new-tokens", rule, got=new_tokens)
    return new_tokens


def conventions_record(conventions: Conventions) -> dict[str, Any]:
    """The conventions as they stand in JSON."""
    return {
        "flops_per_multiply_add": 2,
        "count": conventions.count,
        "form": conventions.form or "default",
        "kv_dtype": conventions.formats.kv,
        "weight_dtype": conventions.formats.weight,
        "activation_dtype": conventions.formats.activation,
        "state_dtype": conventions.formats.of("state", 1).name,
        "conv_dtype": conventions.formats.of("conv", 1).name,
        "index_dtype": conventions.formats.index or conventions.formats.kv,
        "head_tokens": conventions.head_tokens,
        "mtp": conventions.mtp,
        "scores_on_chip": True,
        "experts_read": "min(experts, tokens * top_k) per layer",
        "k": 1024,
    }
