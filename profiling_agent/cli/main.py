"""Command-line application: commands on runs and sweeps, then those on models and this machine, and the entry point."""

import json
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from profiling_agent.cli import terminal
from profiling_agent.errors import RequestError, RunError
from profiling_agent.lib.io import DocumentError, expanded, read_json
from profiling_agent.lib.logs import Progress, keep_stdout
from profiling_agent.request import Request
from profiling_agent.schemas import Approval, ApprovalQuestion, RuntimeName

if TYPE_CHECKING:
    from profiling_agent.reporting.report import RunReport

# Commands import the libraries of a run when they are called, so that `--help` is quick.
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
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_print_version)] = False,
) -> None:
    """Measure, prune and quantize a vision model until a contract is met."""


def watch(work: Callable[..., "RunReport"], root: Path, *, is_quiet: bool = False, is_json: bool = False) -> NoReturn:
    """Run `work`, which takes a listener and an approver, show its progress, and exit with the verdict's code.

    As JSON: a line for each event, and one at the end.
    """
    from profiling_agent.cli import tables

    if is_json:
        keep_stdout()
    with (
        terminal.exit_on_stop(f"; go on with: profiling-agent resume {root}"),
        terminal.Display(terminal.console, is_quiet=is_quiet, is_json=is_json) as display,
    ):

        def approver(question: ApprovalQuestion) -> Approval:
            with display.paused():
                return ask(question)

        report = work(display.show, approver=approver if is_answered_here() and not is_json else None)
    verdict = report.verdict
    if is_json:
        typer.echo(json.dumps({"event": "verdict", "run": str(root), **verdict.model_dump(mode="json")}))
    elif is_quiet:
        terminal.console.print(f"{verdict.outcome}: {verdict.explanation} ({root})", markup=False, highlight=False)
    else:
        terminal.console.print(tables.verdict_table(report, root))
    raise typer.Exit(terminal.EXIT_MET if verdict.outcome == "MET" else terminal.EXIT_NOT_MET)


def is_answered_here() -> bool:
    """Return whether a person can answer at this terminal."""
    return terminal.console.is_terminal and sys.stdin.isatty()


def ask(question: ApprovalQuestion) -> Approval:
    """Show a plan and return the typed decision; ask again until it can be parsed."""
    from rich.prompt import Prompt

    from profiling_agent.cli.tables import approval_table

    terminal.console.print(approval_table(question))
    while True:
        choice = Prompt.ask("decision", console=terminal.console, choices=list(question.choices), default="accept")
        detail = {"reject": "why", "edit": "file with the changes (see `profiling-agent approve --help`)"}.get(choice)
        text = Prompt.ask(detail, console=terminal.console) if detail else ""
        try:
            return _read_answer(choice, text)
        except RequestError as error:
            terminal.print_line(str(error), style="red")


def _read_answer(choice: str, text: str) -> Approval:
    """Return an answer, with a reason, or the edit in a JSON file; RequestError if it can't be read."""
    from profiling_agent.search.attempt import read_answer

    if choice != "edit":
        return read_answer({"decision": choice, "reason": text} if text else {"decision": choice})
    try:
        document = read_json(expanded(text))
    except (OSError, DocumentError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"{text!r} can't be read as JSON ({reason}): give a file with the changes") from error
    if not isinstance(document, dict):
        raise RequestError(f"{text!r} holds a {type(document).__name__}: give an object such as a plan")
    return read_answer({**document, "decision": "edit"})


@terminal.takes_request()
def run(request: Request, *, quiet: terminal.QuietOption = False, json_: terminal.EventsOption = False) -> None:
    """Run a request to its verdict; with no flags, the embedded model and data: no network, no key, minutes.

    Writes the run folder under the output folder: report.html, report.md, report.json and the model to deploy in best/.
    """
    start(request, is_quiet=quiet, is_json=json_)


def start(request: Request, *, is_quiet: bool = False, is_json: bool = False) -> NoReturn:
    """Run a request to its verdict, with its progress; exit with the verdict's code."""
    from profiling_agent.api import make_run_id, optimize

    request = request.model_copy(update={"run_id": request.run_id or make_run_id()})
    root = request.output_dir / str(request.run_id)
    if not is_quiet and not is_json:
        terminal.print_line(f"run folder {root}")
    watch(partial(optimize, request), root, is_quiet=is_quiet, is_json=is_json)


