"""The functions behind `measure`, `verify` and `convert`: options in, report and verdict out."""

import sys
from dataclasses import asdict, dataclass

from attncalc.attention.base import Attention
from attncalc.attention.gqa import GQA
from attncalc.attention.mla import MLA
from attncalc.errors import AttncalcError, shown
from attncalc.inputs import DEFAULT_CONTEXT, find_models
from attncalc.reach import FULL
from attncalc.report import Report, Row
from attncalc.units import parse_count

TORCH_HINT = 'pip install "attncalc[torch]"'


def need_torch(command: str, install: str = TORCH_HINT) -> None:
    """Refuse without torch, in one line that names the install command.

    Raises:
        AttncalcError: torch cannot be imported.
    """
    import warnings

    # torch warns where NumPy is not installed; nothing here needs it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    try:
        import torch  # noqa: F401
    except ImportError:
        raise AttncalcError(command, "needs torch, which is not installed", hint=install) from None


@dataclass(frozen=True)
class MeasureOptions:
    """Options as typed; None is not given."""

    device: str = "cpu"
    form: str | None = None
    context: str | None = None
    batch: str = "1"
    new_tokens: str = "1"
    dtype: str | None = None
    repeat: str | None = None
    seed: str = "0"
    path: str | None = None
    against: str | None = None


def _progress(line: str) -> None:
    """Progress on stderr: one line that overwrites itself on a terminal, a line each elsewhere."""
    end = "\r" if sys.stderr.isatty() else "\n"
    text = f"measure: {line}"
    sys.stderr.write(f"{text:<78}{end}" if end == "\r" else f"{text}\n")
    sys.stderr.flush()


def measure(names: list[str], models: list[str], asked: MeasureOptions) -> tuple[Report, bool]:
    """`attncalc measure`."""
    if asked.against is not None:
        return _against(names + models, asked)
    from attncalc.attention import VARIANTS
    from attncalc.measure import plan
    from attncalc.report.measure import measure_report

    if asked.device not in plan.DEVICES:
        raise AttncalcError("--device", f"must be one of {', '.join(plan.DEVICES)}", got=shown(asked.device))
    dtype = asked.dtype or plan.DEFAULT_DTYPE[asked.device]
    if dtype not in plan.DTYPES:
        raise AttncalcError("--dtype", f"must be one of {', '.join(plan.DTYPES)}", got=shown(dtype))
    if asked.path not in (None, "fast", "reference"):
        raise AttncalcError("--path", "must be fast or reference", got=shown(asked.path))
    settings = plan.Settings(
        device=asked.device,
        dtype=dtype,
        context=parse_count(asked.context or plan.DEFAULT_CONTEXT[asked.device], "--context"),
        batch=parse_count(asked.batch, "--batch"),
        new_tokens=parse_count(asked.new_tokens, "--new-tokens"),
        repeat=parse_count(asked.repeat or plan.DEFAULT_REPEAT[asked.device], "--repeat", minimum=0),
        seed=parse_count(asked.seed, "--seed", minimum=0),
        path=asked.path,
    )
    if settings.new_tokens > settings.context:
        raise AttncalcError(
            "--new-tokens", f"must not exceed the context of {settings.context}", got=settings.new_tokens
        )
    models = [n for n in names if n.partition(":")[0] not in VARIANTS] + models
    names = [n for n in names if n not in models]
    named = find_models(models, []) if models else []
    cases = plan.cases(names, [n.model for n in named], settings, asked.form)
    if asked.form is not None and not any(c.layer.form == asked.form for c in cases):
        forms = dict.fromkeys(form for c in cases for form in c.attention.forms)
        raise AttncalcError(
            "--form", "nothing named here has this form", got=asked.form, hint=f"Known: {', '.join(forms)}"
        )
    need_torch("measure")
    from attncalc.measure import hardware, run

    made, peaks = run.measure(cases, settings, _progress)
    if sys.stderr.isatty():
        sys.stderr.write(f"{'':78}\r")
    rows = list(run.rows(made, peaks, settings))
    notes = [f"on {hardware.device_name(settings.device)}, {settings.dtype}, {settings.context:,} tokens"]
    if settings.device in ("cpu", "mps") and not named:
        notes.append(f"layers smaller than DeepSeek-V3's, so that a run is short: {_sizes(plan.SMALL)}")
    pairs = "every pair (dense)"
    if any(case.layer.name == "dsa" for case in cases):
        pairs += ", selected pairs where a layer gathers their latents"
    notes.append(f"FLOPs are counted by torch, {pairs}; the prediction counts the same")
    if peaks:
        notes += [
            f"errors are against the reference path in a wider dtype, at up to {plan.CHECKED_CONTEXT} tokens",
            (
                "pred.: time as a multiple of the predicted one, the sum over operations of the longer of compute "
                "and memory time at the peaks measured; FLOPs, bytes: the share of these peaks that is reached"
            ),
            (
                "bound: what the time of a second step says (half the prompt, twice the new tokens); !: another was "
                "predicted; ?: that cannot tell, so the prediction"
            ),
        ]
    inputs = asdict(settings) | {"names": names, "models": [n.model.id for n in named], "form": asked.form}
    conventions = {"flops_per_multiply_add": 2, "dense": True, "kv_dtype": settings.dtype, "k": 1024}
    return measure_report(inputs, conventions, rows, peaks, notes), all(m.ok for m in made)


