"""Planners: the next plan by rules, by a language model, or by both."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

from profiling_agent.errors import AdvisorError, PlanError
from profiling_agent.lib.machine import environment
from profiling_agent.planning import allocation
from profiling_agent.planning.allocation import (
    affordable_saving,
    allowed_kl,
    apply_demands,
    dry_run,
    dry_run_or_none,
    saved_share,
    scaled,
)
from profiling_agent.planning.digest import plan_text
from profiling_agent.planning.llm_planner import UNKNOWN, Planning, Setting, Submission
from profiling_agent.planning.rules import analyse
from profiling_agent.pruning.widths import matching_names
from profiling_agent.schemas import (
    EVERYTHING,
    Attempt,
    DryRun,
    Goal,
    Journal,
    ModelProfile,
    Origin,
    Plan,
    StopReason,
    Target,
)
from profiling_agent.search.deployments import is_convolutional, why_undeployable
from profiling_agent.search.evaluator import Evaluator
from profiling_agent.search.probes import lab_of
from profiling_agent.search.selection import option_key, rule_text

# Steps of the paper's loop, which depends on the last evaluation only.
MILDER, STRONGER = 0.5, 1.5
# Until a target is refused, the next may cost this many times the KL of the last, searched in twentieths of the way: twice the saving may cost a
# hundred times the KL, and an attempt that is refused outright shows little.
MORE_KL, NUM_SAVINGS, MIN_NATS = 4.0, 20, 1e-4


# Share of the multiply-accumulates that has to go for plans to be worth their minutes. At 0.01 nats for a point it is 1% on a MobileNetV1, 5% on an
# EfficientNet-Lite0, 13% on a small ResNet, 49% on a small ViT and 84% on an LCNet with four classes (docs/decisions/LOG.md).
PAYING_SAVING = 0.08


def why_pruning_cannot_pay(profile: ModelProfile, goal: Goal, journal: Journal, effort: str) -> str | None:
    """Return why no plan is worth its time; None if one may be, or if no unpruned deployment is fast and small enough.

    A quick run prunes no convolutional network, and needs no evidence for that: int8 made the ResNet 7.1 times as fast, and pruning 7.3 times.
    """
    search, leading = journal.deployment_search, journal.deployment
    if goal.selection == "paper" or goal.objective == "size" or goal.pins or not search or not leading:
        return None
    option = search.of(leading)
    if option.race_result is None or option_key(option, journal.baseline, goal)[0]:
        return None
    speed = f"{leading.name} is {option.race_result.speedup:.1f} times as fast without it"
    if profile.evidence is None:
        is_left_out = effort == "quick" and is_convolutional(profile)
        return f"--effort quick leaves pruning of convolutional networks out: {speed}" if is_left_out else None
    saving = affordable_saving(profile, goal, PAYING_SAVING)
    if saving is None:
        return None
    return f"pruning can't pay here: for the accuracy allowed less than {saving:.0%} of the multiply-accumulates would go; {speed}"


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
ALWAYS = (
    "Your plan is refused if it can't be made or cuts nothing, if it was measured or rejected before, if no runtime here can do what it asks of quantization, "
    "or if its KL is above the limit. A probe's KL counts more than a predicted one"
)
AS_THE_ALLOCATOR = (
    f"It is also refused if its KL is more than {TOLERANCE:g} times that of the allocator's plan for the same saving, with the metric of its target or of the "
    "rules'. If both plans were probed, the probes decide, else the predictions"
)
IS_NEW = (
    f"It is also refused if it saves less than {STEP / 2:.1%} of the model more than an accepted attempt that is deployed alike, or not as much less than a "
    "refused one"
)
ELSE = "A refusal tells you the number. After two more the rules' plan is measured instead"

Proposal = tuple[Plan, Origin]


class Advisor(NamedTuple):
    """Language model that plans: its name, and a function that finds a plan with it, or raises AdvisorError."""

    name: str
    find_plan: Callable[[Planning], Submission]


def setting_of(evaluator: Evaluator, journal: Journal) -> Setting:
    """Return what the prompt contains about the machine and about how plans are judged, and the lab of the tools."""
    goal, supported = evaluator.goal, evaluator.choices.supported
    drops = [row.deployed.drop for row in journal.attempts if row.deployed and row.deployed.drop]
    changed_shares = [(drop.num_lost + drop.num_gained) / drop.num_images for drop in drops]
    schemes = tuple(f"{runtime} {scheme}" for runtime, schemes in supported.items() for scheme in schemes)
    return Setting(
        machine=environment(evaluator.device).machine,
        schemes=() if goal.selection == "paper" else schemes,
        rule=rule_text(goal, len(evaluator.searched), max(changed_shares, default=None)),
        undeployable=partial(why_undeployable, choices=evaluator.choices, goal=goal),
        lab=lab_of(evaluator, journal),
    )


def admission_text(planner: Planner, *, is_first: bool) -> str:
    """Return the prompt's rule for which plans of a language model are measured."""
    if planner == "llm":
        return f"{ALWAYS}. {ELSE}."
    if is_first:
        return f"{ALWAYS}. {AS_THE_ALLOCATOR}. {ELSE}. The rules' own plan is measured after yours, unless yours answers for it."
    return f"{ALWAYS}. {AS_THE_ALLOCATOR}. {IS_NEW}. {ELSE}."


