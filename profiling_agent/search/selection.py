"""Selection: which candidates keep the accuracy, and in what order the contract prefers them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from profiling_agent.measure.intervals import (
    largest_shown,
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

# A point of top-1 goes with 0.01 to 0.02 nats (docs/decisions/LOG.md): ten times that is hopeless, whatever the floor.
HOPELESS_KL, KL_PER_ACCURACY = 0.2, 20.0
# Decisions rest on the search images, the verdict on others. A candidate whose point estimate just meets the floor
# here would miss it there about every second time, so the loop asks for a bound of the drop instead.
SEARCH_CONFIDENCE = 0.9
# Share of images that only one of two models gets right, of pruned and int8 models that lost about a point (docs/benchmarks.md); told where none was measured.
CHANGED = 0.03


class Judgement(Record):
    """Accepted or not, and why."""

    accepted: bool
    reason: str


def hopeless_kl(goal: Goal) -> float:
    """Return the KL to the unpruned or float32 model on calibration images, nats, beyond which no image need be looked at."""
    return HOPELESS_KL + KL_PER_ACCURACY * goal.max_accuracy_drop


def can_be_bounded(drop: AccuracyDrop, goal: Goal) -> bool:
    """Return whether so many images could show the contract kept, if not one of them were answered differently."""
    return perfect_bound(drop.num_images, SEARCH_CONFIDENCE) <= goal.max_accuracy_drop


def keeps_accuracy(candidate: Evaluation, goal: Goal) -> bool:
    """Return whether the drop is inside the contract with the confidence that the search asks for.

    The point estimate decides for the paper's selection, which knows no interval, and where the contract is too
    strict for any answer on so few images to be bounded.
    """
    assert candidate.drop is not None, "a candidate is always compared with the baseline"
    if goal.selection == "paper" or not can_be_bounded(candidate.drop, goal):
        return candidate.drop.drop <= goal.max_accuracy_drop
    return one_sided_bound(candidate.drop, SEARCH_CONFIDENCE) <= goal.max_accuracy_drop


def is_doubtful(candidate: Evaluation, goal: Goal) -> bool:
    """Return whether a candidate is shown neither to keep the accuracy nor to lose more than the contract allows.

    Nobody is where so few images could show neither, nor with the paper's selection: there the point estimate has decided.
    Few images leave many in doubt: of candidates that lose one point where two are allowed, with one in twenty of 344 images answered differently, two thirds.
    """
    assert candidate.drop is not None, "a candidate is always compared with the baseline"
    if goal.selection == "paper" or not can_be_bounded(candidate.drop, goal) or keeps_accuracy(candidate, goal):
        return False
    return one_sided_lower_bound(candidate.drop, SEARCH_CONFIDENCE) <= goal.max_accuracy_drop


def likelihood_of(candidate: Evaluation, goal: Goal) -> float:
    """Return how likely a candidate keeps the accuracy, by its search images."""
    assert candidate.drop is not None, "a candidate is always compared with the baseline"
    return likelihood(candidate.drop, goal.max_accuracy_drop)


def is_likely(candidate: Evaluation, goal: Goal) -> bool:
    """Return whether a candidate rather keeps the accuracy than not."""
    return likelihood_of(candidate, goal) >= 0.5


def rule_text(goal: Goal, num_images: int, changed: float | None = None) -> str:
    """Return in words when an attempt on so many search images is accepted, and which loss to aim for.

    `changed` is the share of images that only one of both models gets right, where attempts have shown it.
    """
    allowed, images = f"{goal.max_accuracy_drop:.2%}", f"{num_images} search images"
    if goal.selection == "paper" or perfect_bound(num_images, SEARCH_CONFIDENCE) > goal.max_accuracy_drop:
        return f"an attempt is accepted where at most {allowed} of top-1 are lost on {images}"
    share = CHANGED if changed is None else changed
    aim = largest_shown(goal.max_accuracy_drop, share, num_images, SEARCH_CONFIDENCE)
    seen = "as the attempts so far have" if changed is not None else "as many have"
    return (
        f"an attempt is accepted where the upper {SEARCH_CONFIDENCE:.0%} bound of the top-1 that it loses on {images} is at most {allowed}. Where {share:.1%} of "
        f"the images are answered right by one of both models alone, {seen}, that is a measured loss of {aim:.2%} at most: aim for that"
    )


def judge(candidate: Evaluation, goal: Goal) -> Judgement:
    """Accept a candidate that keeps the accuracy; what it may take besides is the contract's other terms' to say."""
    assert candidate.drop is not None, "a candidate is always compared with the baseline"
    drop = candidate.drop
    seen = f", of {drop.num_images} that were enough" if drop.num_looks > 1 else ""
    fell = f"fell by {drop.drop:.4f}" if drop.drop >= 0 else f"rose by {-drop.drop:.4f}"
    measured = f"top-1 {fell} ({drop.num_lost} images lost, {drop.num_gained} gained{seen})"
    if not can_be_bounded(drop, goal) and goal.selection != "paper":
        measured = f"unproven, as {drop.num_images} images can't show it: {measured}"
    if keeps_accuracy(candidate, goal):
        return Judgement(accepted=True, reason=f"{measured}, inside the contract's {goal.max_accuracy_drop}")
    bound = one_sided_bound(drop, SEARCH_CONFIDENCE)
    shown = "shown neither inside nor outside" if is_doubtful(candidate, goal) else "outside"
    return Judgement(
        accepted=False,
        reason=f"{measured}, {SEARCH_CONFIDENCE:.0%} bound {bound:.4f}: {shown} the contract's {goal.max_accuracy_drop}",
    )


def rejudged(journal: Journal, goal: Goal) -> Journal:
    """Return the journal with every measured attempt judged by `goal`, which may have changed since."""

    def again(attempt: Attempt) -> Attempt:
        if attempt.deployed is None:
            return attempt
        judgement = judge(attempt.deployed, goal)
        return attempt.model_copy(update={"accepted": judgement.accepted, "reason": judgement.reason})

    return journal.model_copy(update={"attempts": tuple(again(attempt) for attempt in journal.attempts)})


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


def papers_rank(evaluation: Evaluation, latency_ms: float | None) -> tuple[float, int, float]:
    """Return what Algorithm 1 of the paper prefers, least first: accuracy on the search images, then params, then latency."""
    return -evaluation.top1, evaluation.footprint.params, math.inf if latency_ms is None else latency_ms


def ranked(journal: Journal, goal: Goal) -> tuple[Candidate, ...]:
    """Return the candidates that may be returned, best first, as far as counts and accuracy on the search images tell.

    For what has to be said before anything races: small enough first, then fewest MACs, then fewest bytes. The paper's selection has fp32 pruned
    models in the order of `papers_rank`, as far as they beat the baseline by it; latencies were measured once for the run.
    """
    baseline = journal.baseline
    if goal.selection == "paper":
        times = {attempt.number: attempt.latency_ms for attempt in journal.attempts}
        first = papers_rank(baseline, journal.baseline_latency_ms)
        pruned = [
            (papers_rank(found.evaluation, times.get(found.attempt or 0)), found)
            for found in candidates(journal)
            if found.variant is Variant.PRUNED
        ]
        return tuple(found for key, found in sorted(pruned, key=lambda pair: pair[0]) if key < first)
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


def lost(candidate: Candidate) -> float:
    """Return what a candidate lost on the search images; of the baseline nothing."""
    return candidate.evaluation.drop.drop if candidate.evaluation.drop else 0.0


# Two processes of one model hold nearly the same at most; below this share, who holds less is not told.
MEMORY_NOISE = 0.02


@dataclass(frozen=True)
class Ranking:
    """What finalists are ranked by; `memory` is each one's as a fraction of the baseline's, by the model's hash."""

    goal: Goal
    baseline: Evaluation
    race: Race
    memory: Mapping[str, float | None]

    def order(self, finalists: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """Return those that finished the race, best first.

        Of those whose objective can't be told from the leader's, the more accurate comes first, then the smaller.
        """
        waiting = [one for one in finalists if self.race.reason(one.evaluation.model) is None]
        order: list[Candidate] = []
        while waiting:
            best = min(self._beside_the_leader(waiting), key=lambda one: (lost(one), self._size(one)))
            waiting.remove(best)
            order.append(best)
        return tuple(order)

    def keeps_terms(self, candidate: Candidate) -> bool:
        """Return whether the contract is content with all but the accuracy of one that finished the race."""
        return not any(self._key(candidate)[:3])

    def runner_up(self, order: Sequence[Candidate]) -> Candidate | None:
        """Return who else might be the fastest: of those that can't be told from the leader, the fastest but the first."""
        if self.goal.objective != "speed":
            return None
        others = [one for one in self._beside_the_leader(order) if one != order[0]]
        return max(others, key=lambda one: self._result(one).speedup, default=None)

    def _beside_the_leader(self, waiting: Sequence[Candidate]) -> list[Candidate]:
        leader = min(waiting, key=self._key)
        return [one for one in waiting if self._key(one)[:3] == self._key(leader)[:3] and self._is_near(one, leader)]

    def _is_near(self, candidate: Candidate, leader: Candidate) -> bool:
        if self.goal.objective == "speed":
            return not compare(self._result(candidate), self._result(leader)).is_shown_slower
        own, best = self._key(candidate)[3], self._key(leader)[3]
        return own == best or (self.goal.objective == "memory" and own <= best * (1 + MEMORY_NOISE))

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
