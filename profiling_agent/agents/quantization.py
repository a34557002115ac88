"""Quantization agent: chooses scheme, layers and runtime by measurement, and deploys each pruned model in them."""

from profiling_agent.agents.node import Update
from profiling_agent.agents.session import RunSession
from profiling_agent.agents.state import RunState
from profiling_agent.errors import PlanError
from profiling_agent.iteration.attempt import deployment_of, open_journal, quantize_attempt


def quantization(state: RunState, session: RunSession) -> Update:
    """Search the deployments once, with the unpruned model; deploy this attempt in the one that was chosen, or that its plan asks for.

    What a person's first plan asks for is all that is searched; what a language model wishes for one attempt leaves the search open.
    """
    assert state.prepared is not None, "pruning comes first"
    evaluator, plan = session.evaluator(state), state.prepared.plan
    open_plan = plan.model_copy(update={"quantization": None})
    is_own = state.origin is None or state.origin.by in ("user", "rules")
    journal = state.journal or open_journal(evaluator, plan if is_own else open_plan)
    began_s = session.jobs.timesheet.spent_s
    if state.prepared.failure is not None:
        return {"journal": journal, "prepared": state.prepared}
    try:
        # The search has answered what was asked for in the plan that it was made for.
        asked = open_plan if is_own and state.journal is None else plan
        deployment = deployment_of(asked, journal, evaluator.choices, state.goal)
        prepared = quantize_attempt(evaluator, state.prepared, deployment)
    except PlanError as error:
        prepared = state.prepared.model_copy(update={"failure": str(error), "is_undeployable": True})
    took_s = session.jobs.timesheet.spent_s - began_s
    return {"journal": journal, "prepared": prepared, "attempt_s": state.attempt_s + took_s}
