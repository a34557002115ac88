"""`sweep`: the command that makes every run of a sweep file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.text import Text

from profiling_agent.cli.tables import folded_table
from profiling_agent.cli.terminal import (
    EXIT_MET,
    EXIT_NOT_MET,
    GOES_ON,
    JsonOption,
    console,
    echo_json,
    errors,
    open_display,
    refuse,
    refusing,
)
from profiling_agent.processes.streams import keep_stdout
from profiling_agent.records import Outcome
from profiling_agent.reporting.units import drop, percent, speedup
from profiling_agent.request import Request

if TYPE_CHECKING:
    from profiling_agent.sweep import SweepRow

# What `--json` prints of each run; its report has the rest.
FIGURES = {
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
    json_: JsonOption = False,  # noqa: FBT002 - a flag
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
    from profiling_agent.jobs.match import check_matches
    from profiling_agent.sweep import PAGE, optimize_many, read_sweep

    if ray_address and engine == "local":
        refuse(f"--ray-address is {ray_address!r} but --engine is 'local': use --engine ray")
    if json_:
        keep_stdout()
    with refusing(GOES_ON):
        root = Request.model_validate({"output": output}).output_dir
        with open_display(errors) as display:
            requests = read_sweep(file, str(root))
            check_matches(requests, display.stage("models and data"))
            address = (ray_address or "auto") if engine == "ray" else None
            rows = optimize_many(requests, display.hear, ray_address=address)
    if json_:
        echo_json([row.model_dump(mode="json", include=FIGURES) for row in rows])
    else:
        _print_table(rows)
        console.print(str(root / PAGE), markup=False, soft_wrap=True)
    is_met = all(row.report is not None and row.report.verdict.outcome is Outcome.MET for row in rows)
    raise typer.Exit(EXIT_MET if is_met else EXIT_NOT_MET)


def _print_table(rows: "tuple[SweepRow, ...]") -> None:
    table = folded_table("sweep", "run", "verdict", "accuracy lost", "times as fast", "bytes", "failure")
    for row in rows:
        report = row.report
        if report is None:
            cells = ("failed", "", "", "", row.failure)
        else:
            cells = (
                f"{report.verdict.outcome}{', certified' if report.verdict.certified else ''}",
                drop(report.heldout.drop) if report.heldout.drop else "",
                speedup(report.race_result) if report.race_result else "not raced",
                percent(report.best.size_bytes / report.baseline.size_bytes),
                "",
            )
        table.add_row(str(row.request.run_id), *map(Text, cells))
    console.print(table)
