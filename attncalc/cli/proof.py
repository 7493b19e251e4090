"""Commands that run real layers: measure, verify, convert. The only ones that load torch."""

from typing import Annotated

import typer

from attncalc.cli import options as o


def measure(
    names: Annotated[list[str] | None, typer.Argument(metavar="[VARIANT|MODEL]...", show_default=False)] = None,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, mps, or meta (counts alone, no memory).")] = "cpu",
    model: o.ModelOption = None,
    form: o.Form = None,
    context: Annotated[
        str | None,
        typer.Option(
            "--context",
            "-c",
            help="Tokens per sequence. [default: cpu 128, mps 2048, cuda and meta 8192, --against 1000]",
        ),
    ] = None,
    batch: o.Batch = "1",
    new_tokens: Annotated[str, typer.Option("--new-tokens", "-q", help="New tokens of a decode step.")] = "1",
    dtype: Annotated[str | None, typer.Option("--dtype", help="fp32, bf16, fp16, fp64. [default: by device]")] = None,
    repeat: Annotated[str | None, typer.Option("--repeat", help="Runs whose median is taken.")] = None,
    seed: Annotated[str, typer.Option("--seed", help="Of weights and inputs.")] = "0",
    path: Annotated[str | None, typer.Option("--path", help="fast or reference. [default: the layer's first]")] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", help="transformers: its own model of a config.json, on the meta device."),
    ] = None,
    format: o.Format = None,  # noqa: A002
    json: o.Json = False,
    output: o.Output = None,
) -> None:
    """Real layers on your device: estimate beside measurement. Exit status 1 if an exact number differs."""
    from attncalc import proof
    from attncalc.render import chosen_format, deliver

    wanted = chosen_format(format, json, output)
    asked = proof.MeasureOptions(device, form, context, batch, new_tokens, dtype, repeat, seed, path, against)
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


def convert(
    source: Annotated[str, typer.Argument(metavar="FROM", show_default=False, help="mha, gqa or mqa.")],
    target: Annotated[str, typer.Argument(metavar="TO", show_default=False, help="mla.")],
    like: Annotated[str | None, typer.Option("--like", help="Take the dimensions of this model's attention.")] = None,
    hidden_size: Annotated[
        str | None, typer.Option("--hidden-size", help="D. [default: 7168, or heads x head_dim where these are given]")
    ] = None,
    heads: Annotated[str | None, typer.Option("--heads", help="Query heads H. [default: 128]")] = None,
    kv_heads: Annotated[str | None, typer.Option("--kv-heads", help="KV heads of gqa. [default: 8]")] = None,
    head_dim: Annotated[str | None, typer.Option("--head-dim", help="Width of a head. [default: 128]")] = None,
    rope: Annotated[
        bool | None, typer.Option("--rope/--no-rope", help="Rotated keys. [default: as the model, else rotated]")
    ] = None,
    context: o.Context = None,
    seed: Annotated[str, typer.Option("--seed", help="Of the random weights.")] = "0",
    format: o.Format = None,  # noqa: A002
    json: o.Json = False,
    output: o.Output = None,
) -> None:
    """The exact MLA of a GQA: latent, cache and FLOPs before and after, proven. Exit status 1 if the proof fails."""
    from attncalc import proof
    from attncalc.render import chosen_format, deliver

    wanted = chosen_format(format, json)
    asked = proof.ConvertOptions(like, hidden_size, heads, kv_heads, head_dim, rope, context, seed)
    report, ok = proof.convert(source, target, asked)
    deliver(report, wanted, output)
    raise typer.Exit(0 if ok else 1)
