"""Commands on runs and sweeps, with live progress."""

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Group
from rich.text import Text

from profiling_agent.cli import terminal
from profiling_agent.errors import ApprovalPendingError, ProfilingAgentError, RequestError
from profiling_agent.lib.io import DocumentError, expanded, read_json
from profiling_agent.lib.logs import keep_stdout

if TYPE_CHECKING:
    from profiling_agent.reporting.report import RunReport
    from profiling_agent.request import Request
    from profiling_agent.schemas import Approval, ApprovalQuestion

# Takes a listener and an approver, and returns the report.
Work = Callable[[Any, Any], "RunReport"]


def watch(work: Work, root: Path, *, is_quiet: bool = False, is_json: bool = False) -> NoReturn:
    """Run `work`, which takes a listener and an approver, show its progress, and exit with the verdict's code.

    As JSON: a line for each event, and one at the end.
    """
    from profiling_agent.cli.tables import verdict_table

    if is_json:
        keep_stdout()
    try:
        with terminal.Display(terminal.console, is_quiet=is_quiet, is_json=is_json) as display:

            def approver(question: "ApprovalQuestion") -> "Approval":
                with display.paused():
                    return ask(question)

            report = work(display.show, approver if is_answered_here() and not is_json else None)
    except ApprovalPendingError as error:
        terminal.print_line(str(error), terminal.errors)
        raise typer.Exit(terminal.EXIT_WAITING) from None
    except ProfilingAgentError as error:
        terminal.refuse(str(error))
    except (KeyboardInterrupt, EOFError) as stop:
        terminal.exit_stopped(stop, f"; go on with: profiling-agent resume {root}")
    if is_json:
        fields = report.verdict.model_dump(mode="json")
        typer.echo(json.dumps({"event": "verdict", "run": str(root), **fields}))
    else:
        summary = Text(f"{report.verdict.outcome}: {report.verdict.explanation} ({root})")
        terminal.console.print(summary if is_quiet else verdict_table(report, root))
    raise typer.Exit(terminal.EXIT_MET if report.verdict.outcome == "MET" else terminal.EXIT_NOT_MET)


def is_answered_here() -> bool:
    """Return whether a person can answer at this terminal."""
    return terminal.console.is_terminal and sys.stdin.isatty()


def ask(question: "ApprovalQuestion") -> "Approval":
    """Show a plan and return the typed decision; ask again until it can be parsed."""
    from rich.prompt import Prompt

    from profiling_agent.cli.tables import approval_table
    from profiling_agent.search.attempt import read_answer

    terminal.console.print(approval_table(question))
    while True:
        choice = Prompt.ask("decision", console=terminal.console, choices=list(question.choices), default="accept")
        try:
            if choice == "reject":
                return read_answer({"decision": choice, "reason": Prompt.ask("why", console=terminal.console)})
            if choice == "edit":
                path = Prompt.ask(
                    "file with the changes (see `profiling-agent approve --help`)", console=terminal.console
                )
                return read_edit(Path(path))
            return read_answer(choice)
        except RequestError as error:
            terminal.console.print(Text(str(error), style="red"))


def read_edit(path: Path) -> "Approval":
    """Return the edit in a JSON file (parts of a plan, stricter limits), or raise RequestError if it can't be read."""
    from profiling_agent.search.attempt import read_answer

    try:
        document = read_json(expanded(str(path)))
    except (OSError, DocumentError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"{str(path)!r} can't be read as JSON ({reason}): give a file with the changes") from error
    if not isinstance(document, dict):
        raise RequestError(f"{str(path)!r} holds a {type(document).__name__}: give an object such as a plan")
    return read_answer({**document, "decision": "edit"})


