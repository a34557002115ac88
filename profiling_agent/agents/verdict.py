"""Verdict agent: races what was measured, opens the held-out images, and says whether the contract is met."""

from profiling_agent.agents.node import Update
from profiling_agent.agents.session import RunSession
from profiling_agent.agents.state import RunState
from profiling_agent.iteration.attempt import reopened
from profiling_agent.iteration.finalize import finalize


def verdict(state: RunState, session: RunSession) -> Update:
    """Choose the winner by the contract as it is now."""
    evaluator = session.evaluator(state)
    journal = reopened(evaluator, state.seen)
    final = finalize(evaluator, journal)
    return {"journal": journal, "final": final, "verdict": final.verdict}