def resume(
    run: terminal.RunArgument,
    *,
    base_url: terminal.AddressOption = None,
    quiet: terminal.QuietOption = False,
    json_: terminal.EventsOption = False,
) -> None:
    """Go on with a run that was cut, from its last checkpoint."""
    from profiling_agent import api

    watch(partial(api.resume, run, base_url=base_url), run, is_quiet=quiet, is_json=json_)


def show(
    run: terminal.RunArgument,
    *,
    json_: terminal.JsonOption = False,
    plan: Annotated[bool, typer.Option("--plan", help="why each layer was changed or left alone")] = False,
) -> None:
    """Show a finished run: the verdict, before and after, every attempt."""
    from profiling_agent.cli import tables
    from profiling_agent.reporting.results import read_report

    report = read_report(run)
    table = partial(tables.plan_table, report) if plan else partial(tables.verdict_table, report, run)
    terminal.print_result(report, table, is_json=json_)


def report(run: terminal.RunArgument) -> None:
    """Write the report of a finished run again, and show it."""
    from rich.markdown import Markdown

    from profiling_agent.reporting.render import write_report
    from profiling_agent.reporting.results import read_report

    try:
        write_report(read_report(run), run)
    except OSError as error:
        reason = f"can't be written to {str(run)!r} ({error.strerror}): copy the run elsewhere"
        raise RunError(f"the report {reason}") from error
    terminal.console.print(Markdown((run / "report.md").read_text(encoding="utf-8")))


@terminal.takes_request("model", "revision", "batch_size", "device")
def profile(request: Request, *, json_: terminal.JsonOption = False) -> None:
    """Profile a model: where its time, memory, MACs and parameters are, and what can be pruned."""
    from rich.console import Group

    from profiling_agent.cli.tables import profile_tables
    from profiling_agent.jobs.runner import profile_source

    with tempfile.TemporaryDirectory(prefix="profiling-agent-") as folder, _progress("profiling") as progress:
        measured = profile_source(request, Path(folder), batch_size=request.batch_size, progress=progress)
    terminal.print_result(measured, lambda: Group(*profile_tables(measured)), is_json=json_)


def ask_about(
    run_folder: terminal.RunArgument,
    question: Annotated[str, typer.Argument(help="in any language")],
    *,
    llm: Annotated[
        str | None, typer.Option(metavar="openai:MODEL", help="who answers; by default the LLM of the run")
    ] = None,
    base_url: terminal.AddressOption = None,
) -> None:
    """Ask an LLM about a finished run: why something was refused, what another limit would buy.

    It looks answers up in the run's own records. Numbers that it can't have from there are marked. If you ask for it, it
    proposes another run, which starts only after your yes.

    `profiling-agent ask runs/my-run "why was int8 refused?" --llm openai:gpt-5.5`
    """
    from rich.prompt import Confirm

    from profiling_agent.graph.ask import AskContext, answer_question

    def confirm(changes: dict[str, object], reason: str) -> bool:
        changed = ", ".join(f"{name} {value}" for name, value in changes.items())
        terminal.print_line(f"proposes another run with {changed}: {reason}")
        return is_answered_here() and Confirm.ask("start it?", console=terminal.console, default=False)

    answer, confirmed = answer_question(AskContext(str(run_folder), llm, base_url), question, confirm)
    terminal.print_line(answer)
    if confirmed is not None:
        start(confirmed)


