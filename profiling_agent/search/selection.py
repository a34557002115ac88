"""Selection: candidates that keep the accuracy, and their order by the contract."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from profiling_agent.measure.intervals import (
    largest_passing_drop,
    likelihood,
    one_sided_bound,
    one_sided_lower_bound,
    perfect_bound,
)
from profiling_agent.measure.race import compare
from profiling_agent.schemas import (
    AccuracyDrop,
    Attempt,
    Candidate,
    Evaluation,
    Goal,
    Journal,
    Race,
    RaceResult,
    Record,
    Variant,
)

# A point of top-1 corresponds to 0.01 to 0.02 nats (docs/decisions/LOG.md): ten times that is hopeless, whatever the limit.
HOPELESS_KL, KL_PER_ACCURACY = 0.2, 20.0
# Decisions use the search images, the verdict other ones. A candidate whose point estimate just meets the limit here would miss it there about every
# second time, so the loop requires a bound of the drop.
SEARCH_CONFIDENCE = 0.9
# Default share of images that one of two models only classifies correctly: pruned and int8 models that lost about a point (docs/benchmarks.md).
CHANGED = 0.03


class Judgement(Record):
    """Acceptance of a candidate, and why."""

    accepted: bool
    reason: str


def hopeless_kl(goal: Goal) -> float:
    """Return the KL in nats to the unpruned or float32 model on calibration images beyond which images needn't be evaluated."""
    return HOPELESS_KL + KL_PER_ACCURACY * goal.max_accuracy_drop


def can_be_bounded(drop: AccuracyDrop, goal: Goal) -> bool:
    """Return whether so many images could show the contract kept, if no answer differed."""
    return perfect_bound(drop.num_images, SEARCH_CONFIDENCE) <= goal.max_accuracy_drop


def keeps_accuracy(candidate: Evaluation, goal: Goal) -> bool:
    """Return whether the drop is inside the contract with the search's confidence.

    The point estimate decides for the paper's selection, and for contracts too strict to be shown on so few images.
    """
    assert candidate.drop is not None, "a candidate is always compared with the baseline"
    if goal.selection == "paper" or not can_be_bounded(candidate.drop, goal):
        return candidate.drop.drop <= goal.max_accuracy_drop
    return one_sided_bound(candidate.drop, SEARCH_CONFIDENCE) <= goal.max_accuracy_drop


def is_doubtful(candidate: Evaluation, goal: Goal) -> bool:
    """Return whether a candidate is shown neither to keep the accuracy nor to lose more than the contract allows.

    None is when the point estimate decides (`keeps_accuracy`). Few images leave many in doubt: two thirds of candidates that lose one point
    where two are allowed, with one in twenty of 344 images answered differently.
    """
    assert candidate.drop is not None, "a candidate is always compared with the baseline"
    if goal.selection == "paper" or not can_be_bounded(candidate.drop, goal) or keeps_accuracy(candidate, goal):
        return False
    return one_sided_lower_bound(candidate.drop, SEARCH_CONFIDENCE) <= goal.max_accuracy_drop


def likelihood_of(candidate: Evaluation, goal: Goal) -> float:
    """Return the probability that a candidate keeps the accuracy, by its search images."""
    assert candidate.drop is not None, "a candidate is always compared with the baseline"
    return likelihood(candidate.drop, goal.max_accuracy_drop)


def is_likely(candidate: Evaluation, goal: Goal) -> bool:
    """Return whether a candidate is more likely than not to keep the accuracy."""
    return likelihood_of(candidate, goal) >= 0.5


def rule_text(goal: Goal, num_images: int, changed: float | None = None) -> str:
    """Return the prompt's rule for accepting an attempt on so many search images, and the loss to aim for.

    `changed` is the share of images that only one of both models classifies correctly, from attempts so far.
    """
    allowed, images = f"{goal.max_accuracy_drop:.2%}", f"{num_images} search images"
    if goal.selection == "paper" or perfect_bound(num_images, SEARCH_CONFIDENCE) > goal.max_accuracy_drop:
        return f"an attempt is accepted where at most {allowed} of top-1 are lost on {images}"
    share = CHANGED if changed is None else changed
    aim = largest_passing_drop(goal.max_accuracy_drop, share, num_images, SEARCH_CONFIDENCE)
    note = "as the attempts so far have" if changed is not None else "as many have"
    return (
        f"an attempt is accepted where the upper {SEARCH_CONFIDENCE:.0%} bound of the top-1 that it loses on {images} is at most {allowed}. Where {share:.1%} of "
        f"the images are answered right by one of both models alone, {note}, that is a measured loss of {aim:.2%} at most: aim for that"
    )


