"""Demands: what a person has fixed for all plans of a run; and a plan made milder or stronger around them."""

from collections.abc import Sequence

from profiling_agent.records import Cap, Goal, Plan, PruningRecommendation

MAX_RATIO, MAX_SAVING = 0.75, 0.99


def demanded(goal: Goal, pins: Sequence[PruningRecommendation], caps: Sequence[Cap]) -> Goal:
    """Return the contract with more demands; of two for the same pattern the later counts."""
    kept_pins = tuple(pin for pin in goal.pins if pin.layer not in {new.layer for new in pins})
    kept_caps = tuple(cap for cap in goal.caps if cap.layer not in {new.layer for new in caps})
    return goal.model_copy(update={"pins": (*kept_pins, *pins), "caps": (*kept_caps, *caps)})


def obeying(plan: Plan, goal: Goal) -> Plan:
    """Return a plan with the contract's demands: they come last, and of several ratios for a unit the last counts."""
    pruning = tuple(rec for rec in plan.pruning if rec not in goal.pins)
    caps = tuple(cap for cap in plan.caps if cap not in goal.caps)
    return plan.model_copy(update={"pruning": (*pruning, *goal.pins), "caps": (*caps, *goal.caps)})


def scaled(plan: Plan, factor: float, pins: Sequence[PruningRecommendation] = ()) -> Plan:
    """Return `plan` with its target and every ratio that isn't pinned times `factor`; no ratio grows beyond MAX_RATIO."""

    def of(rec: PruningRecommendation) -> PruningRecommendation:
        if rec in pins:
            return rec
        most = max(rec.pruning_ratio, MAX_RATIO)
        return rec.model_copy(update={"pruning_ratio": min(rec.pruning_ratio * factor, most)})

    target = plan.target
    if target is not None:
        target = target.model_copy(update={"saving": min(target.saving * factor, MAX_SAVING), "justification": ""})
    return plan.model_copy(update={"pruning": tuple(of(rec) for rec in plan.pruning), "target": target})
