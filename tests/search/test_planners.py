"""Both planners against each other: what a language model may cost, and what it may not."""

from dataclasses import replace
from typing import Any

import pytest
import sample_records
from advisors import Scripted, advisor_of
from chat_server import Said
from llm_personas import stops, submits
from sample_records import BASELINE, GOAL, attempt, evaluation, profile
from search.scripted import option

from profiling_agent import schemas
from profiling_agent.errors import AdvisorError
from profiling_agent.planning.allocation import MAX_RATIO, allowed_kl, dry_run
from profiling_agent.planning.llm_planner import UNKNOWN, Lab
from profiling_agent.planning.rules import analyse
from profiling_agent.schemas import Attempt, Cap, Deployment, Goal, Journal, ModelProfile, Origin, Plan, StopReason
from profiling_agent.search.planners import (
    Advisor,
    Planner,
    Proposal,
    first_proposal,
    next_proposal,
    propose,
    why_pruning_cannot_pay,
)

# MLPs of which the first costs ten times as much as the others.
FOUND = sample_records.judged(4, {0: [10 * kl for kl in sample_records.DOUBLING]})
RULES = analyse(FOUND, GOAL)


def scripted(*answers: Said | Exception) -> Scripted:
    """Return a language model that gives these replies, the last of them for ever."""
    if isinstance(answers[0], Exception):
        return Scripted(answers[0])
    remaining: list[Any] = [*answers]
    return Scripted(lambda _: remaining.pop(0) if len(remaining) > 1 else remaining[0])


def advised(answer: Said | Exception | Scripted | None) -> Advisor | None:
    return advisor_of(answer if isinstance(answer, Scripted) else scripted(answer)) if answer else None


def cut(layer: str, ratio: float) -> schemas.PruningRecommendation:
    return schemas.PruningRecommendation(layer=layer, pruning_type="structured", pruning_ratio=ratio)


def saving(share: float, **also: Any) -> Plan:
    return Plan(target=schemas.Target(saving=share), **also)


def target(share: float, **also: Any) -> Said:
    return submits({"target": {"metric": "params", "saving": share}, **also}, "evidence")


def ratio(share: float) -> Said:
    """Submit one ratio for all: the dear unit is cut like the others, at more KL than the allocator needs for as much."""
    return submits({"pruning": [{"layer": "mlp", "pruning_type": "structured", "pruning_ratio": share}]})


STOP, ALIKE = stops(), ratio(0.2)


def measured(number: int, plan: Plan, *, accepted: bool, found: ModelProfile = FOUND, **changes: Any) -> Attempt:
    made = Attempt(
        number=number,
        plan=plan,
        dry_run=dry_run(plan, found),
        deployed=evaluation(f"both{number}", schemas.Variant.BOTH, correct=899 if accepted else 800),
        accepted=accepted,
        reason="made",
    )
    return made.model_copy(update=changes)


def by_model(plan: Plan, *, accepted: bool, **changes: Any) -> Journal:
    """Return a journal whose first attempt is a language model's."""
    return after(measured(1, plan, accepted=accepted, origin=Origin(by="scripted"), **changes))


def after(*attempts: Attempt) -> Journal:
    return Journal(baseline=BASELINE, attempts=attempts)


def seen_of(*savings: tuple[float, bool]) -> Journal:
    return after(
        *(measured(number, saving(share), accepted=accepted) for number, (share, accepted) in enumerate(savings, 1))
    )


def first(
    answer: Any, planner: Planner = "hybrid", goal: Goal = GOAL, rules: Plan = RULES, **stated: Any
) -> tuple[Plan, Origin]:
    return first_proposal(advised(answer), planner, FOUND, goal, rules, **stated)


def then(
    answer: Any, seen: Journal, planner: Planner = "hybrid", goal: Goal = GOAL, found: ModelProfile = FOUND
) -> Proposal | StopReason:
    return next_proposal(advised(answer), planner, found, goal, seen, max_iterations=5)


