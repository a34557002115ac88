"""Both planners against each other: what a language model may cost, and what it may not."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import sample_records
from advisors import advisor_of
from chat_server import Said, chat_server, in_turn
from sample_records import BASELINE, GOAL, attempt, evaluation, profile

from profiling_agent.errors import AdvisorError, ContextTooLongError, PlanError
from profiling_agent.llm.transcript import Advice, LanguageModel, Question
from profiling_agent.planning.allocation import MAX_RATIO, apply_demands, dry_run
from profiling_agent.planning.llm_planner import UNKNOWN, NextAnswer, PlanAnswer
from profiling_agent.planning.rules import analyse
from profiling_agent.schemas import (
    Attempt,
    Cap,
    Deployment,
    DeploymentSearch,
    Goal,
    Journal,
    ModelProfile,
    Origin,
    Plan,
    PruningRecommendation,
    QuantizationRecommendation,
    StopReason,
    Target,
    Variant,
)
from profiling_agent.search.planners import Planner, first_proposal, next_proposal, propose


class Scripted(LanguageModel):
    """Answers each question with what a function says."""

    def __init__(self, say: Callable[[Question], dict]) -> None:
        self.name = "scripted"
        self.say = say
        self.asked: list[Question] = []

    def ask(self, question, answer_type, *, check=None, tools=()):
        self.asked.append(question)
        value = answer_type.model_validate(self.say(question))
        return Advice(value=value, complaint=check(value) if check else None)

    def _answer(self, question, answer_type, check, tools):
        return self.ask(question, answer_type, check=check, tools=tools)


def judged(num_layers: int = 4) -> ModelProfile:
    """MLPs of which the first costs ten times as much as the others."""
    return sample_records.judged(num_layers, {0: [10 * kl for kl in sample_records.DOUBLING]})


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


def ask(say, found: ModelProfile, seen: Journal, planner: Planner = "hybrid", goal: Goal = GOAL):
    return next_proposal(Scripted(say), planner, found, goal, seen, max_iterations=5)


def after(*attempts: Attempt) -> Journal:
    return Journal(baseline=BASELINE, attempts=attempts)


def advises_to_stop(_: Question) -> dict:
    return {"reason": "enough", "stop": True}


def proposed(say, found: ModelProfile, seen: Journal, goal: Goal = GOAL) -> tuple[Plan, Origin]:
    proposal = ask(say, found, seen, goal=goal)
    assert isinstance(proposal, tuple)
    return proposal


@pytest.mark.parametrize("planner", ["hybrid", "llm"])
def test_a_model_makes_the_first_plan_and_sees_what_the_rules_would_do(planner: Planner):
    found = judged()
    asked = Scripted(lambda _: target(0.25))
    plan, origin = first_proposal(asked, planner, found, GOAL, analyse(found, GOAL))

    assert plan.target is not None
    assert plan.target.saving == 0.25
    assert (origin.by, origin.reason) == ("scripted", "evidence")
    # The rules' 20% with their dry run: 0.0032 nats.
    assert (
        'The built-in rules would try this first:\n{"target": {"metric": "params", "saving": 0.2}}'
        in asked.asked[0].evidence
    )
    assert "KL 0.0032" in asked.asked[0].evidence.split("The built-in rules")[1]


def test_a_first_plan_that_costs_more_than_the_allocators_leaves_it_to_the_rules_but_not_where_the_model_plans_alone():
    found, rules = judged(), analyse(judged(), GOAL)
    alike = {"reason": "half", "pruning": [{"layer": "mlp", "pruning_type": "structured", "pruning_ratio": 0.2}]}

    plan, origin = first_proposal(Scripted(lambda _: alike), "hybrid", found, GOAL, rules)
    assert plan == rules
    assert "where the allocator saves as much for" in (origin.note or "")
    assert first_proposal(Scripted(lambda _: alike), "llm", found, GOAL, rules)[1].by == "scripted"


@pytest.mark.parametrize(
    ("saving", "accepted", "is_measured"),
    [
        # Bolder than a model's that was accepted, or milder than one that was refused.
        (0.1, True, True),
        (0.35, False, True),
        # What was seen says it of the rules' plan as well.
        (0.35, True, False),
        (0.1, False, False),
        # The same within what predictions are worth.
        (0.2, True, False),
    ],
)
def test_after_a_models_first_plan_the_rules_own_is_measured_where_that_is_not_known(
    saving: float, accepted: bool, is_measured: bool
):
    found = judged()
    first = measured(1, Plan(target=Target(saving=saving)), found, accepted=accepted)
    seen = Journal(baseline=BASELINE, attempts=(first.model_copy(update={"origin": Origin(by="scripted")}),))
    asked = Scripted(lambda _: {"reason": "enough", "stop": True})
    proposal = next_proposal(asked, "hybrid", found, GOAL, seen, max_iterations=5)

    assert isinstance(proposal, tuple)
    assert (proposal[0] == analyse(found, GOAL)) is is_measured
    assert len(asked.asked) == (0 if is_measured else 1)
    assert proposal[1].by == "rules"


def test_why_a_plan_would_not_be_measured_goes_back_at_once_and_the_rule_is_in_the_prompt(tmp_path: Path):
    alike = {"reason": "half", "pruning": [{"layer": "mlp", "pruning_type": "structured", "pruning_ratio": 0.2}]}
    found = judged()
    with chat_server(in_turn(*(Said(content=json.dumps(answer)) for answer in (alike, target(0.25))))) as server:
        plan, origin = first_proposal(advisor_of(server, tmp_path), "hybrid", found, GOAL, analyse(found, GOAL))

    first, second = (payload["messages"] for payload in server.asked)
    assert (
        "it is predicted to cost at most 1.1 times the KL at which the allocator saves as much" in first[1]["content"]
    )
    assert "where the allocator saves as much for" in second[-1]["content"]
    assert plan.target is not None
    assert (plan.target.saving, origin.by, origin.repairs) == (0.25, "openai:scripted", 1)


def test_what_no_runtime_can_do_goes_back_too_and_is_not_measured_in_another_way():
    static = {**target(0.25), "quantization": [{"layer": "all", "quantization_type": "static", "dtype": "qint8"}]}
    found = judged()
    here = replace(UNKNOWN, undeployable=lambda plan: "no runtime that is installed" if plan.quantization else None)
    plan, origin = first_proposal(Scripted(lambda _: static), "llm", found, GOAL, analyse(found, GOAL), setting=here)

    assert plan == analyse(found, GOAL)
    assert "no runtime that is installed" in (origin.note or "")
    asked = Scripted(lambda _: static)
    plan, origin = first_proposal(asked, "llm", found, GOAL, analyse(found, GOAL))
    assert plan.quantization is not None
    assert origin.by == "scripted"


def test_a_refusal_is_in_the_next_question():
    found = judged()
    refused = measured(1, Plan(target=Target(saving=0.2)), found, accepted=False)
    origin = Origin(by="rules", note="scripted: its plan costs 0.03 nats, where the allocator saves as much for 0.01")
    asked = Scripted(lambda _: target(0.1))
    seen = after(refused.model_copy(update={"origin": origin}))
    next_proposal(asked, "hybrid", found, GOAL, seen, max_iterations=5)
    evidence = asked.asked[0].evidence

    assert 'attempt 1 (by "rules", as: "scripted: its plan costs 0.03 nats' in evidence
    assert 'refused: "made"' in evidence
    assert "above all that was accepted and below what was refused" in evidence


def test_a_plan_that_asks_for_another_deployment_is_another_plan():
    found = judged()
    seen = journal(found, (0.3, True), (0.6, False))
    again = {**target(0.3), "quantization": [{"layer": "all", "dtype": "qint8"}]}
    plan, origin = proposed(lambda _: again, found, seen)

    assert plan.quantization is not None
    assert origin.by == "scripted"


def test_what_a_person_has_pinned_makes_no_plan_dearer_than_the_allocators():
    found = judged()
    # The dear unit cut by half, by order: no plan can cost as little as one without that.
    pin = PruningRecommendation(layer="layers.0.mlp", pruning_type="structured", pruning_ratio=0.5)
    goal = GOAL.model_copy(update={"pins": (pin,), "max_accuracy_drop": 0.05})
    plan, origin = first_proposal(Scripted(lambda _: target(0.3)), "hybrid", found, goal, analyse(found, goal))

    assert origin.by == "scripted"
    assert pin in plan.pruning


def test_an_attempt_that_came_to_nothing_answers_for_no_other():
    found = judged()
    first = measured(1, Plan(target=Target(saving=0.1)), found, accepted=False)
    failed = first.model_copy(update={"origin": Origin(by="scripted"), "deployed": None, "reason": "its gate failed"})

    assert proposed(lambda _: {}, found, after(failed))[0] == analyse(found, GOAL)


def test_the_rules_go_on_from_their_own_plan_whatever_a_model_began_with():
    found = judged()
    odd = Plan(pruning=(PruningRecommendation(layer="layers.0", pruning_type="structured", pruning_ratio=0.5),))
    first = measured(1, odd, found, accepted=False).model_copy(update={"origin": Origin(by="scripted")})
    own = measured(2, analyse(found, GOAL), found, accepted=True)
    plan, _ = proposed(advises_to_stop, found, after(first, own))

    assert plan.target is not None
    assert plan.target.saving > 0.2
    assert not plan.pruning


def test_without_evidence_the_rules_own_plan_is_measured_beside_a_models():
    found = profile(4)
    first = Plan(pruning=(PruningRecommendation(layer="layers.0", pruning_type="structured", pruning_ratio=0.25),))
    attempt = measured(1, first, found, accepted=True).model_copy(update={"origin": Origin(by="scripted")})

    assert proposed(lambda _: {}, found, after(attempt))[0] == analyse(found, GOAL)


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


def test_caps_that_put_the_rules_target_out_of_reach_leave_their_own_plan_out_and_end_nothing():
    found = judged()
    goal = GOAL.model_copy(update={"caps": (Cap(layer="mlp", max_ratio=0.05),)})
    mild = Plan(pruning=(PruningRecommendation(layer="layers.1", pruning_type="structured", pruning_ratio=0.01),))
    first = measured(1, mild, found, accepted=True).model_copy(update={"origin": Origin(by="scripted")})
    with pytest.raises(PlanError, match="out of reach"):
        dry_run(apply_demands(analyse(found, goal), goal), found)

    choice = ask(advises_to_stop, found, after(first), goal=goal)

    assert isinstance(choice, StopReason) or choice[0] != analyse(found, goal)


def test_the_rules_plan_is_not_carried_out_again_where_the_models_was_the_same_and_failed():
    found = judged()
    own = analyse(found, GOAL)
    changes = {"origin": Origin(by="scripted"), "deployed": None, "reason": "its gate failed"}
    failed = measured(1, own, found, accepted=False).model_copy(update=changes)
    plan, _ = proposed(advises_to_stop, found, after(failed))

    assert dry_run(plan, found).widths != dry_run(own, found).widths


def test_what_fails_before_it_is_deployed_says_something_of_every_deployment_but_not_what_cannot_be_had():
    found = judged()
    wished = Plan(
        target=Target(saving=0.3),
        quantization=(QuantizationRecommendation(layer="all", quantization_type="dynamic", dtype="qint8"),),
    )
    hopeless = measured(1, wished, found, accepted=False).model_copy(update={"deployed": None, "reason": "hopeless"})
    leading = Deployment(runtime="openvino", scheme="static")
    seen = Journal(
        baseline=BASELINE, attempts=(hopeless,), deployment_search=DeploymentSearch(options=(), chosen=leading)
    )

    assert seen.is_as_leading(hopeless)
    assert not seen.is_as_leading(hopeless.model_copy(update={"is_undeployable": True}))
    assert not seen.is_as_leading(hopeless.model_copy(update={"deployment": Deployment(scheme="dynamic")}))
    choice = propose(GOAL, found, seen, max_iterations=5)
    assert isinstance(choice, Plan)
    assert choice.target is not None
    assert choice.target.saving < 0.3


PROFILE = profile()
PAPER = GOAL.model_copy(update={"selection": "paper"})


def removed(plan: Plan) -> float:
    return 1 - dry_run(plan, PROFILE).cuts[0].keep / 512


def test_after_an_accepted_plan_the_next_one_is_twice_as_strong():
    choice = propose(GOAL, PROFILE, sample_records.journal(attempt(1, 0.125, accepted=True)), max_iterations=5)

    assert isinstance(choice, Plan)
    assert choice.pruning[0].pruning_ratio == pytest.approx(0.25)


def test_after_a_refused_plan_the_next_one_is_milder():
    choice = propose(GOAL, PROFILE, sample_records.journal(attempt(1, 0.25, accepted=False)), max_iterations=5)

    assert isinstance(choice, Plan)
    assert choice.pruning[0].pruning_ratio == pytest.approx(0.125)


@pytest.mark.parametrize("cliff", [0.1, 0.2, 0.4, 0.6, 0.74])
def test_the_loop_brackets_the_accuracy_cliff_to_one_aligned_step(cliff: float):
    seen = sample_records.journal(attempt(1, 0.125, accepted=cliff >= 0.125))
    while isinstance(choice := propose(GOAL, PROFILE, seen, max_iterations=50), Plan):
        number = len(seen.attempts) + 1
        tried = Attempt(number=number, plan=choice, accepted=removed(choice) <= cliff, reason="made")
        seen = seen.with_attempt(tried)

    best = max((removed(a.plan) for a in seen.attempts if a.accepted), default=0.0)
    assert choice is StopReason.CONVERGED
    assert best <= cliff < best + 2 * 32 / 512


def test_no_plan_is_measured_twice():
    seen = sample_records.journal(attempt(1, 0.125, accepted=True))
    while isinstance(choice := propose(GOAL, PROFILE, seen, max_iterations=50), Plan):
        seen = seen.with_attempt(Attempt(number=len(seen.attempts) + 1, plan=choice, accepted=True, reason="made"))

    widths = [tuple(cut.keep for cut in dry_run(a.plan, PROFILE).cuts) for a in seen.attempts]
    assert len(widths) == len(set(widths))


def test_no_ratio_passes_the_ceiling():
    seen = sample_records.journal(attempt(1, 0.5, accepted=True))

    choice = propose(GOAL, PROFILE, seen, max_iterations=5)

    assert isinstance(choice, Plan)
    assert choice.pruning[0].pruning_ratio == MAX_RATIO


def test_the_budget_ends_the_loop():
    assert (
        propose(GOAL, PROFILE, sample_records.journal(attempt(1, 0.125, accepted=True)), max_iterations=1)
        is StopReason.BUDGET_SPENT
    )


def test_a_first_plan_that_prunes_nothing_ends_the_loop():
    empty = Attempt(number=1, plan=Plan(), accepted=True, reason="made")

    assert propose(GOAL, PROFILE, sample_records.journal(empty), max_iterations=5) is StopReason.NOTHING_TO_PRUNE


def test_the_papers_loop_answers_to_the_last_evaluation_alone_and_uses_every_iteration():
    seen = sample_records.journal(attempt(1, 0.2, accepted=True), attempt(2, 0.3, accepted=False))

    choice = propose(PAPER, PROFILE, seen, max_iterations=3)

    assert isinstance(choice, Plan)
    assert choice.pruning[0].pruning_ratio == pytest.approx(0.15)
    assert propose(PAPER, PROFILE, seen, max_iterations=2) is StopReason.BUDGET_SPENT
