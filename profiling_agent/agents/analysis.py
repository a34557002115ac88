"""Analysis agent: from the profile to the first plan."""

from profiling_agent.agents.node import Update
from profiling_agent.agents.session import RunSession
from profiling_agent.agents.state import RunState
from profiling_agent.analysis.advised import UNKNOWN
from profiling_agent.analysis.demands import obeying
from profiling_agent.analysis.rules import analyse
from profiling_agent.iteration.planners import first_proposal, setting_of
from profiling_agent.iteration.propose import milder
from profiling_agent.records import Origin


def analysis(state: RunState, session: RunSession) -> Update:
    """Plan by the built-in rules or a language model, or take the user's own plan."""
    if state.proposal is not None:
        return {"origin": Origin(by="user")}
    profile = session.profile(state)
    rules = obeying(milder(analyse(profile, state.goal), len(state.rejected)), state.goal)
    advisor = session.advisor(state)
    setting = setting_of(session.evaluator(state), state.seen) if advisor else UNKNOWN
    plan, origin = first_proposal(advisor, state.planner, profile, state.goal, rules, state.seen, setting=setting)
    return {"proposal": plan, "origin": origin}