@contextmanager
def _progress(stage: str) -> Generator[Progress]:
    with terminal.Display(terminal.errors) as display:
        yield display.stage(stage)


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file of the runs; see above")],
    *,
    output: Annotated[str, typer.Option(help="folder of the runs and of sweep.html")] = "runs/sweep",
    engine: Annotated[
        Literal["local", "ray"], typer.Option(help="local: one run after the other; ray: one on each node of a cluster")
    ] = "local",
    ray_address: Annotated[str | None, typer.Option(metavar="ADDRESS", help="HOST:PORT of another cluster")] = None,
    json_: terminal.JsonOption = False,
) -> None:
    """Run every combination of the models, data sets, contracts and seeds in a file; the same command resumes it.

    A run that fails is a row of the table with its reason; the next call tries it again. OUTPUT/sweep.html has them all.

    `{models: [./my-vit, {model: microsoft/resnet-50, revision: main}], datasets: [{dataset: ./my-data, split: test}],
    contracts: [{max_accuracy_drop: 0.01}, {max_size_ratio: 0.25, objective: size}], seeds: [0, 1], request: {batch_size: 8}}`
    """
    from profiling_agent.cli.tables import sweep_table
    from profiling_agent.jobs.runner import check_matches
    from profiling_agent.sweep import PAGE, optimize_many, read_sweep

    if ray_address and engine == "local":
        raise RequestError(f"--ray-address is {ray_address!r} but --engine is 'local': use --engine ray")
    if json_:
        keep_stdout()
    root = Request.model_validate({"output": output}).output_dir
    advice = "; the same command goes on with what is complete"
    address = (ray_address or "auto") if engine == "ray" else None
    with terminal.exit_on_stop(advice), terminal.Display(terminal.errors) as display:
        requests = read_sweep(file, str(root))
        check_matches(requests, display.stage("models and data"))
        rows = optimize_many(requests, display.show, ray_address=address)
    # Of each report what is compared.
    compared = {"verdict": True, "baseline": True, "best": True, "heldout": {"drop"}, "environment": True}
    include = {"request": True, "failure": True, "report": compared}
    document = [row.model_dump(mode="json", include=include) for row in rows]
    terminal.print_result(document, lambda: sweep_table(rows), is_json=json_)
    if not json_:
        terminal.print_line(str(root / PAGE))
    is_met = all(row.report is not None and row.report.verdict.outcome == "MET" for row in rows)
    raise typer.Exit(terminal.EXIT_MET if is_met else terminal.EXIT_NOT_MET)


def approve(
    run: terminal.RunArgument,
    *,
    accept: Annotated[bool, typer.Option("--accept", help="carry the plan out")] = False,
    edit: Annotated[str | None, typer.Option(metavar="PATH", help="JSON file with changes to make first")] = None,
    reject: Annotated[str | None, typer.Option(metavar="REASON", help="ask for another plan, and say why")] = None,
    base_url: terminal.AddressOption = None,
    json_: terminal.JsonOption = False,
) -> None:
    """Answer a run that was started with --approve plan or each, and go on with it; without an answer, show what it asks.

    An edit is a JSON object of a plan's parts and of stricter limits; what it fixes, later plans keep:
    `{"pruning": [{"layer": "layers\\.0\\.mlp", "pruning_type": "structured", "pruning_ratio": 0.25}],
    "caps": [{"layer": "layers\\.11"}], "target": {"saving": 0.3}, "max_accuracy_drop": 0.005}`
    """
    from profiling_agent import api
    from profiling_agent.cli.tables import approval_table

    options = {"accept": "" if accept else None, "edit": edit, "reject": reject}
    given = {name: text for name, text in options.items() if text is not None}
    if len(given) > 1:
        raise RequestError(f"{' and '.join(f'--{name}' for name in given)} were given: give one answer")
    answers = [_read_answer(name, text) for name, text in given.items()]
    question = api.pending(run)
    if question is None:
        raise RequestError(f"run {str(run)!r} waits for no approval: go on with `profiling-agent resume {run}`")
    if not answers and (json_ or not is_answered_here()):
        terminal.print_result(question, lambda: approval_table(question), is_json=json_)
        raise typer.Exit(terminal.EXIT_WAITING)
    answer = answers[0] if answers else ask(question)
    watch(partial(api.approve, run, answer, base_url=base_url), run)


SOURCE = typer.Argument(parser=terminal.run_folder, metavar="RUN_OR_FOLDER", help="a run, or a saved model")
SourceArgument = Annotated[Path, SOURCE]
SourcesArgument = Annotated[list[Path], SOURCE]
DeviceOption = Annotated[Literal["cpu", "cuda"], typer.Option(help="where to measure")]


