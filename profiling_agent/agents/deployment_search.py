"""Deployment search agent: measures what the unpruned model does in every deployment, before anything is planned."""

from profiling_agent.agents.node import Update
from profiling_agent.agents.session import RunSession
from profiling_agent.agents.state import RunState
from profiling_agent.analysis.dry_run import dry_run
from profiling_agent.errors import PlanError
from profiling_agent.iteration.attempt import open_journal
from profiling_agent.iteration.deployments import why_undeployable
from profiling_agent.records import Plan


def deployment_search(state: RunState, session: RunSession) -> Update:
    """Open the journal with the baseline, and with the deployments that are possible for it, made, raced and measured.

    What the user's own plan asks of quantization is all that is searched, once it is known to fit the model and what is installed.
    """
    evaluator = session.evaluator(state)
    if state.proposal is not None:
        dry_run(state.proposal, evaluator.profile)
        why = why_undeployable(state.proposal, evaluator.choices, state.goal)
        # The paper's plans have both halves; its loop judges the pruned one in float32.
        if why and state.goal.selection != "paper":
            raise PlanError(why)
    return {"journal": open_journal(evaluator, state.proposal or Plan())}