def judge(candidate: Evaluation, goal: Goal) -> Judgement:
    """Accept a candidate that keeps the accuracy; the other terms are not checked here."""
    assert candidate.drop is not None, "a candidate is always compared with the baseline"
    drop = candidate.drop
    early_note = f", of {drop.num_images} that were enough" if drop.num_looks > 1 else ""
    change = f"fell by {drop.drop:.4f}" if drop.drop >= 0 else f"rose by {-drop.drop:.4f}"
    loss = f"top-1 {change} ({drop.num_lost} images lost, {drop.num_gained} gained{early_note})"
    if not can_be_bounded(drop, goal) and goal.selection != "paper":
        loss = f"unproven, as {drop.num_images} images can't show it: {loss}"
    if keeps_accuracy(candidate, goal):
        return Judgement(accepted=True, reason=f"{loss}, inside the contract's {goal.max_accuracy_drop}")
    bound = one_sided_bound(drop, SEARCH_CONFIDENCE)
    position = "shown neither inside nor outside" if is_doubtful(candidate, goal) else "outside"
    return Judgement(
        accepted=False,
        reason=f"{loss}, {SEARCH_CONFIDENCE:.0%} bound {bound:.4f}: {position} the contract's {goal.max_accuracy_drop}",
    )


def rejudged(journal: Journal, goal: Goal) -> Journal:
    """Judge every measured attempt again by `goal`, which may have changed."""

    def rejudge(attempt: Attempt) -> Attempt:
        if attempt.deployed is None:
            return attempt
        judgement = judge(attempt.deployed, goal)
        return attempt.model_copy(update={"accepted": judgement.accepted, "reason": judgement.reason})

    return journal.model_copy(update={"attempts": tuple(rejudge(attempt) for attempt in journal.attempts)})


def candidates(journal: Journal) -> tuple[Candidate, ...]:
    """Return all candidates measured on the search images, in the order of measurement."""
    results: list[Candidate] = []
    search = journal.deployment_search
    options = (*search.suited, *search.doubtful) if search else ()
    unpruned = [journal.quantized, *(option.evaluation for option in options)]
    results += [Candidate(variant=item.variant, evaluation=item) for item in unpruned if item is not None]
    results += [
        Candidate(variant=item.variant, attempt=attempt.number, evaluation=item)
        for attempt in journal.attempts
        if (item := attempt.deployed) is not None and item.variant in (Variant.PRUNED, Variant.BOTH)
    ]
    return tuple({candidate.evaluation.model.sha256: candidate for candidate in results}.values())


def size_ratio(candidate: Evaluation, baseline: Evaluation) -> float:
    """Return the candidate's bytes on disk as a fraction of the baseline's."""
    return candidate.footprint.size_bytes / baseline.footprint.size_bytes


def may_be_returned(candidate: Evaluation, baseline: Evaluation, goal: Goal) -> bool:
    """Return whether a candidate keeps the accuracy and is no larger than the contract or the baseline."""
    max_size = max(goal.max_size_ratio, 1.0)
    return judge(candidate, goal).accepted and size_ratio(candidate, baseline) <= max_size


def preference(goal: Goal, *, size: float, speedup: float, memory: float | None) -> tuple[bool, bool, bool, float]:
    """Return the contract's sort key for candidates that keep the accuracy, best first: terms kept, then the objective.

    `size` and `memory` are fractions of the baseline's; unknown memory counts as too much.
    """
    known_memory = math.inf if memory is None else memory
    exceeds_memory = goal.max_memory_ratio is not None and known_memory > goal.max_memory_ratio
    objective = {"speed": -speedup, "size": size, "memory": known_memory}[goal.objective]
    return not goal.allows_size(size), speedup < goal.min_speedup, exceeds_memory, objective


def has_answer(journal: Journal, goal: Goal) -> bool:
    """Return whether an accepted attempt or the deployed baseline keeps the contract.

    Attempts' speed isn't known before the end, so only their size is checked.
    """
    accepted = [attempt.deployed for attempt in journal.attempts if attempt.accepted and attempt.deployed]
    if any(goal.allows_size(size_ratio(evaluation, journal.baseline)) for evaluation in accepted):
        return True
    search = journal.deployment_search
    if search is None or search.chosen is None:
        return False
    chosen = search.of(search.chosen)
    assert chosen.evaluation is not None, "what was chosen was measured"
    if not judge(chosen.evaluation, goal).accepted:
        return False
    size, result = size_ratio(chosen.evaluation, journal.baseline), chosen.race_result
    return not any(
        preference(goal, size=size, speedup=result.speedup if result else 0.0, memory=chosen.memory_ratio)[:3]
    )


