"""Planners: the built-in rules, a language model, or both against each other. Nothing here is believed; it is measured."""

from collections.abc import Sequence
from typing import Literal

from profiling_agent.analysis.advised import UNKNOWN, Advised, Setting, first_plan, next_plan
from profiling_agent.analysis.demands import obeying
from profiling_agent.analysis.dry_run import dry_run, saved_share
from profiling_agent.analysis.rules import analyse
from profiling_agent.errors import AdvisorError, PlanError
from profiling_agent.iteration.evaluator import Evaluator
from profiling_agent.iteration.judge import rule_text
from profiling_agent.iteration.propose import milder, propose
from profiling_agent.llm.question import Asks
from profiling_agent.records import Decided, DryRun, Goal, Journal, ModelProfile, Origin, Plan, StopReason, Target
from profiling_agent.reproducibility import environment

Planner = Literal["hybrid", "llm", "rules"]
RULES = Origin(by="rules")
# A plan may cost a tenth more KL than the least for what it saves: sums of KLs aren't more exact than that.
TOLERANCE, TINY_KL = 1.1, 1e-5
# And has to lie this share of the model away from what was measured already, to teach anything.
STEP = 0.01

Proposal = tuple[Plan, Origin]


def setting_of(evaluator: Evaluator, journal: Journal | None = None) -> Setting:
    """Return what a language model is told of the machine and of how its plans will be judged."""
    goal = evaluator.goal
    drops = [row.deployed.drop for row in (journal.attempts if journal else ()) if row.deployed and row.deployed.drop]
    changed = [(drop.num_lost + drop.num_gained) / drop.num_images for drop in drops]
    return Setting(
        machine=environment(evaluator.device).machine,
        schemes=tuple(
            f"{runtime} {scheme}" for runtime, known in evaluator.choices.supported.items() for scheme in known
        ),
        rule=rule_text(goal, len(evaluator.searched), max(changed, default=None)),
    )


def first_proposal(  # noqa: PLR0913 (all that a plan is made from)
    advisor: Asks | None,
    planner: Planner,
    profile: ModelProfile,
    goal: Goal,
    rules: Plan,
    rejected: Sequence[Decided] = (),
    *,
    setting: Setting = UNKNOWN,
) -> Proposal:
    """Return the first plan: a language model's where there is one, which sees what the rules propose.

    With both planners the rules' own plan stands where the model keeps it, and where by the evidence the model's would do worse.
    """
    if advisor is None or planner == "rules":
        return rules, RULES
    try:
        advised = first_plan(advisor, profile, goal, rules, rejected, setting=setting)
    except AdvisorError as error:
        return rules, _instead(str(error))
    assert advised.guarded is not None, "a first plan never stops"
    dry = advised.guarded.dry_run
    if dry is None or not dry.cuts:
        return rules, _instead(f"nothing is left of {advisor.name}'s plan ({'; '.join(advised.guarded.dropped[:3])})")
    if planner == "hybrid" and (why := _dearer(advised.guarded.plan, dry, profile, rules.target)):
        return rules, _instead(f"{advisor.name}: {why}")
    return advised.guarded.plan, _origin(advisor, advised)


