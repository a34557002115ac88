"""Planners: the built-in rules, a language model, or both against each other. Nothing here is believed; it is measured."""

from collections.abc import Sequence
from typing import Literal

from profiling_agent.analysis.advised import Advised, first_plan, next_plan
from profiling_agent.analysis.dry_run import dry_run, saved_share
from profiling_agent.errors import AdvisorError, PlanError
from profiling_agent.iteration.propose import propose
from profiling_agent.llm.question import Asks
from profiling_agent.records import Decided, DryRun, Goal, Journal, ModelProfile, Origin, Plan, StopReason, Target

Planner = Literal["hybrid", "llm", "rules"]
RULES = Origin(by="rules")
# A plan may cost a tenth more KL than the least for what it saves: sums of KLs aren't more exact than that.
TOLERANCE, TINY_KL = 1.1, 1e-5
# And has to lie this share of the model away from what was measured already, to teach anything.
STEP = 0.01

Proposal = tuple[Plan, Origin]


def first_proposal(
    advisor: Asks | None,
    planner: Planner,
    profile: ModelProfile,
    goal: Goal,
    rules: Plan,
    rejected: Sequence[Decided] = (),
) -> Proposal:
    """Return the first plan; the rules' own, unless only the language model is to plan."""
    if advisor is None or planner != "llm":
        return rules, RULES
    try:
        advised = first_plan(advisor, profile, goal, rules, rejected)
    except AdvisorError as error:
        return rules, _instead(str(error))
    assert advised.guarded is not None, "a first plan never stops"
    if advised.guarded.dry_run is None or not advised.guarded.dry_run.cuts:
        return rules, _instead(f"nothing is left of {advisor.name}'s plan ({'; '.join(advised.guarded.dropped[:3])})")
    return advised.guarded.plan, _origin(advisor, advised)


def next_proposal(
    advisor: Asks | None,
    planner: Planner,
    profile: ModelProfile,
    goal: Goal,
    journal: Journal,
    *,
    max_iterations: int,
) -> Proposal | StopReason:
    """Return the next plan and who made it, or the reason to stop.

    With both planners a language model's plan is measured where the evidence puts it beside the rules' best, and where it
    asks something that isn't known; otherwise the rules' plan is, with the reason.
    """
    rules = propose(goal, profile, journal, max_iterations=max_iterations)
    if advisor is None or planner == "rules" or len(journal.attempts) >= max_iterations:
        return rules if isinstance(rules, StopReason) else (rules, RULES)
    by_rules = None if isinstance(rules, StopReason) else rules
    left = max_iterations - len(journal.attempts)
    try:
        advised = next_plan(advisor, profile, goal, journal, attempts_left=left, rules=by_rules)
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
    target = plan.target or journal.attempts[0].plan.target
    metric = target.metric if target else "params"
    saving = saved_share(dry.cuts, profile, metric)
    try:
        least = dry_run(Plan(target=Target(metric=metric, saving=max(saving, 1e-6))), profile).kl
    except PlanError:
        least = None
    if least is not None and dry.kl > least * TOLERANCE + TINY_KL:
        return f"its plan costs {dry.kl:.2g} nats where the allocator saves as much for {least:.2g}"
    measured = [(saved_share(a.dry_run.cuts, profile, metric), a.accepted) for a in journal.attempts if a.dry_run]
    best = max((share for share, accepted in measured if accepted), default=0.0)
    worst = min((share for share, accepted in measured if not accepted and share > best), default=1.0)
    if not best + STEP / 2 <= saving <= worst - STEP / 2:
        return f"its plan saves {saving:.1%} of the {metric}, where only between {best:.1%} and {worst:.1%} is unknown"
    return None
