from typing import Any

import pytest
from made import GOAL, drop, race, race_result, ref

from profiling_agent.iteration.verdict import Facts, Limit, decide
from profiling_agent.records import Outcome


def raced(speedup: float, low: float, high: float) -> dict[str, Any]:
    return {"race": race(race_result("best", speedup, low, high)), "model": ref("best")}


GOOD = Facts(drop=drop(5, 3, 8000), size_ratio=0.3, **raced(1.5, 1.4, 1.6))


def test_a_contract_that_the_bounds_meet_too_is_certified():
    verdict = decide(GOOD, GOAL)

    assert (verdict.outcome, verdict.certified, verdict.binding) == (Outcome.MET, True, None)


@pytest.mark.parametrize("facts", [GOOD, GOOD.model_copy(update={"size_ratio": 0.9})])
def test_a_baseline_in_doubt_leaves_every_verdict_unproven_in_its_first_line(facts: Facts):
    verdict = decide(facts.model_copy(update={"doubt": "the baseline guesses"}), GOAL)

    assert not verdict.certified
    assert verdict.explanation.startswith("unproven: the baseline guesses; ")


def test_met_by_the_point_estimate_alone_is_not_certified_and_says_how_many_images_it_takes():
    verdict = decide(GOOD.model_copy(update={"drop": drop(30, 24, 1000)}), GOAL)

    assert verdict.outcome is Outcome.MET
    assert not verdict.certified
    assert verdict.images_to_certify is not None
    assert verdict.images_to_certify > 1000


def test_no_number_of_images_certifies_what_the_sessions_leave_uncertain():
    facts = GOOD.model_copy(update={"drop": drop(30, 24, 1000), **raced(1.2, 0.8, 1.8)})
    verdict = decide(facts, GOAL)

    assert (verdict.outcome, verdict.certified, verdict.images_to_certify) == (Outcome.MET, False, None)


@pytest.mark.parametrize(
    ("facts", "binding"),
    [
        (GOOD.model_copy(update={"size_ratio": 0.6}), "size"),
        (GOOD.model_copy(update=raced(0.99, 0.95, 1.03)), "speed"),
        (GOOD.model_copy(update={"drop": drop(200, 10, 8000)}), "accuracy"),
    ],
)
def test_a_near_miss_names_the_term_that_binds(facts: Facts, binding: str):
    verdict = decide(facts, GOAL)

    assert (verdict.outcome, verdict.binding) == (Outcome.NEAREST_MISS, binding)


def test_the_term_that_is_missed_by_most_binds():
    missed_both = GOOD.model_copy(update=raced(0.97, 0.94, 1.01) | {"size_ratio": 0.9})

    assert decide(missed_both, GOAL).binding == "size"


def test_a_candidate_refused_on_the_held_out_images_is_a_near_miss_of_accuracy():
    verdict = decide(Facts(size_ratio=1.0, refused="it lost too much there"), GOAL)

    assert (verdict.outcome, verdict.binding) == (Outcome.NEAREST_MISS, "accuracy")


@pytest.mark.parametrize(
    ("limit", "outcome"),
    [
        (Limit(size_ratio=0.55), Outcome.INFEASIBLE),
        (Limit(size_ratio=0.2), Outcome.NEAREST_MISS),
        (Limit(size_ratio=0.2, speedup_high=0.9), Outcome.INFEASIBLE),
    ],
)
def test_only_a_limit_that_misses_too_makes_a_contract_infeasible(limit: Limit, outcome: Outcome):
    assert decide(GOOD.model_copy(update={"size_ratio": 0.6}), GOAL, limit).outcome is outcome


def test_the_baseline_misses_a_contract_that_asks_for_less_size():
    assert decide(Facts(size_ratio=1.0), GOAL).binding == "size"


def test_of_a_machine_that_was_too_noisy_no_speed_is_certain():
    race_ = GOOD.race
    assert race_ is not None
    noisy = race_.model_copy(
        update={"unsteady": "the baseline took 880 ms in its sessions, and 204 when it was timed first"}
    )
    verdict = decide(GOOD.model_copy(update={"race": noisy}), GOAL)
    speed = next(term for term in verdict.terms if term.name == "speed")

    assert (verdict.outcome, verdict.certified, speed.bound) == (Outcome.MET, False, None)
    assert "the speed is unproven, as the machine was too noisy: the baseline took 880 ms" in verdict.explanation
