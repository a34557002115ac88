"""Judging, selection and the verdict."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import sample_records
from sample_records import BASELINE, GOAL, attempt, drop, evaluation, journal, race, race_result, ref
from search.scripted import Jobs, deployed, evaluator, name_of, option

from profiling_agent.errors import JobError
from profiling_agent.jobs.tasks import DeployTask, RaceTask, SessionTask
from profiling_agent.runtimes.registry import recommend
from profiling_agent.schemas import (
    NUM_SESSIONS,
    DeployedModel,
    Deployment,
    DeploymentOption,
    DeploymentSearch,
    Evaluation,
    Goal,
    Journal,
    Outcome,
    PrunedModel,
    Race,
    Variant,
)
from profiling_agent.schemas.plan import Scheme
from profiling_agent.search.deployments import ASKED_SCHEMES, DeploymentChoices, keep_layers_in_float
from profiling_agent.search.selection import has_answer, is_doubtful, judge, may_be_returned, preference, ranked
from profiling_agent.search.verdict import Facts, Limit, decide_verdict, find_limit

PAPER = GOAL.model_copy(update={"selection": "paper"})
SMALL = {"macs": 900, "params": 900, "size_bytes": 1000}


def candidate(lost: int = 0, gained: int = 0, num_images: int = 1000, *, num_looks: int = 1) -> Evaluation:
    """Return a candidate of which so many search images were lost and gained."""
    seen = drop(lost, gained, num_images).model_copy(update={"num_looks": num_looks})
    return evaluation("q", Variant.QUANTIZED).model_copy(update={"drop": seen})


@pytest.mark.parametrize(
    ("seen", "max_drop", "accepted", "said"),
    [
        (candidate(), 0.01, True, "inside"),
        # Just inside the floor, but the search asks for a bound.
        (candidate(9), 0.01, False, "top-1 fell by 0.0090 (9 images lost, 0 gained), 90% bound 0.0"),
        # Too strict to be bounded, it is judged by the point estimate.
        (candidate(), 0.0, True, "inside"),
        (candidate(0, 1), 0.0, True, "inside"),
        (candidate(1), 0.0, False, "outside"),
        (candidate(0, 0, 100), 0.01, True, "unproven, as 100 images can't show it"),
        (candidate(3, 0, 40), 0.02, False, "outside"),
    ],
)
def test_the_search_accepts_by_a_bound_where_the_images_can_show_it(
    seen: Evaluation, max_drop: float, accepted: bool, said: str
):
    goal = GOAL.model_copy(update={"max_accuracy_drop": max_drop})

    judgement = judge(seen, goal)

    assert judgement.accepted is accepted
    assert said in judgement.reason
    # Nobody is in doubt who is accepted, or where images are too few to show anything.
    assert is_doubtful(seen, goal) == (seen == candidate(9))


def test_what_the_contract_lets_be_larger_may_be_returned():
    larger = evaluation("q", Variant.QUANTIZED, size_bytes=4032)
    assert judge(larger, GOAL).accepted
    assert not may_be_returned(larger, BASELINE, GOAL)
    assert may_be_returned(larger, BASELINE, GOAL.model_copy(update={"max_size_ratio": 1.01}))


@pytest.mark.parametrize(
    ("seen", "max_drop", "doubtful"),
    [
        # Adjusted by one image each, 2.3 points with a standard error of 1.2; 4.9 with 1.3; 0.3 with 0.5.
        (candidate(12, 4, 344), 0.02, True),
        (candidate(20, 3, 344), 0.02, False),
        (candidate(2, 1, 344), 0.02, False),
        # Of a test that was looked at early what its bounds leave open.
        *((candidate(lost, 0, 512, num_looks=2), 0.01, lost == 8) for lost in (0, 8, 60)),
    ],
)
def test_in_doubt_is_what_is_shown_neither_inside_the_contract_nor_outside(
    seen: Evaluation, max_drop: float, doubtful: bool
):
    goal = GOAL.model_copy(update={"max_accuracy_drop": max_drop})

    assert is_doubtful(seen, goal) is doubtful
    assert ("shown neither inside nor outside" in judge(seen, goal).reason) is doubtful
    assert not is_doubtful(seen, goal.model_copy(update={"selection": "paper"}))


def opened(*options: DeploymentOption) -> Journal:
    search = DeploymentSearch(options=options, chosen=options[0].deployment)
    return Journal(baseline=BASELINE, deployment_search=search)


@pytest.mark.parametrize(
    ("size_bytes", "speedup", "asked", "answers"),
    [
        (1000, 2.0, {}, True),
        (3000, 2.0, {}, False),
        (3000, 2.0, {"max_size_ratio": 0.8}, True),
        (1000, 2.0, {"min_speedup": 3.0}, False),
        (1000, 2.0, {"max_memory_ratio": 0.5}, False),
    ],
)
def test_the_baseline_deployed_is_an_answer_where_it_keeps_every_term(
    size_bytes: int, speedup: float, asked: dict, answers: bool
):
    leads = option("openvino", "static", speedup=speedup, seen=(0, 0), size_bytes=size_bytes, memory_ratio=0.6)
    losing = option("openvino", "static", speedup=speedup, seen=(11, 0), size_bytes=size_bytes, memory_ratio=0.6)

    goal = GOAL.model_copy(update=asked)
    assert has_answer(opened(leads), goal) is answers
    assert not has_answer(opened(losing), goal)


def test_an_accepted_attempt_is_an_answer_and_a_refused_one_is_none():
    assert has_answer(journal(attempt(1, 0.1, accepted=True, **SMALL)), GOAL)
    assert not has_answer(journal(attempt(1, 0.1, accepted=False, correct=800, **SMALL)), GOAL)
    assert not has_answer(journal(attempt(1, 0.1, accepted=True, **SMALL | {"size_bytes": 3000})), GOAL)
    assert not has_answer(journal(), GOAL)


def test_best_is_not_the_last_attempt():
    seen = journal(
        attempt(1, 0.1, accepted=True, **SMALL),
        attempt(2, 0.3, accepted=False, correct=800, macs=700, params=700, size_bytes=800),
        attempt(3, 0.2, accepted=True, macs=800, params=800, size_bytes=900),
        attempt(4, 0.15, accepted=True, macs=850, params=850, size_bytes=950),
    )

    assert [candidate.attempt for candidate in ranked(seen, GOAL)] == [3, 4, 1]
    assert ranked(journal(), GOAL) == ()


def test_a_candidate_that_is_small_enough_comes_before_a_cheaper_one_that_is_not():
    quantized = evaluation("q", Variant.QUANTIZED, size_bytes=1500)
    seen = journal(attempt(1, 0.1, accepted=True, macs=900, size_bytes=3900), quantized=quantized)

    assert [f.variant for f in ranked(seen, GOAL)] == [Variant.QUANTIZED, Variant.BOTH]


def test_the_papers_rule_prefers_accuracy_then_params_and_nobody_who_does_not_beat_the_baseline():
    def pruned(number: int, **measured: int):
        answers = evaluation(f"p{number}", Variant.PRUNED, **measured)
        return attempt(number, 0.1, accepted=True).model_copy(update={"pruned": answers, "deployed": answers})

    seen = journal(
        pruned(1, correct=905, params=950), pruned(2, correct=905, params=900), pruned(3, correct=899, params=100)
    )

    assert [candidate.attempt for candidate in ranked(seen, PAPER)] == [2, 1]


@pytest.mark.parametrize(
    ("better", "worse", "goal"),
    [
        # A term of the contract comes before any gain beyond it: of size, of speed, of memory.
        ({"size": 0.5}, {"size": 0.9, "speedup": 9.0}, {"max_size_ratio": 0.6}),
        ({"speedup": 2.0}, {"speedup": 1.1, "size": 0.1}, {"min_speedup": 1.5, "objective": "size"}),
        ({"memory": 0.4}, {"memory": 0.8, "speedup": 9.0}, {"max_memory_ratio": 0.5}),
        ({"memory": 0.4}, {"memory": None, "speedup": 9.0}, {"max_memory_ratio": 0.5}),
        # All terms kept, the objective decides.
        ({"speedup": 3.0, "size": 0.6}, {"speedup": 2.0, "size": 0.2}, {"objective": "speed"}),
        ({"speedup": 2.0, "size": 0.2}, {"speedup": 3.0, "size": 0.6}, {"objective": "size"}),
        ({"memory": 0.2}, {"memory": 0.6, "speedup": 9.0}, {"objective": "memory"}),
        ({"memory": 0.9}, {"memory": None}, {"objective": "memory"}),
    ],
)
def test_a_contract_prefers_what_keeps_its_terms_and_then_its_objective(better: dict, worse: dict, goal: dict):
    asked = GOAL.model_copy(update={"max_size_ratio": 1.0, "min_speedup": 1.0} | goal)
    plain = {"size": 0.5, "speedup": 2.0, "memory": 0.5}

    assert preference(asked, **plain | better) < preference(asked, **plain | worse)


def test_half_precision_is_half_the_bytes_to_a_tenth_of_a_percent():
    goal = Goal(max_accuracy_drop=0.01, min_speedup=1.0, max_size_ratio=0.5, selection="contract")

    assert goal.allows_size(0.5002)
    assert not goal.allows_size(0.5006)
    assert goal.model_copy(update={"max_size_ratio": 0.2505}).allows_size(0.2505)


def raced(speedup: float, low: float, high: float) -> dict[str, Any]:
    return {"race": race(race_result("best", speedup, low, high)), "model": ref("best")}


GOOD = Facts(drop=drop(5, 3, 8000), size_ratio=0.3, **raced(1.5, 1.4, 1.6))


def but(**changes: Any) -> Facts:
    return GOOD.model_copy(update=changes)


@pytest.mark.parametrize(
    ("facts", "outcome", "certified", "binding"),
    [
        (GOOD, Outcome.MET, True, None),
        # A near miss names the term that binds, which is missed by most.
        (but(size_ratio=0.6), Outcome.NEAREST_MISS, False, "size"),
        (but(**raced(0.99, 0.95, 1.03)), Outcome.NEAREST_MISS, False, "speed"),
        (but(drop=drop(200, 10, 8000)), Outcome.NEAREST_MISS, False, "accuracy"),
        (but(size_ratio=0.9, **raced(0.97, 0.94, 1.01)), Outcome.NEAREST_MISS, False, "size"),
        # Refused on the held-out images.
        (Facts(size_ratio=1.0, refused="it lost too much there"), Outcome.NEAREST_MISS, False, "accuracy"),
        # The baseline misses a contract that asks for less size.
        (Facts(size_ratio=1.0), Outcome.NEAREST_MISS, False, "size"),
    ],
)
def test_a_contract_is_met_and_certified_by_its_bounds_or_missed_by_the_term_that_binds(
    facts: Facts, outcome: Outcome, certified: bool, binding: str | None
):
    verdict = decide_verdict(facts, GOAL)

    assert (verdict.outcome, verdict.certified, verdict.binding) == (outcome, certified, binding)


@pytest.mark.parametrize("facts", [GOOD, but(size_ratio=0.9)])
def test_a_baseline_in_doubt_leaves_every_verdict_unproven_in_its_first_line(facts: Facts):
    verdict = decide_verdict(facts.model_copy(update={"doubt": "the baseline guesses"}), GOAL)

    assert not verdict.certified
    assert verdict.explanation.startswith("unproven: the baseline guesses; ")


def test_met_by_the_point_estimate_alone_is_not_certified_and_says_how_many_images_it_takes():
    verdict = decide_verdict(but(drop=drop(30, 24, 1000)), GOAL)

    assert (verdict.outcome, verdict.certified) == (Outcome.MET, False)
    assert (verdict.images_to_certify or 0) > 1000
    # No number of images certifies what the sessions leave uncertain.
    unsure = decide_verdict(but(drop=drop(30, 24, 1000), **raced(1.2, 0.8, 1.8)), GOAL)
    assert (unsure.outcome, unsure.certified, unsure.images_to_certify) == (Outcome.MET, False, None)


@pytest.mark.parametrize(
    ("limit", "outcome"),
    [
        (Limit(size_ratio=0.55), Outcome.INFEASIBLE),
        (Limit(size_ratio=0.2), Outcome.NEAREST_MISS),
        (Limit(size_ratio=0.2, speedup_high=0.9), Outcome.INFEASIBLE),
    ],
)
def test_only_a_limit_that_misses_too_makes_a_contract_infeasible(limit: Limit, outcome: Outcome):
    assert decide_verdict(but(size_ratio=0.6), GOAL, limit).outcome is outcome


def test_of_a_machine_that_was_too_noisy_no_speed_is_certain():
    unsteady = "the baseline took 880 ms in its sessions, and 204 when it was timed first"
    assert GOOD.race is not None
    verdict = decide_verdict(but(race=GOOD.race.model_copy(update={"unsteady": unsteady})), GOAL)
    speed = next(term for term in verdict.terms if term.name == "speed")

    assert (verdict.outcome, verdict.certified, speed.bound) == (Outcome.MET, False, None)
    assert f"the speed is unproven, as the machine was too noisy: {unsteady}" in verdict.explanation


@dataclass
class Script(Jobs):
    """Of each deployment of the cheapest model its bytes, of 4000, and its speed-up."""

    sizes: dict[str, int] = field(default_factory=dict[str, int])
    speedups: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def converted(self) -> list[Deployment]:
        return [task.deployment for task in self.of(DeployTask)]

    def PruneTask(self, task: Any) -> PrunedModel:  # noqa: N802
        assert all(cut.keep <= cut.unit.width // 4 for cut in task.cuts), "every unit is cut as far as is allowed"
        model = sample_records.ref("cheapest", size_bytes=self.sizes.get("eager float32", 3000))
        return PrunedModel(model=model, cuts=task.cuts, mask_error=0.0)

    def DeployTask(self, task: Any) -> DeployedModel:  # noqa: N802
        name = task.deployment.name
        if self.sizes.get(name) == 0:
            raise JobError("the child process died of SIGSEGV")
        return deployed(task, name, self.sizes.get(name, 3000))

    def RaceTask(self, task: Any) -> Race:  # noqa: N802
        fast = {name: self.speedups.get(name, 1.2) for name in raced_in(task)}
        return sample_records.race(
            *(sample_records.race_result(name, one, one * 0.98, one * 1.02) for name, one in fast.items())
        )

    SessionTask = RaceTask


def raced_in(task: Any) -> tuple[str, ...]:
    return tuple(name_of(ref) for _, ref in task.entries[1:])


def tried(scheme: Scheme, size_bytes: int, speedup: float) -> DeploymentOption:
    """Return a deployment in which a layer was left in float for the sake of accuracy."""
    made = option("openvino", scheme, size_bytes=size_bytes, speedup=speedup)
    return made.model_copy(update={"deployment": keep_layers_in_float(made.deployment, ["head"])})


def limit_of(
    script: Script,
    term: str,
    choices: DeploymentChoices | None = None,
    *,
    made: Sequence[str] | None = None,
    **goal: Any,
) -> Limit:
    """Return the limit where the baseline's second deployment was the faster, the first the smaller."""
    seen = opened(tried("static", 1000, 2.0), tried("bfloat16", 2000, 3.0))
    limit = find_limit(evaluator(script, choices=choices, **goal), seen, term)
    assert limit is not None
    assert made is None or [f"{each.scheme}" for each in script.converted] == made
    return limit


