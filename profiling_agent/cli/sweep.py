"""`sweep`: the command that makes every run of a sweep file, and says before what that takes."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.text import Text

from profiling_agent.cli.progress import Display, about, open_display
from profiling_agent.cli.tables import folded_table
from profiling_agent.cli.terminal import (
    EXIT_MET,
    EXIT_NOT_MET,
    GOES_ON,
    ClusterOption,
    JsonOption,
    StoreOption,
    console,
    echo_json,
    errors,
    refusing,
)
from profiling_agent.processes.streams import keep_stdout
from profiling_agent.reporting.units import drop, percent, speedup
from profiling_agent.request import Request

if TYPE_CHECKING:
    from profiling_agent.sweep.cost import Cost
    from profiling_agent.sweep.results import RunResult


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file that says which runs; see above")],
    output: Annotated[
        str, typer.Option(help="folder of the runs and of sweep.html; what is complete there isn't done again")
    ] = "runs/sweep",
    engine: Annotated[str, typer.Option(help="where the work is done: local, or ray, run beside run")] = "local",
    ray_address: ClusterOption = None,
    ray_store: StoreOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="time each model, say what each run takes")] = False,  # noqa: FBT002 - a flag
    json_: JsonOption = False,  # noqa: FBT002 - a flag
) -> None:
    """Run every combination of the models, data sets, contracts and seeds in a file; the same command goes on where it was stopped.

    All is looked at before the first run begins: the file, and that each model and its data can be had and go together. A run that fails costs itself
    alone, and is tried again by the next call. OUTPUT/sweep.html has them all.

    models: [./my-vit, {model: microsoft/resnet-50, revision: main}]

    datasets: [{dataset: ./my-data, split: test}]

    contracts: [{max_accuracy_drop: 0.01}, {max_accuracy_drop: 0.02, max_size_ratio: 0.25, objective: size}]

    seeds: [0, 1]

    request: {batch_size: 8, time_budget: 20m}

    `profiling-agent sweep sweep.yaml --dry-run`
    """
    if json_:
        keep_stdout()
    with refusing(GOES_ON):
        place = Request.model_validate(
            {"output": output, "engine": engine, "ray_address": ray_address, "ray_store": ray_store}
        )
        if dry_run:
            _tell_costs(_foretold(file, place), json_=json_)
        else:
            _tell_results(*_swept(file, place), json_=json_)


def _looked_at(file: Path, root: Path, display: Display) -> tuple[Request, ...]:
    """Return the runs that are asked for, below `root`, once each model and its data were had and go together."""
    from profiling_agent.jobs.match import check_matches
    from profiling_agent.sweep.sheet import read_sweep

    requests = read_sweep(file, str(root))
    check_matches(requests, display.stage("what is there"))
    return requests


def _foretold(file: Path, place: Request) -> "tuple[Cost, ...]":
    from profiling_agent.sweep.cost import foretell

    with open_display(errors) as display:
        requests = _looked_at(file, place.output_dir, display)
        return foretell(requests, display.stage("what it takes"))


def _swept(file: Path, place: Request) -> "tuple[tuple[RunResult, ...], Path]":
    from profiling_agent.cluster.engine import count_machines
    from profiling_agent.sweep.folder import PAGE, locked
    from profiling_agent.sweep.many import optimize_many

    root, there = place.output_dir, place.model_dump(include={"engine", "ray_address", "ray_store"})
    with open_display(errors) as display:
        requests = tuple(one.model_copy(update=there) for one in _looked_at(file, root, display))
        progress = display.stage("sweep")

        def begins(done: int, total: int, request: Request) -> None:
            progress(f"run {done + 1} of {total}: {request.run_id}", done, total)

        with locked(root, requests) as folder:
            # Before the first run begins: a cluster that won't do is refused.
            number = count_machines(root, place)
            done = optimize_many(requests, display.hear, begins=begins, ends=folder.note, num_at_once=number)
            return done, root / PAGE


def _tell_costs(costs: "Sequence[Cost]", *, json_: bool) -> NoReturn:
    _tell(costs, [_cost_row(cost) for cost in costs], json_=json_)
    if not json_:
        console.print(f"all of them: {about(sum(cost.seconds for cost in costs))}", markup=False)
    raise typer.Exit(EXIT_NOT_MET if any(cost.problem for cost in costs) else EXIT_MET)


def _tell_results(results: "Sequence[RunResult]", page: Path, *, json_: bool) -> NoReturn:
    _tell(results, [_result_row(result) for result in results], json_=json_)
    if not json_:
        console.print(str(page), markup=False, soft_wrap=True)
    raise typer.Exit(EXIT_MET if all(result.is_met for result in results) else EXIT_NOT_MET)


def _tell(rows: Sequence[Any], lines: Sequence[dict[str, str]], *, json_: bool) -> None:
    if json_:
        echo_json([row.model_dump(mode="json") for row in rows])
        return
    first, *others = lines[0]
    table = folded_table("sweep", first, *others)
    for line in lines:
        table.add_row(*map(Text, line.values()))
    console.print(table)


def _cost_row(cost: "Cost") -> dict[str, str]:
    told = cost.problem or about(cost.seconds)
    return {"run": cost.run_id, "a pass": f"{1e3 * cost.pass_s:.3g} ms" if cost.pass_s else "", "takes": told}


def _result_row(result: "RunResult") -> dict[str, str]:
    met = f"{result.outcome}{', certified' if result.certified else ''}" if not result.failure else "failed"
    return {
        "run": result.run_id,
        "verdict": met,
        "lost": drop(result.drop) if result.drop else "",
        "times as fast": speedup(result.race_result) if result.race_result else "",
        "bytes": percent(result.size_ratio) if not result.failure else "",
        "why": result.failure,
    }
