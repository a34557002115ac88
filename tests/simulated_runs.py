"""Whole loops of plans in a world made by hand: what an attempt loses goes with its predicted KL, and nothing is run."""

from typing import Any

from sample_records import BASELINE, GOAL, drop, evaluation, with_attempt

from profiling_agent.planning.allocation import dry_run
from profiling_agent.planning.rules import analyse
from profiling_agent.schemas import Attempt, Journal, ModelProfile, Origin, Plan, StopReason, Variant
from profiling_agent.search.planners import Advisor, Planner, first_proposal, next_proposal

NUM_ATTEMPTS = 5
# In this world a nat costs 0.6 of the images.
LOST_PER_NAT = 0.6


def measured(number: int, plan: Plan, found: ModelProfile, origin: Origin, lost_per_nat: float) -> Attempt:
    """Return what this world makes of a plan."""
    dry = dry_run(plan, found)
    lost = round(1000 * lost_per_nat * (dry.kl or 0.0))
    run = evaluation(f"both{number}", Variant.BOTH, correct=900 - lost)
    return Attempt(
        number=number,
        plan=plan,
        origin=origin,
        dry_run=dry,
        deployed=run.model_copy(update={"drop": drop(lost, 0)}),
        calibration_kl=dry.kl,
        accepted=lost <= 10,
        reason="made",
    )


def loop(
    advisor: Advisor | None, planner: Planner, found: ModelProfile, lost_per_nat: float = LOST_PER_NAT
) -> tuple[Attempt, ...]:
    """Return the attempts of a whole loop."""
    plan, origin = first_proposal(advisor, planner, found, GOAL, analyse(found, GOAL))
    journal = Journal(baseline=BASELINE)
    while True:
        journal = with_attempt(journal, measured(len(journal.attempts) + 1, plan, found, origin, lost_per_nat))
        choice: Any = next_proposal(advisor, planner, found, GOAL, journal, max_iterations=NUM_ATTEMPTS)
        if isinstance(choice, StopReason):
            return journal.attempts
        plan, origin = choice


def best_saving(attempts: tuple[Attempt, ...], found: ModelProfile) -> float:
    """Return the largest share of the MACs that an accepted attempt saves."""
    return max((1 - a.dry_run.macs / found.macs for a in attempts if a.accepted and a.dry_run), default=0.0)
