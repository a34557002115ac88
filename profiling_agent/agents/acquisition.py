"""Acquisition agent: opens the run, fetches the model, draws the images."""

from langgraph.runtime import Runtime

from profiling_agent.acquisition.query import MAX_RECOVERY
from profiling_agent.agents.node import Update, attend
from profiling_agent.agents.session import Session, begin
from profiling_agent.agents.state import RESULTS, RunState
from profiling_agent.analysis.plan_file import read_plan
from profiling_agent.iteration.forms import check_runtimes
from profiling_agent.jobs.tasks import AcquireTask
from profiling_agent.request import Request


def acquire(request: Request, session: Session) -> Update:
    """Reset every result of an earlier turn of this thread, and record what was acquired.

    A plan of the user's is read here, before anything expensive, and kept: its file may be gone when a run resumes.
    """
    check_runtimes(request)
    plan = read_plan(request.plan) if request.plan else None
    asked = request.model_dump(include=set(AcquireTask.model_fields))
    asked["num_recovery"] = MAX_RECOVERY if request.recover_epochs else 0
    acquired = session.jobs.run(AcquireTask.model_validate(asked))
    blank = {name: RunState.model_fields[name].get_default() for name in RESULTS}
    root = session.workspace.root
    return blank | {"run_id": root.name, "run_dir": str(root), "acquired": acquired, "proposal": plan}


def acquisition(state: Request, *, runtime: Runtime[None]) -> Update:
    """Validate the request and fetch what it names; the only node that reads a request and not a state."""
    info = runtime.execution_info
    session = begin(state, info.thread_id if info else None)
    return attend(session, "acquisition", runtime, lambda: acquire(state, session))
