"""Evaluation agent: measures what was made, on the same images as the baseline."""

from profiling_agent.agents.node import Update
from profiling_agent.agents.session import RunSession
from profiling_agent.agents.state import RunState
from profiling_agent.iteration.attempt import measure_attempt
from profiling_agent.iteration.speed import timed
from profiling_agent.records import StopReason


def evaluation(state: RunState, session: RunSession) -> Update:
    """Add a measured and judged attempt to the journal."""
    assert state.prepared is not None, "pruning comes first"
    assert state.journal is not None, "the deployment search comes first"
    began_s = session.jobs.timesheet.spent_s
    evaluator = session.evaluator(state)
    attempt = measure_attempt(evaluator, state.prepared, state.journal)
    if state.iterate and attempt.number < state.max_iterations and session.advisor(state) is not None:
        attempt = timed(evaluator, attempt)
    journal = state.journal.with_attempt(attempt.model_copy(update={"origin": state.origin or attempt.origin}))
    attempt_s = state.attempt_s + session.jobs.timesheet.spent_s - began_s
    return {
        "journal": journal,
        "stopped": None if state.iterate else StopReason.SINGLE_PASS,
        "attempt_s": attempt_s,
        "longest_s": max(state.longest_s, attempt_s),
    }