AGAINST_CONTEXT = 1000


def _against(names: list[str], asked: MeasureOptions) -> tuple[Report, bool]:
    """`attncalc measure --against transformers`."""
    if asked.against != "transformers":
        raise AttncalcError("--against", "must be transformers", got=shown(asked.against))
    fixed = {"device": "meta", "dtype": "bf16", "form": None, "new_tokens": "1", "repeat": None, "path": None}
    given = asdict(asked) | {
        "device": "meta" if asked.device == "cpu" else asked.device,
        "dtype": asked.dtype or "bf16",
    }
    for option, value in fixed.items():
        if given[option] != value:
            rule = "is that of the model which transformers builds" if value is None else f"must be {value}"
            raise AttncalcError(f"--{option.replace('_', '-')}", f"{rule} with --against", got=shown(given[option]))
    if not names:
        raise AttncalcError("measure", "name the models to build, as config.json files or Hugging Face ids")
    context, batch = parse_count(asked.context or AGAINST_CONTEXT, "--context"), parse_count(asked.batch, "--batch")
    need_torch("measure --against transformers", 'pip install "attncalc[reference]"')
    from attncalc.measure import against, reference
    from attncalc.presets import configuration, load
    from attncalc.report.against import against_report

    version = reference.version()
    rows, notes = list[Row](), list[str]()
    for name in names:
        data, where, path = configuration(name)
        model = None
        try:
            model = load(path)
        except AttncalcError as error:
            notes.append(f"not estimated: {error}")
        _progress(f"{name} in transformers {version}")
        made = reference.built(reference.configured(data, where), where)
        rows += against.rows(model, model.id if model else name, made, context, batch)
    if sys.stderr.isatty():
        sys.stderr.write(f"{'':78}\r")
    notes += [
        f"measured: the model of transformers {version} on the meta device, bf16, eager attention; no weight is read",
        "FLOPs are those of its attention modules, projections included, every pair (dense)",
    ]
    inputs = {"models": names, "against": "transformers", "version": version, "context": context, "batch": batch}
    conventions = {"flops_per_multiply_add": 2, "dense": True, "kv_dtype": "bf16", "k": 1024}
    verdicts = {row["ok"] for row in rows}
    return against_report(inputs, conventions, rows, notes), True in verdicts and False not in verdicts


def _sizes(dimensions: object) -> str:
    return ", ".join(f"{k} {v}" for k, v in vars(dimensions).items())


def verify(claims: list[str], models: list[str], seed: str) -> tuple[Report, bool]:
    """`attncalc verify`."""
    from attncalc.report.verify import verify_report

    number = parse_count(seed, "--seed", minimum=0)
    named = find_models(models, []) if models else []
    need_torch("verify")
    from attncalc.verify import run

    rows = run(claims, [n.model for n in named], number)
    inputs = {"claims": claims, "models": [n.model.id for n in named], "seed": number}
    return verify_report(inputs, rows), all(row["ok"] for row in rows)


@dataclass(frozen=True)
class ConvertOptions:
    """Options as typed; None is not given."""

    like: str | None = None
    hidden_size: str | None = None
    heads: str | None = None
    kv_heads: str | None = None
    head_dim: str | None = None
    rope: bool | None = None
    context: str | None = None
    seed: str = "0"


def convert(source: str, target: str, asked: ConvertOptions) -> tuple[Report, bool]:
    """`attncalc convert`."""
    from attncalc.attention.convert import mla_spec_of
    from attncalc.report.convert import convert_report

    _check_conversion(source, target)
    context = parse_count(asked.context or DEFAULT_CONTEXT, "--context")
    seed = parse_count(asked.seed, "--seed", minimum=0)
    spec, notes = _source(source, asked)
    need_torch("convert")
    from attncalc.verify import conversion

    made = mla_spec_of(spec)
    proven_on, proofs = conversion.prove(spec, seed)
    before, after = _figures(spec, "direct", context), _figures(made, "absorbed", context)
    row: Row = {
        "from": spec.variant,
        "to": made.variant,
        "hidden_size": spec.hidden_size,
        "q_heads": spec.num_heads,
        "head_dim": spec.head_dim,
        "v_head_dim": spec.v_head_dim,
        "rope_dim": spec.rope_dim,
        "kv_lora_rank": made.kv_lora_rank,
        "qk_nope_head_dim": made.qk_nope_head_dim,
        "qk_rope_head_dim": made.qk_rope_head_dim,
        "construction": _construction(spec, made),
    }
    for key in before:
        row |= {f"{key}_before": before[key], f"{key}_after": after[key]}
    rows = [{k: v for k, v in p.row("gqa-as-mla").items() if k != "claim"} for p in proofs]
    row |= {
        "core_flops_ratio": after["core_flops"] / before["core_flops"],
        "proven_on": asdict(proven_on),
        "proofs": rows,
        "error": max(p.error for p in proofs),
        "ok": all(p.ok for p in proofs),
    }
    inputs = {
        "from": source,
        "to": target,
        "like": asked.like,
        "dimensions": asdict(spec),
        "context": context,
        "new_tokens": 1,
        "batch": 1,
        "seed": seed,
    }
    conventions = {"dtype": "fp64", "k": 1024}
    notes.append("2 FLOPs per multiply-add; layer FLOPs include projections, and of the mla its absorbing products")
    if proven_on != spec:
        notes.append("the construction touches rows of the projections alone: a small layer of these widths proves it")
    notes.append("parameters of the mla include its up-projections, which are ones and zeros")
    return convert_report(inputs, conventions, row, notes), bool(row["ok"])


