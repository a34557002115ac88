"""Quantization agent: brings each pruned model into the deployment that was chosen, or that its plan asks for."""

from profiling_agent.agents.node import Update
from profiling_agent.agents.session import RunSession
from profiling_agent.agents.state import RunState
from profiling_agent.errors import PlanError
from profiling_agent.iteration.attempt import deployment_of, quantize_attempt, reopened


def quantization(state: RunState, session: RunSession) -> Update:
    """Deploy this attempt; one that can't be deployed as its plan asks goes on as a candidate that says why."""
    assert state.prepared is not None, "pruning comes first"
    assert state.journal is not None, "the deployment search comes first"
    evaluator = session.evaluator(state)
    # A person, or whoever forked the run, may have changed the contract since.
    journal, began_s = reopened(evaluator, state.journal), session.jobs.timesheet.spent_s
    if state.prepared.failure is not None:
        return {"journal": journal}
    try:
        deployment = deployment_of(state.prepared.plan, journal, evaluator.choices, state.goal)
        prepared = quantize_attempt(evaluator, state.prepared, deployment)
    except PlanError as error:
        prepared = state.prepared.model_copy(update={"failure": str(error), "is_undeployable": True})
    took_s = session.jobs.timesheet.spent_s - began_s
    return {"journal": journal, "prepared": prepared, "attempt_s": state.attempt_s + took_s}
