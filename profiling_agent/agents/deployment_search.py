"""Deployment search agent: measures what the unpruned model does in every deployment, before anything is planned."""

from profiling_agent.agents.node import Update
from profiling_agent.agents.session import RunSession
from profiling_agent.agents.state import RunState
from profiling_agent.analysis.dry_run import dry_run
from profiling_agent.errors import PlanError
from profiling_agent.iteration.attempt import open_journal
from profiling_agent.iteration.deployments import schemes_of, why_undeployable
from profiling_agent.iteration.labelling import with_checked_labels
from profiling_agent.records import Journal, Plan


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
    acquired = with_checked_labels(evaluator)
    journal = open_journal(evaluator, state.proposal or Plan())
    if state.proposal is not None and (why := _why_unmade(state.proposal, journal)):
        raise PlanError(why)
    return {"journal": journal, "acquired": acquired}


def _why_unmade(plan: Plan, journal: Journal) -> str | None:
    """Return why nothing could be made of the model as the user's own plan asks of quantization; None where something was, or nothing is asked."""
    search = journal.deployment_search
    if not schemes_of(plan.quantization or ()) or search is None or any(option.deployed for option in search.options):
        return None
    return f"what the plan asks of quantization can't be made of this model: {search.options[0].reason}"
