"""Selection: the candidates that may win, best first. Only counts and search accuracy decide, so the order repeats."""

import math

from profiling_agent.iteration.judge import judge
from profiling_agent.records import Candidate, Evaluation, Goal, Journal, Variant


def _candidates(journal: Journal) -> list[Candidate]:
    found: list[Candidate] = []
    if journal.quantized is not None:
        found.append(Candidate(variant=Variant.QUANTIZED, evaluation=journal.quantized))
    for attempt in journal.attempts:
        deployments = {e.variant: e for e in (attempt.pruned, attempt.deployed) if e is not None}
        found += [
            Candidate(variant=variant, attempt=attempt.number, evaluation=evaluation)
            for variant, evaluation in deployments.items()
            if variant in (Variant.PRUNED, Variant.BOTH)
        ]
    return found


def size_ratio(candidate: Evaluation, baseline: Evaluation) -> float:
    """Return the candidate's bytes on disk as a fraction of the baseline's."""
    return candidate.footprint.size_bytes / baseline.footprint.size_bytes


def preference(goal: Goal, *, size: float, speedup: float, memory: float | None) -> tuple[bool, bool, bool, float]:
    """Return what the contract prefers of what keeps the accuracy, least first: its terms kept, then its objective.

    `size` and `memory` are fractions of the baseline's. Memory that could not be measured is more than is allowed.
    """
    held = math.inf if memory is None else memory
    is_greedy = goal.max_memory_ratio is not None and held > goal.max_memory_ratio
    wanted = {"speed": -speedup, "size": size, "memory": held}[goal.objective]
    return size > goal.max_size_ratio, speedup < goal.min_speedup, is_greedy, wanted


def _by_contract(journal: Journal, goal: Goal) -> list[Candidate]:
    """Return those that keep the accuracy, the cheapest first: small enough, then fewest MACs, then fewest bytes."""
    passed = [f for f in _candidates(journal) if judge(f.evaluation, journal.baseline, goal).accepted]
    return sorted(
        passed,
        key=lambda f: (
            size_ratio(f.evaluation, journal.baseline) > goal.max_size_ratio,
            f.evaluation.footprint.macs,
            f.evaluation.footprint.size_bytes,
        ),
    )


def _by_paper(journal: Journal) -> list[Candidate]:
    """Return fp32 pruned models by accuracy, then params, then MACs, as far as they beat the baseline (Algorithm 1).

    MACs stand in for the paper's latency: two plans with equal accuracy and params differ by less than timing can tell.
    """

    def rank(evaluation: Evaluation) -> tuple[float, int, int]:
        return -evaluation.top1, evaluation.footprint.params, evaluation.footprint.macs

    pruned = [f for f in _candidates(journal) if f.variant is Variant.PRUNED]
    better = [f for f in pruned if rank(f.evaluation) < rank(journal.baseline)]
    return sorted(better, key=lambda f: rank(f.evaluation))


def ranked(journal: Journal, goal: Goal) -> tuple[Candidate, ...]:
    """Return the candidates that may be returned, best first; the baseline, always one of them, comes last."""
    found = _by_paper(journal) if goal.selection == "paper" else _by_contract(journal, goal)
    return (*found, Candidate(variant=Variant.BASELINE, evaluation=journal.baseline))
