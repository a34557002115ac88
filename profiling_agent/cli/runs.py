"""`run`, `resume`, `show`, `report`, `profile`: the commands that make a run, or show one."""

import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.markdown import Markdown

from profiling_agent.cli.progress import open_display
from profiling_agent.cli.tables import plan_table, verdict_table
from profiling_agent.cli.terminal import (
    AddressOption,
    EventsOption,
    JsonOption,
    QuietOption,
    RunArgument,
    console,
    echo_json,
    errors,
    refuse,
    refusing,
)
from profiling_agent.cli.watching import Work, watch
from profiling_agent.errors import ProfilingAgentError, RequestError, RunError
from profiling_agent.reporting.report import RunReport
from profiling_agent.reporting.results import read_report
from profiling_agent.request import OLD_NAMES, Request, current_names

SCHEMA = Request.model_json_schema()


def _option(name: str) -> inspect.Parameter:
    """Return the flag of one field of Request; the two can't drift apart, because one is made from the other."""
    field, schema = Request.model_fields[name], SCHEMA["properties"][name]
    kind, metavar = field.annotation, None
    if kind is bool:
        flags = [f"--{name.replace('_', '-')}/--no-{name.replace('_', '-')}"]
    else:
        flags = [f"--{name.replace('_', '-')}"]
    if get_args(kind) and all(isinstance(choice, str) for choice in get_args(kind)):
        # A Literal: pydantic names the choices when it refuses one, the help shows them.
        annotation, text = str, f"{field.description} [{'|'.join(get_args(kind))}]"
    elif {"type": "string"} in schema.get("anyOf", ()) and schema["anyOf"][0]["type"] == "number":
        # A number that may have a unit.
        annotation, text, metavar = str | None, field.description, "NUMBER"
    else:
        annotation, text = kind, field.description
    option = typer.Option(*flags, help=text, metavar=metavar, show_default=field.default is not None)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[annotation, option]
    )


def _old_option(name: str) -> inspect.Parameter:
    kind = Request.model_fields[OLD_NAMES[name] or "llm_tokens"].annotation
    option = typer.Option(f"--{name.replace('_', '-')}", hidden=True)
    annotation = Annotated[kind | None, option] if kind else Annotated[str | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def with_request_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that takes a Request one flag for each of its fields, before its own."""
    _, *own = inspect.signature(command).parameters.values()

    def wrapper(**values: Any) -> None:
        rest = {flag.name: values.pop(flag.name) for flag in own}
        given = {name: value for name, value in values.items() if name not in OLD_NAMES or value is not None}
        values, lines = current_names(given, are_flags=True)
        for line in lines:
            errors.print(line, markup=False, soft_wrap=True)
        with refusing():
            request = Request.model_validate(values)
        command(request, **rest)

    flags = [*(_option(name) for name in Request.model_fields), *map(_old_option, OLD_NAMES), *own]
    wrapper.__signature__ = inspect.Signature(flags)
    wrapper.__annotations__ = {flag.name: flag.annotation for flag in flags}
    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    return wrapper


@with_request_flags
def run(request: Request, *, quiet: QuietOption = False, json_: EventsOption = False) -> None:
    """Run a request to its verdict; with no flags, the embedded model and data: no network, no key, minutes.

    Writes the run folder under the output folder: report.html, report.md, report.json and the model to deploy in best/.
    """
    from profiling_agent.lifecycle import make_run_id, optimize

    named = request.model_copy(update={"run_id": request.run_id or make_run_id()})
    try:
        root = named.output_dir / str(named.run_id)
    except RequestError as error:
        refuse(str(error))
    if not quiet and not json_:
        console.print(f"run folder {root}", markup=False, soft_wrap=True)
    work: Work = lambda listener, approver: optimize(named, listener, approver=approver)  # noqa: E731
    watch(work, root, is_quiet=quiet, is_json=json_)


def resume(
    run: RunArgument,
    *,
    base_url: AddressOption = None,
    quiet: QuietOption = False,
    json_: EventsOption = False,
) -> None:
    """Go on with a run that was cut, from its last checkpoint."""
    from profiling_agent.lifecycle import resume as go_on

    work: Work = lambda listener, approver: go_on(run, listener, base_url=base_url, approver=approver)  # noqa: E731
    watch(work, run, is_quiet=quiet, is_json=json_)


def _read(run: Path) -> RunReport:
    try:
        return read_report(run)
    except ProfilingAgentError as error:
        refuse(str(error))


def show(
    run: RunArgument,
    json_: JsonOption = False,  # noqa: FBT002 - a flag
    plan: Annotated[bool, typer.Option("--plan", help="why each layer was changed or left alone")] = False,  # noqa: FBT002
) -> None:
    """Show a finished run: the verdict, before and after, every attempt."""
    report = _read(run)
    if json_:
        echo_json(report.model_dump(mode="json"))
        return
    console.print(plan_table(report) if plan else verdict_table(report, run))


def report(run: RunArgument) -> None:
    """Write the report of a finished run again, and show it."""
    from profiling_agent.reporting.write import write_report

    read = _read(run)
    with refusing():
        try:
            write_report(read, run)
        except OSError as error:
            said = f"the report can't be written to {str(run)!r} ({error.strerror})"
            raise RunError(
                f"{said}: copy the run to where you may write, or read it with `profiling-agent show {run}`"
            ) from error
    console.print(Markdown((run / "report.md").read_text(encoding="utf-8")))


def profile(
    model: Annotated[str, typer.Option(help=Request.model_fields["model"].description or "")],
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit on the Hub")] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=4096, help="images in a forward pass")] = 32,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    json_: JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Profile a model: where its time, memory, MACs and parameters are, and what can be pruned."""
    from profiling_agent.cli.tables import profile_tables
    from profiling_agent.jobs.profile import profile_source

    with (
        refusing(),
        tempfile.TemporaryDirectory(prefix="profiling-agent-") as folder,
        open_display(errors) as display,
    ):
        request = Request.model_validate({"model": model, "revision": revision, "device": device})
        measured = profile_source(request, Path(folder), batch_size=batch_size, progress=display.stage("profiling"))
    if json_:
        echo_json(measured.model_dump(mode="json"))
        return
    for table in profile_tables(measured):
        console.print(table)
