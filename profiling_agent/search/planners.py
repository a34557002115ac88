"""Planners: the next plan by rules, by a language model, or by both."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Literal

from profiling_agent.errors import AdvisorError, ContextTooLongError, PlanError
from profiling_agent.lib.machine import environment
from profiling_agent.llm.transcript import Advice, LanguageModel
from profiling_agent.planning import allocation
from profiling_agent.planning.allocation import (
    CheckedPlan,
    apply_demands,
    dry_run,
    dry_run_or_none,
    saved_share,
    scaled,
)
from profiling_agent.planning.digest import MAX_CHARACTERS
from profiling_agent.planning.llm_planner import (
    SHORT_CHARACTERS,
    UNKNOWN,
    NextAnswer,
    PlanAnswer,
    Setting,
    evidence_tools,
    plan_question,
)
from profiling_agent.planning.rules import analyse
from profiling_agent.schemas import DryRun, Goal, Journal, ModelProfile, Origin, Plan, StopReason, Target
from profiling_agent.search.deployments import why_undeployable
from profiling_agent.search.evaluator import Evaluator
from profiling_agent.search.selection import rule_text

# Steps of the paper's loop, which depends on the last evaluation only.
MILDER, STRONGER = 0.5, 1.5
# Until a target is refused, the next may cost this many times the KL of the last, searched in twentieths of the way: twice the saving may cost a
# hundred times the KL, and an attempt that is refused outright shows little.
MORE_KL, NUM_SAVINGS, MIN_NATS = 4.0, 20, 1e-4


def milder(plan: Plan, times: int) -> Plan:
    """Halve the strength of `plan` for each time that a person rejected it."""
    return scaled(plan, MILDER**times) if times else plan


def propose(
    goal: Goal, profile: ModelProfile, journal: Journal, *, max_iterations: int, first: Plan | None = None
) -> Plan | StopReason:
    """Return the next plan to measure, or the reason to stop; a rejected plan counts as too strong.

    It is `first`, by default the first measured plan, at another strength. No measured time decides, so a resumed run proposes the same plans.
    """
    # The deployment belongs to the attempt: the next one uses the leading deployment.
    first = apply_demands((first or journal.attempts[0].plan).model_copy(update={"quantization": None}), goal)
    if not first.pruning and first.target is None:
        return StopReason.NOTHING_TO_PRUNE
    if len(journal.attempts) >= max_iterations:
        return StopReason.BUDGET_SPENT
    if goal.selection == "paper":
        last = journal.attempts[-1]
        strength = _strength(last.plan, last.dry_run, first, goal, profile) or 1.0
        return scaled(first, strength * (STRONGER if last.accepted else MILDER), goal.pins)

    def widths(plan: Plan) -> tuple[tuple[str, int], ...]:
        dry = dry_run_or_none(plan, profile)
        return dry.widths if dry else ()

    tried = {(), *(widths(row.plan) for row in (*journal.attempts, *journal.rejected))}
    plans = (scaled(first, strength, goal.pins) for strength in _strengths(first, goal, profile, journal))
    return next((plan for plan in plans if widths(plan) not in tried), StopReason.CONVERGED)


def _strengths(first: Plan, goal: Goal, profile: ModelProfile, journal: Journal) -> Iterator[float]:
    """Yield strengths between the strongest accepted and the mildest refused or rejected one, the most informative first."""
    # A plan with its own quantization shows nothing about the leading deployment.
    measured = [
        (_strength(row.plan, row.dry_run, first, goal, profile), row.accepted)
        for row in journal.attempts
        if journal.applies_to_chosen_deployment(row)
    ]
    rejected = [(row.plan, dry_run_or_none(row.plan, profile)) for row in journal.rejected]
    measured += [(_strength(plan, dry, first, goal, profile), False) for plan, dry in rejected]
    low = max((strength for strength, accepted in measured if strength and accepted), default=0.0)
    high = min((strength for strength, accepted in measured if not accepted and strength and strength > low), default=0)
    if not high:
        if first.target is None:
            ratios = [rec.pruning_ratio for rec in first.pruning if rec not in goal.pins]
            high = max((allocation.MAX_RATIO / ratio for ratio in ratios), default=1.0)
            yield min(low * 2, high)
        else:
            most_saving = min(allocation.most_saving(first, profile), allocation.MAX_SAVING)
            high = most_saving / first.target.saving

            def predicted_kl(strength: float) -> float:
                dry = dry_run_or_none(scaled(first, strength, goal.pins), profile)
                return math.inf if dry is None or dry.kl is None else dry.kl

            allowed, choice = MORE_KL * max(predicted_kl(low), MIN_NATS), low
            for share in range(1, NUM_SAVINGS + 1):
                strength = low + (high - low) * share / NUM_SAVINGS
                if choice > low and predicted_kl(strength) > allowed:
                    break
                choice = strength
            yield choice
    # Widths are aligned, so the middle may be a measured plan when its neighbours are not.
    yield from (low + (high - low) * share for share in (1 / 2, 3 / 4, 1 / 4, 7 / 8, 1 / 8))


def _strength(plan: Plan, dry: DryRun | None, first: Plan, goal: Goal, profile: ModelProfile) -> float | None:
    """Return the factor between a plan and the first one, capped ratios aside; None if they can't be compared.

    For a plan of another kind it is the ratio of the savings.
    """
    if (target := first.target) is not None:
        if plan.target is not None and plan.target.metric == target.metric and plan.pruning == first.pruning:
            return plan.target.saving / target.saving
        return saved_share(dry.cuts, profile, target.metric) / target.saving if dry else None
    recs, base = ([rec for rec in each.pruning if rec not in goal.pins] for each in (plan, first))
    if plan.target is not None or [rec.layer for rec in recs] != [rec.layer for rec in base]:
        return None
    return min((new.pruning_ratio / old.pruning_ratio for new, old in zip(recs, base, strict=True)), default=None)


Planner = Literal["hybrid", "llm", "rules"]
RULES = Origin(by="rules")
# A plan may cost a tenth more KL than the least for its saving: sums of KLs are no more exact.
TOLERANCE, TINY_KL = 1.1, 1e-5
# Its saving must differ by this share of the model from measured ones, to show anything.
STEP = 0.01
# Parts of the prompt; `_objection` applies them.
ALWAYS = "Your plan is measured where it cuts something, nobody has measured or rejected it, and a runtime here can do what it asks of quantization"
AS_THE_ALLOCATOR = (
    f"where it is predicted to cost at most {TOLERANCE:g} times the KL at which the allocator saves as much of its target's metric (of the rules' where it "
    "has no target)"
)
IS_NEW = (
    f"where what it saves of that lies at least {STEP / 2:.1%} of the model above all that was accepted and below what was refused, among attempts that are "
    "deployed alike"
)
ELSE = "You are told at once where it isn't, and may mend it; after that the rules' plan is measured instead, and your next question says why"

Proposal = tuple[Plan, Origin]


def setting_of(evaluator: Evaluator, journal: Journal | None = None) -> Setting:
    """Return what the prompt contains about the machine and about how plans are judged."""
    goal, supported = evaluator.goal, evaluator.choices.supported
    drops = [row.deployed.drop for row in (journal.attempts if journal else ()) if row.deployed and row.deployed.drop]
    changed_shares = [(drop.num_lost + drop.num_gained) / drop.num_images for drop in drops]
    schemes = tuple(f"{runtime} {scheme}" for runtime, schemes in supported.items() for scheme in schemes)
    return Setting(
        machine=environment(evaluator.device).machine,
        schemes=() if goal.selection == "paper" else schemes,
        rule=rule_text(goal, len(evaluator.searched), max(changed_shares, default=None)),
        undeployable=partial(why_undeployable, choices=evaluator.choices, goal=goal),
    )


def admission_text(planner: Planner, *, is_first: bool) -> str:
    """Return the prompt's rule for which plans of a language model are measured."""
    if planner == "llm":
        return f"{ALWAYS}. {ELSE}."
    if is_first:
        return f"{ALWAYS}, and {AS_THE_ALLOCATOR}. {ELSE}. The rules' own plan is measured after yours, unless what yours did answers for it."
    return f"{ALWAYS}, {AS_THE_ALLOCATOR}, and {IS_NEW}. {ELSE}."