def _check_conversion(source: str, target: str) -> None:
    from attncalc.attention import variant_class

    for name in (source, target):
        variant_class(name, "convert")
    if source not in ("mha", "gqa", "mqa") or target != "mla":
        raise AttncalcError("convert", "knows the exact mla of an mha, gqa or mqa alone", got=f"{source} to {target}")


def _source(source: str, asked: ConvertOptions) -> tuple[GQA, list[str]]:
    """The layer that is converted: DeepSeek-V3's sizes, or a model's, or as given."""
    from attncalc.attention.convert import plain
    from attncalc.dimensions import OPTIONS, Dimensions

    base, notes = Dimensions(), list[str]()
    start = GQA(base.hidden_size, base.heads, base.kv_heads, base.head_dim, base.head_dim, base.head_dim)
    if asked.like is not None:
        model = find_models([asked.like], [])[0].model
        found = next((g.attention for g in model.groups if type(g.attention) is GQA), None)
        if found is None:
            raise AttncalcError("--like", "must name a model with mha, gqa or mqa layers", got=shown(asked.like))
        start = plain(found)
        if found != start:
            notes.append(f"{model.id}: biases, norms, gates, sinks and softcaps of its layers are left out")
        if len({g.attention for g in model.groups if g.attention}) > 1:
            first = next(g for g in model.groups if g.attention == found)
            notes.append(f"dimensions are those of layer {first.indices[0]} of {model.id}; its layers differ")
    texts = {"--hidden-size": asked.hidden_size, "--heads": asked.heads, "--kv-heads": asked.kv_heads}
    texts["--head-dim"] = asked.head_dim
    given = {option: parse_count(text, option) for option, text in texts.items() if text is not None}
    heads, head_dim = given.get("--heads", start.num_heads), given.get("--head-dim", start.head_dim)
    kv_heads = {"mha": heads, "mqa": 1}.get(source, given.get("--kv-heads", start.num_kv_heads))
    if source != "gqa" and "--kv-heads" in given:
        raise AttncalcError("--kv-heads", f"is a dimension of gqa, and {source} has {kv_heads}")
    hidden = given.get("--hidden-size", start.hidden_size)
    if {"--heads", "--head-dim"} & set(given) and "--hidden-size" not in given and asked.like is None:
        hidden = heads * head_dim
    wide = "--head-dim" in given
    rope = head_dim if wide or (asked.rope and not start.rope_dim) else start.rope_dim
    rope = 0 if asked.rope is False else rope
    try:
        return GQA(hidden, heads, kv_heads, head_dim, head_dim if wide else start.v_head_dim, rope), notes
    except AttncalcError as error:
        raise AttncalcError(OPTIONS.get(error.where, error.where), error.rule, got=error.got) from None


def _figures(spec: Attention, form: str, context: int) -> Row:
    """One decode step of one layer."""
    from attncalc.compare import Layer, measure_layer
    from attncalc.workload import Conventions, Workload

    f = measure_layer(Layer(spec.variant, spec, FULL, form), Workload(context), Conventions())
    return {
        "kv_heads": f.shape.kv_heads,
        "head_dim_k": f.shape.head_dim_k,
        "head_dim_v": f.shape.head_dim_v,
        "cache_elements_per_token_per_layer": f.cache_elements,
        "core_flops": f.core_flops,
        "flops_attention": f.flops_attention,
        "parameters": f.parameters,
    }


def _construction(spec: GQA, made: MLA) -> list[str]:
    """What the latent, the RoPE key and the matrices are, in words."""
    G, d, e, p = spec.num_kv_heads, spec.head_dim, spec.v_head_dim, spec.rope_dim
    keys = f"{'the unrotated ' if p else ''}K"
    latent = f"V of all KV heads: {G} x {e}" if p == d else f"{keys} and V of all KV heads: {G} x ({d - p} + {e})"
    lines = [f"latent: {latent} = {made.kv_lora_rank:,}"]
    if p:
        lines.append(
            f"RoPE key: the rotated K of all KV heads: {G} x {p} = {made.qk_rope_head_dim:,}, "
            "the frequencies of one head tiled for each block"
        )
        lines.append("the query of a head is zero outside the block of its KV head")
    picked = "V" if p == d else "K and V"
    lines.append(f"up-projections pick {picked} of a head's KV head; no norm, scale {d}^-1/2")
    return lines
