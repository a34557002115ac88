"""Acquisition agent: opens the run, fetches the model, draws the images."""

from collections.abc import Collection
from functools import partial
from typing import Any

from langgraph.config import get_config
from langgraph.runtime import Runtime

from profiling_agent.agents.limits import choose_endpoint, key_for
from profiling_agent.agents.node import Update, run_node
from profiling_agent.agents.session import RunSession, Sessions
from profiling_agent.agents.state import RESULTS, RunState
from profiling_agent.analysis.plan_file import read_plan
from profiling_agent.errors import RequestError
from profiling_agent.files import expanded
from profiling_agent.iteration.deployments import check_runtimes
from profiling_agent.iteration.proof import why_unproven
from profiling_agent.jobs.tasks import AcquireTask
from profiling_agent.llm.chat import check_endpoint, name_of
from profiling_agent.llm.transcript import RECORDED, Recorded, open_recording
from profiling_agent.reporting.tracking import check_tracker
from profiling_agent.request import Request

# Recovery's settings were chosen with 1,000 images an epoch. Five times as many leave room for a thousand classes, and
# bound what a stream has to fetch, since those are downloaded one by one.
MAX_RECOVERY = 5000


def choose_advisor(request: Request, advisor: Any, trusted: Collection[str]) -> Update:
    """Return the language model that plans, and a line about it; raises RequestError when it doesn't work.

    `advisor` is a chat model object. Keys go to `trusted` addresses only.
    """
    if request.planner == "rules":
        return {"advisor_note": "the built-in rules plan: they were requested"}
    if advisor is not None:
        name, chosen = name_of(advisor), {"advisor_object": name_of(advisor)}
    elif request.llm.startswith(RECORDED):
        file = str(expanded(request.llm.removeprefix(RECORDED)).resolve())
        recording = open_recording(file)
        name, chosen = Recorded(recording, recording).name, {"recorded": file}
    elif endpoint := choose_endpoint(request.llm, request.base_url):
        check_endpoint(endpoint, key_for(endpoint, trusted), timeout_s=request.llm_timeout_s)
        name, chosen = endpoint.name, {"endpoint": endpoint}
    elif request.planner == "llm":
        raise RequestError("planner is 'llm' but llm is 'none': name a model, as in llm=openai:MODEL")
    else:
        return {"advisor_note": "the built-in rules plan: no language model was requested"}
    beside = " beside the built-in rules" if request.planner == "hybrid" else ""
    return {**chosen, "advisor_note": f"{name} plans{beside}"}


def acquire(request: Request, session: RunSession) -> Update:
    """Reset every result that this thread has had before, and record what was acquired.

    A plan of the user's is read here, before anything expensive, and kept: its file may be gone when a run resumes.
    """
    check_runtimes(request)
    check_tracker(request)
    chosen = choose_advisor(request, session.chat_model, session.trusted)
    plan = read_plan(request.plan, quotes=not session.is_served) if request.plan else None
    asked = request.model_dump(include=set(AcquireTask.model_fields))
    asked["num_recovery"] = MAX_RECOVERY if request.recover_epochs else 0
    session.jobs.progress(chosen["advisor_note"], 0, 0)
    acquired = session.jobs.run(AcquireTask.model_validate(asked))
    if line := why_unproven(acquired, request.goal):
        session.jobs.progress(line, 0, 0)
    blank = {name: RunState.model_fields[name].get_default() for name in RESULTS}
    root = session.workspace.root
    return blank | chosen | {"run_id": root.name, "run_dir": str(root), "acquired": acquired, "proposal": plan}


def _is_checkpointed() -> bool:
    """Return whether this graph can go on after a stop; LangGraph has no public name for it."""
    return bool(get_config().get("configurable", {}).get("__pregel_checkpointer"))


def acquisition(state: Request, *, runtime: Runtime[None], sessions: Sessions) -> Update:
    """Validate the request and fetch what it names; the only node that reads a request and not a state."""
    info = runtime.execution_info
    if state.approve != "never" and not _is_checkpointed():
        raise RequestError(
            f"approve is {state.approve!r}, and a run that waits has to be kept somewhere: "
            "build the graph with a checkpointer, or use approve=never"
        )
    session = sessions.begin(state, info.thread_id if info else None)
    # Without checkpoints it can only be this call's own; with them it may be what an old one, or a stranger, left.
    if state.base_url is not None and sessions.limits is None and not _is_checkpointed():
        session.addresses.add(state.base_url)
    return run_node(session, "acquisition", runtime, partial(acquire, state, session))