def _installed(request: Request) -> tuple[list[RuntimeName], list[str]]:
    """Return the requested runtimes that are installed, and a line about each that is not tried."""
    from profiling_agent.runtimes import registry

    names, left_out = list[RuntimeName](), list[str]()
    for name in request.runtime_names:
        reason = registry.missing(name)
        if reason and request.names_runtimes:
            raise RequestError(f"runtimes asks for {name}, but {reason}")
        if reason:
            left_out.append(f"{name}: {reason}")
        elif registry.runtime(name).is_slow_to_convert and not request.names_runtimes:
            left_out.append(f"{name}: it compiles for minutes; --runtimes {name} tries it")
        else:
            names.append(name)
    return names, left_out


@terminal.takes_request("output", "llm", "base_url", "advisor", "device", "revision", "runtimes")
def doctor(
    request: Request,
    *,
    model: Annotated[str | None, typer.Option(help="look at this model instead, by cutting and deploying it")] = None,
    json_: terminal.JsonOption = False,
) -> None:
    """Look at this machine: versions, CPU, memory, disk, noise, each runtime by running a model, the language model's server, a CUDA device.

    With --model a quarter is cut off every part of that model that can be cut, the result is brought into every deployment that
    is installed here and opened again, and what is refused has its reason. Inductor, which compiles for minutes, is tried if
    --runtimes names it.

    Ends with 1 if something would keep a run from working.
    """
    from profiling_agent.cli import tables
    from profiling_agent.cli.doctor import examine
    from profiling_agent.jobs.check import LookTask, check_deployments
    from profiling_agent.jobs.runner import scratch_jobs

    if model is None:
        with _progress("doctor") as progress:
            findings = list(examine(request, progress))
        terminal.print_result(findings, lambda: tables.findings_table(findings), is_json=json_)
        raise typer.Exit(int(any(row.state == "problem" for row in findings)))
    names, left_out = _installed(request)
    with _progress("doctor") as progress, scratch_jobs(progress) as jobs:
        prunable = jobs.run(LookTask(model=model, revision=request.revision))
        rows = list(check_deployments(jobs, "pruned" if prunable.cut_share else "whole", names))
    document = {"prunable": prunable, "deployable": rows, "left_out": left_out}
    terminal.print_result(document, lambda: tables.model_tables(prunable, rows, left_out), is_json=json_)
    raise typer.Exit(int(all(row.refused for row in rows)))


def pick(
    run: terminal.RunArgument,
    *,
    candidate: Annotated[str | None, typer.Option(metavar="NUMBER|NAME", help="one of the list")] = None,
    output: Annotated[Path | None, typer.Option(help="folder to write; nothing is overwritten")] = None,
    json_: terminal.JsonOption = False,
) -> None:
    """Take another model of a finished run than the one it returned; nothing is measured again.

    Without `--candidate` all that the run measured is listed, with it the model is copied to `--output`. Only what the run
    returned was judged on held-out images.
    """
    from profiling_agent.cli import tables
    from profiling_agent.exporting import pick as picking

    if candidate is None and output is None:
        measured = picking.candidates(run)
        terminal.print_result(measured, lambda: tables.candidates_table(measured), is_json=json_)
        return
    if output is None:
        raise typer.BadParameter("name a folder to write it to: --output small")
    if candidate is None:
        raise typer.BadParameter("name a candidate of the list: --candidate 2")
    picked = picking.pick(run, output, candidate=candidate)
    terminal.print_result(picked, lambda: tables.picked_table(picked), is_json=json_)
    if not json_:
        terminal.print_line(f"wrote {output}")


def export(
    source: SourceArgument,
    *,
    output: Annotated[Path, typer.Option(help="folder to write; nothing is overwritten")],
    format_: Annotated[
        str | None, typer.Option("--format", metavar="onnx|openvino|hf", help="by default as the model is")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="fix the batch (onnx of a model of torch)")] = None,
) -> None:
    """Write a model for machines without profiling-agent, after checking that it computes the same there.

    The folder has the model, the labels, the images' preparation, and `run.py`, ten lines that print the class of an image.
    `onnx` takes models for ONNX Runtime and float32 models of torch, `openvino` models for OpenVINO, `hf` models of torch
    that are neither pruned nor int8.

    `profiling-agent export runs/my-run --output home`, then `python home/run.py image.png`
    """
    from profiling_agent.exporting.export import export as write

    terminal.print_line(write(source, format_, output, batch_size=batch_size))


