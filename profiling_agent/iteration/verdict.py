"""Verdict: the contract against what was measured; met, nearly met, or shown to be out of reach."""

from profiling_agent.evaluation.intervals import images_to_certify, one_sided_bound
from profiling_agent.iteration.heldout import ACCURACY_ERROR
from profiling_agent.records import AccuracyDrop, Goal, Outcome, RaceResult, Record, Term, Verdict


class Facts(Record):
    """What the verdict rests on: the winner on the held-out images, in the race and on disk."""

    drop: AccuracyDrop | None = None
    accuracy_error: float = ACCURACY_ERROR
    race_result: RaceResult | None = None
    size_ratio: float
    memory_ratio: float | None = None
    refused: str | None = None


class Limit(Record):
    """The cheapest model that any plan can make here, whatever its accuracy."""

    size_ratio: float
    speedup_high: float | None = None


def _terms(facts: Facts, goal: Goal) -> tuple[Term, ...]:
    drop = facts.drop.drop if facts.drop else 0.0
    speedup = facts.race_result.speedup if facts.race_result else 1.0
    terms = (
        Term(name="accuracy", required=goal.max_accuracy_drop, measured=drop, holds=drop <= goal.max_accuracy_drop),
        Term(name="speed", required=goal.min_speedup, measured=speedup, holds=speedup >= goal.min_speedup),
        Term(
            name="size",
            required=goal.max_size_ratio,
            measured=facts.size_ratio,
            holds=facts.size_ratio <= goal.max_size_ratio,
        ),
    )
    if goal.max_memory_ratio is None:
        return terms
    # The baseline itself, which is what is returned where nothing was measured, takes as much as it takes.
    memory = 1.0 if facts.memory_ratio is None else facts.memory_ratio
    asked = goal.max_memory_ratio
    return (*terms, Term(name="memory", required=asked, measured=memory, holds=memory <= asked))


def _shortfall(term: Term) -> float:
    """Return by what part of what was asked a missed term falls short, so that terms can be compared."""
    gap = term.required - term.measured if term.name == "speed" else term.measured - term.required
    return gap / term.required if term.required else float("inf")


def out_of_reach(limit: Limit, goal: Goal) -> str | None:
    """Return the term that even the cheapest model misses, or None."""
    if limit.size_ratio > goal.max_size_ratio:
        return "size"
    if limit.speedup_high is not None and limit.speedup_high < goal.min_speedup:
        return "speed"
    return None


def _met(facts: Facts, goal: Goal, terms: tuple[Term, ...]) -> Verdict:
    is_fast = goal.min_speedup <= (facts.race_result.speedup_low if facts.race_result else 1.0)
    confidence = 1 - facts.accuracy_error
    bound = one_sided_bound(facts.drop, confidence) if facts.drop else 0.0
    certified = is_fast and bound <= goal.max_accuracy_drop
    needed = None
    if facts.drop and bound > goal.max_accuracy_drop:
        needed = images_to_certify(facts.drop, goal.max_accuracy_drop, confidence)
    said = "its bounds, together at 95%, meet it too" if certified else "its bounds, together at 95%, do not"
    return Verdict(
        outcome=Outcome.MET,
        certified=certified,
        terms=terms,
        images_to_certify=needed,
        explanation=f"the contract is met on held-out images; {said}",
    )


def decide(facts: Facts, goal: Goal, limit: Limit | None = None) -> Verdict:
    """Return the verdict; `limit` is needed to call a missed contract infeasible, and is only measured then."""
    terms = _terms(facts, goal)
    missed = [term for term in terms if not term.holds]
    if not missed and facts.refused is None:
        return _met(facts, goal, terms)
    unreachable = out_of_reach(limit, goal) if limit else None
    if unreachable is not None:
        return Verdict(
            outcome=Outcome.INFEASIBLE,
            certified=False,
            terms=terms,
            binding=unreachable,
            explanation=f"even the cheapest plan, whatever its accuracy, misses the {unreachable} term",
        )
    binding = "accuracy" if facts.refused else max(missed, key=_shortfall).name
    explanation = facts.refused or f"no candidate that keeps the accuracy meets the {binding} term"
    return Verdict(outcome=Outcome.NEAREST_MISS, certified=False, terms=terms, binding=binding, explanation=explanation)
