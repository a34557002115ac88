"""Both planners against each other: what a language model may cost, and what it may not."""

from collections.abc import Callable

import pytest
from made import BASELINE, GOAL, evaluation, evidence, profile

from profiling_agent.analysis.advised import NextAnswer, PlanAnswer
from profiling_agent.analysis.dry_run import dry_run
from profiling_agent.analysis.rules import analyse
from profiling_agent.errors import AdvisorError, ContextTooLongError
from profiling_agent.iteration.planners import Planner, first_proposal, next_proposal
from profiling_agent.llm.question import Advice, Question
from profiling_agent.records import (
    Attempt,
    Journal,
    ModelProfile,
    Plan,
    PruningRecommendation,
    StopReason,
    Target,
    Variant,
)

KLS = tuple(0.0001 * 2**step for step in range(12))


class Scripted:
    """Answers each question with what a function says."""

    name = "scripted"

    def __init__(self, say: Callable[[Question], dict]) -> None:
        self.say = say
        self.asked: list[Question] = []

    def ask(self, question, answer_type, *, check=None, tools=(), max_repairs=2):
        self.asked.append(question)
        value = answer_type.model_validate(self.say(question))
        return Advice(value=value, complaint=check(value) if check else None, repairs=0, is_replayed=False)


def judged(num_layers: int = 4) -> ModelProfile:
    """MLPs of which the first costs ten times as much as the others."""
    found = profile(num_layers)
    kls = {unit.name: tuple(kl * (10 if index == 0 else 1) for kl in KLS) for index, unit in enumerate(found.units)}
    return found.model_copy(update={"evidence": evidence(found.units, kls)})


def measured(number: int, plan: Plan, found: ModelProfile, *, accepted: bool) -> Attempt:
    return Attempt(
        number=number,
        plan=plan,
        dry_run=dry_run(plan, found),
        deployed=evaluation(f"both{number}", Variant.BOTH, correct=899 if accepted else 800),
        accepted=accepted,
        reason="made",
    )


def journal(found: ModelProfile, *savings: tuple[float, bool]) -> Journal:
    plans = [Plan(target=Target(saving=saving)) for saving, _ in savings]
    attempts = [
        measured(number, plan, found, accepted=accepted)
        for number, (plan, (_, accepted)) in enumerate(zip(plans, savings, strict=True), start=1)
    ]
    return Journal(baseline=BASELINE, attempts=tuple(attempts))


def target(saving: float) -> dict:
    return {"reason": "evidence", "target": {"metric": "params", "saving": saving}}


def ask(say, found: ModelProfile, seen: Journal, planner: Planner = "hybrid"):
    return next_proposal(Scripted(say), planner, found, GOAL, seen, max_iterations=5)


def proposed(say, found: ModelProfile, seen: Journal):
    proposal = ask(say, found, seen)
    assert isinstance(proposal, tuple)
    return proposal


def test_with_both_planners_the_rules_go_first_and_alone_the_model_does():
    found = judged()
    rules = analyse(found, GOAL)

    assert first_proposal(Scripted(lambda _: target(0.2)), "hybrid", found, GOAL, rules) == (rules, *[first_origin()])
    plan, origin = first_proposal(Scripted(lambda _: target(0.2)), "llm", found, GOAL, rules)
    assert plan.target is not None
    assert plan.target.saving == 0.2
    assert (origin.by, origin.reason) == ("scripted", "evidence")


def first_origin():
    return first_proposal(None, "hybrid", judged(), GOAL, Plan())[1]


@pytest.mark.parametrize("error", [AdvisorError("no answer"), ContextTooLongError("too long")])
def test_a_model_that_fails_costs_nothing_but_its_note(error: AdvisorError):
    def fail(_: Question) -> dict:
        raise error

    found = judged()
    plan, origin = first_proposal(Scripted(fail), "llm", found, GOAL, analyse(found, GOAL))
    assert plan == analyse(found, GOAL)
    assert origin.by == "rules"
    assert str(error) in (origin.note or "")

    seen = journal(found, (0.2, True))
    by_rules = next_proposal(None, "rules", found, GOAL, seen, max_iterations=5)
    assert isinstance(by_rules, tuple)
    assert ask(fail, found, seen)[0] == by_rules[0]