def approve(
    run: terminal.RunArgument,
    accept: Annotated[bool, typer.Option("--accept", help="carry the plan out")] = False,  # noqa: FBT002 - a flag
    edit: Annotated[Path | None, typer.Option(help="JSON file with changes to make first")] = None,
    reject: Annotated[str | None, typer.Option(metavar="REASON", help="ask for another plan, and say why")] = None,
    base_url: terminal.AddressOption = None,
    json_: terminal.JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Answer a run that was started with --approve plan or each, and go on with it; without an answer, show what it asks.

    An edit is a JSON object of a plan's parts and of stricter limits; what it fixes, later plans keep:
    `{"pruning": [{"layer": "layers\\.0\\.mlp", "pruning_type": "structured", "pruning_ratio": 0.25}],
    "caps": [{"layer": "layers\\.11"}], "target": {"saving": 0.3}, "max_accuracy_drop": 0.005}`

    `profiling-agent approve runs/my-run --edit plan.json`
    """
    from profiling_agent.api import approve as go_on
    from profiling_agent.api import pending
    from profiling_agent.cli.tables import approval_table

    with terminal.exit_on_errors():
        answer = _parse_answer(accept=accept, edit=edit, reject=reject)
        question = pending(run)
    if question is None:
        terminal.refuse(f"run {str(run)!r} waits for no approval: go on with `profiling-agent resume {run}`")
    if answer is None and (json_ or not is_answered_here()):
        terminal.print_result(question, lambda: approval_table(question), is_json=json_)
        raise typer.Exit(terminal.EXIT_WAITING)
    decision = answer or ask(question)
    watch(lambda listener, approver: go_on(run, decision, listener, base_url=base_url, approver=approver), run)


def _parse_answer(**options: Any) -> "Approval | None":
    from profiling_agent.search.attempt import read_answer

    given = {name: value for name, value in options.items() if value not in (None, False)}
    if len(given) > 1:
        raise RequestError(f"{' and '.join(f'--{name}' for name in given)} were given: give one answer")
    if "edit" in given:
        return read_edit(given["edit"])
    if "reject" in given:
        return read_answer({"decision": "reject", "reason": given["reject"]})
    return read_answer("accept") if given else None


@terminal.takes_request()
def run(request: "Request", *, quiet: terminal.QuietOption = False, json_: terminal.EventsOption = False) -> None:
    """Run a request to its verdict; with no flags, the embedded model and data: no network, no key, minutes.

    Writes the run folder under the output folder: report.html, report.md, report.json and the model to deploy in best/.
    """
    from profiling_agent.api import make_run_id, optimize

    named_request = request.model_copy(update={"run_id": request.run_id or make_run_id()})
    with terminal.exit_on_errors():
        root = named_request.output_dir / str(named_request.run_id)
    if not quiet and not json_:
        terminal.print_line(f"run folder {root}")
    watch(
        lambda listener, approver: optimize(named_request, listener, approver=approver),
        root,
        is_quiet=quiet,
        is_json=json_,
    )


def resume(
    run: terminal.RunArgument,
    *,
    base_url: terminal.AddressOption = None,
    quiet: terminal.QuietOption = False,
    json_: terminal.EventsOption = False,
) -> None:
    """Go on with a run that was cut, from its last checkpoint."""
    from profiling_agent.api import resume as go_on

    watch(
        lambda listener, approver: go_on(run, listener, base_url=base_url, approver=approver),
        run,
        is_quiet=quiet,
        is_json=json_,
    )


def show(
    run: terminal.RunArgument,
    json_: terminal.JsonOption = False,  # noqa: FBT002 - a flag
    plan: Annotated[bool, typer.Option("--plan", help="why each layer was changed or left alone")] = False,  # noqa: FBT002
) -> None:
    """Show a finished run: the verdict, before and after, every attempt."""
    from profiling_agent.cli.tables import plan_table, verdict_table
    from profiling_agent.reporting.results import read_report

    with terminal.exit_on_errors():
        report = read_report(run)
    terminal.print_result(report, lambda: plan_table(report) if plan else verdict_table(report, run), is_json=json_)


def report(run: terminal.RunArgument) -> None:
    """Write the report of a finished run again, and show it."""
    from rich.markdown import Markdown

    from profiling_agent.reporting.render import write_report
    from profiling_agent.reporting.results import read_report

    with terminal.exit_on_errors():
        try:
            write_report(read_report(run), run)
        except OSError as error:
            terminal.refuse(f"the report can't be written to {str(run)!r} ({error.strerror}): copy the run elsewhere")
    terminal.console.print(Markdown((run / "report.md").read_text(encoding="utf-8")))


@terminal.takes_request("model", "revision", "batch_size", "device")
def profile(request: "Request", json_: terminal.JsonOption = False) -> None:  # noqa: FBT002 - a flag
    """Profile a model: where its time, memory, MACs and parameters are, and what can be pruned."""
    from profiling_agent.cli.tables import profile_tables
    from profiling_agent.jobs.runner import profile_source

    with (
        terminal.exit_on_errors(),
        tempfile.TemporaryDirectory(prefix="profiling-agent-") as folder,
        terminal.Display(terminal.errors) as display,
    ):
        progress = display.stage("profiling")
        measured = profile_source(request, Path(folder), batch_size=request.batch_size, progress=progress)
    terminal.print_result(measured, lambda: Group(*profile_tables(measured)), is_json=json_)


# Fields of a run that `--json` prints; its report has the rest.
JSON_FIELDS = {
    "request": True,
    "failure": True,
    "report": {"verdict": True, "baseline": True, "best": True, "heldout": {"drop"}, "environment": True},
}


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file of the runs; see above")],
    output: Annotated[
        str, typer.Option(help="folder of the runs and of sweep.html; finished runs there are read back")
    ] = "runs/sweep",
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="local: one run after the other; ray: one on each node of a cluster")
    ] = "local",
    ray_address: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="with --engine ray: HOST:PORT of the cluster; by default this machine's"),
    ] = None,
    json_: terminal.JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Run every combination of the models, data sets, contracts and seeds in a file; the same command resumes it.

    Before the first run begins, the file is checked, and that each model fits its data. A run that fails is a row of
    the table with its reason; the next call tries it again. OUTPUT/sweep.html has all of them.

    models: [./my-vit, {model: microsoft/resnet-50, revision: main}]

    datasets: [{dataset: ./my-data, split: test}]

    contracts: [{max_accuracy_drop: 0.01}, {max_accuracy_drop: 0.02, max_size_ratio: 0.25, objective: size}]

    seeds: [0, 1]

    request: {batch_size: 8, time_budget: 20m}

    `profiling-agent sweep sweep.yaml --output runs/sweep`
    """
    from profiling_agent.cli.tables import sweep_table
    from profiling_agent.jobs.runner import check_matches
    from profiling_agent.request import Request
    from profiling_agent.sweep import PAGE, optimize_many, read_sweep

    if ray_address and engine == "local":
        terminal.refuse(f"--ray-address is {ray_address!r} but --engine is 'local': use --engine ray")
    if json_:
        keep_stdout()
    with terminal.exit_on_errors(terminal.GOES_ON):
        root = Request.model_validate({"output": output}).output_dir
        with terminal.Display(terminal.errors) as display:
            requests = read_sweep(file, str(root))
            check_matches(requests, display.stage("models and data"))
            address = (ray_address or "auto") if engine == "ray" else None
            rows = optimize_many(requests, display.show, ray_address=address)
    document = [row.model_dump(mode="json", include=JSON_FIELDS) for row in rows]
    terminal.print_result(document, lambda: sweep_table(rows), is_json=json_)
    if not json_:
        terminal.print_line(str(root / PAGE))
    is_met = all(row.report is not None and row.report.verdict.outcome == "MET" for row in rows)
    raise typer.Exit(terminal.EXIT_MET if is_met else terminal.EXIT_NOT_MET)
