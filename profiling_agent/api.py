"""Python API of a run: start, resume, approve, or complete it, with checkpoints."""

import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain_core.runnables import RunnableConfig

from profiling_agent.errors import ApprovalPendingError, RequestError, RunError
from profiling_agent.graph.checkpoints import open_saver
from profiling_agent.graph.nodes import pending_question, resume_command
from profiling_agent.graph.run import ProgressEvent, Run
from profiling_agent.graphs.optimization import build_graph  # pyright: ignore[reportMissingImports] - mapped on install
from profiling_agent.lib.io import expanded, inside
from profiling_agent.lib.logs import interruptible
from profiling_agent.lib.machine import environment
from profiling_agent.reporting.report import REPORT, RunReport, read_report
from profiling_agent.request import Request
from profiling_agent.schemas import Approval, ApprovalQuestion
from profiling_agent.workspace import Workspace, changed_fields, create_workspace, read_manifest

Listener = Callable[[ProgressEvent], None]
Approver = Callable[[ApprovalQuestion], Approval]


def ignore(event: ProgressEvent) -> None:
    """Ignore a progress event."""


def make_run_id() -> str:
    """Return a new run id: the start time, and four hex digits to tell runs of one second apart."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _drive(
    request: Request,
    workspace: Workspace,
    listener: Listener,
    approver: Approver | None,
    answer: Approval | None = None,
    **options: Any,
) -> RunReport:
    """Run the graph until there is a report, or an approval without `approver`; `options` are those of a `Run`."""
    root, question = workspace.root, None
    config: RunnableConfig = {"configurable": {"thread_id": root.name}}
    while True:
        # Locked before the person is asked, so that no other process answers meanwhile.
        with interruptible(), Run(workspace, **options) as run, open_saver(root) as saver:
            graph = build_graph(saver)
            if question is not None:
                if approver is None:
                    problem = f" ({question.problem})" if question.problem else ""
                    raise ApprovalPendingError(
                        f"run {root.name!r} waits for an approval of "
                        f"{f'attempt {question.attempt}' if question.attempt else 'its limits'}{problem}: answer with `profiling-agent approve {root}`"
                    )
                answer = approver(question)
            elif answer is not None and pending_question(graph, config) is None:
                raise RunError(f"run {root.name!r} waits for no approval: go on with `profiling-agent resume {root}`")
            # A run interrupted before its first checkpoint starts again; its finished jobs are reused.
            graph_input: Any = resume_command(answer) if answer else None if saver.get_tuple(config) else request
            for event in graph.stream(graph_input, config, context=run, stream_mode="custom", durability="sync"):
                listener(ProgressEvent.model_validate(event))
            question = pending_question(graph, config)
            state = graph.get_state(config).values
        if question is None:
            # The folder may have been moved since.
            return read_report(inside(root / Path(state["results_dir"]).relative_to(state["run_dir"]), root))


def optimize(
    request: Request, listener: Listener = ignore, *, advisor: Any = None, approver: Approver | None = None
) -> RunReport:
    """Run a request to its verdict, checkpointed; an existing run id is refused (`resume` continues one).

    `advisor` is a LangChain chat model that plans instead of the requested one. `approver` answers if the request needs approvals; without one the
    run stops there, with ApprovalPendingError, until `approve` answers.
    """
    workspace = create_workspace(request, request.run_id or make_run_id())
    named_request = request.model_copy(update={"run_id": workspace.root.name})
    try:
        return _drive(named_request, workspace, listener, approver, advisor=advisor, addresses=(request.base_url,))
    except RequestError as error:
        # A request that can't be carried out leaves nothing; a run that is in use, damaged or waiting stays.
        if not isinstance(error, RunError):
            shutil.rmtree(workspace.root, ignore_errors=True)
        raise


def complete(request: Request, listener: Listener = ignore) -> RunReport:
    """Return the report of a request with a run id: of its finished run, resumed run, or new run.

    A run begun on another kind of machine starts again: times of both are never mixed. Raises RunError if the folder has another request's run.
    """
    folder = request.output_dir / str(request.run_id)
    if not folder.exists():
        return optimize(request, listener)
    manifest = read_manifest(folder)
    if changed := changed_fields(manifest.request, request):
        raise RunError(f"run {request.run_id!r} was begun with another {changed[0]}: choose another run_id")
    if (folder / REPORT).exists():
        return read_report(folder)
    if manifest.machine in ("", environment(request.device).machine):
        return resume(folder, listener, base_url=request.base_url)
    Workspace(folder).lock().release()
    shutil.rmtree(folder)
    return optimize(request, listener)


def resume(
    run: str | Path,
    listener: Listener = ignore,
    *,
    advisor: Any = None,
    base_url: str | None = None,
    approver: Approver | None = None,
) -> RunReport:
    """Resume an interrupted run from its last checkpoint; a finished run returns its report again.

    A run begun with an `advisor` needs it again. If the language model's address is neither the provider's nor the environment's, it gets the
    environment's key only if that address is given again, as `base_url`.
    """
    return _drive(*_open_run(run), listener, approver, advisor=advisor, addresses=(base_url,))


def approve(
    run: str | Path,
    answer: Approval,
    listener: Listener = ignore,
    *,
    advisor: Any = None,
    base_url: str | None = None,
    approver: Approver | None = None,
) -> RunReport:
    """Answer the question that a run waits with, and resume it; `advisor` and `base_url` as for `resume`.

    Raises:
        ApprovalPendingError: the run waits again, for the next plan or because the answer was invalid.
        RunError: the run waits for nothing.
    """
    return _drive(*_open_run(run), listener, approver, answer, advisor=advisor, addresses=(base_url,))


def pending(run: str | Path) -> ApprovalQuestion | None:
    """Return the question that a run waits with, or None."""
    _, workspace = _open_run(run)
    with open_saver(workspace.root, create=False) as saver:
        return pending_question(build_graph(saver), {"configurable": {"thread_id": workspace.root.name}})


def _open_run(run: str | Path) -> tuple[Request, Workspace]:
    # Resolved, so that `.` has a name too.
    root = expanded(str(run)).resolve()
    manifest = read_manifest(root)
    machine = environment(manifest.request.device).machine
    if manifest.machine not in ("", machine) and not (root / REPORT).exists():
        advice = "finish it there, or start a new run here"
        raise RunError(f"run {root.name!r} was begun on {manifest.machine!r} and this is {machine!r}: {advice}")
    request = manifest.request.model_copy(update={"run_id": root.name, "output": str(root.parent)})
    return request, Workspace(root)