def first_proposal(
    advisor: LanguageModel | None,
    planner: Planner,
    profile: ModelProfile,
    goal: Goal,
    rules: Plan,
    journal: Journal | None = None,
    *,
    setting: Setting = UNKNOWN,
) -> Proposal:
    """Return the first plan: a language model's, which sees the rules' plan, or the rules' if there is an objection."""
    if advisor is None or planner == "rules":
        return rules, RULES
    answer = _ask(advisor, planner, profile, goal, rules, journal, setting, target=rules.target)
    return answer if isinstance(answer, tuple) else (rules, Origin(by="rules", note=answer))


def next_proposal(
    advisor: LanguageModel | None,
    planner: Planner,
    profile: ModelProfile,
    goal: Goal,
    journal: Journal,
    *,
    max_iterations: int,
    setting: Setting = UNKNOWN,
) -> Proposal | StopReason:
    """Return the next plan and its origin, or the reason to stop.

    With `hybrid`, the rules' own plan comes second unless the first attempt makes it redundant; the rules continue from it.
    """
    first, rules_plan = journal.attempts[0], None
    if planner == "hybrid" and first.origin.by not in ("rules", "user"):
        # Later demands of a person may put its target out of reach.
        plan = apply_demands(milder(analyse(profile, goal), len(journal.rejected)), goal)
        rules_plan = plan if (dry := dry_run_or_none(plan, profile)) and dry.cuts else None
    rules = propose(goal, profile, journal, max_iterations=max_iterations, first=rules_plan)
    own = rules if isinstance(rules, StopReason) else (rules, RULES)
    num_left = max_iterations - len(journal.attempts)
    if advisor is None or planner == "rules" or num_left <= 0:
        return own
    if rules_plan is not None and not _is_redundant(rules_plan, profile, journal):
        return rules_plan, Origin(by="rules", note=f"beside {advisor.name}'s first plan, the rules' own is measured")
    offered, target = None if isinstance(rules, StopReason) else rules, (rules_plan or first.plan).target
    answer = _ask(advisor, planner, profile, goal, offered, journal, setting, target=target, num_left=num_left)
    if isinstance(answer, (tuple, StopReason)):
        return answer
    return own if isinstance(rules, StopReason) else (rules, Origin(by="rules", note=answer))