def first_proposal(
    advisor: Advisor | None,
    planner: Planner,
    profile: ModelProfile,
    goal: Goal,
    rules: Plan,
    journal: Journal | None = None,
    *,
    setting: Setting = UNKNOWN,
) -> Proposal:
    """Return the first plan: a language model's, which sees the rules' plan, or the rules' if it fails or is refused."""
    if advisor is None or planner == "rules":
        return rules, RULES
    planning = Planning(profile, goal, rules, journal, setting=setting)
    choice = _ask(advisor, planner, planning, rules.target)
    return choice if isinstance(choice, tuple) else (rules, Origin(by="rules", note=choice))


def next_proposal(
    advisor: Advisor | None,
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
    if rules_plan is not None and not _is_redundant(rules_plan, profile, journal, setting):
        return rules_plan, Origin(by="rules", note=f"beside {advisor.name}'s first plan, the rules' own is measured")
    offered = None if isinstance(rules, StopReason) else rules
    planning = Planning(profile, goal, offered, journal, num_left, setting)
    choice = _ask(advisor, planner, planning, (rules_plan or first.plan).target)
    if isinstance(choice, (tuple, StopReason)):
        return choice
    return own if isinstance(rules, StopReason) else (rules, Origin(by="rules", note=choice))


def _ask(advisor: Advisor, planner: Planner, planning: Planning, target: Target | None) -> Proposal | StopReason | str:
    """Return a language model's proposal, a stop if it decides alone, or why the rules' plan is measured instead.

    `target` is that of the rules' first plan, whose metric plans are compared by.
    """
    setting = replace(planning.setting, admission=admission_text(planner, is_first=planning.num_left is None))
    planning = replace(planning, setting=setting)
    objection = partial(_objection, planning=planning, planner=planner, target=target)
    try:
        answer = advisor.find_plan(replace(planning, objection=objection))
    except AdvisorError as error:
        return str(error)
    if answer.plan is not None:
        plan = apply_demands(answer.plan, planning.goal)
        return plan, Origin(by=advisor.name, reason=answer.reason, repairs=answer.repairs)
    return StopReason.ADVISED if planner == "llm" else f"{advisor.name}: advises to stop ({answer.reason[:200]})"


def _is_redundant(rules_plan: Plan, profile: ModelProfile, journal: Journal, setting: Setting) -> bool:
    """Return whether the rules' first plan is already measured, rejected, or answered by the first attempt.

    An accepted attempt answers it if it saves as much of every metric; a refused one if its KL was no higher, as probed or else as predicted.
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
    known = setting.lab.known_kl(rules_plan) if setting.lab else None
    kl, prior_kl = (known, first.calibration_kl) if known is not None else (dry.kl, prior.kl)
    if kl is not None and prior_kl is not None:
        return kl * TOLERANCE >= prior_kl
    return min(gains) > -STEP


def _objection(plan: Plan, planning: Planning, planner: Planner, target: Target | None) -> str | None:
    """Return why a language model's plan is not measured, with the number that a dry run or a probe has, or None.

    `target` is the rules'.
    """
    profile, goal, journal, setting = planning.profile, planning.goal, planning.journal, planning.setting
    plan = apply_demands(plan, goal)
    try:
        dry = dry_run(plan, profile)
    except PlanError as error:
        return str(error)
    if not dry.cuts:
        return f"it cuts nothing: {'; '.join(dry.notes[:3]) or 'name layers, or a target'}"
    if any(dry.widths == dry_run(row.plan, profile).widths for row in (journal.rejected if journal else ())):
        return "a person rejected it already"
    if problem := setting.undeployable(plan) or _unknown_layers(plan, profile):
        return problem
    alike = _deployed_alike(plan, journal) if journal else []
    measured = [(row.number, row.dry_run, row.accepted) for row in alike if row.dry_run]
    if same := next((number for number, prior, _ in measured if dry.widths == prior.widths), None):
        return f"attempt {same} measured it already"
    known, allowed = (setting.lab.known_kl(plan) if setting.lab else None), allowed_kl(goal)
    kl, how = (known, "probed") if known is not None else (dry.kl, "predicted")
    if kl is not None and kl > allowed:
        return f"its KL is {kl:.2g} nats ({how}), where at most {allowed:.2g} can keep the accuracy"
    if planner == "llm" or dry.kl is None or profile.evidence is None:
        return None
    metric = (plan.target or target or Target(saving=0.5)).metric
    saving = saved_share(dry.cuts, profile, metric)
    rival = Plan(target=Target(metric=metric, saving=min(max(saving, 1e-6), allocation.MAX_SAVING)))
    least = dry_run_or_none(apply_demands(rival, goal), profile)
    if least is not None and least.kl is not None:
        kl, least_kl, how = dry.kl, least.kl, "predicted"
        # Measured and predicted KLs aren't comparable.
        if setting.lab and known is not None and (probed := setting.lab.known_kl(rival)) is not None:
            kl, least_kl, how = known, probed, "probed"
        if kl > least_kl * TOLERANCE + TINY_KL:
            return (
                f"it costs {kl:.2g} nats ({how}), where the allocator saves as much for {least_kl:.2g}: {saving:.1%} of the {metric}, "
                f"by {plan_text(rival)}; where both were probed, that decides"
            )
    if journal is None or not journal.attempts:
        return None
    savings = [(saved_share(prior.cuts, profile, metric), accepted) for _, prior, accepted in measured]
    low = max((share for share, accepted in savings if accepted), default=0.0)
    high = min((share for share, accepted in savings if not accepted and share > low), default=1.0)
    text = f"it saves {saving:.1%} of the {metric}, where only between {low:.1%} and {high:.1%} is unknown"
    return None if low + STEP / 2 <= saving <= high - STEP / 2 else text


def _deployed_alike(plan: Plan, journal: Journal) -> list[Attempt]:
    quantization, leading = plan.quantization, journal.deployment.recommendations if journal.deployment else ()
    if quantization is None or quantization == leading:
        return [row for row in journal.attempts if journal.applies_to_chosen_deployment(row)]
    return [row for row in journal.attempts if row.plan.quantization == quantization]


def _unknown_layers(plan: Plan, profile: ModelProfile) -> str | None:
    """Return which pattern of a plan's quantization matches no layer, or None."""
    names = [row.name for row in profile.layers]
    for part in plan.quantization or ():
        try:
            if part.layer != EVERYTHING and not matching_names(part.layer, names):
                return f"the layer pattern {part.layer!r} matches no layer to quantize"
        except PlanError as error:
            return str(error)
    return None
