"""`reproduce`: the command that puts the paper's numbers beside a user's own."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.text import Text

from profiling_agent.cli.progress import open_display
from profiling_agent.cli.tables import folded_table
from profiling_agent.cli.terminal import JsonOption, console, echo_json, errors, refuse, say_stopped
from profiling_agent.documents import first_problem
from profiling_agent.errors import ProfilingAgentError, RequestError
from profiling_agent.processes.streams import keep_stdout
from profiling_agent.reproduce.paper import TABLE_5, Study

NAMES = "table1|table2|table3|table4|table5|figure5"


def reproduce(  # noqa: PLR0913, PLR0917 (a command's options)
    name: Annotated[str, typer.Argument(metavar=NAMES, help="what of the paper to make")],
    models: Annotated[list[str] | None, typer.Option(help="your models; by default the paper's, from the Hub")] = None,
    data: Annotated[
        str | None, typer.Option(help="your labelled images, of one configuration; by default Imagenette")
    ] = None,
    advisor: Annotated[list[str] | None, typer.Option(help="table5: language models to compare, two times")] = None,
    base_url: Annotated[str | None, typer.Option(help="address of their server")] = None,
    num_samples: Annotated[int | None, typer.Option(min=50, help="images to search on")] = None,
    output: Annotated[Path, typer.Option(help="folder of the runs; what is complete there is used again")] = Path(
        "runs/reproduce"
    ),
    json_: JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Run our pipeline and the paper's baselines on models and data, beside the numbers that the paper prints.

    Without a network the embedded models and digits stand in, and what could not be run is said. Imagenette has several
    configurations on the Hub, none of which can be named here: have one of them in a folder.

    `profiling-agent reproduce table1 --models microsoft/resnet-101 --data ./imagenette-320px`
    """
    from profiling_agent.reproduce.study import Reproduction, subjects_of
    from profiling_agent.reproduce.tables import TABLES
    from profiling_agent.reproduce.tables import reproduce as make

    if json_:
        keep_stdout()
    try:
        _check(name, advisor or [], list(TABLES))
        subjects, chosen, missing = subjects_of(models or [], data)
        with open_display(errors) as display:
            runs = Reproduction(
                output.expanduser(),
                chosen,
                num_samples=num_samples,
                listener=display.hear,
                advisors=advisor or [],
                base_url=base_url,
            )
            study = make(name, runs, subjects, missing)
    except ProfilingAgentError as error:
        refuse(str(error))
    except ValidationError as error:
        refuse(first_problem(error))
    except KeyboardInterrupt as stop:
        say_stopped(stop, "; the same command goes on with what is complete")
    if json_:
        echo_json(study.model_dump(mode="json"))
    else:
        _show(study)
    raise typer.Exit(0 if study.rows else 1)


def _check(name: str, advisors: list[str], names: list[str]) -> None:
    if name not in names:
        raise RequestError(f"there is no {name!r} to reproduce: name one of {', '.join(names)}")
    if advisors and (name != "table5" or len(advisors) > len(TABLE_5["ViT-B/16"])):
        raise RequestError("table5 compares two language models: name two with --advisor, and none for the others")


def _show(study: Study) -> None:
    table = folded_table(
        f"{study.name}: {study.title}", "model", "what", "quantity", "paper", "ours", "better by", "note"
    )
    for row in study.rows:
        told = [f"{value:+.2f}" if value is not None else "" for value in (row.paper, row.ours, row.better_by)]
        table.add_row(row.family, Text(row.what), row.quantity, *told, Text(row.note))
    console.print(table)
    console.print(Text("What was different:", style="bold"))
    for line in study.differences:
        console.print(Text(f"- {line}"), soft_wrap=True)
    if study.missing:
        console.print(Text("What could not be run:", style="bold"))
    for line in study.missing:
        console.print(Text(f"- {line}"), soft_wrap=True)
