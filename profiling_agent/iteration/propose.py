"""Proposal: the next plan, or why there is none; a pure question about the journal.

Every plan is the first one at another strength: its target and all its ratios times one factor. The loop halves the gap
between the strongest accepted and the mildest refused factor, doubling while nothing was refused.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from profiling_agent.analysis.demands import MAX_RATIO, MAX_SAVING, obeying, scaled
from profiling_agent.analysis.dry_run import dry_run, most_saving, saved_share
from profiling_agent.errors import PlanError
from profiling_agent.records import DryRun, Goal, Journal, ModelProfile, Plan, PruningRecommendation, StopReason

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
