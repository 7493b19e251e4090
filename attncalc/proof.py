"""The functions behind `measure` and `verify`: options in, report and verdict out."""

import sys
from dataclasses import asdict, dataclass

from attncalc.errors import AttncalcError, shown
from attncalc.inputs import find_models
from attncalc.report import Report
from attncalc.units import parse_count

TORCH_HINT = 'pip install "attncalc[torch]"'


def need_torch(command: str) -> None:
    """Refuse without torch, in one line that names the install command.

    Raises:
        AttncalcError: torch cannot be imported.
    """
    try:
        import torch  # noqa: F401
    except ImportError:
        raise AttncalcError(command, "needs torch, which is not installed", hint=TORCH_HINT) from None


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


def _progress(line: str) -> None:
    """Progress on stderr: one line that overwrites itself on a terminal, a line each elsewhere."""
    end = "\r" if sys.stderr.isatty() else "\n"
    text = f"measure: {line}"
    sys.stderr.write(f"{text:<78}{end}" if end == "\r" else f"{text}\n")
    sys.stderr.flush()


def measure(names: list[str], models: list[str], asked: MeasureOptions) -> tuple[Report, bool]:
    """`attncalc measure`."""
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
    need_torch("measure")
    from attncalc.measure import hardware, run

    made, peaks = run.measure(cases, settings, _progress)
    if sys.stderr.isatty():
        sys.stderr.write(f"{'':78}\r")
    rows = list(run.rows(made, peaks, settings))
    notes = [f"on {hardware.device_name(settings.device)}, {settings.dtype}, {settings.context:,} tokens"]
    if settings.device in ("cpu", "mps") and not named:
        notes.append(f"layers smaller than DeepSeek-V3's, so that a run is short: {_sizes(plan.SMALL)}")
    notes.append("FLOPs are counted by torch, every pair (dense); the prediction counts the same")
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
