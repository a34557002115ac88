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
    Guarded,
    dry_run,
    most_saving,
    obeying,
    saved_share,
    scaled,
)
from profiling_agent.planning.llm_planner import UNKNOWN, Advised, Setting, ask_for_plan, plan_question
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

# The paper's loop answers to the last evaluation alone; these are its steps.
MILDER, STRONGER = 0.5, 1.5
# While no target was refused the next may cost this many times the KL of the last, by steps of a twentieth of the way.
MORE_KL, NUM_SAVINGS, MIN_NATS = 4.0, 20, 1e-4


def milder(plan: Plan, times: int) -> Plan:
    """Return `plan` at half its strength for each time that a person rejected it."""
    return scaled(plan, MILDER**times) if times else plan


@dataclass(frozen=True)
class _Search:
    """The first plan's strengths: what is known of them, and which to try next."""

    first: Plan
    profile: ModelProfile
    journal: Journal
    pins: tuple[PruningRecommendation, ...]

    def at(self, strength: float) -> Plan:
        """Return the first plan scaled."""
        return scaled(self.first, strength, self.pins)

    def by_bisection(self) -> Iterator[float]:
        """Give strengths to try, the most informative first."""
        low, high = self._bracket()
        strongest = self._strongest()
        if high is None:
            yield self._stronger(low, strongest) if self.first.target else min(low * 2, strongest)
            high = strongest
        # Widths are aligned, so the exact middle may be a plan that was measured already; its neighbours may not be.
        yield from (low + (high - low) * share for share in (1 / 2, 3 / 4, 1 / 4, 7 / 8, 1 / 8))

    def as_the_paper(self) -> Iterator[float]:
        """Give the paper's next strength: from the last plan and the last evaluation, nothing older."""
        last = self.journal.attempts[-1]
        yield (self._strength(last.plan, last.dry_run) or 1.0) * (STRONGER if last.accepted else MILDER)

    def _strength(self, plan: Plan, dry: DryRun | None) -> float | None:
        """Return the factor by which a plan is the first one scaled (capped ratios aside).

        Of another's plan it is the saving that counts, beside the first one's; None where they can't be compared.
        """
        target = self.first.target
        if target is None:
            return self._common_factor(plan)
        if plan.target is not None and plan.target.metric == target.metric and plan.pruning == self.first.pruning:
            return plan.target.saving / target.saving
        return saved_share(dry.cuts, self.profile, target.metric) / target.saving if dry else None

    def _common_factor(self, plan: Plan) -> float | None:
        now, was = self._free(plan), self._free(self.first)
        if plan.target is not None or [rec.layer for rec in now] != [rec.layer for rec in was]:
            return None
        return min((new.pruning_ratio / old.pruning_ratio for new, old in zip(now, was, strict=True)), default=None)

    def _free(self, plan: Plan) -> list[PruningRecommendation]:
        return [rec for rec in plan.pruning if rec not in self.pins]

    def _bracket(self) -> tuple[float, float | None]:
        """Return the strongest that was accepted, and the mildest beyond it that was refused, by measurement or a person."""
        # What a plan's own wish for quantization cost says nothing of the deployment that leads.
        measured = [
            (self._strength(row.plan, row.dry_run), row.accepted)
            for row in self.journal.attempts
            if self.journal.is_as_leading(row)
        ]
        low = max((strength for strength, accepted in measured if strength and accepted), default=0.0)
        refused = [strength for strength, accepted in measured if strength and not accepted]
        refused += [
            strength for row in self.journal.rejected if (strength := self._strength(row.plan, self._dry(row.plan)))
        ]
        return low, min((strength for strength in refused if strength > low), default=None)

    def _strongest(self) -> float:
        """Return the factor that takes the first plan to the most that it can ask for."""
        if self.first.target is not None:
            return min(most_saving(self.first, self.profile), MAX_SAVING) / self.first.target.saving
        return max((MAX_RATIO / rec.pruning_ratio for rec in self._free(self.first)), default=1.0)

    def _stronger(self, low: float, strongest: float) -> float:
        """Return the strength between `low` and `strongest` at which the predicted KL is a few times that of `low`.

        Twice the saving may cost a hundred times the KL, and an attempt that is refused outright teaches little.
        """
        allowed = MORE_KL * max(self._kl(low), MIN_NATS)
        choice = low
        for share in range(1, NUM_SAVINGS + 1):
            strength = low + (strongest - low) * share / NUM_SAVINGS
            if choice > low and self._kl(strength) > allowed:
                break
            choice = strength
        return choice

    def _kl(self, strength: float) -> float:
        """Return the KL that the evidence predicts, without end where the plan can't be made."""
        dry = self._dry(self.at(strength))
        return math.inf if dry is None or dry.kl is None else dry.kl

    def widths(self, plan: Plan) -> tuple[tuple[str, int], ...]:
        """Return what a plan comes to after alignment; nothing where no unit would change or the plan can't be made."""
        dry = self._dry(plan)
        return dry.widths if dry else ()

    def _dry(self, plan: Plan) -> DryRun | None:
        try:
            return dry_run(plan, self.profile)
        except PlanError:
            return None


