"""Quantization agent: decides scheme, layers and runtime by measurement, and brings each pruned model into that form."""

from profiling_agent.agents.node import Update, agent
from profiling_agent.agents.session import Session
from profiling_agent.agents.state import RunState
from profiling_agent.iteration.attempt import open_journal, quantize_candidate


@agent
def quantization(state: RunState, session: Session) -> Update:
    """Let the forms compete once, on the unpruned model; deploy this attempt in the one that was chosen."""
    assert state.candidate is not None, "pruning comes first"
    bench = session.bench(state)
    journal = state.journal or open_journal(bench, state.candidate.plan)
    return {"journal": journal, "candidate": quantize_candidate(bench, state.candidate, journal.form)}