def test_a_question_that_was_too_long_is_asked_again_with_less_evidence():
    def say(question: Question) -> dict:
        if len(question.evidence) > 6000:
            raise ContextTooLongError("too long")
        return target(0.3)

    found = judged(120)
    asked = Scripted(say)
    first_proposal(asked, "llm", found, GOAL, Plan())
    assert len(asked.asked) in (1, 2)
    assert len(asked.asked[-1].evidence) <= 6000


def test_a_plan_on_the_front_that_asks_something_new_is_measured():
    found = judged()
    plan, origin = proposed(lambda _: target(0.45), found, journal(found, (0.3, True), (0.6, False)))

    assert plan.target is not None
    assert plan.target.saving == 0.45
    assert origin.by == "scripted"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        # The dear unit is cut like the others: more KL than the allocator needs for as much.
        (
            {"reason": "half", "pruning": [{"layer": "mlp", "pruning_type": "structured", "pruning_ratio": 0.44}]},
            "allocator",
        ),
        (target(0.25), "only between"),
        (target(0.3), "measured already"),
        ({"reason": "enough", "stop": True}, "advises to stop"),
        ({"reason": "nothing"}, "nothing is left"),
        ({"reason": "?", "caps": [{"layer": "nowhere"}]}, "nothing is left"),
    ],
)
def test_with_both_planners_anything_else_leaves_the_attempt_to_the_rules(answer: dict, why: str):
    found = judged()
    seen = journal(found, (0.3, True), (0.6, False))
    by_rules = next_proposal(None, "rules", found, GOAL, seen, max_iterations=5)

    plan, origin = proposed(lambda _: answer, found, seen)

    assert isinstance(by_rules, tuple)
    assert plan == by_rules[0]
    assert origin.by == "rules"
    assert why in (origin.note or "")


def test_a_plan_that_is_too_bold_is_measured_as_far_as_the_evidence_allows():
    found = judged()
    plan, origin = proposed(lambda _: target(0.7), found, journal(found, (0.3, True)))

    assert plan.target is not None
    assert 0.3 < plan.target.saving < 0.7
    assert origin.by == "scripted"
    assert "at most 0.06" in (origin.cut_back or "")


def test_alone_the_model_decides_when_to_stop_and_is_not_asked_after_the_last_iteration():
    found = judged()
    seen = journal(found, (0.3, True))
    stop = {"reason": "enough", "stop": True}

    assert ask(lambda _: stop, found, seen, planner="llm") is StopReason.ADVISED
    assert (
        next_proposal(Scripted(lambda _: stop), "llm", found, GOAL, seen, max_iterations=1) is StopReason.BUDGET_SPENT
    )


def test_the_rules_learn_from_a_models_attempt():
    found = judged()
    mixed = Plan(
        pruning=(PruningRecommendation(layer="layers.1.mlp", pruning_type="structured", pruning_ratio=0.5),),
        target=Target(saving=0.5),
    )
    seen = journal(found, (0.3, True)).with_attempt(measured(2, mixed, found, accepted=False))
    choice = next_proposal(None, "rules", found, GOAL, seen, max_iterations=5)

    assert isinstance(choice, tuple)
    assert choice[0].target is not None
    assert 0.3 < choice[0].target.saving < 0.5


def test_answers_are_plans_and_no_more():
    with pytest.raises(ValueError, match="Extra inputs"):
        PlanAnswer.model_validate({"reason": "x", "shell": "rm"})
    with pytest.raises(ValueError, match="at most 40"):
        NextAnswer.model_validate({"reason": "x", "caps": [{"layer": "a"}] * 41})
