import pytest
from made import GOAL, attempt, journal, profile

from profiling_agent.analysis.allocation import MAX_RATIO, dry_run
from profiling_agent.iteration.planners import propose
from profiling_agent.records import Attempt, Plan, StopReason

PROFILE = profile()
PAPER = GOAL.model_copy(update={"selection": "paper"})


def removed(plan: Plan) -> float:
    return 1 - dry_run(plan, PROFILE).cuts[0].keep / 512


def test_after_an_accepted_plan_the_next_one_is_twice_as_strong():
    choice = propose(GOAL, PROFILE, journal(attempt(1, 0.125, accepted=True)), max_iterations=5)

    assert isinstance(choice, Plan)
    assert choice.pruning[0].pruning_ratio == pytest.approx(0.25)


def test_after_a_refused_plan_the_next_one_is_milder():
    choice = propose(GOAL, PROFILE, journal(attempt(1, 0.25, accepted=False)), max_iterations=5)

    assert isinstance(choice, Plan)
    assert choice.pruning[0].pruning_ratio == pytest.approx(0.125)


@pytest.mark.parametrize("cliff", [0.1, 0.2, 0.4, 0.6, 0.74])
def test_the_loop_brackets_the_accuracy_cliff_to_one_aligned_step(cliff: float):
    seen = journal(attempt(1, 0.125, accepted=cliff >= 0.125))
    while isinstance(choice := propose(GOAL, PROFILE, seen, max_iterations=50), Plan):
        number = len(seen.attempts) + 1
        tried = Attempt(number=number, plan=choice, accepted=removed(choice) <= cliff, reason="made")
        seen = seen.with_attempt(tried)

    best = max((removed(a.plan) for a in seen.attempts if a.accepted), default=0.0)
    assert choice is StopReason.CONVERGED
    assert best <= cliff < best + 2 * 32 / 512


def test_no_plan_is_measured_twice():
    seen = journal(attempt(1, 0.125, accepted=True))
    while isinstance(choice := propose(GOAL, PROFILE, seen, max_iterations=50), Plan):
        seen = seen.with_attempt(Attempt(number=len(seen.attempts) + 1, plan=choice, accepted=True, reason="made"))

    widths = [tuple(cut.keep for cut in dry_run(a.plan, PROFILE).cuts) for a in seen.attempts]
    assert len(widths) == len(set(widths))


def test_no_ratio_passes_the_ceiling():
    seen = journal(attempt(1, 0.5, accepted=True))

    choice = propose(GOAL, PROFILE, seen, max_iterations=5)

    assert isinstance(choice, Plan)
    assert choice.pruning[0].pruning_ratio == MAX_RATIO


def test_the_budget_ends_the_loop():
    assert (
        propose(GOAL, PROFILE, journal(attempt(1, 0.125, accepted=True)), max_iterations=1) is StopReason.BUDGET_SPENT
    )


def test_a_first_plan_that_prunes_nothing_ends_the_loop():
    empty = Attempt(number=1, plan=Plan(), accepted=True, reason="made")

    assert propose(GOAL, PROFILE, journal(empty), max_iterations=5) is StopReason.NOTHING_TO_PRUNE


def test_the_papers_loop_answers_to_the_last_evaluation_alone_and_uses_every_iteration():
    seen = journal(attempt(1, 0.2, accepted=True), attempt(2, 0.3, accepted=False))

    choice = propose(PAPER, PROFILE, seen, max_iterations=3)

    assert isinstance(choice, Plan)
    assert choice.pruning[0].pruning_ratio == pytest.approx(0.15)
    assert propose(PAPER, PROFILE, seen, max_iterations=2) is StopReason.BUDGET_SPENT