def propose(
    goal: Goal, profile: ModelProfile, journal: Journal, *, max_iterations: int, first: Plan | None = None
) -> Plan | StopReason:
    """Return the next plan to measure, or the reason to stop; what a person rejected counts as too strong.

    It is `first` at another strength, by default the first that was measured. Nothing that was timed decides here, so a resumed run proposes what an undisturbed one does.
    """
    # How it was deployed is the attempt's: the next one is deployed in what leads.
    first = obeying((first or journal.attempts[0].plan).model_copy(update={"quantization": None}), goal)
    if not first.pruning and first.target is None:
        return StopReason.NOTHING_TO_PRUNE
    if len(journal.attempts) >= max_iterations:
        return StopReason.BUDGET_SPENT
    search = _Search(first, profile, journal, goal.pins)
    is_paper = goal.selection == "paper"
    tried = {search.widths(row.plan) for row in (*journal.attempts, *journal.rejected)}
    for strength in search.as_the_paper() if is_paper else search.by_bisection():
        plan = search.at(strength)
        widths = search.widths(plan)
        if is_paper or (widths and widths not in tried):
            return plan
    return StopReason.CONVERGED


Planner = Literal["hybrid", "llm", "rules"]
RULES = Origin(by="rules")
# A plan may cost a tenth more KL than the least for what it saves: sums of KLs aren't more exact than that.
TOLERANCE, TINY_KL = 1.1, 1e-5
# And has to lie this share of the model away from what was measured already, to teach anything.
STEP = 0.01
# As a language model reads them; `_objection` applies them.
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
    """Return what a language model is told of the machine and of how its plans will be judged."""
    goal, supported = evaluator.goal, evaluator.choices.supported
    drops = [row.deployed.drop for row in (journal.attempts if journal else ()) if row.deployed and row.deployed.drop]
    changed = [(drop.num_lost + drop.num_gained) / drop.num_images for drop in drops]
    is_paper = goal.selection == "paper"
    return Setting(
        machine=environment(evaluator.device).machine,
        schemes=()
        if is_paper
        else tuple(f"{runtime} {scheme}" for runtime, known in supported.items() for scheme in known),
        rule=rule_text(goal, len(evaluator.searched), max(changed, default=None)),
        undeployable=partial(why_undeployable, choices=evaluator.choices, goal=goal),
    )


