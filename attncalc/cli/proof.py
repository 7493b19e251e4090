"""Commands that run real layers: measure, verify. The only ones that load torch."""

from typing import Annotated

import typer

from attncalc.cli import options as o


def measure(
    names: Annotated[list[str] | None, typer.Argument(metavar="[VARIANT|MODEL]...", show_default=False)] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, mps, or meta (counts alone, no memory).")] = "cpu",
    model: o.ModelOption = None,
    form: o.Form = None,
    context: o.Context = None,
    batch: o.Batch = "1",
    new_tokens: Annotated[str, typer.Option("--new-tokens", "-q", help="New tokens of a decode step.")] = "1",
    dtype: Annotated[str | None, typer.Option("--dtype", help="fp32, bf16, fp16, fp64. [default: by device]")] = None,
    repeat: Annotated[str | None, typer.Option("--repeat", help="Runs whose median is taken.")] = None,
    seed: Annotated[str, typer.Option("--seed", help="Of weights and inputs.")] = "0",
    path: Annotated[str | None, typer.Option("--path", help="fast or reference. [default: the layer's first]")] = None,
    format: o.Format = None,  # noqa: A002
    json: o.Json = False,
    output: o.Output = None,
) -> None:
    """Real layers on your device: estimate beside measurement. Exit status 1 if an exact number differs."""
    from attncalc import proof
    from attncalc.render import chosen_format, deliver

    wanted = chosen_format(format, json, output)
    asked = proof.MeasureOptions(device, form, context, batch, new_tokens, dtype, repeat, seed, path)
    report, ok = proof.measure(names or [], model or [], asked)
    deliver(report, wanted, output)
    raise typer.Exit(0 if ok else 1)


def verify(
    claims: Annotated[list[str] | None, typer.Argument(metavar="[CLAIM]...", show_default=False)] = None,
    model: o.ModelOption = None,
    seed: Annotated[str, typer.Option("--seed", help="Of the random weights.")] = "0",
    format: o.Format = None,  # noqa: A002
    json: o.Json = False,
    output: o.Output = None,
) -> None:
    """The identities and figures that the estimates rest on, proven. Exit status 1 if one fails."""
    from attncalc import proof
    from attncalc.render import chosen_format, deliver

    wanted = chosen_format(format, json, output)
    report, ok = proof.verify(claims or [], model or [], seed)
    deliver(report, wanted, output)
    raise typer.Exit(0 if ok else 1)


COMMANDS = (measure, verify)
