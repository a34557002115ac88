"""Selection: the candidates that may win, as far as counts and accuracy on the search images tell; and what is preferred."""

import math

from profiling_agent.iteration.judge import judge
from profiling_agent.records import Candidate, Evaluation, Goal, Journal, Variant


def candidates(journal: Journal) -> tuple[Candidate, ...]:
    """Return all that was measured on the search images, in the order in which it was."""
    found: list[Candidate] = []
    search = journal.deployment_search
    options = (*search.suited, *search.doubtful) if search else ()
    unpruned = [journal.quantized, *(option.evaluation for option in options)]
    found += [Candidate(variant=one.variant, evaluation=one) for one in unpruned if one is not None]
    found += [
        Candidate(variant=one.variant, attempt=attempt.number, evaluation=one)
        for attempt in journal.attempts
        if (one := attempt.deployed) is not None and one.variant in (Variant.PRUNED, Variant.BOTH)
    ]
    return tuple({candidate.evaluation.model.sha256: candidate for candidate in found}.values())


def size_ratio(candidate: Evaluation, baseline: Evaluation) -> float:
    """Return the candidate's bytes on disk as a fraction of the baseline's."""
    return candidate.footprint.size_bytes / baseline.footprint.size_bytes


def may_be_returned(candidate: Evaluation, baseline: Evaluation, goal: Goal) -> bool:
    """Return whether a candidate keeps the accuracy, and is no larger than the contract allows, or than the baseline."""
    most = max(goal.max_size_ratio, 1.0)
    return judge(candidate, goal).accepted and size_ratio(candidate, baseline) <= most


def preference(goal: Goal, *, size: float, speedup: float, memory: float | None) -> tuple[bool, bool, bool, float]:
    """Return what the contract prefers of what keeps the accuracy, least first: its terms kept, then its objective.

    `size` and `memory` are fractions of the baseline's. Memory that could not be measured is more than is allowed.
    """
    held = math.inf if memory is None else memory
    is_greedy = goal.max_memory_ratio is not None and held > goal.max_memory_ratio
    wanted = {"speed": -speedup, "size": size, "memory": held}[goal.objective]
    return not goal.allows_size(size), speedup < goal.min_speedup, is_greedy, wanted


def has_answer(journal: Journal, goal: Goal) -> bool:
    """Return whether there is something to return that the contract is content with: an accepted attempt, or the baseline deployed.

    How fast attempts are isn't known before the end: of them the bytes are asked.
    """
    accepted = [attempt.deployed for attempt in journal.attempts if attempt.accepted and attempt.deployed]
    if any(goal.allows_size(size_ratio(one, journal.baseline)) for one in accepted):
        return True
    search = journal.deployment_search
    if search is None or search.chosen is None:
        return False
    chosen = search.of(search.chosen)
    assert chosen.evaluation is not None, "what was chosen was measured"
    if not judge(chosen.evaluation, goal).accepted:
        return False
    size, raced = size_ratio(chosen.evaluation, journal.baseline), chosen.race_result
    return not any(preference(goal, size=size, speedup=raced.speedup if raced else 0.0, memory=chosen.memory_ratio)[:3])


def _by_counts(journal: Journal, goal: Goal) -> tuple[Candidate, ...]:
    """Return all that was measured and may be returned, the cheapest first, by counts alone.

    For what has to be said before anything races: small enough first, then fewest MACs, then fewest bytes.
    """
    baseline = journal.baseline
    passed = [found for found in candidates(journal) if may_be_returned(found.evaluation, baseline, goal)]
    return tuple(
        sorted(
            passed,
            key=lambda found: (
                not goal.allows_size(size_ratio(found.evaluation, baseline)),
                found.evaluation.footprint.macs,
                found.evaluation.footprint.size_bytes,
            ),
        )
    )


def papers_rank(evaluation: Evaluation, latency_ms: float | None) -> tuple[float, int, float]:
    """Return what Algorithm 1 of the paper prefers, least first: accuracy on the search images, then params, then latency."""
    return -evaluation.top1, evaluation.footprint.params, math.inf if latency_ms is None else latency_ms


def _by_paper(journal: Journal) -> tuple[Candidate, ...]:
    """Return fp32 pruned models by the paper's order, as far as they beat the baseline by it.

    Latencies were measured once for the run, as its jobs: whoever resumes it ranks by the same ones.
    """
    times = {attempt.number: attempt.latency_ms for attempt in journal.attempts}

    def rank(found: Candidate) -> tuple[float, int, float]:
        return papers_rank(found.evaluation, None if found.attempt is None else times[found.attempt])

    first = papers_rank(journal.baseline, journal.baseline_latency_ms)
    pruned = [found for found in candidates(journal) if found.variant is Variant.PRUNED and rank(found) < first]
    return tuple(sorted(pruned, key=rank))


def ranked(journal: Journal, goal: Goal) -> tuple[Candidate, ...]:
    """Return the candidates that may be returned, best first, as far as counts and accuracy on the search images tell."""
    return _by_paper(journal) if goal.selection == "paper" else _by_counts(journal, goal)


def lost(candidate: Candidate) -> float:
    """Return what a candidate lost on the search images; of the baseline nothing."""
    return candidate.evaluation.drop.drop if candidate.evaluation.drop else 0.0
