"""The verdict, and what no plan can reach in any deployment: what is made and raced for it, and when that ends."""

from dataclasses import dataclass, field
from typing import Any

import made
import pytest
from made import GOAL, drop, race, race_result, ref
from search.scripted import Jobs, deployed, evaluator, name_of

from profiling_agent.errors import JobError
from profiling_agent.jobs.tasks import DeployTask, RaceTask, SessionTask
from profiling_agent.runtimes.registry import recommend
from profiling_agent.schemas import (
    NUM_SESSIONS,
    DeployedModel,
    Deployment,
    DeploymentOption,
    DeploymentSearch,
    Journal,
    Outcome,
    PrunedModel,
    Race,
)
from profiling_agent.schemas.plan import Scheme
from profiling_agent.search.deployments import ASKED_SCHEMES, DeploymentChoices, leaving_in_float
from profiling_agent.search.verdict import Facts, Limit, decide_verdict, find_limit


def raced(speedup: float, low: float, high: float) -> dict[str, Any]:
    return {"race": race(race_result("best", speedup, low, high)), "model": ref("best")}


GOOD = Facts(drop=drop(5, 3, 8000), size_ratio=0.3, **raced(1.5, 1.4, 1.6))


def test_a_contract_that_the_bounds_meet_too_is_certified():
    verdict = decide_verdict(GOOD, GOAL)

    assert (verdict.outcome, verdict.certified, verdict.binding) == (Outcome.MET, True, None)


@pytest.mark.parametrize("facts", [GOOD, GOOD.model_copy(update={"size_ratio": 0.9})])
def test_a_baseline_in_doubt_leaves_every_verdict_unproven_in_its_first_line(facts: Facts):
    verdict = decide_verdict(facts.model_copy(update={"doubt": "the baseline guesses"}), GOAL)

    assert not verdict.certified
    assert verdict.explanation.startswith("unproven: the baseline guesses; ")


def test_met_by_the_point_estimate_alone_is_not_certified_and_says_how_many_images_it_takes():
    verdict = decide_verdict(GOOD.model_copy(update={"drop": drop(30, 24, 1000)}), GOAL)

    assert verdict.outcome is Outcome.MET
    assert not verdict.certified
    assert verdict.images_to_certify is not None
    assert verdict.images_to_certify > 1000


def test_no_number_of_images_certifies_what_the_sessions_leave_uncertain():
    facts = GOOD.model_copy(update={"drop": drop(30, 24, 1000), **raced(1.2, 0.8, 1.8)})
    verdict = decide_verdict(facts, GOAL)

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
    verdict = decide_verdict(facts, GOAL)

    assert (verdict.outcome, verdict.binding) == (Outcome.NEAREST_MISS, binding)


def test_the_term_that_is_missed_by_most_binds():
    missed_both = GOOD.model_copy(update=raced(0.97, 0.94, 1.01) | {"size_ratio": 0.9})

    assert decide_verdict(missed_both, GOAL).binding == "size"


def test_a_candidate_refused_on_the_held_out_images_is_a_near_miss_of_accuracy():
    verdict = decide_verdict(Facts(size_ratio=1.0, refused="it lost too much there"), GOAL)

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
    assert decide_verdict(GOOD.model_copy(update={"size_ratio": 0.6}), GOAL, limit).outcome is outcome


def test_the_baseline_misses_a_contract_that_asks_for_less_size():
    assert decide_verdict(Facts(size_ratio=1.0), GOAL).binding == "size"


def test_of_a_machine_that_was_too_noisy_no_speed_is_certain():
    race_ = GOOD.race
    assert race_ is not None
    noisy = race_.model_copy(
        update={"unsteady": "the baseline took 880 ms in its sessions, and 204 when it was timed first"}
    )
    verdict = decide_verdict(GOOD.model_copy(update={"race": noisy}), GOAL)
    speed = next(term for term in verdict.terms if term.name == "speed")

    assert (verdict.outcome, verdict.certified, speed.bound) == (Outcome.MET, False, None)
    assert "the speed is unproven, as the machine was too noisy: the baseline took 880 ms" in verdict.explanation


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
        model = made.ref("cheapest", size_bytes=self.sizes.get("eager float32", 3000))
        return PrunedModel(model=model, cuts=task.cuts, mask_error=0.0)

    def DeployTask(self, task: Any) -> DeployedModel:  # noqa: N802
        name = task.deployment.name
        if self.sizes.get(name) == 0:
            raise JobError("the child process died of SIGSEGV")
        return deployed(task, name, self.sizes.get(name, 3000))

    def RaceTask(self, task: Any) -> Race:  # noqa: N802
        fast = {name: self.speedups.get(name, 1.2) for name in raced_in(task)}
        return made.race(*(made.race_result(name, one, one * 0.98, one * 1.02) for name, one in fast.items()))

    SessionTask = RaceTask


