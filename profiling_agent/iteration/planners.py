"""Planners: the built-in rules, a language model, or both against each other. Nothing here is believed; it is measured."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from profiling_agent.analysis.advised import UNKNOWN, Advised, Setting, first_plan, next_plan
from profiling_agent.analysis.demands import obeying
from profiling_agent.analysis.dry_run import dry_run, saved_share
from profiling_agent.analysis.frontier import METRICS, Metric
from profiling_agent.analysis.guards import Guarded
from profiling_agent.analysis.rules import analyse
from profiling_agent.errors import AdvisorError, PlanError
from profiling_agent.iteration.deployments import why_undeployable
from profiling_agent.iteration.evaluator import Evaluator
from profiling_agent.iteration.judge import rule_text
from profiling_agent.iteration.propose import milder, propose
from profiling_agent.llm.question import Asks
from profiling_agent.records import (
    Attempt,
    Decided,
    DryRun,
    Goal,
    Journal,
    ModelProfile,
    Origin,
    Plan,
    StopReason,
    Target,
)
from profiling_agent.reproducibility import environment

Planner = Literal["hybrid", "llm", "rules"]
RULES = Origin(by="rules")
# A plan may cost a tenth more KL than the least for what it saves: sums of KLs aren't more exact than that.
TOLERANCE, TINY_KL = 1.1, 1e-5
# And has to lie this share of the model away from what was measured already, to teach anything.
STEP = 0.01
# As a language model reads them; what they say is what `_why_not` and `_dearer` and `_is_known` do.
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
    advisor: Asks | None,
    planner: Planner,
    profile: ModelProfile,
    goal: Goal,
    rules: Plan,
    journal: Journal | None = None,
    *,
    setting: Setting = UNKNOWN,
) -> Proposal:
    """Return the first plan: a language model's where there is one, which sees what the rules propose, and what deployments did if there is a journal.

    The rules' own stands where the model has none that may be measured; with both planners, that is one that by the evidence does worse.
    """
    if advisor is None or planner == "rules":
        return rules, RULES
    rejected = journal.rejected if journal else ()

    def why_not(guarded: Guarded) -> str | None:
        if why := _why_not(guarded, profile, rejected, setting):
            return why
        return _dearer(guarded, profile, goal, rules.target) if planner == "hybrid" else None

    asked = replace(setting, admission=admission_text(planner, is_first=True), why_not=why_not)
    try:
        advised = first_plan(advisor, profile, goal, rules, journal, setting=asked)
    except AdvisorError as error:
        return rules, _instead(str(error))
    assert advised.guarded is not None, "a first plan never stops"
    if objection := why_not(advised.guarded):
        return rules, _instead(f"{advisor.name}: {objection}")
    return advised.guarded.plan, _origin(advisor, advised)


def next_proposal(
    advisor: Asks | None,
    planner: Planner,
    profile: ModelProfile,
    goal: Goal,
    journal: Journal,
    *,
    max_iterations: int,
    setting: Setting = UNKNOWN,
) -> Proposal | StopReason:
    """Return the next plan and who made it, or the reason to stop.

    With both planners a language model's plan is measured where the evidence puts it beside the rules' best, and where it
    asks something that isn't known; otherwise the rules' plan is, with the reason. Where a model made the first plan, the rules' own
    comes second, unless the first has answered for it, and it is that one that they go on from.
    """
    own = _rules_own(profile, goal, journal) if planner == "hybrid" else None
    rules = propose(goal, profile, journal, max_iterations=max_iterations, first=own)
    if advisor is None or planner == "rules" or len(journal.attempts) >= max_iterations:
        return rules if isinstance(rules, StopReason) else (rules, RULES)
    if own is not None and not _is_answered(own, profile, journal):
        return own, _instead(f"beside {advisor.name}'s first plan, the rules' own is measured")
    target = (own or journal.attempts[0].plan).target

    def why_not(guarded: Guarded) -> str | None:
        why = _why_not(guarded, profile, journal.rejected, setting) or _repeated(guarded, journal)
        if why or planner == "llm":
            return why
        return _dearer(guarded, profile, goal, target) or _is_known(guarded, profile, journal, target)

    asked = replace(setting, admission=admission_text(planner, is_first=False), why_not=why_not)
    by_rules = None if isinstance(rules, StopReason) else rules
    left = max_iterations - len(journal.attempts)
    try:
        advised = next_plan(advisor, profile, goal, journal, attempts_left=left, rules=by_rules, setting=asked)
    except AdvisorError as error:
        return _rules_instead(rules, f"{advisor.name}: {error}")
    if advised.guarded is None:
        stops = f"{advisor.name}: advises to stop ({advised.reason[:200]})"
        return StopReason.ADVISED if planner == "llm" else _rules_instead(rules, stops)
    if objection := why_not(advised.guarded):
        return _rules_instead(rules, f"{advisor.name}: {objection}")
    return advised.guarded.plan, _origin(advisor, advised)


def _rules_instead(rules: Plan | StopReason, why: str) -> Proposal | StopReason:
    return rules if isinstance(rules, StopReason) else (rules, _instead(why))


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
    ahead = [_saved(dry, profile, metric) - _saved(other, profile, metric) for metric in metrics]
    if first.accepted:
        return max(ahead) < STEP
    if dry.kl is not None and other.kl is not None:
        return dry.kl * TOLERANCE >= other.kl
    return min(ahead) > -STEP


def _origin(advisor: Asks, advised: Advised) -> Origin:
    guarded = advised.guarded
    assert guarded is not None, "there is a plan"
    return Origin(
        by=advisor.name,
        reason=advised.reason,
        repairs=advised.repairs,
        dropped=guarded.dropped,
        cut_back=guarded.cut_back,
    )


def _instead(why: str) -> Origin:
    return Origin(by="rules", note=why)


def _why_not(guarded: Guarded, profile: ModelProfile, rejected: Sequence[Decided], setting: Setting) -> str | None:
    """Return why nobody would measure a plan; None where it may be."""
    dry = guarded.dry_run
    if dry is None or not dry.cuts:
        return f"nothing is left of its plan ({'; '.join(guarded.dropped[:3]) or 'it names no layers and no target'})"
    if any(dry.widths == dry_run(row.plan, profile).widths for row in rejected):
        return "its plan was rejected already"
    return setting.undeployable(guarded.plan)


def _repeated(guarded: Guarded, journal: Journal) -> str | None:
    widths = guarded.dry_run.widths if guarded.dry_run else ()
    if any(widths == row.dry_run.widths for row in _alike(guarded.plan, journal) if row.dry_run):
        return "its plan was measured already"
    return None


def _alike(plan: Plan, journal: Journal) -> list[Attempt]:
    """Return the attempts that were deployed as this plan's would be."""
    wish, leading = plan.quantization, journal.deployment
    if wish is None or wish == (leading.recommendations if leading else ()):
        return [row for row in journal.attempts if journal.is_as_leading(row)]
    return [row for row in journal.attempts if row.plan.quantization == wish]


