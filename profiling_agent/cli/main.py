"""Command-line application: commands on runs and sweeps, then those on models and this machine, and the entry point."""

import json
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from profiling_agent.cli import terminal
from profiling_agent.errors import RequestError
from profiling_agent.lib.io import DocumentError, expanded, read_json
from profiling_agent.lib.logs import keep_stdout
from profiling_agent.request import Request
from profiling_agent.schemas import Approval, ApprovalQuestion

if TYPE_CHECKING:
    from profiling_agent.reporting.report import RunReport

# Commands import the libraries of a run when they are called, so that `--help` is quick.
app = typer.Typer(
    cls=terminal.Commands,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 the contract is met, 1 it is not (the report says why), 2 bad request, 3 it waits for an approval, 70 a bug of ours, 130 stopped (129 or 143 by SIGHUP or SIGTERM).",
)


@app.callback(invoke_without_command=True)
def common(
    context: typer.Context, *, version: Annotated[bool, typer.Option("--version", help="print the version")] = False
) -> None:
    """Measure, prune and quantize a vision model until a contract is met."""
    if version:
        typer.echo(f"profiling-agent {metadata.version('profiling-agent')}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(terminal.EXIT_BAD_REQUEST)


def watch(work: Callable[..., "RunReport"], root: Path, *, is_quiet: bool = False, is_json: bool = False) -> NoReturn:
    """Run `work`, which takes a listener and an approver, show its progress, and exit with the verdict's code.

    As JSON: a line for each event, and one at the end.
    """
    if is_json:
        keep_stdout()
    with (
        terminal.exit_on_stop(f"; go on with: profiling-agent resume {root}"),
        terminal.Display(terminal.console, is_quiet=is_quiet, is_json=is_json) as display,
    ):

        def approver(question: ApprovalQuestion) -> Approval:
            display.stop()
            return ask(question)

        report = work(display.show, approver=approver if is_answered_here() and not is_json else None)
    verdict = report.verdict
    if is_json:
        typer.echo(json.dumps({"event": "verdict", "run": str(root), **verdict.model_dump(mode="json")}))
    elif is_quiet:
        terminal.console.out(f"{verdict.outcome}: {verdict.explanation} ({root})")
    else:
        _print_summary(report, root)
    raise typer.Exit(terminal.EXIT_MET if verdict.outcome == "MET" else terminal.EXIT_NOT_MET)


def _print_summary(report: "RunReport", root: Path) -> None:
    terminal.print_text("summary", r=report)
    for name, path in (("best model", root / "best"), ("full report", root / "report.html")):
        terminal.console.out(f"{name}: {path}")


def is_answered_here() -> bool:
    """Return whether a person can answer at this terminal."""
    return terminal.console.is_terminal and sys.stdin.isatty()


def ask(question: ApprovalQuestion) -> Approval:
    """Show a plan and return the typed decision; ask again until it can be parsed."""
    from rich.prompt import Prompt

    terminal.print_text("approval", q=question)
    choices = list(question.choices)
    while True:
        choice = Prompt.ask("decision", console=terminal.console, choices=choices, default=choices[0])
        detail = {"reject": "why", "edit": "file with the changes (see `profiling-agent approve --help`)"}.get(choice)
        text = Prompt.ask(detail, console=terminal.console) if detail else ""
        try:
            return _read_answer(choice, text)
        except RequestError as error:
            terminal.console.out(str(error), style="red")


def _read_answer(choice: str, text: str) -> Approval:
    """Return an answer, with a reason, or the edit in a JSON file; RequestError if it can't be read."""
    from profiling_agent.search.attempt import read_answer

    if choice != "edit":
        return read_answer({"decision": choice, "reason": text} if text else {"decision": choice})
    try:
        return read_answer({**read_json(expanded(text)), "decision": "edit"})
    except (OSError, DocumentError, TypeError) as error:
        raise RequestError(f"{text!r} holds no JSON object with changes, such as a plan ({error})") from error


@app.command()
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
        terminal.console.out(f"run folder {root}")
    watch(partial(optimize, request), root, is_quiet=is_quiet, is_json=is_json)


@app.command()
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


@app.command()
def show(
    run: terminal.RunArgument,
    *,
    json_: terminal.JsonOption = False,
    plan: Annotated[bool, typer.Option("--plan", help="why each layer was changed or left alone")] = False,
) -> None:
    """Show a finished run: the verdict, before and after, every attempt."""
    from profiling_agent.reporting.report import read_report

    report = read_report(run)
    if json_ or plan:
        terminal.print_result(report, "plan", is_json=json_, r=report)
    else:
        _print_summary(report, run)


@app.command()
@terminal.takes_request("model", "revision", "batch_size", "device")
def profile(request: Request, *, json_: terminal.JsonOption = False) -> None:
    """Profile a model: where its time, memory, MACs and parameters are, and what can be pruned."""
    from profiling_agent.jobs.runner import profile_source

    with terminal.Display(terminal.errors) as display:
        measured = profile_source(request, display.stage("profiling"))
    terminal.print_result(measured, "profile", is_json=json_, p=measured)


@app.command("ask")
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
        terminal.console.out(f"proposes another run with {changed}: {reason}")
        return is_answered_here() and Confirm.ask("start it?", console=terminal.console, default=False)

    answer, confirmed = answer_question(AskContext(str(run_folder), llm, base_url), question, confirm)
    terminal.console.out(answer)
    if confirmed is not None:
        start(confirmed)


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file of the runs; see above")],
    *,
    output: Annotated[str, typer.Option(help="folder of the runs and of sweep.html")] = "runs/sweep",
    ray: Annotated[
        str | None, typer.Option(metavar="auto|HOST:PORT", help="Ray cluster that makes one run on each node")
    ] = None,
    json_: terminal.JsonOption = False,
) -> None:
    """Run every combination of the models, data sets, contracts and seeds in a file; the same command resumes it.

    A run that fails is a row of the table with its reason; the next call tries it again. OUTPUT/sweep.html has them all.

    `{models: [./my-vit, {model: microsoft/resnet-50, revision: main}], datasets: [{dataset: ./my-data, split: test}],
    contracts: [{max_accuracy_drop: 0.01}, {max_size_ratio: 0.25, objective: size}], seeds: [0, 1], request: {batch_size: 8}}`
    """
    from profiling_agent.jobs.runner import check_matches
    from profiling_agent.sweep import PAGE, optimize_many, read_sweep

    if json_:
        keep_stdout()
    root = Request.model_validate({"output": output}).output_dir
    advice = "; the same command goes on with what is complete"
    with terminal.exit_on_stop(advice), terminal.Display(terminal.errors) as display:
        requests = read_sweep(file, str(root))
        check_matches(requests, display.stage("models and data"))
        rows = optimize_many(requests, display.show, ray_address=ray)
    terminal.print_result(rows, "sweep", is_json=json_, rows=rows)
    if not json_:
        terminal.console.out(str(root / PAGE))
    is_met = all(row.report is not None and row.report.verdict.outcome == "MET" for row in rows)
    raise typer.Exit(terminal.EXIT_MET if is_met else terminal.EXIT_NOT_MET)


