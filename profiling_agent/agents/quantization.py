"""Quantization agent: chooses scheme, layers and runtime by measurement, and deploys each pruned model in them."""

from profiling_agent.agents.node import Update
from profiling_agent.agents.session import RunSession
from profiling_agent.agents.state import RunState
from profiling_agent.iteration.attempt import open_journal, quantize_attempt


def quantization(state: RunState, session: RunSession) -> Update:
    """Search the deployments once, with the unpruned model; deploy this attempt in the one that was chosen."""
    assert state.prepared is not None, "pruning comes first"
    evaluator = session.evaluator(state)
    journal = state.journal or open_journal(evaluator, state.prepared.plan)
    began_s = session.jobs.timesheet.spent_s
    prepared = quantize_attempt(evaluator, state.prepared, journal.deployment)
    took_s = session.jobs.timesheet.spent_s - began_s
    return {"journal": journal, "prepared": prepared, "attempt_s": state.attempt_s + took_s}
