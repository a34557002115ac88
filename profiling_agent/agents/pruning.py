"""Pruning agent: applies the plan to the unpruned model."""

from profiling_agent.agents.node import Update, agent
from profiling_agent.agents.session import Session
from profiling_agent.agents.state import RunState
from profiling_agent.iteration.attempt import prune_candidate


@agent
def pruning(state: RunState, session: Session) -> Update:
    """Prune; a plan that fails a gate goes on as a candidate that says why."""
    assert state.proposal is not None, "a plan is proposed before it is applied"
    return {"candidate": prune_candidate(session.bench(state), state.proposal)}