def proposed(*asked: Any, **stated: Any) -> tuple[Plan, Origin]:
    proposal = then(*asked, **stated)
    assert isinstance(proposal, tuple)
    return proposal


def saving_in(plan: Plan) -> float:
    assert plan.target is not None
    return plan.target.saving


@pytest.mark.parametrize("planner", ["hybrid", "llm"])
def test_a_model_makes_the_first_plan_and_sees_what_the_rules_would_do(planner: Planner):
    asked = scripted(target(0.25))
    plan, origin = first_proposal(advised(asked), planner, FOUND, GOAL, RULES)

    assert saving_in(plan) == 0.25
    assert (origin.by, origin.reason) == ("scripted", "evidence")
    # The rules' 20% with their dry run: 0.0032 nats.
    _, rules = asked.asked[0][1].text.split("The built-in rules would try this first:\n")
    assert rules.startswith('{"target": {"metric": "params", "saving": 0.2}}')
    assert "KL 0.0032" in rules


@pytest.mark.parametrize(
    ("share", "accepted", "is_measured"),
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
    share: float, accepted: bool, is_measured: bool
):
    asked = scripted(STOP)
    proposal = next_proposal(
        advised(asked), "hybrid", FOUND, GOAL, by_model(saving(share), accepted=accepted), max_iterations=5
    )

    assert isinstance(proposal, tuple)
    assert (proposal[0] == RULES) is is_measured
    assert len(asked.asked) == (0 if is_measured else 1)
    assert proposal[1].by == "rules"


def test_why_a_plan_is_refused_goes_back_with_the_number_and_the_rule_is_in_the_prompt():
    asked = scripted(ALIKE, target(0.25))
    plan, origin = first_proposal(advised(asked), "hybrid", FOUND, GOAL, RULES)

    assert "more than 1.1 times that of the allocator's plan for the same saving" in asked.asked[0][1].text
    refused = asked.asked[1][-1].text
    assert refused.startswith("Refused: it costs 0.0052 nats (predicted), where the allocator saves as much for 0.0024")
    assert (saving_in(plan), origin.by, origin.repairs) == (0.25, "scripted", 1)
    # A model that plans alone is not compared with the allocator.
    assert first(ALIKE, "llm")[1].by == "scripted"


def probing(found: dict[float, float], rival_kl: float | None = None) -> Lab:
    """Return a lab in which plans of one ratio have been probed with these KLs, and those with a target with another."""

    def known_kl(plan: Plan) -> float | None:
        return found.get(plan.pruning[0].pruning_ratio) if plan.pruning else rival_kl

    nothing: Any = None
    return Lab(prices={}, probe=nothing, probe_layers=nothing, time_plan=nothing, known_kl=known_kl)


@pytest.mark.parametrize(
    ("probed", "rival", "why"),
    [
        # Measured, it is as cheap as the allocator's plan, whatever was predicted.
        (0.005, 0.005, None),
        (0.006, 0.005, "it costs 0.006 nats (probed), where the allocator saves as much for 0.005"),
        # A measured KL isn't compared with a predicted one.
        (0.005, None, "it costs 0.0052 nats (predicted)"),
        # A probe shows that it costs too much.
        (0.07, None, "its KL is 0.07 nats (probed), where at most 0.06 can keep the accuracy"),
    ],
)
def test_where_there_are_probes_they_decide(probed: float, rival: float | None, why: str | None):
    assert allowed_kl(GOAL) == pytest.approx(0.06)
    plan, origin = first(ALIKE, setting=replace(UNKNOWN, lab=probing({0.2: probed}, rival)))

    assert (origin.by == "scripted") is (why is None)
    assert (plan == RULES) is (why is not None)
    assert why is None or why in (origin.note or "")


def test_a_plan_that_is_predicted_to_cost_too_much_is_measured_where_a_probe_shows_otherwise():
    bold = ratio(0.5)
    assert "its KL is 0.17 nats (predicted)" in (first(bold, "llm")[1].note or "")
    assert first(bold, "llm", setting=replace(UNKNOWN, lab=probing({0.5: 0.05})))[1].by == "scripted"


