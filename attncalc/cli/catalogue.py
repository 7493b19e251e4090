"""Commands that show what ships: models, variants, devices."""

from attncalc.cli import options as o
from attncalc.errors import AttncalcError


def models(
    names: o.Models = None,
    mtp: o.Mtp = False,
    export: o.Export = False,
    format: o.Format = None,  # noqa: A002
    json: o.Json = False,
    output: o.Output = None,
) -> None:
    """All presets, or the sizes, layers and source of some models."""
    from attncalc import commands
    from attncalc.render import chosen_format, deliver, deliver_text

    if export:
        if mtp or json or format is not None:
            raise AttncalcError("--export", "writes a model file, and takes no option but --output")
        deliver_text(commands.export(names or [], output), output)
        return

    wanted = chosen_format(format, json, output)
    deliver(commands.models(names or [], mtp=mtp), wanted, output)


def variants(
    format: o.Format = None,  # noqa: A002
    json: o.Json = False,
    output: o.Output = None,
) -> None:
    """All attention variants."""
    from attncalc import commands
    from attncalc.render import chosen_format, deliver

    wanted = chosen_format(format, json, output)
    deliver(commands.variants(), wanted, output)


def devices(
    format: o.Format = None,  # noqa: A002
    json: o.Json = False,
    output: o.Output = None,
) -> None:
    """All accelerators: memory, bandwidth, dense peaks."""
    from attncalc import commands
    from attncalc.render import chosen_format, deliver

    wanted = chosen_format(format, json, output)
    deliver(commands.devices(), wanted, output)
