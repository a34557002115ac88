"""Sweeps: one run for every combination of models, data sets, contracts and seeds, on this machine or a Ray cluster."""

import contextlib
import hashlib
import itertools
import json
import logging
import os
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from profiling_agent.api import Listener, complete, ignore
from profiling_agent.errors import ProfilingAgentError, RequestError, StorageError
from profiling_agent.graph.run import ProgressEvent
from profiling_agent.lib.io import first_line, first_problem, parse_record, write_text
from profiling_agent.reporting.render import render_sweep
from profiling_agent.reporting.report import RunReport
from profiling_agent.request import Request
from profiling_agent.schemas import Record
from profiling_agent.workspace import slug

PAGE = "sweep.html"


class SweepFile(Record):
    """Content of a sweep file; models and data sets may be names only, and `request` applies to all runs."""

    models: tuple[str | dict[str, Any], ...] = Field(min_length=1)
    datasets: tuple[str | dict[str, Any], ...] = Field(min_length=1)
    contracts: tuple[dict[str, Any], ...] = Field(default=({},), min_length=1)
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    request: dict[str, Any] = Field(default_factory=dict)


class SweepRow(Record):
    """Run of a sweep: its report, or the `failure` that ended it."""

    request: Request
    report: RunReport | None = None
    failure: str = ""


def read_sweep(path: Path, output: str) -> tuple[Request, ...]:
    """Return the requests of a sweep file, each with its run id; raises RequestError for an invalid file."""
    try:
        sweep = parse_record(SweepFile, json.dumps(yaml.safe_load(path.read_text(encoding="utf-8"))), quotes=True)
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise RequestError(f"sweep file {str(path)!r} can't be used: {error}") from error
    requests: list[Request] = []
    for model, dataset, contract, seed in itertools.product(sweep.models, sweep.datasets, sweep.contracts, sweep.seeds):
        fields = {**sweep.request, **contract, "seed": seed, "output": output}
        for name, entry in (("model", model), ("dataset", dataset)):
            fields |= {name: "", **entry} if isinstance(entry, dict) else {name: entry}
        try:
            requests.append(with_run_id(Request.model_validate(fields)))
        except ValidationError as error:
            label = f"the run of {model} on {dataset}, contract {contract}, seed {seed}"
            raise RequestError(f"{str(path)!r}: {label} can't be requested: {first_problem(error)}") from error
    return tuple(requests)


def with_run_id(request: Request) -> Request:
    """Return a request with a run id derived from it, the same in every folder and on every machine."""
    names = [slug(name.rstrip("/").rpartition("/")[2])[:24] or "x" for name in (request.model, request.dataset)]
    digest = hashlib.sha256(request.model_dump_json(exclude={"run_id", "output"}).encode()).hexdigest()[:10]
    return request.model_copy(update={"run_id": request.run_id or "-".join((*names, f"s{request.seed}", digest))})


def optimize_many(
    requests: Sequence[Request], listener: Listener = ignore, *, ray_address: str | None = None
) -> tuple[SweepRow, ...]:
    """Complete the runs of one output folder and write `sweep.html` after each; finished ones are read back, interrupted ones resumed.

    With a `ray_address`, each takes a node of that cluster, whose nodes share the folder. Raises RequestError, StorageError.
    """
    cells = {cell.run_id: cell for cell in map(with_run_id, requests)}
    if len(cells) < len(requests) or len({cell.output for cell in requests}) != 1:
        raise RequestError("the runs of a sweep lie in one output, each with a run_id of its own: none is there twice")
    root, rows = requests[0].output_dir, dict[str | None, SweepRow]()

    def write_page() -> None:
        write_text(root / PAGE, render_sweep([rows[run_id] for run_id in cells if run_id in rows], len(cells)))

    try:
        root.mkdir(parents=True, exist_ok=True)
        write_page()
    except OSError as error:
        raise StorageError(f"sweep folder {str(root)!r} can't be written ({error.strerror}): choose another") from error
    for row in _on_ray(cells, ray_address) if ray_address else (run_cell(cell, listener) for cell in cells.values()):
        rows[row.request.run_id] = row
        write_page()
        message = f"{row.request.run_id}: {row.report.verdict.outcome if row.report else row.failure}"
        listener(ProgressEvent(stage="sweep", message=message, done=len(rows), total=len(cells)))
    return tuple(rows[run_id] for run_id in cells)


def run_cell(request: Request, listener: Listener = ignore) -> SweepRow:
    """Complete one run; any error becomes the row's failure."""
    try:
        return SweepRow(request=request, report=complete(request, listener))
    except Exception as error:  # noqa: BLE001 - the other runs go on
        is_ours = isinstance(error, ProfilingAgentError)
        return SweepRow(request=request, failure=str(error) if is_ours else traceback.format_exc())


def _on_ray(cells: dict[str | None, Request], address: str) -> Iterator[SweepRow]:
    """Yield rows as runs end, one run per cluster node; Ray restarts the run of a lost node."""
    os.environ.setdefault("RAY_task_oom_retries", "3")  # Unlimited by default; read when Ray is imported.
    try:
        import ray
        from ray.exceptions import RayError

        if (port := address.rpartition(":")[2]).isdecimal():  # Ray's own timeout is minutes.
            socket.create_connection((address.rpartition(":")[0], int(port)), timeout=5).close()
        cluster = ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises all kinds.
        raise RequestError(f"no Ray cluster at {address!r} ({error}): start one, with profiling-agent[ray]") from error
    # Ray prints lost nodes to standard output, which may be for a document.
    with cluster, contextlib.redirect_stdout(sys.stderr):
        cpus = sorted({int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]} - {0})
        if len(cpus) != 1:
            raise RequestError(f"the nodes have {cpus} CPUs and a run takes a whole node: give all the same --num-cpus")
        task: Any = ray.remote(num_cpus=cpus[0], max_retries=3)(_on_node)
        waiting = {task.remote(cell.model_dump_json(), str(Path.cwd())): cell for cell in cells.values()}
        while waiting:
            (finished,), _ = ray.wait(list(waiting))
            request = waiting.pop(finished)
            try:
                yield SweepRow.model_validate_json(ray.get(finished))
            except RayError as error:
                yield SweepRow(request=request, failure=first_line(getattr(error, "cause", None) or error))


def _on_node(request_json: str, folder: str) -> str:
    """Complete a run in a Ray task, with paths relative to the driver's working folder."""
    os.chdir(folder)
    os.environ.pop("OMP_NUM_THREADS", None)  # Set by Ray for each task; a run sets its own number of threads.
    request = Request.model_validate_json(request_json)
    if not (request.output_dir / PAGE).exists():
        raise RequestError(f"node {os.uname().nodename} does not see {request.output!r}: name a folder that all share")
    return run_cell(request).model_dump_json()