def test_what_no_runtime_can_do_goes_back_too_and_is_not_measured_in_another_way():
    static = target(0.25, quantization=[{"layer": "all", "quantization_type": "static", "dtype": "qint8"}])
    here = replace(UNKNOWN, undeployable=lambda plan: "no runtime that is installed" if plan.quantization else None)
    plan, origin = first(static, "llm", setting=here)

    assert plan == RULES
    assert "no runtime that is installed" in (origin.note or "")
    plan, origin = first(static, "llm")
    assert plan.quantization is not None
    assert origin.by == "scripted"


def test_what_a_person_has_pinned_makes_no_plan_dearer_than_the_allocators():
    # The dear unit cut by half, by order: no plan can cost as little as one without that.
    pin = cut("layers.0.mlp", 0.5)
    goal = GOAL.model_copy(update={"pins": (pin,), "max_accuracy_drop": 0.05})
    plan, origin = first(target(0.3), goal=goal, rules=analyse(FOUND, goal))

    assert origin.by == "scripted"
    assert pin in plan.pruning


def test_an_attempt_that_came_to_nothing_answers_for_no_other_plan_and_is_not_carried_out_again():
    failed: dict[str, Any] = {"accepted": False, "deployed": None, "reason": "its gate failed"}

    assert proposed(target(0.1), by_model(saving(0.1), **failed))[0] == RULES
    plan, _ = proposed(STOP, by_model(RULES, **failed))
    assert dry_run(plan, FOUND).widths != dry_run(RULES, FOUND).widths


def test_the_rules_go_on_from_their_own_plan_whatever_a_model_began_with():
    odd = by_model(Plan(pruning=(cut("layers.0", 0.5),)), accepted=False)
    plan, _ = proposed(STOP, sample_records.with_attempt(odd, measured(2, RULES, accepted=True)))

    assert saving_in(plan) > 0.2
    assert not plan.pruning


def test_without_evidence_the_rules_own_plan_is_measured_beside_a_models():
    found = profile(4)
    seen = by_model(Plan(pruning=(cut("layers.0", 0.25),)), accepted=True, found=found)

    assert proposed(target(0.1), seen, found=found)[0] == analyse(found, GOAL)


def test_a_model_that_fails_costs_nothing_but_its_note():
    error = AdvisorError("no answer")
    plan, origin = first(error, "llm")
    assert (plan, origin.by) == (RULES, "rules")
    assert str(error) in (origin.note or "")

    seen = seen_of((0.2, True))
    assert proposed(error, seen)[0] == proposed(None, seen, "rules")[0]


@pytest.mark.parametrize(
    "answer",
    [
        # On the front, and new.
        target(0.45),
        # Another deployment is another plan.
        target(0.3, quantization=[{"layer": "all", "dtype": "qint8"}]),
    ],
)
def test_a_plan_that_asks_something_new_is_measured(answer: Said):
    plan, origin = proposed(answer, seen_of((0.3, True), (0.6, False)))

    asked = answer.tool_calls[0][1]["plan"]
    assert saving_in(plan) == asked["target"]["saving"]
    assert bool(plan.quantization) == ("quantization" in asked)
    assert origin.by == "scripted"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (ratio(0.2), "allocator"),
        (target(0.25), "only between"),
        (target(0.3), "attempt 1 measured it already"),
        (STOP, "advises to stop"),
        (submits({}), "it cuts nothing"),
        (target(0.3, quantization=[{"layer": "nowhere", "dtype": "qint8"}]), "matches no layer to quantize"),
        (target(0.3, quantization=[{"layer": "(", "dtype": "qint8"}]), "pattern"),
        (target(0.98), "out of reach"),
    ],
)
def test_with_both_planners_anything_else_leaves_the_attempt_to_the_rules(answer: Said, why: str):
    seen = seen_of((0.3, True), (0.6, False))
    plan, origin = proposed(answer, seen)

    assert plan == proposed(None, seen, "rules")[0]
    assert origin.by == "rules"
    assert why in (origin.note or "")