def _ask(  # noqa: PLR0913 (all that a question is made of)
    advisor: LanguageModel,
    planner: Planner,
    profile: ModelProfile,
    goal: Goal,
    rules: Plan | None,
    journal: Journal | None,
    setting: Setting,
    *,
    target: Target | None,
    num_left: int | None = None,
) -> Proposal | StopReason | str:
    """Return a language model's proposal, a stop if it decides alone, or why the rules' plan is measured instead.

    `num_left` are the attempts left, None before the first. `target` is that of the rules' first plan, whose metric plans are compared by.
    """
    setting = replace(setting, admission=admission_text(planner, is_first=num_left is None))
    answer_type: type[PlanAnswer] = NextAnswer if num_left is not None else PlanAnswer
    tools = evidence_tools(profile, goal, journal)
    # The last answer's plan, None for the advice to stop, and the objection to it.
    checked: list[tuple[CheckedPlan | None, str | None]] = [(None, None)]

    def check(answer: PlanAnswer) -> str | None:
        if isinstance(answer, NextAnswer) and answer.stop:
            checked.append((None, None))
            return None
        plan = allocation.guard(answer.plan, profile, goal)
        objection = _objection(plan, planner, profile, goal, journal, target, setting)
        checked.append((plan, objection))
        return plan.complaint or objection

    def ask(max_characters: int) -> Advice[PlanAnswer]:
        question = plan_question(profile, goal, rules, journal, max_characters, attempts_left=num_left, setting=setting)
        return advisor.ask(question, answer_type, check=check, tools=tools)

    try:
        try:
            advice = ask(MAX_CHARACTERS)
        except ContextTooLongError:
            advice = ask(SHORT_CHARACTERS)
    except AdvisorError as error:
        return str(error)
    plan, objection = checked[-1]
    reason = advice.value.reason
    if plan is not None and objection is None:
        return plan.plan, Origin(
            by=advisor.name, reason=reason, repairs=advice.repairs, dropped=plan.dropped, cut_back=plan.cut_back
        )
    if plan is None and planner == "llm" and num_left is not None:
        return StopReason.ADVISED
    return f"{advisor.name}: {objection or f'advises to stop ({reason[:200]})'}"