def raced_in(task: Any) -> tuple[str, ...]:
    return tuple(name_of(ref) for _, ref in task.entries[1:])


def journal() -> Journal:
    """Return a baseline that was tried in two deployments: the second was the faster, the first the smaller."""
    schemes: list[tuple[Scheme, int, float]] = [("static", 1000, 2.0), ("bfloat16", 2000, 3.0)]
    options = [
        DeploymentOption(
            deployment=leaving_in_float(
                Deployment(runtime="openvino", scheme=scheme, recommendations=recommend(scheme)), ["head"]
            ),
            deployed=DeployedModel(
                model=made.ref(scheme, size_bytes=size), deployment=Deployment(), layers=(), distance=0, kl=0, seconds=1
            ),
            race_result=made.race_result(scheme, speedup, speedup * 0.98, speedup * 1.02),
            reason="",
        )
        for scheme, size, speedup in schemes
    ]
    return Journal(baseline=made.BASELINE, deployment_search=DeploymentSearch(options=tuple(options), chosen=None))


def limit_of(script: Script, term: str, choices: DeploymentChoices | None = None, **goal: Any):
    return find_limit(evaluator(script, choices=choices, **goal), journal(), term)


def test_the_first_deployment_that_keeps_the_size_ends_the_question():
    script = Script(sizes={"openvino static": 800})
    limit = limit_of(script, "size", max_size_ratio=0.25)
    assert limit is not None
    assert limit.size_ratio == 0.2
    assert [made_of.name for made_of in script.converted] == ["openvino static"]


def test_the_least_of_all_deployments_is_what_infeasible_rests_on():
    script = Script(sizes={"openvino static": 1200, "openvino bfloat16": 800, "eager float32": 2000})
    limit = limit_of(script, "size", max_size_ratio=0.1)
    assert limit is not None
    assert limit.size_ratio == 0.2
    assert [made_of.name for made_of in script.converted] == ["openvino static", "openvino bfloat16"]


def test_what_can_not_be_made_of_the_cheapest_is_as_small_as_of_the_unpruned():
    limit = limit_of(Script(sizes={"openvino static": 0, "openvino bfloat16": 1600}), "size", max_size_ratio=0.1)
    assert limit is not None
    # 1000 of 4000 bytes, as the run has it: a contract of 30% is not out of reach.
    assert limit.size_ratio == 0.25


def test_layers_that_were_left_in_float_for_accuracy_are_not_left_where_accuracy_is_no_matter():
    choices = DeploymentChoices({"openvino": ("static", "bfloat16")}, ASKED_SCHEMES["auto"])
    script = Script(sizes={"openvino static": 800})

    limit_of(script, "size", choices, max_size_ratio=0.25)

    assert [made_of.recommendations for made_of in script.converted] == [recommend("static")]


def test_speed_that_the_most_promising_has_is_asked_of_nobody_else():
    script = Script(speedups={"openvino bfloat16": 5.0})
    limit = limit_of(script, "speed", min_speedup=4.0)
    assert limit is not None
    assert limit.speedup_high == pytest.approx(5.1)
    assert limit.size_ratio is None
    assert [raced_in(task) for task in script.of(RaceTask)] == [("openvino bfloat16",)]
    assert not script.of(SessionTask)


def test_speed_that_nobody_has_is_shown_by_sessions_of_the_fastest():
    script = Script(speedups={"openvino bfloat16": 3.0, "openvino static": 3.5})
    limit = limit_of(script, "speed", min_speedup=4.0)
    assert limit is not None
    assert ("openvino bfloat16", "openvino static", "cheapest") in map(raced_in, script.of(RaceTask))
    # Once for the one that was most promising, and once for the fastest of all.
    assert len(script.of(SessionTask)) == 2 * NUM_SESSIONS
    assert limit.speedup_high == pytest.approx(3.5 * 1.02, rel=0.02)
