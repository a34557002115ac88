"""Deployment search agent: measures what the unpruned model does in every deployment, before anything is planned."""

from profiling_agent.agents.node import Update
from profiling_agent.agents.session import RunSession
from profiling_agent.agents.state import RunState
from profiling_agent.analysis.dry_run import dry_run
from profiling_agent.iteration.attempt import open_journal
from profiling_agent.records import Plan


def deployment_search(state: RunState, session: RunSession) -> Update:
    """Open the journal with the baseline, and with the deployments that are possible for it, made, raced and measured.

    What the user's own plan asks of quantization is all that is searched, once the plan is known to fit the model.
    """
    if state.proposal is not None:
        dry_run(state.proposal, session.profile(state))
    return {"journal": open_journal(session.evaluator(state), state.proposal or Plan())}
