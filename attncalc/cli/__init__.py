"""The command line. A command parses, calls one function, and renders; nothing is computed here."""

import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Annotated

import typer

from attncalc import __version__
from attncalc.cli import analytic, capacity, catalogue, proof
from attncalc.errors import AttncalcError, one_line

app = typer.Typer(
    name="attncalc",
    help="Exact KV-cache bytes, FLOPs and arithmetic intensity of attention.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
COMMANDS: tuple[Callable[..., None], ...] = (
    *(analytic.cache, analytic.compare, analytic.flops, capacity.fit),
    *(proof.measure, proof.verify, analytic.explain, proof.convert),
    *(catalogue.models, catalogue.variants, catalogue.devices),
)
"""In the order of `--help`: questions, proofs, what ships."""
for command in COMMANDS:
    app.command()(command)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"attncalc {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Exact KV-cache bytes, FLOPs and arithmetic intensity of attention."""


def main(arguments: list[str] | None = None) -> None:
    """Run and exit: 0, 1 for a failed proof, 2 for anything that was not understood."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run one command; errors that a user can cause become one line on stderr."""
    from typer._click.exceptions import ClickException, NoArgsIsHelpError

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # Whatever the locale cannot encode is escaped, never a crash.
            stream.reconfigure(errors="backslashreplace")
    try:
        status = app(arguments, prog_name="attncalc", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except AttncalcError as error:
        return _fail(str(error))
    except NoArgsIsHelpError as error:
        typer.echo(error.format_message())
        return 0
    except ClickException as error:
        return _fail(_usage(error))
    except BrokenPipeError:  # the reader has gone
        from attncalc.render import silence_stdout

        silence_stdout()
        return 1
    except OSError as error:  # --help and --version write before any report does
        from attncalc.render import silence_stdout

        silence_stdout()
        return _fail(f"output: cannot be written, got {error.strerror or 'an error'}")
    except (typer.Abort, KeyboardInterrupt):
        return 130
    return status if isinstance(status, int) else 0


def _usage(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    where = context.command_path if context else "attncalc"
    message = getattr(error, "format_message", error.__str__)().strip().rstrip(".")
    stop = "" if message.endswith("?") else "."
    return f"{where}: {message[:1].lower()}{message[1:]}{stop} `{where} --help` lists the options"


def _fail(line: str) -> int:
    if sys.stderr is not None:
        sys.stderr.write(f"{one_line(line)}\n")
    return 2