@app.command()
def approve(
    run: terminal.RunArgument,
    *,
    accept: Annotated[bool, typer.Option("--accept", help="carry the plan out")] = False,
    edit: Annotated[str | None, typer.Option(metavar="PATH", help="JSON file with changes to make first")] = None,
    reject: Annotated[str | None, typer.Option(metavar="REASON", help="ask for another plan, and say why")] = None,
    base_url: terminal.AddressOption = None,
    json_: terminal.JsonOption = False,
) -> None:
    """Answer a run that waits for an approval, and go on with it; without an answer, show its question.

    An edit is a JSON object of a plan's parts and of stricter limits; what it fixes, later plans keep:
    `{"pruning": [{"layer": "layers\\.0\\.mlp", "pruning_type": "structured", "pruning_ratio": 0.25}],
    "caps": [{"layer": "layers\\.11"}], "target": {"saving": 0.3}, "max_accuracy_drop": 0.005}`
    """
    from profiling_agent import api

    options = {"accept": "" if accept else None, "edit": edit, "reject": reject}
    given = {name: text for name, text in options.items() if text is not None}
    if len(given) > 1:
        raise RequestError(f"{' and '.join(f'--{name}' for name in given)} were given: give one answer")
    answers = [_read_answer(name, text) for name, text in given.items()]
    question = api.pending(run)
    if question is None:
        raise RequestError(f"run {str(run)!r} waits for no approval: go on with `profiling-agent resume {run}`")
    if not answers and (json_ or not is_answered_here()):
        terminal.print_result(question, "approval", is_json=json_, q=question)
        raise typer.Exit(terminal.EXIT_WAITING)
    answer = answers[0] if answers else ask(question)
    watch(partial(api.approve, run, answer, base_url=base_url), run)


SOURCE = typer.Argument(parser=terminal.run_folder, metavar="RUN_OR_FOLDER", help="a run, or a saved model")
SourceArgument = Annotated[Path, SOURCE]


@app.command()
@terminal.takes_request("output", "llm", "base_url", "device")
def doctor(request: Request, *, json_: terminal.JsonOption = False) -> None:
    """Look at this machine: versions, CPU, memory, disk, noise, each runtime by running a model, the language model's server, a CUDA device.

    Ends with 1 if something would keep a run from working.
    """
    from profiling_agent.cli.doctor import examine

    with terminal.Display(terminal.errors) as display:
        findings = list(examine(request, display.stage("doctor")))
    terminal.print_result(findings, "doctor", is_json=json_, findings=findings)
    raise typer.Exit(int(any(row.state == "problem" for row in findings)))


