"""Terminal: what all commands share, the console, how a bad request ends, how a run is named."""

from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from profiling_agent.request import Request

EXIT_MET, EXIT_NOT_MET, EXIT_BAD_REQUEST, EXIT_WAITING, EXIT_INTERRUPTED = 0, 1, 2, 3, 130

console = Console()
errors = Console(stderr=True)


def refuse(message: str) -> NoReturn:
    """Say in one line what was wrong, and end with the code of a bad request."""
    errors.print(
        f"profiling-agent: {' '.join(message.split())}", style="red", markup=False, highlight=False, soft_wrap=True
    )
    raise typer.Exit(EXIT_BAD_REQUEST)


def run_folder(named: str) -> Path:
    """Return the folder of a run that is named by its path, or by its id where it lies in the default place."""
    folder = Path(named).expanduser()
    default = Request().output_dir / named
    return default if not folder.exists() and default.exists() else folder


RunArgument = Annotated[
    Path, typer.Argument(parser=run_folder, metavar="RUN", help="run folder, or the id of one in runs/")
]
AddressOption = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="the run's language model is at this address, and may have your key"),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="the verdict alone, in one line")]
EventsOption = Annotated[bool, typer.Option("--json", help="a JSON line for each event, the verdict last")]
JsonOption = Annotated[bool, typer.Option("--json", help="one JSON document on standard output")]