def _is_redundant(rules_plan: Plan, profile: ModelProfile, journal: Journal) -> bool:
    """Return whether the rules' first plan is already measured, rejected, or answered by the first attempt.

    An accepted attempt answers it if it saves as much of every metric; a refused one if its predicted KL was no higher.
    """
    first, dry = journal.attempts[0], dry_run(rules_plan, profile)
    if len(journal.attempts) > 1 or any(dry.widths == dry_run(row.plan, profile).widths for row in journal.rejected):
        return True
    prior, is_measured = first.dry_run, first.deployed is not None or first.calibration_kl is not None
    if prior is None or not journal.applies_to_chosen_deployment(first):
        return False
    if prior.widths == dry.widths:
        # The same plan would have the same result.
        return True
    if not is_measured:
        return False
    metrics = allocation.METRICS if profile.evidence else ("params", "macs")
    gains = [saved_share(dry.cuts, profile, metric) - saved_share(prior.cuts, profile, metric) for metric in metrics]
    if first.accepted:
        return max(gains) < STEP
    if dry.kl is not None and prior.kl is not None:
        return dry.kl * TOLERANCE >= prior.kl
    return min(gains) > -STEP


def _objection(
    checked: CheckedPlan,
    planner: Planner,
    profile: ModelProfile,
    goal: Goal,
    journal: Journal | None,
    target: Target | None,
    setting: Setting,
) -> str | None:
    """Return why a language model's plan is not measured, or None; `target` is the rules'."""
    plan, dry = checked.plan, checked.dry_run
    if dry is None or not dry.cuts:
        return f"nothing is left of its plan ({'; '.join(checked.dropped[:3]) or 'it names no layers and no target'})"
    if any(dry.widths == dry_run(row.plan, profile).widths for row in (journal.rejected if journal else ())):
        return "its plan was rejected already"
    if problem := setting.undeployable(plan):
        return problem
    # Attempts that are deployed as the plan would be, each with what it cuts.
    measured = list[tuple[DryRun, bool]]()
    if journal is not None:
        wish, leading = plan.quantization, journal.deployment.recommendations if journal.deployment else ()
        if wish is None or wish == leading:
            alike = [row for row in journal.attempts if journal.applies_to_chosen_deployment(row)]
        else:
            alike = [row for row in journal.attempts if row.plan.quantization == wish]
        measured = [(row.dry_run, row.accepted) for row in alike if row.dry_run]
    if any(dry.widths == prior.widths for prior, _ in measured):
        return "its plan was measured already"
    if planner == "llm" or dry.kl is None or profile.evidence is None:
        return None
    metric = (plan.target or target or Target(saving=0.5)).metric
    saving = saved_share(dry.cuts, profile, metric)
    with suppress(PlanError):
        min_kl = dry_run(apply_demands(Plan(target=Target(metric=metric, saving=max(saving, 1e-6))), goal), profile).kl
        if min_kl is not None and dry.kl > min_kl * TOLERANCE + TINY_KL:
            return f"its plan costs {dry.kl:.2g} nats, where the allocator saves as much for {min_kl:.2g}: {saving:.1%} of the {metric}"
    if journal is None or not journal.attempts:
        return None
    savings = [(saved_share(prior.cuts, profile, metric), accepted) for prior, accepted in measured]
    low = max((share for share, accepted in savings if accepted), default=0.0)
    high = min((share for share, accepted in savings if not accepted and share > low), default=1.0)
    if low + STEP / 2 <= saving <= high - STEP / 2:
        return None
    return f"its plan saves {saving:.1%} of the {metric}, where only between {low:.1%} and {high:.1%} is unknown"
