"""Analysis agent: from the profile to the first plan."""

from profiling_agent.agents.node import Update, agent
from profiling_agent.agents.session import Session
from profiling_agent.agents.state import RunState
from profiling_agent.analysis.dry_run import dry_run
from profiling_agent.analysis.rules import analyse


@agent
def analysis(state: RunState, session: Session) -> Update:
    """Plan by the built-in rules, or take the user's own plan once it is known to fit the model."""
    profile = session.profile(state)
    if state.proposal is None:
        return {"proposal": analyse(profile, state.goal)}
    dry_run(state.proposal, profile)
    return {}
