"""`reproduce`: the command that puts the paper's numbers beside a user's own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.text import Text

from profiling_agent.cli.progress import Display, open_display
from profiling_agent.cli.tables import folded_table
from profiling_agent.cli.terminal import GOES_ON, JsonOption, console, echo_json, errors, refusing
from profiling_agent.errors import RequestError
from profiling_agent.files import write_text
from profiling_agent.processes.streams import keep_stdout
from profiling_agent.reproduce.paper import TABLE_NAMES, TableName
from profiling_agent.reproduce.table import Study, columns, lines, markdown, sections
from profiling_agent.request import Request

if TYPE_CHECKING:
    from profiling_agent.reproduce.study import Options, Reproduction
    from profiling_agent.reproduce.subjects import Chosen

ALL = "all"
NAMES = "|".join((*TABLE_NAMES, ALL))
# Where tables of a study lie in its output folder.
FOLDER = "tables"
Several = list[str] | None
FOR_EACH = "; once for all data sets, or once for each"


@dataclass(frozen=True)
class Asked:
    """What was asked for besides the tables; `fields` are those of data sets, one value for all of them or one for each."""

    models: Sequence[str]
    data: Sequence[str]
    fields: Mapping[str, Sequence[str]]
    output: Path
    options: "Options"


def reproduce(  # noqa: PLR0913, PLR0917 (a command's options)
    names: Annotated[list[str], typer.Argument(metavar=NAMES, help="what of the paper to make; all of it with all")],
    models: Annotated[
        Several,
        typer.Option(help="your models, as FOLDER or ResNet-101=FOLDER; by default the paper's, from the Hub"),
    ] = None,
    data: Annotated[
        Several,
        typer.Option(help="your labelled images, as FOLDER or CIFAR-100=FOLDER; by default the paper's of each table"),
    ] = None,
    config: Annotated[Several, typer.Option(help=f"configuration of the data, where it has several{FOR_EACH}")] = None,
    revision: Annotated[Several, typer.Option(help=f"branch, tag or commit of the data on the Hub{FOR_EACH}")] = None,
    split: Annotated[Several, typer.Option(help=f"split to measure on{FOR_EACH}")] = None,
    image_column: Annotated[Several, typer.Option(help=f"column of images{FOR_EACH}")] = None,
    label_column: Annotated[Several, typer.Option(help=f"column of labels{FOR_EACH}")] = None,
    num_samples: Annotated[int | None, typer.Option(help="images to search on")] = None,
    batch_size: Annotated[int, typer.Option(help="images in a batch; the paper times one")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    advisor: Annotated[
        Several, typer.Option(help="language model that plans; table5 compares as many as are named")
    ] = None,
    base_url: Annotated[str | None, typer.Option(help="address of its server")] = None,
    time_budget: Annotated[str | None, typer.Option(help="time that each run may take, such as 30m")] = None,
    num_sessions: Annotated[int, typer.Option(help="sessions that times are taken in")] = 5,
    output: Annotated[Path, typer.Option(help="folder of the runs; what is complete there is used again")] = Path(
        "runs/reproduce"
    ),
    json_: JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Run our pipeline, the paper's method and its baselines on models and data, beside the numbers that the paper prints.

    Each table has the paper's own models and data by default. Without a network the embedded models and digits stand in, and what could not be made
    is said. The tables are written to OUTPUT/tables as well, as JSON and Markdown.

    `profiling-agent reproduce table1 --models microsoft/resnet-101 --data frgfm/imagenette --config 320px`

    `profiling-agent reproduce table2 --models ./my-vit --data ./my-data --config 320px --split test`
    """
    from profiling_agent.reproduce.study import Options

    if json_:
        keep_stdout()
    # Looked at as part of a request, which says what is wrong with it in the request's words.
    options = Options.model_construct(
        batch_size=batch_size,
        device=device,
        num_samples=num_samples,
        time_budget=time_budget,
        num_sessions=num_sessions,
        advisors=tuple(advisor or ()),
        base_url=base_url,
    )
    asked = Asked(
        models=models or [],
        data=data or [],
        fields={
            "dataset_config": config or [],
            "dataset_revision": revision or [],
            "split": split or [],
            "image_column": image_column or [],
            "label_column": label_column or [],
        },
        output=output,
        options=options,
    )
    with refusing(GOES_ON), open_display(errors) as display:
        studies = _make(_check(names, asked), asked, display)
    if json_:
        echo_json([study.model_dump(mode="json") for study in studies])
    else:
        for study in studies:
            _show(study)
    raise typer.Exit(0 if all(study.rows for study in studies) else 1)


