"""Iterative pruning agent: the next plan, or the reason to stop (the paper's Algorithm 1)."""

from profiling_agent.agents.node import Update
from profiling_agent.agents.session import RunSession
from profiling_agent.agents.state import RunState
from profiling_agent.analysis.advised import UNKNOWN
from profiling_agent.iteration.planners import next_proposal, setting_of
from profiling_agent.iteration.selection import has_answer
from profiling_agent.records import StopReason


def iterative_pruning(state: RunState, session: RunSession) -> Update:
    """Ask the journal, and a language model where there is one, as long as the run has the time for another attempt."""
    budget, has_accepted = session.evaluator(state).budget, any(attempt.accepted for attempt in state.seen.attempts)
    # Where attempts are cheap, int8 alone is no reason to end without one; whoever asks for training asks for what takes long.
    is_answered = has_accepted or (budget.is_slow and has_answer(state.seen, state.goal))
    is_worth_it = budget.allows_attempt(state.longest_s, is_optional=is_answered and not state.recover_epochs)
    advisor = session.advisor(state) if is_worth_it else None
    choice = next_proposal(
        advisor,
        state.planner,
        session.profile(state),
        state.goal,
        state.seen,
        max_iterations=state.max_iterations,
        setting=setting_of(session.evaluator(state), state.seen) if advisor else UNKNOWN,
    )
    if isinstance(choice, StopReason):
        return {"stopped": choice}
    if not is_worth_it:
        return {"stopped": StopReason.TIME_SPENT}
    plan, origin = choice
    return {"proposal": plan, "origin": origin}