def test_alone_the_model_decides_when_to_stop_and_is_not_asked_after_the_last_iteration():
    seen = seen_of((0.3, True))

    assert then(STOP, seen, "llm") is StopReason.ADVISED
    assert next_proposal(advised(STOP), "llm", FOUND, GOAL, seen, max_iterations=1) is StopReason.BUDGET_SPENT


def test_the_rules_learn_from_a_models_attempt():
    mixed = saving(0.5, pruning=(cut("layers.1.mlp", 0.5),))
    seen = sample_records.with_attempt(seen_of((0.3, True)), measured(2, mixed, accepted=False))

    assert 0.3 < saving_in(proposed(None, seen, "rules")[0]) < 0.5


def test_caps_that_put_the_rules_target_out_of_reach_leave_their_own_plan_out_and_end_nothing():
    goal = GOAL.model_copy(update={"caps": (Cap(layer="mlp", max_ratio=0.05),)})

    choice = then(STOP, by_model(Plan(pruning=(cut("layers.1", 0.01),)), accepted=True), goal=goal)

    assert isinstance(choice, StopReason) or choice[0] != analyse(FOUND, goal)


def test_what_fails_before_it_is_deployed_says_something_of_every_deployment_but_not_what_cannot_be_had():
    wish = schemas.QuantizationRecommendation(layer="all", quantization_type="dynamic", dtype="qint8")
    hopeless = measured(1, saving(0.3, quantization=(wish,)), accepted=False, deployed=None, reason="hopeless")
    leading = Deployment(runtime="openvino", scheme="static")
    seen = after(hopeless).model_copy(
        update={"deployment_search": schemas.DeploymentSearch(options=(), chosen=leading)}
    )

    assert seen.applies_to_chosen_deployment(hopeless)
    assert not seen.applies_to_chosen_deployment(hopeless.model_copy(update={"is_undeployable": True}))
    assert not seen.applies_to_chosen_deployment(
        hopeless.model_copy(update={"deployment": Deployment(scheme="dynamic")})
    )
    choice = propose(GOAL, FOUND, seen, max_iterations=5)
    assert isinstance(choice, Plan)
    assert saving_in(choice) < 0.3


PROFILE = profile()
PAPER = GOAL.model_copy(update={"selection": "paper"})


@pytest.mark.parametrize(
    ("ratios", "goal", "max_iterations", "expected"),
    [
        # After an accepted plan twice as strong, but not beyond the ceiling, and milder after a refused one.
        ([(0.125, True)], GOAL, 5, 0.25),
        ([(0.5, True)], GOAL, 5, MAX_RATIO),
        ([(0.25, False)], GOAL, 5, 0.125),
        ([(0.125, True)], GOAL, 1, StopReason.BUDGET_SPENT),
        # The paper's loop answers to the last evaluation alone, and uses every iteration.
        ([(0.2, True), (0.3, False)], PAPER, 3, 0.15),
        ([(0.2, True), (0.3, False)], PAPER, 2, StopReason.BUDGET_SPENT),
    ],
)
def test_the_next_plan_is_the_first_at_another_strength_until_the_budget_is_spent(
    ratios: list[tuple[float, bool]], goal: Goal, max_iterations: int, expected: float | StopReason
):
    seen = after(*(attempt(number, ratio, accepted=accepted) for number, (ratio, accepted) in enumerate(ratios, 1)))

    choice = propose(goal, PROFILE, seen, max_iterations=max_iterations)

    ratio = choice.pruning[0].pruning_ratio if isinstance(choice, Plan) else choice
    assert ratio == (pytest.approx(expected) if isinstance(expected, float) else expected)


