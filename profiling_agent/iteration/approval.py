"""Approval: the question that a plan is to a person, and what their answer makes of the plan. No side effects."""

import math
from typing import Any

from pydantic import ValidationError

from profiling_agent.analysis.allocation import demanded, dry_run, obeying
from profiling_agent.documents import first_problem
from profiling_agent.errors import RequestError
from profiling_agent.records import (
    Approval,
    ApprovalQuestion,
    Cut,
    Goal,
    Journal,
    ModelProfile,
    Origin,
    Plan,
    UnitCut,
)

# Each limit of the contract, and the direction in which an edit may move it.
TIGHTER = {"max_accuracy_drop": -1, "min_speedup": 1, "max_size_ratio": -1, "max_memory_ratio": -1}


def pose(
    run_id: str, plan: Plan, origin: Origin | None, profile: ModelProfile, journal: Journal | None
) -> ApprovalQuestion:
    """Return what a person is shown of a plan before it is applied; PlanError where the plan can't be made."""
    dry = dry_run(plan, profile)
    return ApprovalQuestion(
        run_id=run_id,
        attempt=len(journal.attempts) + 1 if journal else 1,
        proposed_by=origin.by if origin else "rules",
        reason=origin.reason if origin else "",
        plan=plan,
        cuts=tuple(_told(cut, profile) for cut in dry.cuts),
        params_saved=1 - dry.params / profile.params,
        macs_saved=1 - dry.macs / max(profile.macs, 1),
        latency_saved=dry.latency_saved,
        kl=dry.kl,
        notes=dry.notes,
    )


def _told(cut: Cut, profile: ModelProfile) -> UnitCut:
    row = profile.evidence.of(cut.unit.name) if profile.evidence else None
    kl = next((option.kl for option in (row.options if row else ()) if option.keep == cut.keep), None)
    return UnitCut(unit=cut.unit.name, width=cut.unit.width, keep=cut.keep, kl=kl)


def read_answer(said: Any) -> Approval:
    """Return the answer in what a person, a form or a file said; RequestError with what is wrong with it."""
    if isinstance(said, Approval):
        return said
    if said == "accept":
        return Approval(decision="accept")
    try:
        return Approval.model_validate(said)
    except ValidationError as error:
        raise RequestError(f"that is no answer: {first_problem(error)}") from error


def edited(answer: Approval, plan: Plan, goal: Goal, profile: ModelProfile) -> tuple[Plan, Goal]:
    """Return the plan and the contract after an edit.

    Raises:
        PlanError: a pattern hits nothing, or the target is out of reach.
        RequestError: a limit would be loosened.
    """
    goal = demanded(_tightened(goal, answer), answer.pruning, answer.caps)
    changed = plan.model_copy(update={"target": answer.target}) if answer.target else plan
    changed = obeying(changed, goal)
    dry_run(changed, profile)
    return changed, goal


def _tightened(goal: Goal, answer: Approval) -> Goal:
    limits = {name: value for name in TIGHTER if (value := getattr(answer, name)) is not None}
    for name, value in limits.items():
        before = getattr(goal, name)
        before = math.inf if before is None else before
        if (value - before) * TIGHTER[name] < 0:
            raise RequestError(f"{name} is {value:g} but the contract says {before:g}: an edit can only tighten it")
    return goal.model_copy(update=limits)