def admission_text(planner: Planner, *, is_first: bool) -> str:
    """Return in words which plans of a language model are measured."""
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
    """Return the first plan: a language model's, which sees the rules' plan, or the rules' when there is an objection to it."""
    if advisor is None or planner == "rules":
        return rules, RULES
    setting = replace(setting, admission=admission_text(planner, is_first=True))
    try:
        advised = ask_for_plan(
            advisor,
            lambda most: plan_question(profile, goal, rules, journal, most, setting=setting),
            profile,
            goal,
            journal,
            lambda guarded: _objection(guarded, planner, profile, goal, journal, rules.target, setting),
            may_stop=False,
        )
    except AdvisorError as error:
        return rules, Origin(by="rules", note=str(error))
    return _proposal(advisor, advised) or (rules, Origin(by="rules", note=f"{advisor.name}: {advised.objection}"))


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

    With `hybrid` the rules' own plan comes second, unless the model's first has answered for it; the rules go on from it.
    """
    own = _rules_own(profile, goal, journal) if planner == "hybrid" else None
    rules = propose(goal, profile, journal, max_iterations=max_iterations, first=own)
    if advisor is None or planner == "rules" or len(journal.attempts) >= max_iterations:
        return rules if isinstance(rules, StopReason) else (rules, RULES)
    if own is not None and not _is_answered(own, profile, journal):
        return own, Origin(by="rules", note=f"beside {advisor.name}'s first plan, the rules' own is measured")
    target = (own or journal.attempts[0].plan).target
    setting = replace(setting, admission=admission_text(planner, is_first=False))
    by_rules, left = None if isinstance(rules, StopReason) else rules, max_iterations - len(journal.attempts)
    try:
        advised = ask_for_plan(
            advisor,
            lambda most: plan_question(profile, goal, by_rules, journal, most, attempts_left=left, setting=setting),
            profile,
            goal,
            journal,
            lambda guarded: _objection(guarded, planner, profile, goal, journal, target, setting),
            may_stop=True,
        )
    except AdvisorError as error:
        return rules if isinstance(rules, StopReason) else (rules, Origin(by="rules", note=str(error)))
    if proposal := _proposal(advisor, advised):
        return proposal
    if advised.guarded is None and planner == "llm":
        return StopReason.ADVISED
    why = advised.objection or f"advises to stop ({advised.reason[:200]})"
    return rules if isinstance(rules, StopReason) else (rules, Origin(by="rules", note=f"{advisor.name}: {why}"))


def _proposal(advisor: LanguageModel, advised: Advised) -> Proposal | None:
    guarded = advised.guarded
    if guarded is None or advised.objection is not None:
        return None
    return guarded.plan, Origin(
        by=advisor.name,
        reason=advised.reason,
        repairs=advised.repairs,
        dropped=guarded.dropped,
        cut_back=guarded.cut_back,
    )


def _rules_own(profile: ModelProfile, goal: Goal, journal: Journal) -> Plan | None:
    """Return the rules' first plan where a language model made the one that was measured first; None where they cut nothing, or can't."""
    if journal.attempts[0].origin.by in ("rules", "user"):
        return None
    plan = obeying(milder(analyse(profile, goal), len(journal.rejected)), goal)
    try:
        return plan if dry_run(plan, profile).cuts else None
    except PlanError:
        # What a person fixed or limited meanwhile may leave its target out of reach.
        return None


def _is_answered(own: Plan, profile: ModelProfile, journal: Journal) -> bool:
    """Return whether the rules' first plan needn't be measured: it was, was rejected, or the model's attempt has answered for it.

    That was accepted and saves as much of everything, or refused and was predicted to cost no more.
    """
    first, dry = journal.attempts[0], dry_run(own, profile)
    if len(journal.attempts) > 1 or any(dry.widths == dry_run(row.plan, profile).widths for row in journal.rejected):
        return True
    other, is_measured = first.dry_run, first.deployed is not None or first.calibration_kl is not None
    if other is not None and other.widths == dry.widths and journal.is_as_leading(first):
        # Whatever became of it would again.
        return True
    if other is None or not is_measured or not journal.is_as_leading(first):
        return False
    metrics = METRICS if profile.evidence else ("params", "macs")
    ahead = [saved_share(dry.cuts, profile, metric) - saved_share(other.cuts, profile, metric) for metric in metrics]
    if first.accepted:
        return max(ahead) < STEP
    if dry.kl is not None and other.kl is not None:
        return dry.kl * TOLERANCE >= other.kl
    return min(ahead) > -STEP


def _objection(
    guarded: Guarded,
    planner: Planner,
    profile: ModelProfile,
    goal: Goal,
    journal: Journal | None,
    target: Target | None,
    setting: Setting,
) -> str | None:
    """Return why a language model's plan is not measured; None when it is. `target` is the rules'."""
    dry = guarded.dry_run
    if dry is None or not dry.cuts:
        return f"nothing is left of its plan ({'; '.join(guarded.dropped[:3]) or 'it names no layers and no target'})"
    if any(dry.widths == dry_run(row.plan, profile).widths for row in (journal.rejected if journal else ())):
        return "its plan was rejected already"
    if problem := setting.undeployable(guarded.plan):
        return problem
    alike = [row for row in _alike(guarded.plan, journal) if row.dry_run] if journal else []
    if any(row.dry_run and row.dry_run.widths == dry.widths for row in alike):
        return "its plan was measured already"
    if planner == "llm" or dry.kl is None or profile.evidence is None:
        return None
    metric = (guarded.plan.target or target or Target(saving=0.5)).metric
    saving = saved_share(dry.cuts, profile, metric)
    with suppress(PlanError):
        least = dry_run(obeying(Plan(target=Target(metric=metric, saving=max(saving, 1e-6))), goal), profile).kl
        if least is not None and dry.kl > least * TOLERANCE + TINY_KL:
            return f"its plan costs {dry.kl:.2g} nats, where the allocator saves as much for {least:.2g}: {saving:.1%} of the {metric}"
    if journal is None or not journal.attempts:
        return None
    measured = [(saved_share(row.dry_run.cuts, profile, metric), row.accepted) for row in alike if row.dry_run]
    best = max((share for share, accepted in measured if accepted), default=0.0)
    worst = min((share for share, accepted in measured if not accepted and share > best), default=1.0)
    if best + STEP / 2 <= saving <= worst - STEP / 2:
        return None
    return f"its plan saves {saving:.1%} of the {metric}, where only between {best:.1%} and {worst:.1%} is unknown"


def _alike(plan: Plan, journal: Journal) -> list[Attempt]:
    """Return the attempts that were deployed as this plan's would be."""
    wish, leading = plan.quantization, journal.deployment
    if wish is None or wish == (leading.recommendations if leading else ()):
        return [row for row in journal.attempts if journal.is_as_leading(row)]
    return [row for row in journal.attempts if row.plan.quantization == wish]
