"""Pruning agent: applies the plan to the unpruned model."""

from profiling_agent.agents.node import Update
from profiling_agent.agents.session import RunSession
from profiling_agent.agents.state import RunState
from profiling_agent.iteration.attempt import prune_attempt


def pruning(state: RunState, session: RunSession) -> Update:
    """Prune; a plan that fails a gate goes on as a candidate that says why."""
    assert state.proposal is not None, "a plan is proposed before it is applied"
    evaluator, began_s = session.evaluator(state), session.jobs.timesheet.spent_s
    prepared = prune_attempt(evaluator, state.proposal)
    return {"prepared": prepared, "attempt_s": session.jobs.timesheet.spent_s - began_s}
