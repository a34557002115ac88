"""The next plan, or why there is none: a pure question about the journal.

Every plan is the first one at another strength: its target and all its ratios times one factor. The loop halves the gap
between the strongest accepted and the mildest refused factor, doubling while nothing was refused.
"""

import math
from collections.abc import Iterator

from profiling_agent.analysis.dry_run import dry_run, most_saving, saved_share
from profiling_agent.errors import PlanError
from profiling_agent.records import Attempt, Goal, Journal, ModelProfile, Plan, StopReason

MAX_RATIO, MAX_SAVING = 0.75, 0.99
# The paper's loop answers to the last evaluation alone; these are its steps.
MILDER, STRONGER = 0.5, 1.5
# While no target was refused the next may cost this many times the KL of the last, by steps of a twentieth of the way.
MORE_KL, NUM_SAVINGS, MIN_NATS = 4.0, 20, 1e-4


def scaled(plan: Plan, factor: float) -> Plan:
    """Return `plan` with its target and every pruning ratio times `factor`, ratios at most MAX_RATIO."""
    cuts = tuple(
        rec.model_copy(update={"pruning_ratio": min(rec.pruning_ratio * factor, MAX_RATIO)}) for rec in plan.pruning
    )
    target = plan.target
    if target is not None:
        target = target.model_copy(update={"saving": min(target.saving * factor, MAX_SAVING), "justification": ""})
    return plan.model_copy(update={"pruning": cuts, "target": target})


def _strength(attempt: Attempt, first: Plan, profile: ModelProfile) -> float | None:
    """Return the factor by which a plan is the first one scaled (capped ratios aside).

    Of another's plan it is the saving that counts, beside the first one's; None where they can't be compared.
    """
    plan = attempt.plan
    if first.target is None:
        return _common_factor(plan, first)
    if plan.target is not None and plan.target.metric == first.target.metric and plan.pruning == first.pruning:
        return plan.target.saving / first.target.saving
    if attempt.dry_run is None:
        return None
    return saved_share(attempt.dry_run.cuts, profile, first.target.metric) / first.target.saving


def _common_factor(plan: Plan, first: Plan) -> float | None:
    if plan.target is not None or [rec.layer for rec in plan.pruning] != [rec.layer for rec in first.pruning]:
        return None
    return min(now.pruning_ratio / was.pruning_ratio for now, was in zip(plan.pruning, first.pruning, strict=True))


def _bracket(journal: Journal, profile: ModelProfile) -> tuple[float, float | None]:
    first = journal.attempts[0].plan
    strengths = [(_strength(attempt, first, profile), attempt.accepted) for attempt in journal.attempts]
    low = max((strength for strength, accepted in strengths if strength and accepted), default=0.0)
    refused = [strength for strength, accepted in strengths if strength and not accepted and strength > low]
    return low, min(refused, default=None)


def _strongest(first: Plan, profile: ModelProfile) -> float:
    """Return the factor that takes the first plan to the most that it can ask for."""
    if first.target is not None:
        return min(most_saving(first, profile), MAX_SAVING) / first.target.saving
    return max(MAX_RATIO / rec.pruning_ratio for rec in first.pruning)


def _stronger(first: Plan, profile: ModelProfile, low: float, strongest: float) -> float:
    """Return the strength between `low` and `strongest` at which the predicted KL is a few times that of `low`.

    Twice the saving may cost a hundred times the KL, and an attempt that is refused outright teaches little.
    """
    allowed = MORE_KL * max(_kl(scaled(first, low), profile), MIN_NATS)
    choice = low
    for share in range(1, NUM_SAVINGS + 1):
        strength = low + (strongest - low) * share / NUM_SAVINGS
        if choice > low and _kl(scaled(first, strength), profile) > allowed:
            break
        choice = strength
    return choice


def _kl(plan: Plan, profile: ModelProfile) -> float:
    """Return the KL that the evidence predicts, without end where the plan can't be made."""
    try:
        kl = dry_run(plan, profile).kl
    except PlanError:
        return math.inf
    return math.inf if kl is None else kl


def _by_bisection(journal: Journal, profile: ModelProfile) -> Iterator[float]:
    """Give strengths to try, the most informative first."""
    low, high = _bracket(journal, profile)
    first = journal.attempts[0].plan
    strongest = _strongest(first, profile)
    if high is None:
        yield _stronger(first, profile, low, strongest) if first.target else min(low * 2, strongest)
        high = strongest
    # Widths are aligned, so the exact middle may be a plan that was measured already; its neighbours may not be.
    yield from (low + (high - low) * share for share in (1 / 2, 3 / 4, 1 / 4, 7 / 8, 1 / 8))


def _as_the_paper(last: Attempt, journal: Journal, profile: ModelProfile) -> Iterator[float]:
    """Give the paper's next strength: from the last plan and the last evaluation, nothing older."""
    strength = _strength(last, journal.attempts[0].plan, profile) or 1.0
    yield strength * (STRONGER if last.accepted else MILDER)


def propose(goal: Goal, profile: ModelProfile, journal: Journal, *, max_iterations: int) -> Plan | StopReason:
    """Return the next plan to measure, or the reason to stop.

    Nothing that was timed decides here, so a resumed run proposes what an undisturbed one does.
    """
    first = journal.attempts[0].plan
    if not first.pruning and first.target is None:
        return StopReason.NOTHING_TO_PRUNE
    if len(journal.attempts) >= max_iterations:
        return StopReason.BUDGET_SPENT
    is_paper = goal.selection == "paper"
    strengths = _as_the_paper(journal.attempts[-1], journal, profile) if is_paper else _by_bisection(journal, profile)
    tried = {_widths(attempt.plan, profile) for attempt in journal.attempts}
    for strength in strengths:
        plan = scaled(first, strength)
        widths = _widths(plan, profile)
        if is_paper or (widths and widths not in tried):
            return plan
    return StopReason.CONVERGED


def _widths(plan: Plan, profile: ModelProfile) -> tuple[tuple[str, int], ...]:
    """Return what a plan comes to after alignment; nothing where no unit would change or the plan can't be read."""
    try:
        return tuple((cut.unit.name, cut.keep) for cut in dry_run(plan, profile).cuts)
    except PlanError:
        return ()
