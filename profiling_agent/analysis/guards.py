"""Guards: a plan by somebody else, before anything is measured; refused parts dropped, ratios bounded by evidence.

A language model's plan is a proposal. What is wrong with it is said in words that it can act on; what stays wrong is left
out with its reason, and what is predicted to cost more than the contract allows is made milder.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from profiling_agent.analysis.demands import obeying, scaled
from profiling_agent.analysis.dry_run import dry_run, most_saving
from profiling_agent.errors import PlanError
from profiling_agent.modules.layer_names import matching_names
from profiling_agent.records import EVERYTHING, DryRun, Goal, ModelProfile, Plan, Record

# A point of top-1 went with 0.01 to 0.02 nats on the shared models (docs/decisions/LOG.md), and sums of single KLs are
# right within 1.5. Twice the dearer of both is more than any accepted plan had.
NATS_A_POINT = (0.01, 0.02)
MAX_NATS_PER_ACCURACY, MIN_NATS = 6.0, 5e-3
# The factor by which a plan is made milder is found to one part in so many.
STEPS = 32

Part = TypeVar("Part")


class Guarded(Record):
    """A plan that can be made, what it is predicted to do, and what was done to it, each with the reason."""

    plan: Plan
    dry_run: DryRun | None
    dropped: tuple[str, ...] = ()
    cut_back: str | None = None

    @property
    def complaint(self) -> str | None:
        """Return what was wrong with the plan, for its author; None when nothing was."""
        problems = [*self.dropped, *([self.cut_back] if self.cut_back else [])]
        if not problems and self.dry_run is not None and not self.dry_run.cuts:
            problems.append(f"it cuts nothing: {'; '.join(self.dry_run.notes[:3]) or 'name layers, or a target'}")
        return "; ".join(problems[:6]) or None


def allowed_kl(goal: Goal) -> float:
    """Return the predicted KL in nats beyond which no plan is worth an evaluation."""
    return max(goal.max_accuracy_drop * MAX_NATS_PER_ACCURACY, MIN_NATS)


def guard(plan: Plan, profile: ModelProfile, goal: Goal) -> Guarded:
    """Return what can be made of a plan; at worst one that prunes nothing."""
    dropped: list[str] = []
    plan = obeying(plan, goal)

    def possible(**parts: object) -> str | None:
        try:
            dry_run(Plan().model_copy(update=parts), profile)
        except PlanError as error:
            return str(error)
        return None

    pruning = _kept(plan.pruning, lambda part: possible(pruning=(part,)), dropped)
    caps = _kept(plan.caps, lambda part: possible(caps=(part,)), dropped)
    quantization = None
    if plan.quantization is not None:
        names = [row.name for row in profile.layers]
        kept = _kept(plan.quantization, lambda part: _unknown(part.layer, names), dropped)
        # An empty one is an answer, float32, and not what is left where every part was wrong.
        quantization = kept if kept or not plan.quantization else None
    update = {"pruning": pruning, "caps": caps, "quantization": quantization}
    plan = _with_reachable_target(plan.model_copy(update=update), profile, dropped)
    try:
        dry = dry_run(plan, profile)
    except PlanError as error:
        dropped.append(str(error))
        plan = plan.model_copy(update={"pruning": goal.pins, "target": None})
        dry = dry_run(plan, profile)
    milder = _milder(plan, dry, profile, goal)
    if milder is None:
        return Guarded(plan=plan, dry_run=dry, dropped=tuple(dropped))
    plan, factor = milder
    said = (
        f"its predicted KL is {dry.kl:.2g} nats where at most {allowed_kl(goal):.2g} can keep the accuracy: "
        f"ratios and target were cut back to {factor:.0%}"
    )
    return Guarded(plan=plan, dry_run=dry_run(plan, profile), dropped=tuple(dropped), cut_back=said)


def _kept(parts: Sequence[Part], why_not: Callable[[Part], str | None], dropped: list[str]) -> tuple[Part, ...]:
    kept: list[Part] = []
    for part in parts:
        if (reason := why_not(part)) is None:
            kept.append(part)
        else:
            dropped.append(reason)
    return tuple(kept)


def _unknown(pattern: str, names: Sequence[str]) -> str | None:
    try:
        found = pattern == EVERYTHING or matching_names(pattern, names)
    except PlanError as error:
        return str(error)
    return None if found else f"the layer pattern {pattern!r} matches no layer to quantize"


def _with_reachable_target(plan: Plan, profile: ModelProfile, dropped: list[str]) -> Plan:
    """Return the plan with a target that its caps leave within reach, without one where none is."""
    if plan.target is None:
        return plan
    if profile.evidence is None:
        dropped.append("a target needs evidence, and the profile has none: name layers and ratios instead")
        return plan.model_copy(update={"target": None})
    try:
        most = most_saving(plan, profile)
    except PlanError as error:
        dropped.append(str(error))
        return plan.model_copy(update={"target": None})
    if plan.target.saving <= most:
        return plan
    dropped.append(
        f"a saving of {plan.target.saving:.1%} of the {plan.target.metric} is out of reach: {_most_text(plan, most, profile)}"
    )
    target = plan.target.model_copy(update={"saving": most}) if most > 0 else None
    return plan.model_copy(update={"target": target})


def _most_text(plan: Plan, most: float, profile: ModelProfile) -> str:
    """Return the most that a plan's target can reach, what binds it, and what that would be predicted to cost."""
    assert plan.target is not None, "only a target can be out of reach"
    said = f"the most is {most:.1%} of it"
    try:
        free = most_saving(plan.model_copy(update={"caps": (), "pruning": ()}), profile)
        binds = free >= plan.target.saving
        said += f", as {'its caps and fixed cuts bind' if binds else 'no unit is left that could be cut further'}"
        if most <= 0:
            return said
        kl = dry_run(plan.model_copy(update={"target": plan.target.model_copy(update={"saving": most})}), profile).kl
    except PlanError:
        # The allocator had no time to find either.
        return said
    return f"{said} ({free:.1%} without), at a predicted KL of {kl:.2g} nats" if kl is not None else said


def _milder(plan: Plan, dry: DryRun, profile: ModelProfile, goal: Goal) -> tuple[Plan, float] | None:
    """Return the strongest plan of the same kind that is predicted to stay inside, and its factor; None where it does."""
    allowed = allowed_kl(goal)
    if dry.kl is None or dry.kl <= allowed:
        return None
    # What is cut more costs more, so that the strongest lies where halves of what is left say.
    found, mild, strong = plan.model_copy(update={"pruning": goal.pins, "target": None}), 0, STEPS
    while strong - mild > 1:
        middle = (mild + strong) // 2
        candidate = scaled(plan, middle / STEPS, goal.pins)
        if _costs_at_most(candidate, allowed, profile):
            found, mild = candidate, middle
        else:
            strong = middle
    return found, mild / STEPS


def _costs_at_most(plan: Plan, allowed: float, profile: ModelProfile) -> bool:
    try:
        kl = dry_run(plan, profile).kl
    except PlanError:
        return False
    return kl is not None and kl <= allowed