@pytest.mark.parametrize("cliff", [0.1, 0.2, 0.4, 0.6, 0.74])
def test_the_loop_brackets_the_accuracy_cliff_to_one_aligned_step_and_measures_no_plan_twice(cliff: float):
    def removed(plan: Plan) -> float:
        return 1 - dry_run(plan, PROFILE).cuts[0].keep / 512

    seen = after(attempt(1, 0.125, accepted=cliff >= 0.125))
    while isinstance(choice := propose(GOAL, PROFILE, seen, max_iterations=50), Plan):
        number = len(seen.attempts) + 1
        tried = Attempt(number=number, plan=choice, accepted=removed(choice) <= cliff, reason="made")
        seen = sample_records.with_attempt(seen, tried)

    best = max((removed(a.plan) for a in seen.attempts if a.accepted), default=0.0)
    assert choice is StopReason.CONVERGED
    assert best <= cliff < best + 2 * 32 / 512
    assert len({dry_run(a.plan, PROFILE).widths for a in seen.attempts}) == len(seen.attempts)


def test_a_first_plan_that_prunes_nothing_ends_the_loop():
    empty = Attempt(number=1, plan=Plan(), accepted=True, reason="made")

    assert propose(GOAL, PROFILE, after(empty), max_iterations=5) is StopReason.NOTHING_TO_PRUNE


# MLPs of which each width costs a hundred times as much: a tenth of a nat goes with the first.
COMPACT = sample_records.judged(4, {unit: [100 * kl for kl in sample_records.DOUBLING] for unit in range(4)})


def deployed_as(**stated: Any) -> Journal:
    """Return a journal in which OpenVINO's static int8 leads."""
    values: dict[str, Any] = {"speedup": 8.1, "seen": (2, 1)} | stated
    leading = option("openvino", "static", **values)
    search = schemas.DeploymentSearch(options=(leading,), chosen=leading.deployment)
    return Journal(baseline=BASELINE, deployment_search=search)


@pytest.mark.parametrize(
    ("found", "journal", "goal", "cannot"),
    [
        (COMPACT, deployed_as(), {}, True),
        # Half of the model goes for next to nothing.
        (FOUND, deployed_as(), {}, False),
        # What is allowed pays for it.
        (COMPACT, deployed_as(), {"max_accuracy_drop": 0.2}, False),
        # The contract needs a smaller or a faster model, or one that keeps the accuracy.
        (COMPACT, deployed_as(), {"max_size_ratio": 0.2}, False),
        (COMPACT, deployed_as(), {"min_speedup": 9.0}, False),
        (COMPACT, deployed_as(speedup=None), {}, False),
        (COMPACT, Journal(baseline=BASELINE), {}, False),
        # Too few images to tell: a pruned model changes more answers than an unpruned one.
        (COMPACT, deployed_as(status=schemas.Status.UNCERTAIN), {}, True),
        # Fewer bytes are asked for, or the paper's method.
        (COMPACT, deployed_as(), {"objective": "size"}, False),
        (COMPACT, deployed_as(), {"selection": "paper"}, False),
        (COMPACT.model_copy(update={"evidence": None}), deployed_as(), {}, False),
    ],
)
def test_no_plan_is_worth_its_time_where_int8_meets_the_contract_and_hardly_any_work_goes_for_the_accuracy_allowed(
    found: ModelProfile, journal: Journal, goal: dict[str, Any], cannot: bool
):
    reason = why_pruning_cannot_pay(found, GOAL.model_copy(update=goal), journal, "default")
    assert (reason is not None) is cannot
    assert reason is None or reason == (
        "pruning can't pay here: for the accuracy allowed less than 2% of the multiply-accumulates would go; "
        "openvino static is 8.1 times as fast without it"
    )


@pytest.mark.parametrize(
    ("kind", "effort", "is_left_out"),
    [("Conv2d", "quick", True), ("Conv2d", "default", False), ("Linear", "quick", False)],
)
def test_a_quick_run_prunes_no_convolutional_network_and_needs_no_evidence_for_that(
    kind: str, effort: str, is_left_out: bool
):
    rows = [row.model_copy(update={"kind": kind}) for row in FOUND.layers]
    found = FOUND.model_copy(update={"layers": tuple(rows), "evidence": None})
    reason = why_pruning_cannot_pay(found, GOAL, deployed_as(), effort)
    assert (reason is not None) is is_left_out
    assert why_pruning_cannot_pay(found, GOAL, deployed_as(size_bytes=3000), effort) is None