def _is_known(guarded: Guarded, profile: ModelProfile, journal: Journal, target: Target | None) -> str | None:
    """Return between which savings nothing is known, where a plan lies outside; None without evidence, which then can't tell."""
    dry = guarded.dry_run
    if dry is None or dry.kl is None or profile.evidence is None:
        return None
    metric = _metric(guarded.plan, target)
    saving = _saved(dry, profile, metric)
    alike = [row for row in _alike(guarded.plan, journal) if row.dry_run]
    measured = [(_saved(row.dry_run, profile, metric), row.accepted) for row in alike if row.dry_run]
    best = max((share for share, accepted in measured if accepted), default=0.0)
    worst = min((share for share, accepted in measured if not accepted and share > best), default=1.0)
    if not best + STEP / 2 <= saving <= worst - STEP / 2:
        return f"its plan saves {saving:.1%} of the {metric}, where only between {best:.1%} and {worst:.1%} is unknown"
    return None


def _dearer(guarded: Guarded, profile: ModelProfile, goal: Goal, target: Target | None) -> str | None:
    """Return by how much the allocator, obeying the same demands, would save as much for less; None where it wouldn't, or without evidence."""
    dry = guarded.dry_run
    if dry is None or dry.kl is None or profile.evidence is None:
        return None
    metric = _metric(guarded.plan, target)
    saving = _saved(dry, profile, metric)
    try:
        least = dry_run(obeying(Plan(target=Target(metric=metric, saving=max(saving, 1e-6))), goal), profile).kl
    except PlanError:
        return None
    if least is None or dry.kl <= least * TOLERANCE + TINY_KL:
        return None
    return f"its plan costs {dry.kl:.2g} nats, where the allocator saves as much for {least:.2g}: {saving:.1%} of the {metric}"


def _saved(dry: DryRun, profile: ModelProfile, metric: Metric) -> float:
    return saved_share(dry.cuts, profile, metric)


def _metric(plan: Plan, rules: Target | None) -> Metric:
    target = plan.target or rules
    return target.metric if target else "params"
