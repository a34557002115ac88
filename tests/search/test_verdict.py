"""Judging, selection and the verdict."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import sample_records
from sample_records import BASELINE, GOAL, attempt, drop, evaluation, journal, race, race_result, ref
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


def test_a_candidate_that_loses_nothing_is_accepted():
    assert judge(evaluation("q", Variant.QUANTIZED, size_bytes=1000), GOAL).accepted


def test_a_candidate_just_inside_the_floor_is_refused_because_the_search_asks_for_a_bound():
    judgement = judge(evaluation("both", Variant.BOTH, correct=891), GOAL)

    assert not judgement.accepted
    assert "0.0090" in judgement.reason
    assert "outside" in judgement.reason


@pytest.mark.parametrize(("correct", "accepted"), [(900, True), (901, True), (899, False)])
def test_a_contract_too_strict_to_be_bounded_is_judged_by_the_point_estimate(correct: int, accepted: bool):
    strict = GOAL.model_copy(update={"max_accuracy_drop": 0.0})

    assert judge(evaluation("q", Variant.QUANTIZED, correct=correct), strict).accepted is accepted


def test_what_the_contract_lets_be_larger_may_be_returned():
    larger = evaluation("q", Variant.QUANTIZED, size_bytes=4032)
    assert judge(larger, GOAL).accepted
    assert not may_be_returned(larger, BASELINE, GOAL)
    assert may_be_returned(larger, BASELINE, GOAL.model_copy(update={"max_size_ratio": 1.01}))


def test_few_images_are_called_unproven():
    few = evaluation("q", Variant.QUANTIZED).model_copy(update={"drop": drop(0, 0, 100)})
    assert judge(few, GOAL).reason.startswith("unproven, as 100 images can't show it")


@pytest.mark.parametrize(
    ("lost", "gained", "doubtful"),
    # Adjusted by one image each, 2.3 points with a standard error of 1.2; 4.9 with 1.3; 0.3 with 0.5.
    [(12, 4, True), (20, 3, False), (2, 1, False)],
)
def test_in_doubt_is_what_is_shown_neither_inside_the_contract_nor_outside(lost: int, gained: int, doubtful: bool):
    goal = GOAL.model_copy(update={"max_accuracy_drop": 0.02})
    seen = evaluation("q", Variant.QUANTIZED).model_copy(update={"drop": drop(lost, gained, 344)})

    assert is_doubtful(seen, goal) is doubtful
    assert ("shown neither inside nor outside" in judge(seen, goal).reason) is doubtful
    assert not is_doubtful(seen, goal.model_copy(update={"selection": "paper"}))


def test_nobody_is_in_doubt_where_images_are_too_few_to_show_anything():
    goal = GOAL.model_copy(update={"max_accuracy_drop": 0.02})
    few = evaluation("q", Variant.QUANTIZED).model_copy(update={"drop": drop(3, 0, 40)})
    assert not judge(few, goal).accepted
    assert not is_doubtful(few, goal)


def test_in_doubt_of_a_test_that_was_looked_at_early_is_what_its_bounds_leave_open():
    early = [drop(lost, 0, 512).model_copy(update={"num_looks": 2}) for lost in (0, 8, 60)]
    seen = [evaluation("q", Variant.QUANTIZED).model_copy(update={"drop": one}) for one in early]

    assert [is_doubtful(one, GOAL) for one in seen] == [False, True, False]


def test_without_an_attempt_nobody_is_ahead():
    assert ranked(journal(), GOAL) == ()


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
    deployment = Deployment(runtime="openvino")
    option = DeploymentOption(
        deployment=deployment,
        evaluation=evaluation("q", Variant.QUANTIZED, size_bytes=size_bytes),
        race_result=race_result("q", speedup, 1.9, 2.1),
        memory_ratio=0.6,
        keeps_accuracy=True,
        reason="chosen",
    )
    seen = journal().model_copy(update={"deployment_search": DeploymentSearch(options=(option,), chosen=deployment)})

    goal = GOAL.model_copy(update=asked)
    assert has_answer(seen, goal) is answers
    losing = evaluation("q", Variant.QUANTIZED, correct=889, size_bytes=size_bytes)
    doubtful = option.model_copy(update={"evaluation": losing, "keeps_accuracy": False, "is_doubtful": True})
    search = DeploymentSearch(options=(doubtful,), chosen=deployment)
    assert not has_answer(seen.model_copy(update={"deployment_search": search}), goal)


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


def verdict_journal() -> Journal:
    """Return a baseline that was tried in two deployments: the second was the faster, the first the smaller."""
    schemes: list[tuple[Scheme, int, float]] = [("static", 1000, 2.0), ("bfloat16", 2000, 3.0)]
    options = [
        DeploymentOption(
            deployment=keep_layers_in_float(
                Deployment(runtime="openvino", scheme=scheme, recommendations=recommend(scheme)), ["head"]
            ),
            deployed=DeployedModel(
                model=sample_records.ref(scheme, size_bytes=size),
                deployment=Deployment(),
                layers=(),
                distance=0,
                kl=0,
                seconds=1,
            ),
            race_result=sample_records.race_result(scheme, speedup, speedup * 0.98, speedup * 1.02),
            reason="",
        )
        for scheme, size, speedup in schemes
    ]
    return Journal(
        baseline=sample_records.BASELINE, deployment_search=DeploymentSearch(options=tuple(options), chosen=None)
    )


def limit_of(script: Script, term: str, choices: DeploymentChoices | None = None, **goal: Any):
    return find_limit(evaluator(script, choices=choices, **goal), verdict_journal(), term)


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
