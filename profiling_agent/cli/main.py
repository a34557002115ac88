"""Entry point: the command-line application, with its commands in the order of `--help`."""

import signal
import sys
import traceback
from importlib import metadata
from typing import Annotated

import typer

from profiling_agent.cli import models, runs, terminal

# Typer's error for arguments that it can't parse has no public name.
USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]
COMMANDS = (
    *(runs.run, runs.resume, runs.show, runs.report, runs.profile, runs.sweep, runs.approve),
    *(models.doctor, models.pick, models.export, models.push, models.race, models.measure, models.compare),
)

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Measure, prune and quantize a vision model until a contract is met.",
    epilog="Exit codes: 0 the contract is met, 1 it is not (the report says why), 2 bad request, 3 it waits for an approval, 70 a bug of ours, 130 stopped (129 or 143 by SIGHUP or SIGTERM).",
)


def _print_version(is_requested: bool) -> None:  # noqa: FBT001 - a flag's callback
    if is_requested:
        typer.echo(f"profiling-agent {metadata.version('profiling-agent')}")
        raise typer.Exit


@app.callback()
def common(
    *,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="show the version")
    ] = False,
) -> None:
    """Measure, prune and quantize a vision model until a contract is met."""


for command in COMMANDS:
    kind = terminal.RequestCommand if hasattr(command, "fields") else None
    app.command(cls=kind)(terminal.stoppable(command))


def main() -> None:
    """Run the command line; exit with 2 on a usage error as on every bad request, with 70 on a bug of ours."""
    terminal.escape_unencodable()
    terminal.listen_to_signals()
    try:
        # Without arguments the error is the help, which only standalone mode prints over several lines.
        sys.exit(app(standalone_mode=len(sys.argv) == 1))
    except USAGE_ERROR as error:
        message = getattr(error, "format_message", error.__str__)()
        terminal.print_error(f"{message} (`profiling-agent --help` lists all)")
        sys.exit(terminal.EXIT_BAD_REQUEST)
    except typer.Abort:
        sys.exit(terminal.SIGNALLED + signal.SIGINT)
    except Exception:  # noqa: BLE001 - the boundary: an unexpected error is no verdict on a model
        traceback.print_exc()
        terminal.print_line(
            "profiling-agent: this is a bug of ours: please report it, with the lines above", terminal.errors
        )
        sys.exit(terminal.EXIT_CRASHED)


if __name__ == "__main__":
    main()
