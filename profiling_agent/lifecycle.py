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
from profiling_agent.agents.session import open_session
from profiling_agent.errors import RequestError, RunError
from profiling_agent.graphs.optimization import build_graph  # pyright: ignore[reportMissingImports] - mapped on install
from profiling_agent.reporting.report import RunReport
from profiling_agent.request import Request
from profiling_agent.workspace import Workspace, create_workspace, read_manifest

Listener = Callable[[ProgressEvent], None]


def ignore(event: ProgressEvent) -> None:
    """Hear nothing."""


def make_run_id() -> str:
    """Return a new run's name: when it began, and four letters so that two of one second differ."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _drive(request: Request, workspace: Workspace, listener: Listener, advisor: Any) -> RunReport:
    """Run the graph on the thread that the run folder is named after, until its report is there."""
    session = open_session(workspace)
    saver = RunSaver(workspace.root.parent)
    config: RunnableConfig = {"configurable": {"thread_id": workspace.root.name}}
    try:
        graph = build_graph(saver, advisor)
        # A run that was cut before its first checkpoint starts again; the jobs it has finished are still there.
        graph_input = None if saver.get_tuple(config) else request
        for event in graph.stream(graph_input, config, stream_mode="custom", durability="sync"):
            listener(ProgressEvent.model_validate(event))
        report: Any = graph.get_state(config).values.get("report")
    finally:
        # The last node, or one that fails, closes the session; an interrupt between two nodes leaves it to us.
        session.close()
        saver.close()
    if not isinstance(report, RunReport):
        raise RunError(f"run {workspace.root.name!r} ended without a report: start a new run")
    return report


def optimize(request: Request, listener: Listener = ignore, *, advisor: Any = None) -> RunReport:
    """Run a request to its verdict, checkpointed; an existing run id is refused (`resume` goes on with one).

    `advisor` is a LangChain chat model to plan with, instead of what the request names.
    """
    workspace = create_workspace(request, request.run_id or make_run_id())
    named = request.model_copy(update={"run_id": workspace.root.name})
    try:
        return _drive(named, workspace, listener, advisor)
    except RequestError:
        # A request that can't be carried out leaves nothing behind, its checkpoints included.
        shutil.rmtree(workspace.root, ignore_errors=True)
        raise


def resume(run: str | Path, listener: Listener = ignore, *, advisor: Any = None) -> RunReport:
    """Go on with a run that was cut, from its last checkpoint; a finished run gives its report again.

    A run that was begun with an `advisor` needs it again.
    """
    # Resolved, so that `.` has a name too.
    root = Path(run).expanduser().resolve()
    request = read_manifest(root).request.model_copy(update={"run_id": root.name, "output": str(root.parent)})
    return _drive(request, Workspace(root), listener, advisor)
