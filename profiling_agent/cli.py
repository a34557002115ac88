"""The command line: run, resume, show, report, profile; and in `cli_saved`, export, race, measure."""

import inspect
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_args

import typer
from pydantic import ValidationError
from rich.markdown import Markdown

from profiling_agent.analysis.plan_file import first_problem
from profiling_agent.display import ProgressDisplay, plan_table, verdict_table
from profiling_agent.errors import ProfilingAgentError, RunError
from profiling_agent.reporting.report import RunReport
from profiling_agent.request import Request
from profiling_agent.terminal import (
    EXIT_INTERRUPTED,
    EXIT_MET,
    EXIT_NOT_MET,
    JsonOption,
    RunArgument,
    app,
    console,
    errors,
    refuse,
)
from profiling_agent.workspace import read_manifest


def _option(name: str) -> inspect.Parameter:
    """Return the flag of one field of Request; the two can't drift apart, because one is made from the other."""
    field = Request.model_fields[name]
    kind = field.annotation
    if kind is bool:
        flags = [f"--{name.replace('_', '-')}/--no-{name.replace('_', '-')}"]
    else:
        flags = [f"--{name.replace('_', '-')}"]
    if get_args(kind) and all(isinstance(choice, str) for choice in get_args(kind)):
        # A Literal: pydantic names the choices when it refuses one, the help shows them.
        annotation, text = str, f"{field.description} [{'|'.join(get_args(kind))}]"
    else:
        annotation, text = kind, field.description
    option = typer.Option(*flags, help=text, show_default=field.default is not None)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=Annotated[annotation, option]
    )


def with_request_flags(command: Callable[[Request], None]) -> Callable[..., None]:
    """Give a command that takes a Request one flag for each of its fields."""

    def wrapper(**values: Any) -> None:
        try:
            request = Request.model_validate(values)
        except ValidationError as error:
            refuse(first_problem(error))
        command(request)

    flags = [_option(name) for name in Request.model_fields]
    wrapper.__signature__ = inspect.Signature(flags)
    wrapper.__annotations__ = {flag.name: flag.annotation for flag in flags}
    wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
    return wrapper


def _finish(report: RunReport, root: Path) -> NoReturn:
    console.print(verdict_table(report, root))
    raise typer.Exit(EXIT_MET if report.verdict.outcome == "MET" else EXIT_NOT_MET)


def _watch(work: Callable[[Any], RunReport], root: Path) -> NoReturn:
    try:
        with ProgressDisplay(console) as display:
            report = work(display.hear)
    except ProfilingAgentError as error:
        refuse(str(error))
    except KeyboardInterrupt:
        errors.print(f"stopped; go on with: profiling-agent resume {root}", markup=False, soft_wrap=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _finish(report, root)


@app.command()
@with_request_flags
def run(request: Request) -> None:
    """Run a request to its verdict; with no flags, the embedded model and data: no network, no key, minutes.

    Writes the run folder under the output folder: report.md, report.json and the model to deploy in best/.
    """
    from profiling_agent.lifecycle import make_run_id, optimize

    named = request.model_copy(update={"run_id": request.run_id or make_run_id()})
    root = named.output_dir / str(named.run_id)
    console.print(f"run folder {root}", markup=False, soft_wrap=True)
    _watch(lambda listener: optimize(named, listener), root)


@app.command()
def resume(run: RunArgument) -> None:
    """Go on with a run that was cut, from its last checkpoint."""
    from profiling_agent.lifecycle import resume as go_on

    _watch(lambda listener: go_on(run, listener), run)


def _read_report(run: Path) -> RunReport:
    try:
        read_manifest(run)
        path = run / "report.json"
        if not path.exists():
            raise RunError(f"run {str(run)!r} has no report yet: finish it with `profiling-agent resume {run}`")
        return RunReport.model_validate_json(path.read_text(encoding="utf-8"))
    except ProfilingAgentError as error:
        refuse(str(error))
    except ValidationError as error:
        refuse(f"{str(run / 'report.json')!r} is damaged: {first_problem(error)}")


@app.command()
def show(
    run: RunArgument,
    json_: JsonOption = False,  # noqa: FBT002 - a flag
    plan: Annotated[bool, typer.Option("--plan", help="why each layer was changed or left alone")] = False,  # noqa: FBT002
) -> None:
    """Show a finished run: the verdict, before and after, every attempt."""
    report = _read_report(run)
    if json_:
        typer.echo(report.model_dump_json(indent=1))
        return
    console.print(plan_table(report) if plan else verdict_table(report, run))


@app.command()
def report(run: RunArgument) -> None:
    """Write the report of a finished run again, and show it."""
    from profiling_agent.reporting.write import write_report

    read = _read_report(run)
    write_report(read, run)
    console.print(Markdown((run / "report.md").read_text(encoding="utf-8")))


@app.command()
def profile(
    model: Annotated[str, typer.Option(help=Request.model_fields["model"].description or "")],
    revision: Annotated[str | None, typer.Option(help="branch, tag or commit on the Hub")] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=4096, help="images in a forward pass")] = 32,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    json_: JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Profile a model: where its time, memory, MACs and parameters are, and what can be pruned."""
    from profiling_agent.display import profile_tables
    from profiling_agent.profiling.standalone import profile_source

    try:
        with tempfile.TemporaryDirectory(prefix="profiling-agent-") as folder, ProgressDisplay(errors) as display:
            request = Request.model_validate({"model": model, "revision": revision, "device": device})
            measured = profile_source(request, Path(folder), batch_size=batch_size, progress=display.stage("profiling"))
    except ProfilingAgentError as error:
        refuse(str(error))
    except ValidationError as error:
        refuse(first_problem(error))
    if json_:
        typer.echo(json.dumps(measured.model_dump(mode="json"), indent=1))
        return
    for table in profile_tables(measured):
        console.print(table)


def main() -> None:
    """Run the command line; a usage error ends with code 2 like every other bad request."""
    sys.exit(app())


# Last, so that `--help` lists these after the commands above.
from profiling_agent import cli_saved as cli_saved  # noqa: E402

if __name__ == "__main__":
    main()
