"""`race`, `measure`, `compare`: the commands on models that are saved already."""

from pathlib import Path
from typing import Annotated

import typer

from profiling_agent.cli.progress import open_display
from profiling_agent.cli.terminal import JsonOption, console, echo_json, errors, refuse, run_folder
from profiling_agent.errors import ProfilingAgentError
from profiling_agent.records import NUM_SESSIONS
from profiling_agent.request import SYNONYMS


def _device(named: str) -> str:
    named = SYNONYMS["device"].get(named, named)
    if named not in ("cpu", "cuda"):
        raise typer.BadParameter(f"{named[:80]!r} is no device: use cpu or cuda")
    return named


DeviceOption = Annotated[str, typer.Option(parser=_device, metavar="cpu|cuda", help="where to measure")]


def race(
    sources: Annotated[
        list[Path],
        typer.Argument(parser=run_folder, metavar="RUN_OR_FOLDER...", help="a run (its models), or saved models"),
    ],
    batch_size: Annotated[int, typer.Option(min=1, max=4096, help="images in a forward pass")] = 32,
    num_sessions: Annotated[
        int, typer.Option(min=2, max=100, help="times that all start anew; fewer are quicker and prove less")
    ] = NUM_SESSIONS,
    device: DeviceOption = "cpu",
    json_: JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Race saved models on this machine: samples are interleaved, a process each; speed-ups are over the first.

    What was the fastest on one CPU need not be on another: race a run's models again where you deploy them.

    `profiling-agent race runs/my-run --batch-size 1`
    """
    from profiling_agent.benchmarking.saved import race_saved
    from profiling_agent.cli.tables import race_table
    from profiling_agent.reporting.results import models_of_all

    try:
        with open_display(errors) as display:
            models = models_of_all(sources)
            names, held = race_saved(
                models,
                batch_size=batch_size,
                num_sessions=num_sessions,
                device=device,
                progress=display.stage("race"),
            )
    except ProfilingAgentError as error:
        refuse(str(error))
    if json_:
        echo_json(held.model_dump(mode="json"))
        return
    console.print(race_table(names, held))


def measure(
    sources: Annotated[
        list[Path],
        typer.Argument(
            parser=run_folder, metavar="RUN_OR_FOLDER...", help="a run (its baseline and best), or saved models"
        ),
    ],
    device: DeviceOption = "cpu",
    against: Annotated[
        Path | None, typer.Option(help="file that an earlier --json wrote; another machine's is refused")
    ] = None,
    json_: JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Measure what saved models take: images per second at batch sizes 1, 8 and 32, peak memory, bytes on disk.

    `profiling-agent measure runs/my-run --json > now.json`
    """
    from profiling_agent.benchmarking.saved import compare_measurements, measure_saved, read_measurements
    from profiling_agent.cli.tables import measurement_table
    from profiling_agent.reporting.results import before_and_after

    try:
        earlier = read_measurements(against, device=device) if against else None
        with open_display(errors) as display:
            models = [model for source in sources for model in before_and_after(source)]
            measured = measure_saved(models, device=device, progress=display.stage("measure"))
        compared = compare_measurements(measured, earlier or measured)
    except ProfilingAgentError as error:
        refuse(str(error))
    if json_:
        echo_json(measured.model_dump(mode="json"))
        return
    console.print(measurement_table(measured, compared))


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(parser=run_folder, metavar="RUN...", help="finished runs, or forks of one"),
    ],
    json_: JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Show finished runs side by side: contract, verdict, accuracy, speed, size, plans.

    `profiling-agent compare runs/mild runs/bold`
    """
    from profiling_agent.cli.tables import compare_table
    from profiling_agent.reporting.results import read_report

    try:
        reports = {str(run): read_report(run) for run in runs}
    except ProfilingAgentError as error:
        refuse(str(error))
    if json_:
        echo_json({name: report.model_dump(mode="json") for name, report in reports.items()})
        return
    console.print(compare_table(reports))