def papers_rank(evaluation: Evaluation, latency_ms: float | None) -> tuple[float, int, float]:
    """Return the sort key of the paper's Algorithm 1, best first: accuracy on the search images, params, latency."""
    return -evaluation.top1, evaluation.footprint.params, math.inf if latency_ms is None else latency_ms


def ranked(journal: Journal, goal: Goal) -> tuple[Candidate, ...]:
    """Return the candidates that may be returned, best first by counts and accuracy, before any race.

    Order: small enough, then fewest MACs, then fewest bytes. For the paper's selection: float32 pruned models by `papers_rank`, if they beat the
    baseline; latencies were measured once for the run.
    """
    baseline = journal.baseline
    if goal.selection == "paper":
        times = {attempt.number: attempt.latency_ms for attempt in journal.attempts}
        baseline_key = papers_rank(baseline, journal.baseline_latency_ms)
        pruned = [
            (papers_rank(candidate.evaluation, times.get(candidate.attempt or 0)), candidate)
            for candidate in candidates(journal)
            if candidate.variant is Variant.PRUNED
        ]
        return tuple(candidate for key, candidate in sorted(pruned, key=lambda pair: pair[0]) if key < baseline_key)
    eligible = [candidate for candidate in candidates(journal) if may_be_returned(candidate.evaluation, baseline, goal)]
    return tuple(
        sorted(
            eligible,
            key=lambda candidate: (
                not goal.allows_size(size_ratio(candidate.evaluation, baseline)),
                candidate.evaluation.footprint.macs,
                candidate.evaluation.footprint.size_bytes,
            ),
        )
    )


def accuracy_lost(candidate: Candidate) -> float:
    """Return the top-1 that a candidate lost on the search images; 0 for the baseline."""
    return candidate.evaluation.drop.drop if candidate.evaluation.drop else 0.0


# Two processes of one model differ by about this share of memory; a smaller difference decides nothing.
MEMORY_NOISE = 0.02


@dataclass(frozen=True)
class Ranking:
    """What finalists are ranked by; `memory` is a fraction of the baseline's, by the model's hash."""

    goal: Goal
    baseline: Evaluation
    race: Race
    memory: Mapping[str, float | None]

    def order(self, finalists: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """Return the candidates that finished the race, best first.

        Among those tied with the leader, the more accurate comes first, then the smaller.
        """
        remaining = [c for c in finalists if self.race.reason(c.evaluation.model) is None]
        order: list[Candidate] = []
        while remaining:
            best = min(self._leader_and_ties(remaining), key=lambda c: (accuracy_lost(c), self._size(c)))
            remaining.remove(best)
            order.append(best)
        return tuple(order)

    def keeps_terms(self, candidate: Candidate) -> bool:
        """Return whether a candidate that finished the race keeps all terms except accuracy."""
        return not any(self._key(candidate)[:3])

    def runner_up(self, order: Sequence[Candidate]) -> Candidate | None:
        """Return the fastest candidate tied with the leader, the first excluded, or None."""
        if self.goal.objective != "speed":
            return None
        ties = [c for c in self._leader_and_ties(order) if c != order[0]]
        return max(ties, key=lambda c: self._result(c).speedup, default=None)

    def _leader_and_ties(self, remaining: Sequence[Candidate]) -> list[Candidate]:
        leader = min(remaining, key=self._key)
        return [c for c in remaining if self._key(c)[:3] == self._key(leader)[:3] and self._is_tied(c, leader)]

    def _is_tied(self, candidate: Candidate, leader: Candidate) -> bool:
        if self.goal.objective == "speed":
            return not compare(self._result(candidate), self._result(leader)).is_shown_slower
        value, leader_value = self._key(candidate)[3], self._key(leader)[3]
        return value == leader_value or (self.goal.objective == "memory" and value <= leader_value * (1 + MEMORY_NOISE))

    def _key(self, candidate: Candidate) -> tuple[bool, bool, bool, float]:
        return preference(
            self.goal,
            size=self._size(candidate),
            speedup=self._result(candidate).speedup,
            memory=self.memory.get(candidate.evaluation.model.sha256),
        )

    def _size(self, candidate: Candidate) -> float:
        return size_ratio(candidate.evaluation, self.baseline)

    def _result(self, candidate: Candidate) -> RaceResult:
        return self.race.result_of(candidate.evaluation.model)
