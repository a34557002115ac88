"""Profiling agent: measures where the model spends time, memory and parameters, and how much each unit is missed."""

from profiling_agent.agents.node import Update, agent
from profiling_agent.agents.session import Session
from profiling_agent.agents.state import RunState
from profiling_agent.profiling.job import profile_artifact


@agent
def profiling(state: RunState, session: Session) -> Update:
    """Profile the baseline, headline numbers in a process of their own."""
    assert state.acquired is not None, "acquisition comes first"
    assert state.resolved is not None, "the input shape resolver comes first"
    profiled = profile_artifact(
        session.jobs,
        state.resolved.baseline,
        batch_size=state.batch_size,
        device=state.acquired.source.device,
        calibration=state.acquired.calibration,
        criterion=state.criterion,
        seed=state.seed,
    )
    return {"profiled": profiled}
