"""Deployment search agent: measures what the unpruned model does in every deployment, before anything is planned."""

from profiling_agent.acquisition.labels import why_doubtful
from profiling_agent.agents.node import Update
from profiling_agent.agents.session import RunSession
from profiling_agent.agents.state import RunState
from profiling_agent.analysis.dry_run import dry_run
from profiling_agent.errors import PlanError
from profiling_agent.iteration.attempt import open_journal
from profiling_agent.iteration.deployments import schemes_of, why_undeployable
from profiling_agent.iteration.evaluator import Evaluator
from profiling_agent.records import SHARD, Acquired, Journal, Plan


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
    acquired = _with_checked_labels(evaluator)
    journal = open_journal(evaluator, state.proposal or Plan())
    if state.proposal is not None and (why := _why_unmade(state.proposal, journal)):
        raise PlanError(why)
    return {"journal": journal, "acquired": acquired}


def _with_checked_labels(evaluator: Evaluator) -> Acquired:
    """Return what was acquired, with the doubt that the baseline's answers on the first search images leave.

    Raises:
        AcquisitionError: they contradict labels that were matched by place or number only.
    """
    acquired = evaluator.acquired
    answers = evaluator.answers(evaluator.evaluate_baseline(acquired.search, range(SHARD)))
    doubt = why_doubtful(answers.predicted, answers.true, acquired.labels)
    if doubt is None:
        return acquired
    evaluator.jobs.progress(doubt, 0, 0)
    return acquired.model_copy(update={"notes": (*acquired.notes, doubt), "doubt": doubt})


def _why_unmade(plan: Plan, journal: Journal) -> str | None:
    """Return why what the user's own plan asks of quantization fits nothing of the model; None where something was made, or nothing is asked.

    A conversion that crashed or took too long says nothing against the plan.
    """
    options = journal.deployment_search.options if journal.deployment_search else ()
    if not schemes_of(plan.quantization or ()) or not options or not all(option.is_unfit for option in options):
        return None
    return f"what the plan asks of quantization can't be made of this model: {options[0].reason}"
