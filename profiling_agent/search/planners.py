"""Planners: the next plan by rules, by a language model, or by both."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from profiling_agent.errors import AdvisorError, PlanError
from profiling_agent.lib.machine import environment
from profiling_agent.llm.transcript import LanguageModel
from profiling_agent.planning.allocation import (
    MAX_RATIO,
    MAX_SAVING,
    METRICS,
    CheckedPlan,
    apply_demands,
    dry_run,
    dry_run_or_none,
    most_saving,
    saved_share,
    scaled,
)
from profiling_agent.planning.llm_planner import UNKNOWN, Setting, ask_for_plan, plan_question
from profiling_agent.planning.rules import analyse
from profiling_agent.schemas import (
    Attempt,
    DryRun,
    Goal,
    Journal,
    ModelProfile,
    Origin,
    Plan,
    PruningRecommendation,
    StopReason,
    Target,
)
from profiling_agent.search.deployments import why_undeployable
from profiling_agent.search.evaluator import Evaluator
from profiling_agent.search.selection import rule_text

# Steps of the paper's loop, which depends on the last evaluation only.
MILDER, STRONGER = 0.5, 1.5
# Until a target is refused, the next may cost this many times the KL of the last, searched in twentieths of the way.
MORE_KL, NUM_SAVINGS, MIN_NATS = 4.0, 20, 1e-4


def milder(plan: Plan, times: int) -> Plan:
    """Halve the strength of `plan` for each time that a person rejected it."""
    return scaled(plan, MILDER**times) if times else plan


@dataclass(frozen=True)
class _StrengthSearch:
    """Search over strengths of the first plan: what was measured, and which to try next."""

    first: Plan
    profile: ModelProfile
    journal: Journal
    pins: tuple[PruningRecommendation, ...]

    def scaled_plan(self, strength: float) -> Plan:
        return scaled(self.first, strength, self.pins)

    def bisection_strengths(self) -> Iterator[float]:
        """Yield strengths to try, the most informative first."""
        low, high = self._bracket()
        max_strength = self._max_strength()
        if high is None:
            yield self._next_stronger(low, max_strength) if self.first.target else min(low * 2, max_strength)
            high = max_strength
        # Widths are aligned, so the middle may be a measured plan when its neighbours are not.
        yield from (low + (high - low) * share for share in (1 / 2, 3 / 4, 1 / 4, 7 / 8, 1 / 8))

    def paper_strengths(self) -> Iterator[float]:
        """Yield the paper's next strength, from the last plan and evaluation only."""
        last = self.journal.attempts[-1]
        yield (self._strength(last.plan, last.dry_run) or 1.0) * (STRONGER if last.accepted else MILDER)

    def _strength(self, plan: Plan, dry: DryRun | None) -> float | None:
        """Return the factor between a plan and the first one, capped ratios aside; None if they can't be compared.

        For a plan of another kind it is the ratio of the savings.
        """
        target = self.first.target
        if target is None:
            return self._shared_factor(plan)
        if plan.target is not None and plan.target.metric == target.metric and plan.pruning == self.first.pruning:
            return plan.target.saving / target.saving
        return saved_share(dry.cuts, self.profile, target.metric) / target.saving if dry else None

    def _shared_factor(self, plan: Plan) -> float | None:
        recs, base = self._unpinned(plan), self._unpinned(self.first)
        if plan.target is not None or [rec.layer for rec in recs] != [rec.layer for rec in base]:
            return None
        return min((new.pruning_ratio / old.pruning_ratio for new, old in zip(recs, base, strict=True)), default=None)

    def _unpinned(self, plan: Plan) -> list[PruningRecommendation]:
        return [rec for rec in plan.pruning if rec not in self.pins]

    def _bracket(self) -> tuple[float, float | None]:
        """Return the strongest accepted strength, and the mildest refused or rejected one above it."""
        # A plan with its own quantization shows nothing about the leading deployment.
        measured = [
            (self._strength(row.plan, row.dry_run), row.accepted)
            for row in self.journal.attempts
            if self.journal.is_as_leading(row)
        ]
        low = max((strength for strength, accepted in measured if strength and accepted), default=0.0)
        refused = [strength for strength, accepted in measured if strength and not accepted]
        refused += [
            strength
            for row in self.journal.rejected
            if (strength := self._strength(row.plan, dry_run_or_none(row.plan, self.profile)))
        ]
        return low, min((strength for strength in refused if strength > low), default=None)

    def _max_strength(self) -> float:
        if self.first.target is not None:
            return min(most_saving(self.first, self.profile), MAX_SAVING) / self.first.target.saving
        return max((MAX_RATIO / rec.pruning_ratio for rec in self._unpinned(self.first)), default=1.0)

    def _next_stronger(self, low: float, max_strength: float) -> float:
        """Return the strength up to `max_strength` whose predicted KL is a few times that of `low`.

        Twice the saving may cost a hundred times the KL, and an attempt that is refused outright shows little.
        """
        allowed = MORE_KL * max(self._predicted_kl(low), MIN_NATS)
        choice = low
        for share in range(1, NUM_SAVINGS + 1):
            strength = low + (max_strength - low) * share / NUM_SAVINGS
            if choice > low and self._predicted_kl(strength) > allowed:
                break
            choice = strength
        return choice

    def _predicted_kl(self, strength: float) -> float:
        """Return the KL in nats predicted by the evidence, infinite if the plan can't be made."""
        dry = dry_run_or_none(self.scaled_plan(strength), self.profile)
        return math.inf if dry is None or dry.kl is None else dry.kl

    def widths(self, plan: Plan) -> tuple[tuple[str, int], ...]:
        """Return a plan's aligned widths; empty if no unit changes or the plan can't be made."""
        dry = dry_run_or_none(plan, self.profile)
        return dry.widths if dry else ()


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
    search = _StrengthSearch(first, profile, journal, goal.pins)
    is_paper = goal.selection == "paper"
    tried = {search.widths(row.plan) for row in (*journal.attempts, *journal.rejected)}
    for strength in search.paper_strengths() if is_paper else search.bisection_strengths():
        plan = search.scaled_plan(strength)
        widths = search.widths(plan)
        if is_paper or (widths and widths not in tried):
            return plan
    return StopReason.CONVERGED


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
    is_paper = goal.selection == "paper"
    return Setting(
        machine=environment(evaluator.device).machine,
        schemes=()
        if is_paper
        else tuple(f"{runtime} {scheme}" for runtime, schemes in supported.items() for scheme in schemes),
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
    rules_plan = _first_rules_plan(profile, goal, journal) if planner == "hybrid" else None
    rules = propose(goal, profile, journal, max_iterations=max_iterations, first=rules_plan)
    if advisor is None or planner == "rules" or len(journal.attempts) >= max_iterations:
        return rules if isinstance(rules, StopReason) else (rules, RULES)
    if rules_plan is not None and not _is_redundant(rules_plan, profile, journal):
        return rules_plan, Origin(by="rules", note=f"beside {advisor.name}'s first plan, the rules' own is measured")
    proposed, num_left = None if isinstance(rules, StopReason) else rules, max_iterations - len(journal.attempts)
    target = (rules_plan or journal.attempts[0].plan).target
    answer = _ask(advisor, planner, profile, goal, proposed, journal, setting, num_left, target=target)
    if isinstance(answer, (tuple, StopReason)):
        return answer
    return rules if isinstance(rules, StopReason) else (rules, Origin(by="rules", note=answer))


def _ask(  # noqa: PLR0913 (all that a question is made of)
    advisor: LanguageModel,
    planner: Planner,
    profile: ModelProfile,
    goal: Goal,
    rules: Plan | None,
    journal: Journal | None,
    setting: Setting,
    num_left: int | None = None,
    *,
    target: Target | None,
) -> Proposal | StopReason | str:
    """Return a language model's proposal, a stop if it decides alone, or why the rules' plan is measured instead.

    `num_left` are the attempts left, None before the first. `target` is that of the rules' first plan, whose metric plans are compared by.
    """
    setting = replace(setting, admission=admission_text(planner, is_first=num_left is None))
    try:
        advice = ask_for_plan(
            advisor,
            lambda limit: plan_question(profile, goal, rules, journal, limit, attempts_left=num_left, setting=setting),
            profile,
            goal,
            journal,
            lambda guarded: _objection(guarded, planner, profile, goal, journal, target, setting),
            may_stop=num_left is not None,
        )
    except AdvisorError as error:
        return str(error)
    guarded = advice.guarded
    if guarded is not None and advice.objection is None:
        return guarded.plan, Origin(
            by=advisor.name,
            reason=advice.reason,
            repairs=advice.repairs,
            dropped=guarded.dropped,
            cut_back=guarded.cut_back,
        )
    if guarded is None and planner == "llm" and num_left is not None:
        return StopReason.ADVISED
    return f"{advisor.name}: {advice.objection or f'advises to stop ({advice.reason[:200]})'}"


def _first_rules_plan(profile: ModelProfile, goal: Goal, journal: Journal) -> Plan | None:
    """Return the rules' plan if a language model's was measured first; None if it cuts nothing or fails."""
    if journal.attempts[0].origin.by in ("rules", "user"):
        return None
    plan = apply_demands(milder(analyse(profile, goal), len(journal.rejected)), goal)
    # Later demands of a person may put its target out of reach.
    dry = dry_run_or_none(plan, profile)
    return plan if dry and dry.cuts else None


def _is_redundant(rules_plan: Plan, profile: ModelProfile, journal: Journal) -> bool:
    """Return whether the rules' first plan is already measured, rejected, or answered by the first attempt.

    An accepted attempt answers it if it saves as much of every metric; a refused one if its predicted KL was no higher.
    """
    first, dry = journal.attempts[0], dry_run(rules_plan, profile)
    if len(journal.attempts) > 1 or any(dry.widths == dry_run(row.plan, profile).widths for row in journal.rejected):
        return True
    prior, is_measured = first.dry_run, first.deployed is not None or first.calibration_kl is not None
    if prior is not None and prior.widths == dry.widths and journal.is_as_leading(first):
        # The same plan would have the same result.
        return True
    if prior is None or not is_measured or not journal.is_as_leading(first):
        return False
    metrics = METRICS if profile.evidence else ("params", "macs")
    gains = [saved_share(dry.cuts, profile, metric) - saved_share(prior.cuts, profile, metric) for metric in metrics]
    if first.accepted:
        return max(gains) < STEP
    if dry.kl is not None and prior.kl is not None:
        return dry.kl * TOLERANCE >= prior.kl
    return min(gains) > -STEP


def _objection(
    guarded: CheckedPlan,
    planner: Planner,
    profile: ModelProfile,
    goal: Goal,
    journal: Journal | None,
    target: Target | None,
    setting: Setting,
) -> str | None:
    """Return why a language model's plan is not measured, or None; `target` is the rules'."""
    dry = guarded.dry_run
    if dry is None or not dry.cuts:
        return f"nothing is left of its plan ({'; '.join(guarded.dropped[:3]) or 'it names no layers and no target'})"
    if any(dry.widths == dry_run(row.plan, profile).widths for row in (journal.rejected if journal else ())):
        return "its plan was rejected already"
    if problem := setting.undeployable(guarded.plan):
        return problem
    comparable = [row for row in _deployed_alike(guarded.plan, journal) if row.dry_run] if journal else []
    if any(row.dry_run and row.dry_run.widths == dry.widths for row in comparable):
        return "its plan was measured already"
    if planner == "llm" or dry.kl is None or profile.evidence is None:
        return None
    metric = (guarded.plan.target or target or Target(saving=0.5)).metric
    saving = saved_share(dry.cuts, profile, metric)
    with suppress(PlanError):
        min_kl = dry_run(apply_demands(Plan(target=Target(metric=metric, saving=max(saving, 1e-6))), goal), profile).kl
        if min_kl is not None and dry.kl > min_kl * TOLERANCE + TINY_KL:
            return f"its plan costs {dry.kl:.2g} nats, where the allocator saves as much for {min_kl:.2g}: {saving:.1%} of the {metric}"
    if journal is None or not journal.attempts:
        return None
    measured = [(saved_share(row.dry_run.cuts, profile, metric), row.accepted) for row in comparable if row.dry_run]
    low = max((share for share, accepted in measured if accepted), default=0.0)
    high = min((share for share, accepted in measured if not accepted and share > low), default=1.0)
    if low + STEP / 2 <= saving <= high - STEP / 2:
        return None
    return f"its plan saves {saving:.1%} of the {metric}, where only between {low:.1%} and {high:.1%} is unknown"


def _deployed_alike(plan: Plan, journal: Journal) -> list[Attempt]:
    requested, leading = plan.quantization, journal.deployment
    if requested is None or requested == (leading.recommendations if leading else ()):
        return [row for row in journal.attempts if journal.is_as_leading(row)]
    return [row for row in journal.attempts if row.plan.quantization == requested]
