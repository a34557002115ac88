"""Profiling agent: measures where the model spends time, memory and parameters, and how much each unit is missed."""

from profiling_agent.agents.node import Update
from profiling_agent.agents.session import RunSession
from profiling_agent.agents.state import RunState


def profiling(state: RunState, session: RunSession) -> Update:
    """Profile the baseline, headline numbers in a process of their own; they say how many calibration images there is time for."""
    assert state.acquired is not None, "acquisition comes first"
    asked, calibration = state.acquired.calibration, session.calibration(state)
    if calibration == asked:
        return {"profiled": session.measured(state, calibration)}
    note = f"calibrated on {calibration.num_images} of {asked.num_images} images: the time budget has no room for more"
    acquired = state.acquired.model_copy(update={"calibration": calibration, "notes": (*state.acquired.notes, note)})
    return {"acquired": acquired, "profiled": session.measured(state, calibration)}