@pytest.mark.parametrize(
    ("sizes", "max_size_ratio", "made", "size_ratio"),
    [
        # The first that keeps the size ends the question.
        ({"openvino static": 800}, 0.25, ["static"], 0.2),
        # Infeasible rests on the least of all.
        ({"openvino static": 1200, "openvino bfloat16": 800, "eager float32": 2000}, 0.1, ["static", "bfloat16"], 0.2),
        # What can't be made of the cheapest is as small as of the unpruned: 1,000 of 4,000 bytes.
        ({"openvino static": 0, "openvino bfloat16": 1600}, 0.1, ["static", "bfloat16"], 0.25),
    ],
)
def test_the_least_size_is_sought_in_all_deployments_until_one_keeps_the_term(
    sizes: dict[str, int], max_size_ratio: float, made: list[str], size_ratio: float
):
    limit = limit_of(Script(sizes=sizes), "size", made=made, max_size_ratio=max_size_ratio)
    assert limit.size_ratio == size_ratio


def test_layers_that_were_left_in_float_for_accuracy_are_not_left_where_accuracy_is_no_matter():
    choices = DeploymentChoices({"openvino": ("static", "bfloat16")}, ASKED_SCHEMES["auto"])
    script = Script(sizes={"openvino static": 800})

    limit_of(script, "size", choices, max_size_ratio=0.25)

    assert [made.recommendations for made in script.converted] == [recommend("static")]


def test_speed_that_the_most_promising_has_is_asked_of_nobody_else():
    script = Script(speedups={"openvino bfloat16": 5.0})
    limit = limit_of(script, "speed", min_speedup=4.0)
    assert limit.speedup_high == pytest.approx(5.1)
    assert limit.size_ratio is None
    assert [raced_in(task) for task in script.of(RaceTask)] == [("openvino bfloat16",)]
    assert not script.of(SessionTask)


def test_speed_that_nobody_has_is_shown_by_sessions_of_the_fastest():
    script = Script(speedups={"openvino bfloat16": 3.0, "openvino static": 3.5})
    limit = limit_of(script, "speed", min_speedup=4.0)
    assert ("openvino bfloat16", "openvino static", "cheapest") in map(raced_in, script.of(RaceTask))
    # Once for the one that was most promising, and once for the fastest of all.
    assert len(script.of(SessionTask)) == 2 * NUM_SESSIONS
    assert limit.speedup_high == pytest.approx(3.5 * 1.02, rel=0.02)