def next_proposal(  # noqa: PLR0913 (all that a plan is made from)
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
    asks something that isn't known; otherwise the rules' plan is, with the reason. Where a model made the first plan, the rules' own comes second, if
    it is another by more than what predictions are worth.
    """
    rules = propose(goal, profile, journal, max_iterations=max_iterations)
    if advisor is None or planner == "rules" or len(journal.attempts) >= max_iterations:
        return rules if isinstance(rules, StopReason) else (rules, RULES)
    if planner == "hybrid" and (own := _rules_first(profile, goal, journal)) is not None:
        return own, _instead(f"beside {advisor.name}'s first plan, the rules' own is measured")
    by_rules = None if isinstance(rules, StopReason) else rules
    left = max_iterations - len(journal.attempts)
    try:
        advised = next_plan(advisor, profile, goal, journal, attempts_left=left, rules=by_rules, setting=setting)
        objection = _objection(advised, planner, profile, journal)
    except AdvisorError as error:
        advised, objection = None, str(error)
    if advised is not None and advised.guarded is not None and objection is None:
        return advised.guarded.plan, _origin(advisor, advised)
    if planner == "llm" and advised is not None and advised.stop:
        return StopReason.ADVISED
    if isinstance(rules, StopReason):
        return rules
    return rules, _instead(f"{advisor.name}: {objection}")


def _rules_first(profile: ModelProfile, goal: Goal, journal: Journal) -> Plan | None:
    """Return the rules' first plan where a language model made the only attempt and it is another one that may do better; None otherwise."""
    if len(journal.attempts) != 1 or journal.attempts[0].origin.by in ("rules", "user"):
        return None
    first = journal.attempts[0]
    plan = obeying(milder(analyse(profile, goal), len(journal.rejected)), goal)
    own, other = dry_run(plan, profile), first.dry_run
    if other is None or not own.cuts:
        return plan if own.cuts else None
    metric = plan.target.metric if plan.target else "params"
    ahead = saved_share(own.cuts, profile, metric) - saved_share(other.cuts, profile, metric)
    # What the first attempt says of milder plans, or of bolder ones, it says of this one too.
    if abs(ahead) < STEP or (ahead < 0) == first.accepted:
        return None
    return plan


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


def _objection(advised: Advised, planner: Planner, profile: ModelProfile, journal: Journal) -> str | None:
    """Return why a language model's plan isn't worth an evaluation; None where it is."""
    if advised.stop or advised.guarded is None:
        return f"advises to stop ({advised.reason[:200]})"
    dry = advised.guarded.dry_run
    if dry is None or not dry.cuts:
        return "nothing is left of its plan"
    if any(dry.widths == attempt.dry_run.widths for attempt in journal.attempts if attempt.dry_run):
        return "its plan was measured already"
    if any(dry.widths == dry_run(row.plan, profile).widths for row in journal.rejected):
        return "its plan was rejected already"
    return _behind(advised.guarded.plan, dry, profile, journal) if planner == "hybrid" else None


def _behind(plan: Plan, dry: DryRun, profile: ModelProfile, journal: Journal) -> str | None:
    """Return why the rules would do better, by the evidence; None without evidence, which then can't tell."""
    if dry.kl is None or profile.evidence is None:
        return None
    first = journal.attempts[0].plan.target
    if why := _dearer(plan, dry, profile, first):
        return why
    metric = _metric(plan, first)
    saving = saved_share(dry.cuts, profile, metric)
    measured = [(saved_share(a.dry_run.cuts, profile, metric), a.accepted) for a in journal.attempts if a.dry_run]
    best = max((share for share, accepted in measured if accepted), default=0.0)
    worst = min((share for share, accepted in measured if not accepted and share > best), default=1.0)
    if not best + STEP / 2 <= saving <= worst - STEP / 2:
        return f"its plan saves {saving:.1%} of the {metric}, where only between {best:.1%} and {worst:.1%} is unknown"
    return None


def _dearer(plan: Plan, dry: DryRun, profile: ModelProfile, first: Target | None) -> str | None:
    """Return by how much the allocator would save as much for less; None where it wouldn't, or without evidence."""
    if dry.kl is None or profile.evidence is None:
        return None
    metric = _metric(plan, first)
    saving = saved_share(dry.cuts, profile, metric)
    try:
        least = dry_run(Plan(target=Target(metric=metric, saving=max(saving, 1e-6))), profile).kl
    except PlanError:
        return None
    if least is None or dry.kl <= least * TOLERANCE + TINY_KL:
        return None
    return f"its plan costs {dry.kl:.2g} nats where the allocator saves as much for {least:.2g}"


def _metric(plan: Plan, first: Target | None) -> Literal["params", "macs", "latency"]:
    target = plan.target or first
    return target.metric if target else "params"
