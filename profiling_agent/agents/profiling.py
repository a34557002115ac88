"""Profiling agent: measures where the model spends time, memory and parameters, and how much each unit is missed."""

from profiling_agent.agents.node import Update
from profiling_agent.agents.session import RunSession
from profiling_agent.agents.state import RunState


def profiling(state: RunState, session: RunSession) -> Update:
    """Profile the baseline, headline numbers in a process of their own."""
    return {"profiled": session.measured(state)}
