"""Quantization agent: brings the pruned model into the form it would be deployed in."""

from profiling_agent.agents.node import Update, agent
from profiling_agent.agents.session import Session
from profiling_agent.agents.state import RunState
from profiling_agent.iteration.attempt import quantize_candidate


@agent
def quantization(state: RunState, session: Session) -> Update:
    """Quantize as the plan says."""
    assert state.candidate is not None, "pruning comes first"
    return {"candidate": quantize_candidate(session.bench(state), state.candidate)}