@app.command()
def pick(
    run: terminal.RunArgument,
    *,
    candidate: Annotated[int | None, typer.Option(metavar="NUMBER", help="one of the list")] = None,
    output: Annotated[Path | None, typer.Option(help="folder to write; nothing is overwritten")] = None,
    json_: terminal.JsonOption = False,
) -> None:
    """Take another model of a finished run than the one it returned; nothing is measured again.

    Without `--candidate` all that the run measured is listed, with it the model is copied to `--output`. Only what the run
    returned was judged on held-out images.
    """
    from profiling_agent.exporting import pick as picking
    from profiling_agent.reporting.report import read_report

    if candidate is not None and output is not None:
        rows, line = (picking.pick(run, output, candidate=candidate),), f"wrote {output}"
    elif candidate is None and output is None:
        rows = picking.candidates(read_report(run))
        line = f"take one home: profiling-agent pick {run} --candidate NUMBER --output FOLDER"
    else:
        raise typer.BadParameter("give both a number of the list and a folder: --candidate 2 --output small")
    terminal.print_result(rows, "candidates", is_json=json_, candidates=rows)
    if not json_:
        terminal.console.out(line)


@app.command()
def export(
    source: SourceArgument,
    *,
    output: Annotated[Path, typer.Option(help="folder to write; nothing is overwritten")],
    format_: Annotated[
        Literal["onnx", "openvino", "hf"] | None, typer.Option("--format", help="by default as the model is")
    ] = None,
) -> None:
    """Write a model for machines without profiling-agent, after checking that it computes the same there.

    The folder has the model, the labels, the images' preparation, and `run.py`, ten lines that print the class of an image.
    `onnx` takes models for ONNX Runtime and float32 models of torch, `openvino` models for OpenVINO, `hf` models of torch
    that are neither pruned nor int8.

    `profiling-agent export runs/my-run --output home`, then `python home/run.py image.png`
    """
    from profiling_agent.exporting.export import export as write

    terminal.console.out(write(source, format_, output))


@app.command()
def push(
    source: SourceArgument,
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="owner/name on the Hub; created if missing")],
    *,
    private: Annotated[bool, typer.Option("--private", help="seen by its owner only, if it is created now")] = False,
    update: Annotated[bool, typer.Option("--update", help="replace what was pushed there before")] = False,
) -> None:
    """Put a model and its card on the Hugging Face Hub, and nothing else of the run.

    The token is that of `hf auth login`, or HF_TOKEN; it is never written down. A repository that holds something is left alone,
    unless it was pushed from here and `--update` is given.
    """
    from profiling_agent.exporting.pick import push as put

    terminal.console.out(f"pushed to {put(source, repo_id, private=private, update=update)}")


@app.command()
@terminal.takes_request("batch_size", "num_sessions", "device")
def benchmark(
    request: Request,
    sources: Annotated[list[Path], SOURCE],
    *,
    json_: terminal.JsonOption = False,
) -> None:
    """Time saved models, or all those of a run, on this machine: they take turns, and speed-ups are over the first.

    Prints images per second at batch sizes 1, 8 and 32, peak memory and bytes on disk as well. What is the fastest on one CPU
    need not be on another: benchmark a run's models again where you deploy them.
    """
    from profiling_agent.measure.race import measure_saved, noise_warning, race_saved
    from profiling_agent.reporting.report import models_of_all

    models, device = models_of_all(sources), "cuda" if request.device == "cuda" else "cpu"
    with terminal.Display(terminal.errors) as display:
        progress = display.stage("benchmark")
        race = race_saved(
            [*models.values()],
            batch_size=request.batch_size,
            num_sessions=request.num_sessions,
            device=device,
            progress=progress,
        )
        timed = {name: folder for name, folder in models.items() if str(folder) not in race.dropped}
        measured = measure_saved(timed, device=device, progress=progress)
    document, names = {"race": race, "models": measured}, {str(folder): name for name, folder in models.items()}
    terminal.print_result(document, "benchmark", is_json=json_, **document, names=names, warning=noise_warning(race))


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(parser=terminal.run_folder, metavar="RUN...", help="finished runs")],
    *,
    json_: terminal.JsonOption = False,
) -> None:
    """Show finished runs side by side: contract, verdict, accuracy, speed, size, plans."""
    from profiling_agent.reporting.report import read_report

    reports = {str(run): read_report(run) for run in runs}
    terminal.print_result(reports, "compare", is_json=json_, reports=reports)


def main() -> None:
    """Run the command line."""
    terminal.listen_to_signals()
    app()


if __name__ == "__main__":
    main()
