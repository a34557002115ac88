"""Commands on models and this machine: `race`, `measure`, `compare`, `pick`, `export`, `push`, `doctor`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from profiling_agent.cli import terminal
from profiling_agent.errors import RequestError

if TYPE_CHECKING:
    from profiling_agent.request import Request
    from profiling_agent.schemas import RuntimeName

SourcesArgument = Annotated[
    list[Path],
    typer.Argument(parser=terminal.run_folder, metavar="RUN_OR_FOLDER...", help="runs (their models), or saved models"),
]
DeviceOption = Annotated[Literal["cpu", "cuda"], typer.Option(help="where to measure")]
SourceArgument = Annotated[
    Path,
    typer.Argument(parser=terminal.run_folder, metavar="RUN_OR_FOLDER", help="run (its best model), or a saved model"),
]


@terminal.takes_request("batch_size", "num_sessions")
def race(
    request: "Request",
    sources: SourcesArgument,
    device: DeviceOption = "cpu",
    json_: terminal.JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Race saved models on this machine: samples are interleaved, a process each; speed-ups are over the first.

    What was the fastest on one CPU need not be on another: race a run's models again where you deploy them.

    `profiling-agent race runs/my-run --batch-size 1`
    """
    from profiling_agent.cli.tables import race_table
    from profiling_agent.measure.race import race_saved
    from profiling_agent.reporting.results import models_of_all

    with terminal.exit_on_errors(), terminal.Display(terminal.errors) as display:
        names, result = race_saved(
            models_of_all(sources),
            batch_size=request.batch_size,
            num_sessions=request.num_sessions,
            device=device,
            progress=display.stage("race"),
        )
    terminal.print_result(result, lambda: race_table(names, result), is_json=json_)