def _make(names: Sequence[TableName], asked: Asked, display: Display) -> list[Study]:
    """Return the tables, written down as they are made; what they are made on is looked at before any of them."""
    from profiling_agent.reproduce.study import Reproduction, check_writable
    from profiling_agent.reproduce.tables import reproduce as make

    # A request says what is wrong with a path that can't be one.
    output = Request(output=str(asked.output)).output_dir
    runs = Reproduction(output, asked.options, listener=display.hear)
    _check_options(runs)
    check_writable(output)
    chosen = _choose(names, asked, display)
    studies: list[Study] = []
    for name in names:
        studies.append(make(name, runs, chosen[name]))
        _write(studies[-1], output)
    return studies


def _choose(names: Sequence[TableName], asked: Asked, display: Display) -> "Mapping[TableName, Chosen]":
    """Return what each table is made on; tables that are made on the same are looked at once."""
    from profiling_agent.reproduce.paper import DataSet
    from profiling_agent.reproduce.subjects import Chosen, choose, datasets_of

    progress = display.stage("what is there")
    data = {name: datasets_of(asked.data, asked.fields, name) for name in names}
    known: dict[tuple[DataSet, ...], Chosen] = {
        own: choose(asked.models, own, named_data=bool(asked.data), progress=progress) for own in set(data.values())
    }
    chosen: dict[TableName, Chosen] = {}
    for name in names:
        chosen[name] = known[data[name]]
    return chosen


def _check(names: Sequence[str], asked: Asked) -> list[TableName]:
    """Return the tables that are meant; RequestError where there is no such table, or language models that none would ask."""
    for name in names:
        if name not in (*TABLE_NAMES, ALL):
            raise RequestError(f"there is no {name!r} to reproduce: name one of {', '.join(TABLE_NAMES)}, or {ALL}")
    found = TABLE_NAMES if ALL in names else cast("Sequence[TableName]", dict.fromkeys(names))
    if len(asked.options.advisors) > 1 and "table5" not in found:
        raise RequestError("table5 compares language models: name one with --advisor for the others")
    return list(found)


def _check_options(runs: "Reproduction") -> None:
    """Raise ValidationError where an option is none that a run has."""
    from profiling_agent.reproduce.paper import FAMILIES, PAPERS_DATA
    from profiling_agent.reproduce.study import KINDS, Subject

    for advisor in (None, *runs.options.advisors):
        for kind in KINDS:
            subject = Subject(model="checked", family=FAMILIES[0], data=PAPERS_DATA["Imagenette"])
            runs.request(subject, kind, advisor)


def _write(study: Study, output: Path) -> None:
    folder = output / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / f"{study.name}.json", f"{study.model_dump_json(indent=1)}\n")
        write_text(folder / f"{study.name}.md", markdown(study))
    except OSError as error:
        raise RequestError(f"{str(folder)!r} can't be written ({error.strerror}): choose another output") from error


def _show(study: Study) -> None:
    first, *others = columns(study)
    table = folded_table(f"{study.name}: {study.title}", first, *others)
    for line in lines(study):
        table.add_row(*map(Text, line))
    console.print(table)
    for title, told in sections(study):
        console.print(Text(f"{title}:", style="bold"))
        for line in told:
            console.print(Text(f"- {line}"), soft_wrap=True)
