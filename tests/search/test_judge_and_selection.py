import pytest
from made import BASELINE, GOAL, attempt, drop, evaluation, journal, race_result

from profiling_agent.schemas import Deployment, DeploymentOption, DeploymentSearch, Goal, Variant
from profiling_agent.search.selection import has_answer, is_doubtful, judge, may_be_returned, preference, ranked

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
        made = evaluation(f"p{number}", Variant.PRUNED, **measured)
        return attempt(number, 0.1, accepted=True).model_copy(update={"pruned": made, "deployed": made})

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
