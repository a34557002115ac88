"""Evaluation agent: measures what was made, on the same images as the baseline."""

from profiling_agent.agents.node import Update, agent
from profiling_agent.agents.session import Session
from profiling_agent.agents.state import RunState
from profiling_agent.iteration.attempt import measure_attempt, open_journal
from profiling_agent.records import StopReason


@agent
def evaluation(state: RunState, session: Session) -> Update:
    """Add a measured and judged attempt to the journal, which the first one opens."""
    assert state.candidate is not None, "pruning and quantization come first"
    bench = session.bench(state)
    journal = state.journal or open_journal(bench, state.candidate.plan)
    measured = journal.with_attempt(measure_attempt(bench, state.candidate, journal))
    return {"journal": measured, "stopped": None if state.iterate else StopReason.SINGLE_PASS}
