"""The product in one call: run the graph with checkpoints, or go on with a run that was cut."""

import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain_core.runnables import RunnableConfig

from profiling_agent.agents.checkpoints import RunSaver
from profiling_agent.agents.node import ProgressEvent
from profiling_agent.agents.session import SESSIONS
from profiling_agent.errors import RequestError, RunError
from profiling_agent.graphs.optimization import build_graph  # pyright: ignore[reportMissingImports] - mapped on install
from profiling_agent.reporting.report import RunReport
from profiling_agent.request import Request
from profiling_agent.workspace import Workspace, read_manifest

Listener = Callable[[ProgressEvent], None]


def ignore(event: ProgressEvent) -> None:
    """Hear nothing."""


def make_run_id() -> str:
    """Return a new run's name: when it began, and four letters so that two of one second differ."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _drive(graph_input: Request | None, root: Path, listener: Listener) -> RunReport:
    """Run the graph on the thread that the run folder is named after, until its report is there."""
    saver = RunSaver(root.parent)
    config: RunnableConfig = {"configurable": {"thread_id": root.name}}
    try:
        graph = build_graph(saver)
        for event in graph.stream(graph_input, config, stream_mode="custom", durability="sync"):
            listener(ProgressEvent.model_validate(event))
        report: Any = graph.get_state(config).values.get("report")
    finally:
        # A node closes its session when it fails; an interrupt between two nodes leaves it to us.
        if (session := SESSIONS.get(root.resolve())) is not None:
            session.close()
        saver.close()
    if not isinstance(report, RunReport):
        raise RunError(f"run {root.name!r} ended without a report: resume it, or start a new run")
    return report


def optimize(request: Request, listener: Listener = ignore) -> RunReport:
    """Run a request to its verdict, checkpointed; an existing run id is refused (`resume` goes on with one)."""
    run_id = request.run_id or make_run_id()
    root = request.output_dir / run_id
    try:
        root.mkdir(parents=True)
    except FileExistsError as error:
        raise RunError(f"run {run_id!r} exists in {request.output!r}: resume it, or choose another run_id") from error
    except OSError as error:
        raise RequestError(f"output {request.output!r} can't be written ({error.strerror}): choose another") from error
    try:
        return _drive(request.model_copy(update={"run_id": run_id}), root, listener)
    except RequestError:
        # A request that can't be carried out leaves nothing behind, its checkpoints included.
        shutil.rmtree(root, ignore_errors=True)
        raise


def resume(run: str | Path, listener: Listener = ignore) -> RunReport:
    """Go on with a run that was cut, from its last checkpoint; a finished run gives its report again."""
    root = Path(run).expanduser()
    manifest = read_manifest(root)
    if not Workspace(root).checkpoints.exists():
        # Cut before its first checkpoint, or run without one: its finished jobs are reused all the same.
        return _drive(
            manifest.request.model_copy(update={"run_id": root.name, "output": str(root.parent)}), root, listener
        )
    return _drive(None, root, listener)
