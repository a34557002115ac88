"""The command that looks at the machine before a run does."""

import json
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.text import Text

from profiling_agent.analysis.plan_file import first_problem
from profiling_agent.cli.progress import open_display
from profiling_agent.cli.tables import folded_table
from profiling_agent.cli.terminal import JsonOption, app, console, errors, refuse
from profiling_agent.errors import ProfilingAgentError
from profiling_agent.request import Request

COLORS = {"ok": "green", "note": "yellow", "problem": "red"}


@app.command()
def doctor(
    output: Annotated[Path, typer.Option(help="folder that would hold the run folders")] = Path("runs"),
    advisor: Annotated[str, typer.Option(help="the language model that would plan")] = "auto",
    base_url: Annotated[str | None, typer.Option(help="address of its server")] = None,
    json_: JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Look at this machine: versions, CPU, memory, disk, noise, each runtime by running a model, the language model's server.

    Ends with 1 where something would keep a run from working.
    """
    from profiling_agent.cli.examine import examine

    try:
        request = Request(output=str(output), advisor=advisor, base_url=base_url)
        with open_display(errors) as display:
            findings = list(examine(request, display.stage("doctor")))
    except ProfilingAgentError as error:
        refuse(str(error))
    except ValidationError as error:
        refuse(first_problem(error))
    if json_:
        typer.echo(json.dumps([finding.model_dump() for finding in findings], indent=1))
    else:
        table = folded_table("doctor", "what", "state", "seen", "what to do")
        for one in findings:
            table.add_row(one.name, Text(one.state, style=COLORS[one.state]), Text(one.seen), Text(one.advice))
        console.print(table)
    raise typer.Exit(1 if any(one.state == "problem" for one in findings) else 0)