def measure(
    sources: SourcesArgument,
    device: DeviceOption = "cpu",
    json_: terminal.JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Measure what saved models take: images per second at batch sizes 1, 8 and 32, peak memory, bytes on disk.

    Of a run, its baseline and its best model are measured.

    `profiling-agent measure runs/my-run --json > now.json`
    """
    from profiling_agent.cli.tables import measurement_table
    from profiling_agent.measure.race import measure_saved
    from profiling_agent.reporting.results import before_and_after

    with terminal.exit_on_errors(), terminal.Display(terminal.errors) as display:
        models = [model for source in sources for model in before_and_after(source)]
        measurements = measure_saved(models, device=device, progress=display.stage("measure"))
    terminal.print_result(measurements, lambda: measurement_table(measurements), is_json=json_)


def compare(
    runs: Annotated[
        list[Path], typer.Argument(parser=terminal.run_folder, metavar="RUN...", help="finished runs, or forks of one")
    ],
    json_: terminal.JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Show finished runs side by side: contract, verdict, accuracy, speed, size, plans.

    `profiling-agent compare runs/mild runs/bold`
    """
    from profiling_agent.cli.tables import compare_table
    from profiling_agent.reporting.results import read_report

    with terminal.exit_on_errors():
        reports = {str(run): read_report(run) for run in runs}
    terminal.print_result(reports, lambda: compare_table(reports), is_json=json_)


def pick(
    run: terminal.RunArgument,
    candidate: Annotated[
        str | None, typer.Option(metavar="NUMBER|NAME", help="one of the list, or `openvino static`")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="folder to write; nothing is overwritten, the run stays as it is")
    ] = None,
    json_: terminal.JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Take another model of a finished run than the one it returned; nothing is measured again.

    Without `--candidate` all that the run measured is listed: on search images, and whether anything beats it. With it the model
    is copied to `--output`, to be loaded, exported or pushed. Only what the run returned was judged on held-out images; of every
    other this says so.

    `profiling-agent pick runs/my-run --candidate 2 --output small`
    """
    from profiling_agent.cli.tables import candidates_table, picked_table
    from profiling_agent.exporting.pick import candidates
    from profiling_agent.exporting.pick import pick as take

    with terminal.exit_on_errors():
        if candidate is None and output is None:
            measured = candidates(run)
            terminal.print_result(measured, lambda: candidates_table(measured), is_json=json_)
            return
        if output is None:
            raise typer.BadParameter("name a folder to write it to: --output small")
        if candidate is None:
            raise typer.BadParameter("name a candidate of the list: --candidate 2")
        picked = take(run, output, candidate=candidate)
    terminal.print_result(picked, lambda: picked_table(picked), is_json=json_)
    if not json_:
        terminal.print_line(f"wrote {output}")


def export(
    source: SourceArgument,
    output: Annotated[Path, typer.Option(help="folder to write; nothing is overwritten")],
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="onnx|openvino|hf",
            help="onnx: for ONNX Runtime; openvino: for OpenVINO; hf: for from_pretrained; default: as the model is",
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="onnx, of a model of torch: fix the batch; else any batch will do")
    ] = None,
) -> None:
    """Write a model for machines without profiling-agent, after checking that it computes the same there.

    The folder has the model, the labels, the images' preparation, and `run.py`, ten lines that print the class of an image.
    `onnx` takes models for ONNX Runtime and float32 models of torch; `openvino` takes models for OpenVINO; `hf` takes models of
    torch without int8 layers. A pruned model is a Hugging Face model only if its layers were cut alike.

    `profiling-agent export runs/my-run --output home`, then `python home/run.py image.png`
    """
    from profiling_agent.exporting.export import export as write

    with terminal.exit_on_errors():
        line = write(source, format_, output, batch_size=batch_size)
    terminal.print_line(line)


def push(
    source: SourceArgument,
    repo_id: Annotated[
        str, typer.Argument(metavar="REPO_ID", help="owner/name on the Hub; it is made where it isn't there")
    ],
    *,
    private: Annotated[bool, typer.Option("--private", help="seen by its owner alone, where it is made now")] = False,
    update: Annotated[
        bool, typer.Option("--update", help="replace what was pushed there before; earlier commits stay")
    ] = False,
) -> None:
    """Put a model and its card on the Hugging Face Hub, and nothing else of the run: no logs, no reports, no paths.

    A folder that `pick` or `export` wrote can be pushed as well. The token is that of `hf auth login`, or HF_TOKEN; it is never
    written down. A repository that holds something is named and left alone, unless it was pushed from here and `--update` is given.

    `profiling-agent push runs/my-run my-name/small-resnet --private`
    """
    from profiling_agent.exporting.push import push as put

    with terminal.exit_on_errors():
        pushed = put(source, repo_id, private=private, update=update)
    terminal.print_line(f"{pushed.url} holds {', '.join(pushed.files)} (commit {pushed.commit[:12]})")


def _look_at_model(request: "Request", *, is_json: bool) -> None:
    """Cut a model, deploy the result in every way and show what worked; exit with 1 if no deployment did."""
    from profiling_agent.cli.tables import model_tables
    from profiling_agent.jobs.check import LookTask, deployable
    from profiling_agent.jobs.runner import scratch_jobs

    with terminal.exit_on_errors():
        names, left_out = _installed(request)
        with terminal.Display(terminal.errors) as display, scratch_jobs(display.stage("doctor")) as jobs:
            prunable = jobs.run(LookTask(model=request.model, revision=request.revision))
            rows = list(deployable(jobs, "pruned" if prunable.cut_share else "whole", names))
    document = {"prunable": prunable, "deployable": rows, "left_out": left_out}
    terminal.print_result(document, lambda: model_tables(prunable, rows, left_out), is_json=is_json)
    raise typer.Exit(0 if any(not row.refused for row in rows) else 1)


def _installed(request: "Request") -> tuple[list["RuntimeName"], list[str]]:
    from profiling_agent.runtimes import registry

    names, left_out = list["RuntimeName"](), list[str]()
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
    request: "Request",
    model: Annotated[
        str | None,
        typer.Option(help="look at this model instead: what can be cut of it and deployed here, found by doing it"),
    ] = None,
    json_: terminal.JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Look at this machine: versions, CPU, memory, disk, noise, each runtime by running a model, the language model's server, a CUDA device.

    The device, with auto a CUDA device if there is one, is tested by a small model that is profiled, pruned and evaluated on it.

    With --model the model is looked at instead. A quarter is cut off every part of it that can be cut, that is brought into
    every deployment that is installed here and opened again elsewhere, and what is refused has its reason. No data set is needed;
    how much accuracy a deployment costs is for a run to tell. Inductor, which compiles for minutes, is tried if --runtimes names it.

    Ends with 1 where something would keep a run from working.
    """
    if model is not None:
        _look_at_model(request, is_json=json_)
        return
    from profiling_agent.cli.doctor import examine
    from profiling_agent.cli.tables import findings_table

    with terminal.exit_on_errors(), terminal.Display(terminal.errors) as display:
        findings = list(examine(request, display.stage("doctor")))
    terminal.print_result(findings, lambda: findings_table(findings), is_json=json_)
    raise typer.Exit(1 if any(row.state == "problem" for row in findings) else 0)
