"""One function for each command: options in, report out. The command line and tests call these."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attncalc.dtypes import Formats
from attncalc.engines import ALL, ENGINES, engine
from attncalc.engines.options import EngineOptions, option
from attncalc.errors import AttncalcError, shown, suggestion
from attncalc.inputs import (
    DEFAULT_CONTEXT,
    Named,
    Options,
    Resolved,
    conventions_record,
    find_models,
    named_record,
    resolve,
)
from attncalc.model import Model
from attncalc.report import Report
from attncalc.units import parse_count

if TYPE_CHECKING:
    from attncalc.allocation import Allocation, Baseline
    from attncalc.flops import StepCost

    Made = tuple[Allocation, Sequence[Baseline]]

T = TypeVar("T")

Row = dict[str, Any]


def model_inputs(named: list[Named], resolved: list[Resolved], engines: list[str]) -> Row:
    """Models, engines and workload, as they stand in `inputs`."""
    return {
        "models": [named_record(n) for n in named],
        "engines": engines,
        "context": common([r.workload.context for r in resolved]),
        "new_tokens": common([r.workload.new_tokens for r in resolved]),
        "batch": resolved[0].workload.batch,
        "tp": resolved[0].tp,
    }


def common(values: list[Any]) -> Any:
    """The value, where all are the same."""
    return values[0] if len(set(values)) == 1 else values


def notes_of(resolved: list[Resolved]) -> list[str]:
    """What was remarkable about the inputs."""
    return [note for r in resolved for note in r.notes]


def one_conventions(resolved: list[Resolved], formats: list[Formats] | None = None) -> Row:
    """The conventions, of all models together; `formats` are those that engines really keep."""
    record = conventions_record(resolved[0].conventions)
    if formats is None:
        return record | {"kv_dtype": common([r.conventions.formats.kv for r in resolved])}
    return record | {
        "kv_dtype": common([f.kv for f in formats]),
        "state_dtype": common([f.of("state", 1).name for f in formats]),
        "conv_dtype": common([f.of("conv", 1).name for f in formats]),
        "index_dtype": common([f.index or f.kv for f in formats]),
    }


def cache(positional: list[str], options: list[str], engines: list[str], asked: Options) -> Report:
    """`attncalc cache`."""
    from attncalc.allocation import Request, baselines, idle_options, run

    idle: list[str] = []
    named = find_models(positional, options)
    resolved = [resolve(asked, n.model) for n in named]

    def compute(model: Model, r: Resolved, engine: str, settings: EngineOptions) -> "Made":
        w, c = r.workload, r.conventions
        request = Request(w.context, w.batch, c.formats, c.form, r.tp, asked.mtp, settings)
        made = run(model, engine, request)
        idle.extend(idle_notes(model, engine, idle_options(model, engine, request)))
        return made, baselines(made, mtp=asked.mtp)

    made, refused, used = under_engines(named, resolved, engines, asked.engine, compute)
    notes = notes_of(resolved)
    for allocation, compared in made:
        notes += [f"{allocation.model.id}, {allocation.engine}: {r.rule} ({r.bytes:+,} B)" for r in allocation.reasons]
        notes += [f"{allocation.model.id}: no {b.name} of these heads: {b.reason}" for b in compared if b.reason]
        notes += [f"{allocation.model.id}: {line}" for line in allocation.replicated]
        notes += [f"{allocation.model.id}, {allocation.engine}: {line}" for line in allocation.shares]
        if asked.engine.dp and allocation.sequences != allocation.batch:
            held = f"{allocation.sequences:,} of the {allocation.batch:,} sequences"
            notes.append(f"{allocation.model.id}, {allocation.engine}: bytes of one replica, which holds {held}")
    inputs = model_inputs(named, resolved, used)
    del inputs["new_tokens"]
    if asked.engine.given:
        inputs["engine_options"] = asked.engine.record()
    conventions = one_conventions(resolved, [a.formats for a, _ in made])
    from attncalc.report.cache import cache_report

    return cache_report(inputs, conventions, made, list(dict.fromkeys(notes + idle + refused)))


def idle_notes(model: Model, engine: str, names: Iterable[str]) -> list[str]:
    """What was set and changes nothing."""
    return [f"{model.id}, {engine}: {option(name)} changes nothing here" for name in names]


def under_engines(
    named: list[Named],
    resolved: list[Resolved],
    engines: list[str],
    settings: EngineOptions,
    compute: Callable[[Model, Resolved, str, EngineOptions], T],
) -> tuple[list[T], list[str], list[str]]:
    """What every model comes to under every engine, notes, and the engines.

    `all` gives each engine the options that it has, and a refusal of one is a note.
    """
    if ALL not in engines:
        with_version = [name for name in dict.fromkeys(engines) if "version" in engine(name).options]
        if settings.version is not None and len(with_version) > 1:
            rule = f"must be of one engine, and {' and '.join(with_version)} each have their own versions"
            raise AttncalcError("--engine-version", rule, got=shown(settings.version), hint="Give one --engine")
        pairs = [(n.model, r) for n, r in zip(named, resolved, strict=True)]
        return [compute(m, r, engine, settings) for m, r in pairs for engine in engines], [], engines
    profiles = [engine(name) for name in ENGINES]
    left = {p.name: settings.limited(p.options) for p in profiles}
    notes = []
    for name in settings.given:
        without = [p for p in left if name not in left[p].given]
        within = " within --tp" if name == "dp" and settings.dp_attention else ""
        if without:
            notes.append(f"{option(name)}{within} changes nothing in {', '.join(without)}: no such option")
    made = []
    for n, r in zip(named, resolved, strict=True):
        for profile in profiles:
            try:
                made.append(compute(n.model, r, profile.name, left[profile.name]))
            except AttncalcError as error:
                if profile.name == "logical":
                    raise
                notes.append(f"{n.model.id}, {profile.name}: {error}")
    return made, notes, [p.name for p in profiles]


def flops(positional: list[str], options: list[str], engines: list[str], asked: Options) -> Report:
    """`attncalc flops`."""
    from attncalc.allocation import same
    from attncalc.flops import step_cost

    idle: list[str] = []
    named = find_models(positional, options)
    resolved = [resolve(asked, n.model) for n in named]

    def compute(model: Model, r: Resolved, engine: str, settings: EngineOptions) -> "StepCost":
        w = r.workload

        def cost(options: EngineOptions) -> "StepCost":
            shared = {"batch": w.batch, "tp": r.tp}
            return step_cost(
                model, w.context, w.new_tokens, engine=engine, conventions=r.conventions, options=options, **shared
            )

        made = cost(settings)
        idle.extend(idle_notes(model, engine, (n for n in settings.given if same(cost, settings, settings.without(n)))))
        return made

    costs, refused, used = under_engines(named, resolved, engines, asked.engine, compute)
    inputs = model_inputs(named, resolved, used) | {"phase": costs[0].workload.phase}
    if asked.engine.given:
        inputs["engine_options"] = asked.engine.record()
    notes = notes_of(resolved) + idle + refused + [n.model.partial_note for n in named if n.model.partial_note]
    for cost in costs:
        silent = [w.name for w in cost.model.extras(mtp=asked.mtp) if w.operation == "none" and w.place != "embedding"]
        if silent:
            notes.append(f"{cost.model.id}: elementwise work with {', '.join(silent)} is in no count")
    from attncalc.report.flops import flops_report

    conventions = one_conventions(resolved, [cost.conventions.formats for cost in costs])
    return flops_report(inputs, conventions, costs, list(dict.fromkeys(notes)))


def compare(
    names: list[str], like: str | None, sizes: Mapping[str, str | None], asked: Options, device: str | None
) -> Report:
    """`attncalc compare`."""
    from attncalc import compare as layers
    from attncalc.attention import VARIANTS
    from attncalc.dimensions import known_variants
    from attncalc.presets import ids, load_device

    if not names:
        hint = f"Variants: {', '.join(known_variants())}"
        raise AttncalcError("compare", "name at least one variant or model", hint=hint)
    accelerator = load_device(device) if device is not None else None
    dimensions, notes = _dimensions(like, sizes, names)
    model_names = [n for n in names if n.partition(":")[0] not in VARIANTS]
    _check_used([n.partition(":")[0] for n in names if n not in model_names], like, sizes)
    for name in model_names:
        if "/" not in name and "." not in name and name.lower() not in ids("models"):
            known = (*VARIANTS, *ids("models"))
            hint = suggestion(name, known, "`attncalc variants` and `attncalc models` list all")
            raise AttncalcError("compare", "no such variant or model", got=repr(name), hint=hint)
    named = {n.given: n for n in (find_models(model_names, []) if model_names else [])}
    if asked.context is None:
        asked = replace(asked, context=str(DEFAULT_CONTEXT))
    resolved = [resolve(asked, named[n].model if n in named else None) for n in names]
    chosen = []
    for name, r in zip(names, resolved, strict=True):
        if name in named:
            model = named[name].model
            found = layers.layers_of_groups(model.id, model.groups, asked.form)
        else:
            found = layers.layers_of(name, dimensions, asked.form)
        chosen += [layers.measure_layer(x, r.workload, r.conventions, r.tp) for x in found]
    if asked.form is not None and not any(f.layer.form == asked.form for f in chosen):
        forms = dict.fromkeys(form for f in chosen for form in f.layer.attention.forms)
        raise AttncalcError(
            "--form", "nothing named here has this form", got=asked.form, hint=f"Known: {', '.join(forms)}"
        )
    first = resolved[0]
    inputs = {
        "names": names,
        "models": [named_record(n) for n in named.values()],
        "like": like,
        "dimensions": asdict(dimensions),
        "context": first.workload.context,
        "new_tokens": first.workload.new_tokens,
        "batch": first.workload.batch,
        "tp": first.tp,
        "device": accelerator.id if accelerator else None,
    }
    conventions = one_conventions(resolved)
    dtype = first.conventions.formats.activation
    from attncalc.report.compare import compare_report

    return compare_report(inputs, conventions, chosen, accelerator, dtype, [*notes, *notes_of(resolved)])


def _check_used(variants: list[str], like: str | None, sizes: Mapping[str, str | None]) -> None:
    """Refuse a dimension that nothing named here has: the table would not show it."""
    from attncalc.dimensions import used_dimensions

    used = used_dimensions(variants)
    if like is not None and not variants:
        raise AttncalcError("--like", "gives dimensions to variants, and none is named", got=repr(like))
    for name, text in sizes.items():
        inherited = name == "head_dim" and used & {"v_head_dim", "qk_nope_head_dim"}
        if text is not None and name not in used and not inherited:
            raise AttncalcError(f"--{name.replace('_', '-')}", "is a dimension of nothing named here", got=text)


def _dimensions(like: str | None, sizes: Mapping[str, str | None], names: list[str]) -> tuple[Any, list[str]]:
    from attncalc.dimensions import Dimensions, dimensions_like, shown_attention

    notes: list[str] = []
    base = Dimensions()
    if like is not None:
        model = find_models([like], [])[0].model
        attention = shown_attention(model)
        if attention is None:
            raise AttncalcError("--like", "must name a model with attention", got=like)
        base = dimensions_like(attention)
        kinds = {g.attention for g in model.groups if g.attention}
        if len(kinds) > 1:
            first = next(g for g in model.groups if g.attention == attention)
            notes.append(f"dimensions are those of layer {first.indices[0]} of {model.id}; its layers differ")
        if attention.variant not in ("mla", "dsa") and any(n.partition(":")[0] in ("mla", "mla-split") for n in names):
            notes.append(f"latent sizes of mla are DeepSeek-V3's: {model.id} has none")
    given: dict[str, int | None] = {
        name: parse_count(
            text, f"--{name.replace('_', '-')}", minimum=int(name not in ("q_lora_rank", "qk_rope_head_dim"))
        )
        for name, text in sizes.items()
        if text is not None
    }
    if given.get("q_lora_rank") == 0:
        given["q_lora_rank"] = None
    if "head_dim" in given:
        given = {"v_head_dim": given["head_dim"], "qk_nope_head_dim": given["head_dim"]} | given
    if {"heads", "head_dim"} & set(given) and "hidden_size" not in given and like is None:
        given["hidden_size"] = (given.get("heads") or base.heads) * (given.get("head_dim") or base.head_dim)
    return replace(base, **given), notes  # type: ignore[arg-type]


def explain(variant: str | None, models: list[str], asked: Options) -> Report:
    """`attncalc explain`."""
    from attncalc.allocation import check_form_known, own_form
    from attncalc.attention import VARIANTS
    from attncalc.attention.base import check_form
    from attncalc.compare import Layer, layers_of
    from attncalc.dimensions import Dimensions
    from attncalc.explain import explain_layer
    from attncalc.report.explain import explain_report

    if variant is not None and variant.partition(":")[0] not in VARIANTS:
        models, variant = [variant, *models], None
    if (variant is None) == (not models):
        raise AttncalcError("explain", "name either a variant or models")
    chosen: list[tuple[Layer, str, Resolved]] = []
    profile = engine("logical")
    if variant is not None:
        resolved = [resolve(asked, None)]
        layer = layers_of(variant, Dimensions(), asked.form)[0]
        if asked.form is not None:
            check_form(layer.attention, asked.form)
        _, cached = profile.execution(layer.attention, resolved[0].workload, layer.form, EngineOptions())
        chosen.append((layer, cached, resolved[0]))
        inputs: Row = {"variant": variant, "dimensions": asdict(Dimensions())}
    else:
        named = find_models([], models)
        resolved = [resolve(asked, n.model) for n in named]
        for n, r in zip(named, resolved, strict=True):
            check_form_known(n.model, asked.form)
            for group in n.model.groups:
                if group.attention:
                    wish = own_form(group, asked.form)
                    form, cached = profile.execution(group.attention, r.workload, wish, EngineOptions())
                    layer = Layer(group.variant, group.attention, group.reach, form, n.model.id, group.indices)
                    chosen.append((layer, cached, r))
        inputs = model_inputs(named, resolved, ["logical"])
    rows: list[Row] = []
    seen = set[tuple[object, ...]]()
    for layer, cached, r in chosen:
        key = (layer.model, layer.attention, layer.reach, layer.form)
        if key not in seen:
            place = " ".join(filter(None, (layer.model, layer.name, layer.form, layer.reach.text)))
            args = (layer.attention, layer.reach, layer.form, cached, r.workload, r.conventions)
            rows += explain_layer(place, *args)
        seen.add(key)
    workload = resolved[0].workload
    inputs |= {"context": workload.context, "new_tokens": workload.new_tokens, "batch": workload.batch}
    return explain_report(inputs, one_conventions(resolved), rows, notes_of(resolved))


def models(names: list[str], *, mtp: bool) -> Report:
    """`attncalc models`."""
    from attncalc.presets import ids, load

    found = [n.model for n in find_models(names, [])] if names else [load(i) for i in ids("models")]
    if mtp and not names:
        raise AttncalcError("--mtp", "name the models whose MTP layers to add")
    from attncalc.report.catalogue import models_report

    return models_report(found, single=bool(names), mtp=mtp)


def export(names: list[str], output: str | None = None) -> str:
    """`attncalc models --export`: the preset document of one model, as YAML, which must not replace what it reads."""
    from attncalc.export import document_yaml
    from attncalc.presets import document, find_model

    if len(names) != 1:
        raise AttncalcError("--export", "writes one model", got=f"{len(names)} names")
    path, _ = find_model(names[0])
    read = path / "config.json" if path.is_dir() else path
    text = document_yaml(document(path))
    if output is not None and Path(output).exists() and Path(output).samefile(read):
        raise AttncalcError("--output", "is the file that is read", got=shown(output))
    return text


def variants() -> Report:
    """`attncalc variants`."""
    from attncalc.attention import VARIANTS, variant_class

    rows = []
    for name, entry in VARIANTS.items():
        cls = variant_class(name)
        rows.append({"variant": name, "what": entry.about, "forms": list(cls.forms), "source": cls.source})
    from attncalc.report.catalogue import variants_report

    return variants_report(rows)


def devices() -> Report:
    """`attncalc devices`."""
    from attncalc.presets import ids, load_device
    from attncalc.report.catalogue import devices_report

    return devices_report([load_device(i) for i in ids("devices")])