def push(
    source: SourceArgument,
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="owner/name on the Hub; created if missing")],
    *,
    private: Annotated[bool, typer.Option("--private", help="seen by its owner only, if it is created now")] = False,
    update: Annotated[bool, typer.Option("--update", help="replace what was pushed there before")] = False,
) -> None:
    """Put a model and its card on the Hugging Face Hub, and nothing else of the run: no logs, no reports, no paths.

    The token is that of `hf auth login`, or HF_TOKEN; it is never written down. A repository that holds something is left alone,
    unless it was pushed from here and `--update` is given.
    """
    from profiling_agent.exporting.push import push as put

    pushed = put(source, repo_id, private=private, update=update)
    terminal.print_line(f"{pushed.url} holds {', '.join(pushed.files)} (commit {pushed.commit[:12]})")


@terminal.takes_request("batch_size", "num_sessions")
def race(
    request: Request,
    sources: SourcesArgument,
    *,
    device: DeviceOption = "cpu",
    json_: terminal.JsonOption = False,
) -> None:
    """Race saved models on this machine: samples are interleaved, a process each; speed-ups are over the first.

    What was the fastest on one CPU need not be on another: race a run's models again where you deploy them.
    """
    from profiling_agent.cli.tables import race_table
    from profiling_agent.measure.race import race_saved
    from profiling_agent.reporting.results import models_of_all

    batch_size, num_sessions, models = request.batch_size, request.num_sessions, models_of_all(sources)
    with _progress("race") as progress:
        names, result = race_saved(
            models, batch_size=batch_size, num_sessions=num_sessions, device=device, progress=progress
        )
    terminal.print_result(result, lambda: race_table(names, result), is_json=json_)


def measure(sources: SourcesArgument, *, device: DeviceOption = "cpu", json_: terminal.JsonOption = False) -> None:
    """Measure what saved models take: images per second at batch sizes 1, 8 and 32, peak memory, bytes on disk.

    Of a run, its baseline and its best model are measured.
    """
    from profiling_agent.cli.tables import measurement_table
    from profiling_agent.measure.race import measure_saved
    from profiling_agent.reporting.results import before_and_after

    with _progress("measure") as progress:
        models = [model for source in sources for model in before_and_after(source)]
        measurements = measure_saved(models, device=device, progress=progress)
    terminal.print_result(measurements, lambda: measurement_table(measurements), is_json=json_)


def compare(
    runs: Annotated[list[Path], typer.Argument(parser=terminal.run_folder, metavar="RUN...", help="finished runs")],
    *,
    json_: terminal.JsonOption = False,
) -> None:
    """Show finished runs side by side: contract, verdict, accuracy, speed, size, plans."""
    from profiling_agent.cli.tables import compare_table
    from profiling_agent.reporting.results import read_report

    reports = {str(run): read_report(run) for run in runs}
    terminal.print_result(reports, lambda: compare_table(reports), is_json=json_)


# In the order of `--help`.
for command in (
    *(run, resume, show, report, profile, sweep, approve),
    *(doctor, pick, export, push, race, measure, compare),
):
    app.command()(terminal.handle_errors(command))
app.command("ask")(terminal.handle_errors(ask_about))

# Typer's error for arguments that it can't parse has no public name.
USAGE_ERROR: type[Exception] = typer.BadParameter.__bases__[0]


def main() -> None:
    """Run the command line; exit with 2 on a usage error as on every bad request, with 70 on a bug of ours."""
    terminal.listen_to_signals()
    try:
        # Without arguments the error is the help, which only standalone mode prints over several lines.
        sys.exit(app(standalone_mode=len(sys.argv) == 1))
    except USAGE_ERROR as error:
        message = getattr(error, "format_message", error.__str__)()
        sys.exit(terminal.refusal(f"{message} (`profiling-agent --help` lists all)").exit_code)
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
