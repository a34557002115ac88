"""Judging, selection and the verdict."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import sample_records
from sample_records import BASELINE, GOAL, attempt, drop, evaluation, journal, race, race_result
from search.scripted import Jobs, acquired, deployed, evaluator, name_of, option

from profiling_agent import schemas
from profiling_agent.errors import JobError
from profiling_agent.jobs.tasks import DeployTask
from profiling_agent.measure.intervals import Counts, upper_bound
from profiling_agent.runtimes.registry import recommend
from profiling_agent.schemas import DeploymentOption, Evaluation, Goal, Journal, Outcome, PrunedModel, Status, Variant
from profiling_agent.schemas.plan import Scheme
from profiling_agent.search.deployments import ASKED_SCHEMES, DeploymentChoices, keep_layers_in_float
from profiling_agent.search.selection import judge, may_be_returned, preference, ranked
from profiling_agent.search.verdict import ACCURACY_ERROR, HeldoutTest, decide_verdict, is_out_of_reach

LENIENT = GOAL.model_copy(update={"max_accuracy_drop": 0.015})
SMALL = {"macs": 900, "params": 900, "size_bytes": 1000}


def candidate(lost: int = 0, gained: int = 0, num_images: int = 1000, *, num_looks: int = 1) -> Evaluation:
    """Return a candidate of which so many search images were lost and gained."""
    seen = drop(lost, gained, num_images).model_copy(update={"num_looks": num_looks})
    return evaluation("q", Variant.QUANTIZED).model_copy(update={"drop": seen})


ACCEPTED, UNCERTAIN, REJECTED = Status


@pytest.mark.parametrize(
    ("seen", "max_drop", "p_keeps", "status", "said"),
    [
        (candidate(), 0.01, 1.0, ACCEPTED, "inside"),
        # Just inside the floor, but the search asks for a bound.
        (candidate(9), 0.01, 0.62, UNCERTAIN, "top-1 fell by 0.0090 (9 images lost, 0 gained), 90% bound 0.0"),
        # Too strict to be bounded, it is judged by the point estimate.
        (candidate(), 0.0, 1.0, ACCEPTED, "inside"),
        (candidate(0, 1), 0.0, 1.0, ACCEPTED, "inside"),
        (candidate(1), 0.0, 0.0, REJECTED, "outside"),
        (candidate(0, 0, 100), 0.01, 1.0, ACCEPTED, "unproven, as 100 images can't show it"),
        (candidate(3, 0, 40), 0.02, 0.0, REJECTED, "outside"),
        # Adjusted by one image each, 2.3 points with a standard error of 1.2; 4.9 with 1.4; 0.3 with 0.6; 0.9 with 1.0.
        (candidate(12, 4, 344), 0.02, 0.40, REJECTED, "outside"),
        (candidate(20, 3, 344), 0.02, 0.02, REJECTED, "outside"),
        (candidate(2, 1, 344), 0.02, 0.996, ACCEPTED, "inside"),
        (candidate(6, 3, 344), 0.02, 0.88, UNCERTAIN, "too few images to tell"),
        # By the same formula where a test was ended early.
        (candidate(0, 0, 512, num_looks=2), 0.01, 1.0, ACCEPTED, "of 512 that were enough"),
        (candidate(60, 0, 512, num_looks=2), 0.01, 0.0, REJECTED, "of 512 that were enough"),
    ],
)
def test_a_candidate_is_accepted_by_a_bound_where_the_images_can_show_it(
    seen: Evaluation, max_drop: float, p_keeps: float, status: Status, said: str
):
    goal = GOAL.model_copy(update={"max_accuracy_drop": max_drop})
    judgement = judge(seen, goal)

    assert judgement.status is status
    assert judgement.p_keeps == pytest.approx(p_keeps, abs=0.02)
    assert said in judgement.reason
    # The paper's selection knows no doubt.
    assert judge(seen, goal.model_copy(update={"selection": "paper"})).p_keeps in (0.0, 1.0)


def test_what_the_contract_lets_be_larger_may_be_returned():
    larger = evaluation("q", Variant.QUANTIZED, size_bytes=4032)
    seen = judge(larger, GOAL)
    assert seen.status is Status.ACCEPTED
    assert not may_be_returned(seen, BASELINE, GOAL)
    assert may_be_returned(seen, BASELINE, GOAL.model_copy(update={"max_size_ratio": 1.01}))


def opened(*options: DeploymentOption) -> Journal:
    search = schemas.DeploymentSearch(options=options, chosen=options[0].deployment)
    return Journal(baseline=BASELINE, deployment_search=search)


def test_best_is_not_the_last_attempt_and_what_is_small_enough_comes_before_what_is_cheaper():
    quantized = option("eager", "dynamic").model_copy(
        update={"evaluation": evaluation("q", Variant.QUANTIZED, size_bytes=1500)}
    )
    seen = journal(
        attempt(1, 0.1, accepted=True, **SMALL),
        attempt(2, 0.3, accepted=False, correct=800, macs=700, params=700, size_bytes=800),
        attempt(3, 0.2, accepted=True, macs=800, params=800, size_bytes=900),
        attempt(4, 0.15, accepted=True, macs=850, params=850, size_bytes=3900),
        search=schemas.DeploymentSearch(options=(quantized,), chosen=quantized.deployment),
    )

    assert [candidate.attempt for candidate in ranked(seen, GOAL)] == [3, 1, None, 4]
    assert ranked(journal(), GOAL) == ()


@pytest.mark.parametrize(
    ("better", "worse", "goal"),
    [
        # A term of the contract comes before any gain beyond it: of size, of speed.
        ({"size": 0.5}, {"size": 0.9, "speedup": 9.0}, {"max_size_ratio": 0.6}),
        ({"speedup": 2.0}, {"speedup": 1.1, "size": 0.1}, {"min_speedup": 1.5, "objective": "size"}),
        # All terms kept, the objective decides.
        ({"speedup": 3.0, "size": 0.6}, {"speedup": 2.0, "size": 0.2}, {"objective": "speed"}),
        ({"speedup": 2.0, "size": 0.2}, {"speedup": 3.0, "size": 0.6}, {"objective": "size"}),
    ],
)
def test_a_contract_prefers_what_keeps_its_terms_and_then_its_objective(better: dict, worse: dict, goal: dict):
    asked = GOAL.model_copy(update={"max_size_ratio": 1.0, "min_speedup": 1.0} | goal)
    plain: dict[str, Any] = {"size": 0.5, "speedup": 2.0, "status": ACCEPTED}

    assert preference(asked, **plain | better) < preference(asked, **plain | worse)


def test_half_precision_is_half_the_bytes_to_a_tenth_of_a_percent():
    goal = Goal(max_accuracy_drop=0.01, min_speedup=1.0, max_size_ratio=0.5, selection="contract")

    assert goal.allows_size(0.5002)
    assert not goal.allows_size(0.5006)
    assert goal.model_copy(update={"max_size_ratio": 0.2505}).allows_size(0.2505)


def heldout(seen: schemas.AccuracyDrop, size_bytes: int = 1200, error: float = 0.02) -> HeldoutTest:
    """Return a test of a model of so many bytes, of 4,000, which keeps the accuracy if its point estimate does."""
    made = evaluation("best", Variant.BOTH, size_bytes=size_bytes).model_copy(update={"drop": seen})
    opening = schemas.Opening(number=1, share=error / ACCURACY_ERROR)
    return HeldoutTest(
        baseline=BASELINE, candidate=made, opening=opening, pooled=seen.drop, keeps_accuracy=seen.drop <= 0.01
    )


def raced(speedup: float, low: float, high: float) -> schemas.Race:
    return race(race_result("best", speedup, low, high))


HELDOUT, GOOD, FAST = acquired(8000), drop(5, 3, 8000), raced(1.5, 1.4, 1.6)


@pytest.mark.parametrize(
    ("test", "timed", "outcome", "certified", "binding"),
    [
        (heldout(GOOD), FAST, Outcome.MET, True, None),
        # A near miss names the term that binds, which is missed by most.
        (heldout(GOOD, 2400), FAST, Outcome.NEAREST_MISS, False, "size"),
        (heldout(GOOD), raced(0.99, 0.95, 1.03), Outcome.NEAREST_MISS, False, "speed"),
        (heldout(drop(200, 10, 8000)), FAST, Outcome.NEAREST_MISS, False, "accuracy"),
        (heldout(GOOD, 3600), raced(0.97, 0.94, 1.01), Outcome.NEAREST_MISS, False, "size"),
        # The baseline misses a contract that asks for less size.
        (None, None, Outcome.NEAREST_MISS, False, "size"),
    ],
)
def test_a_contract_is_met_and_certified_by_its_bounds_or_missed_by_the_term_that_binds(
    test: HeldoutTest | None, timed: schemas.Race | None, outcome: Outcome, certified: bool, binding: str | None
):
    verdict = decide_verdict(GOAL, HELDOUT, test, timed)

    assert (verdict.outcome, verdict.certified, verdict.binding) == (outcome, certified, binding)
    # Only a term that is out of reach makes a contract infeasible.
    shown = decide_verdict(GOAL, HELDOUT, test, timed, out_of_reach="size")
    assert (shown.outcome is Outcome.INFEASIBLE) == (outcome is not Outcome.MET)


@pytest.mark.parametrize("size_bytes", [1200, 3600])
def test_a_baseline_in_doubt_leaves_every_verdict_unproven_in_its_first_line(size_bytes: int):
    doubted = HELDOUT.model_copy(update={"doubt": "the baseline guesses"})
    verdict = decide_verdict(GOAL, doubted, heldout(GOOD, size_bytes), FAST)

    assert not verdict.certified
    assert verdict.explanation.startswith("unproven: the baseline guesses; ")


def test_met_by_the_point_estimate_alone_is_not_certified_and_says_how_many_images_it_takes():
    verdict = decide_verdict(GOAL, HELDOUT, heldout(drop(30, 24, 1000)), FAST)

    assert (verdict.outcome, verdict.certified) == (Outcome.MET, False)
    assert (verdict.images_to_certify or 0) > 1000
    # No number of images certifies what the sessions leave uncertain.
    unsure = decide_verdict(GOAL, HELDOUT, heldout(drop(30, 24, 1000)), raced(1.2, 0.8, 1.8))
    assert (unsure.outcome, unsure.certified, unsure.images_to_certify) == (Outcome.MET, False, None)


@pytest.mark.parametrize(("lost", "gained"), [(30, 24), (12, 2)])
def test_as_many_images_as_are_said_to_certify_do_by_the_test_that_so_many_get(lost: int, gained: int):
    test = heldout(drop(lost, gained, 1000)).model_copy(update={"keeps_accuracy": True})
    needed = decide_verdict(LENIENT, HELDOUT, test, FAST).images_to_certify

    assert needed is not None
    times = 1.03 * needed / 1000
    counts = Counts(round(times * lost), round(times * gained), round(times * 1000))
    assert upper_bound(counts, 0.02) <= 0.015


def test_of_a_machine_that_was_too_noisy_no_speed_is_certain():
    unsteady = "the baseline took 880 ms in its sessions, and 204 when it was timed first"
    verdict = decide_verdict(GOAL, HELDOUT, heldout(GOOD), FAST.model_copy(update={"unsteady": unsteady}))
    speed = next(term for term in verdict.terms if term.name == "speed")

    assert (verdict.outcome, verdict.certified, speed.bound) == (Outcome.MET, False, None)
    assert f"the speed is unproven, as the machine was too noisy: {unsteady}" in verdict.explanation


@dataclass
class Script(Jobs):
    """Of each deployment of the cheapest model its bytes, of 4000, and its speed-up."""

    sizes: dict[str, int] = field(default_factory=dict[str, int])
    speedups: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def converted(self) -> list[schemas.Deployment]:
        return [task.deployment for task in self.of(DeployTask)]

    def PruneTask(self, task: Any) -> PrunedModel:  # noqa: N802
        assert all(cut.keep <= cut.unit.width // 4 for cut in task.cuts), "every unit is cut as far as is allowed"
        model = sample_records.ref("cheapest", size_bytes=self.sizes.get("eager float32", 3000))
        return PrunedModel(model=model, cuts=task.cuts)

    def DeployTask(self, task: Any) -> schemas.DeployedModel:  # noqa: N802
        name = task.deployment.name
        if self.sizes.get(name) == 0:
            raise JobError("the child process died of SIGSEGV")
        return deployed(task, name, self.sizes.get(name, 3000))

    def RaceTask(self, task: Any) -> schemas.Race:  # noqa: N802
        fast = {name: self.speedups.get(name, 1.2) for name in raced_in(task)}
        return sample_records.race(
            *(sample_records.race_result(name, one, one * 0.98, one * 1.02) for name, one in fast.items())
        )


def raced_in(task: Any) -> tuple[str, ...]:
    return tuple(map(name_of, task.models[1:]))


def tried(scheme: Scheme, size_bytes: int, speedup: float) -> DeploymentOption:
    """Return a deployment in which a layer was left in float for the sake of accuracy."""
    made = option("openvino", scheme, size_bytes=size_bytes, speedup=speedup)
    return made.model_copy(update={"deployment": keep_layers_in_float(made.deployment, ["head"])})


CHOICES = DeploymentChoices({"openvino": ("static", "bfloat16")}, ASKED_SCHEMES["auto"])


def is_missed(script: Script, term: Any, **asked: Any) -> bool:
    """Return whether the term is out of reach where the unpruned model has a quarter of the bytes, or runs three times as fast."""
    seen = opened(tried("static", 1000, 2.0), tried("bfloat16", 2000, 3.0))
    return is_out_of_reach(evaluator(script, choices=CHOICES, **asked), seen, term)


@pytest.mark.parametrize(
    ("sizes", "max_size_ratio", "made", "expected"),
    [
        # The first that keeps the size ends the question.
        ({"openvino static": 800}, 0.24, ["static"], False),
        # Infeasible rests on the least of all, of which some can't be made.
        ({"openvino static": 1200, "openvino bfloat16": 800}, 0.1, ["static", "bfloat16"], True),
        ({"openvino static": 0, "openvino bfloat16": 1600}, 0.1, ["static", "bfloat16"], True),
        # The unpruned model is small enough.
        ({}, 0.25, [], False),
    ],
)
def test_the_least_size_is_sought_in_all_deployments_until_one_keeps_the_term(
    sizes: dict[str, int], max_size_ratio: float, made: list[str], expected: bool
):
    script = Script(sizes=sizes)
    assert is_missed(script, "size", max_size_ratio=max_size_ratio) is expected
    assert [each.scheme for each in script.converted] == made
    # Layers that were left in float for accuracy are not left in float here.
    assert [each.recommendations for each in script.converted] == [recommend(each.scheme) for each in script.converted]


@pytest.mark.parametrize(
    ("speedups", "min_speedup", "expected"),
    [
        # The unpruned model may be as fast as 3.15.
        ({}, 3.1, False),
        ({"openvino bfloat16": 5.0}, 4.0, False),
        # Or 4.02.
        ({"openvino static": 3.95}, 4.0, False),
        ({"openvino bfloat16": 3.0, "openvino static": 3.5}, 4.0, True),
    ],
)
def test_speed_that_none_has_is_shown_by_a_race_of_all(speedups: dict[str, float], min_speedup: float, expected: bool):
    assert is_missed(Script(speedups=speedups), "speed", min_speedup=min_speedup) is expected


def test_without_time_for_all_deployments_nothing_is_out_of_reach():
    script = Script()
    script.timesheet.resume_at(50.0)
    assert not is_missed(script, "size", max_size_ratio=0.1, time_budget_s=60.0)
