"""What a person may say of a plan, and what becomes of it and of the plans after it."""

import pytest
from sample_records import GOAL, attempt, journal, judged, plan, profile

from profiling_agent import schemas
from profiling_agent.errors import RequestError
from profiling_agent.planning.allocation import apply_demands, dry_run
from profiling_agent.schemas import Approval, Cap, Decided, ModelProfile, Origin, Plan, PruningRecommendation, Target
from profiling_agent.search.attempt import apply_edit, build_approval_question, read_answer
from profiling_agent.search.planners import milder, propose
from profiling_agent.search.selection import rejudged

PIN = PruningRecommendation(layer=r"layers\.0\.mlp", pruning_type="structured", pruning_ratio=0.5)
LEFT_ALONE = Cap(layer=r"layers\.1\.mlp")
FOUND = judged(3)


def kept(plan: Plan, found: ModelProfile = FOUND) -> dict[str, int]:
    return {cut.unit.name.split(".")[2]: cut.keep for cut in dry_run(plan, found).cuts}


def test_a_question_tells_what_would_be_cut_and_what_that_is_predicted_to_do():
    found = judged(2)
    question = build_approval_question("run", plan(0.5), Origin(by="rules", reason="why not"), found, 1)

    # 2 units of 512 keep 256: 2 x 256 x 10 params of 10304, 2 x 256 x 20 MACs of 20480.
    assert question.params_saved == pytest.approx(5120 / 10304)
    assert question.macs_saved == 0.5
    assert [(cut.width, cut.keep) for cut in question.cuts] == [(512, 256), (512, 256)]
    assert question.kl == pytest.approx(sum(cut.kl or 0 for cut in question.cuts))
    assert (question.attempt, question.proposed_by, question.reason) == (1, "rules", "why not")


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("yes", "that is no answer"),
        ({}, "decision"),
        ({"decision": "accept", "min_speedup": 2}, "the decision is accept but min_speedup is changed"),
        ({"decision": "edit", "max_accuracy_drop": float("nan")}, "max_accuracy_drop"),
        ({"decision": "edit", "pruning": [{"layer": "a", "pruning_type": "head", "pruning_ratio": 2}]}, "ratio"),
    ],
)
def test_what_is_no_answer_is_refused_in_one_line(said, wrong: str):
    with pytest.raises(RequestError, match=wrong) as refused:
        read_answer(said)
    assert "\n" not in str(refused.value)


def test_an_edit_fixes_ratios_and_leaves_units_alone_in_later_plans_too():
    answer = Approval(decision="edit", pruning=(PIN,), caps=(LEFT_ALONE,))
    now, goal = apply_edit(answer, plan(0.25), GOAL, FOUND)
    assert kept(now) == {"0": 256, "2": 384}

    later = apply_demands(Plan(target=Target(saving=0.3)), goal)
    assert kept(later)["0"] == 256
    assert "1" not in kept(later)
    # The same again changes nothing.
    assert apply_demands(later, goal) == later

    once_more = Approval(decision="edit", pruning=(PIN.model_copy(update={"pruning_ratio": 0.25}),))
    changed, goal = apply_edit(once_more, later, goal, FOUND)
    assert kept(changed)["0"] == 384
    assert len(goal.pins) == 1


def test_an_edit_tightens_limits_and_one_that_cant_be_carried_out_says_why():
    for changes, wrong in (
        ({"caps": (Cap(layer="encoder"),)}, "matches no layer"),
        ({"target": Target(saving=0.98)}, "reach"),
        ({"max_accuracy_drop": 0.02}, "max_accuracy_drop is 0.02 but the contract says 0.01"),
        ({"max_size_ratio": 0.6}, "an edit can only tighten it"),
    ):
        with pytest.raises(RequestError, match=wrong):
            apply_edit(Approval.model_validate({"decision": "edit", **changes}), plan(0.25), GOAL, FOUND)
    _, goal = apply_edit(Approval(decision="edit", min_speedup=2), plan(0.25), GOAL, FOUND)
    assert (goal.min_speedup, goal.max_accuracy_drop) == (2, 0.01)


def test_a_stricter_contract_is_asked_of_earlier_attempts_as_well():
    seen = journal(attempt(1, 0.1, accepted=True, correct=895), attempt(2, 0.3, accepted=False))
    stricter = GOAL.model_copy(update={"max_accuracy_drop": 0.001})

    again = rejudged(seen, stricter)

    assert [row.accepted for row in again.attempts] == [False, False]
    assert again.attempts[1] == seen.attempts[1]


def test_the_rules_take_a_rejection_for_too_strong_and_never_offer_the_plan_again():
    found = profile()
    seen = journal(attempt(1, 0.125, accepted=True))
    offered: list[Plan] = []
    while isinstance(choice := propose(GOAL, found, seen, max_iterations=5), Plan):
        offered.append(choice)
        decided = Decided(attempt=2, plan=choice, answer=Approval(decision="reject", reason="too much"))
        seen = seen.model_copy(update={"rejected": (*seen.rejected, decided)})

    ratios = [row.pruning[0].pruning_ratio for row in offered]
    assert choice is schemas.StopReason.CONVERGED
    assert ratios[0] == 0.25
    assert all(later < ratios[0] for later in ratios[1:])
    assert len({tuple(kept(row, found).values()) for row in offered}) == len(offered)


def test_the_rules_scale_what_is_not_fixed():
    goal = GOAL.model_copy(update={"pins": (PIN,), "caps": (LEFT_ALONE,)})

    choice = propose(goal, FOUND, journal(attempt(1, 0.125, accepted=True)), max_iterations=5)

    assert isinstance(choice, Plan)
    assert kept(choice) == {"0": 256, "2": 384}


def test_a_first_plan_that_was_rejected_comes_back_milder():
    assert milder(plan(0.4), 0) == plan(0.4)
    assert milder(plan(0.4), 2).pruning[0].pruning_ratio == pytest.approx(0.1)
