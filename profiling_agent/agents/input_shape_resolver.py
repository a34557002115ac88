"""Input shape resolver agent: finds the input shape and saves the baseline with it."""

from profiling_agent.agents.node import Update, agent
from profiling_agent.agents.session import Session
from profiling_agent.agents.state import RunState
from profiling_agent.jobs.tasks import ResolveShapeTask


@agent
def input_shape_resolver(state: RunState, session: Session) -> Update:
    """Resolve the input shape by the ordered rules."""
    assert state.acquired is not None, "acquisition comes first"
    source = state.acquired.source
    task = ResolveShapeTask(model=source.name, revision=source.revision, device=source.device)
    return {"resolved": session.jobs.run(task)}
