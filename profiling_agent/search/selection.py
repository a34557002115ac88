"""Selection: the probability that a candidate keeps the accuracy, its status, and the order of candidates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from profiling_agent.measure.intervals import largest_passing_drop, likelihood, one_sided_bound, paired_bound
from profiling_agent.measure.race import compare
from profiling_agent.schemas import (
    Attempt,
    Candidate,
    DeploymentOption,
    Evaluation,
    Goal,
    Journal,
    RaceResult,
    Status,
    Variant,
)

# A point of top-1 corresponds to 0.01 to 0.02 nats (docs/decisions/LOG.md): ten times that is hopeless, whatever the limit.
HOPELESS_KL, KL_PER_ACCURACY = 0.2, 20.0
# Decisions use the search images, the verdict other ones. A candidate whose point estimate just meets the limit here would miss it there about every
# second time, so the search asks for more.
ACCEPTED_FROM, UNCERTAIN_FROM = 0.9, 0.5
SEARCH_CONFIDENCE = ACCEPTED_FROM
# Below this a candidate is shown to lose too much; others may be tested on held-out images, after those of a better status.
TESTED_FROM = 0.1
# Default share of images that one of two models only classifies correctly: pruned and int8 models that lost about a point (docs/benchmarks.md).
CHANGED = 0.03
SortKey = tuple[bool, int, bool, bool, float]


def hopeless_kl(goal: Goal) -> float:
    """Return the KL in nats to the unpruned or float32 model on calibration images beyond which images needn't be evaluated."""
    return HOPELESS_KL + KL_PER_ACCURACY * goal.max_accuracy_drop


def can_be_bounded(num_images: int, goal: Goal) -> bool:
    """Return whether so many images could show the contract kept, if no answer differed."""
    return paired_bound(0, 0, num_images, SEARCH_CONFIDENCE) <= goal.max_accuracy_drop


def judge(evaluation: Evaluation, goal: Goal, attempt: int | None = None) -> Candidate:
    """Judge a model's accuracy by its search images; the other terms are not checked here.

    The point estimate decides, with a probability of 0 or 1, for the paper's selection and for contracts too strict to be shown on so few images.
    """
    assert evaluation.drop is not None, "a candidate is always compared with the baseline"
    drop, limit = evaluation.drop, goal.max_accuracy_drop
    early_note = f", of {drop.num_images} that were enough" if drop.num_looks > 1 else ""
    change = f"fell by {drop.drop:.4f}" if drop.drop >= 0 else f"rose by {-drop.drop:.4f}"
    loss = f"top-1 {change} ({drop.num_lost} images lost, {drop.num_gained} gained{early_note})"
    is_bounded = goal.selection != "paper" and can_be_bounded(drop.num_images, goal)
    p_keeps = likelihood(drop, limit) if is_bounded else float(drop.drop <= limit)
    if not is_bounded and goal.selection != "paper":
        loss = f"unproven, as {drop.num_images} images can't show it: {loss}"
    if p_keeps >= ACCEPTED_FROM:
        status, reason = Status.ACCEPTED, f"{loss}, inside the contract's {limit}"
    else:
        status = Status.UNCERTAIN if p_keeps >= UNCERTAIN_FROM else Status.REJECTED
        position = "too few images to tell if inside" if status is Status.UNCERTAIN else "outside"
        bound = f"{SEARCH_CONFIDENCE:.0%} bound {one_sided_bound(drop, SEARCH_CONFIDENCE):.4f}"
        reason = f"{loss}, {bound}: {position} the contract's {limit}"
    return Candidate(evaluation=evaluation, attempt=attempt, p_keeps=p_keeps, status=status, reason=reason)


def keeps_accuracy(candidate: Evaluation, goal: Goal) -> bool:
    """Return whether a candidate is accepted."""
    return judge(candidate, goal).status is Status.ACCEPTED


def rule_text(goal: Goal, num_images: int, changed: float | None = None) -> str:
    """Return the prompt's rule for accepting an attempt on so many search images, and the loss to aim for.

    `changed` is the share of images that only one of both models classifies correctly, from attempts so far.
    """
    allowed, images = f"{goal.max_accuracy_drop:.2%}", f"{num_images} search images"
    if goal.selection == "paper" or not can_be_bounded(num_images, goal):
        return f"an attempt is accepted where at most {allowed} of top-1 are lost on {images}"
    share = CHANGED if changed is None else changed
    aim = largest_passing_drop(goal.max_accuracy_drop, share, num_images, SEARCH_CONFIDENCE)
    note = "as the attempts so far have" if changed is not None else "as many have"
    return (
        f"an attempt is accepted where the upper {SEARCH_CONFIDENCE:.0%} bound of the top-1 that it loses on {images} is at most {allowed}. Where {share:.1%} of "
        f"the images are answered right by one of both models alone, {note}, that is a measured loss of {aim:.2%} at most: aim for that"
    )


def size_ratio(candidate: Evaluation, baseline: Evaluation) -> float:
    """Return the candidate's bytes on disk as a fraction of the baseline's."""
    return candidate.footprint.size_bytes / baseline.footprint.size_bytes


def preference(goal: Goal, *, size: float, speedup: float, status: Status) -> SortKey:
    """Return the sort key of a candidate, best first: a term missed, status, size missed, speed missed, the objective.

    `size` is the fraction of the baseline's.
    """
    misses_size, misses_speed = not goal.allows_size(size), speedup < goal.min_speedup
    objective = -speedup if goal.objective == "speed" else size
    return misses_size or misses_speed, list(Status).index(status), misses_size, misses_speed, objective


def option_key(option: DeploymentOption, baseline: Evaluation, goal: Goal) -> SortKey:
    """Return the sort key of a converted deployment; without a race it counts as too slow."""
    assert option.deployed is not None, "only converted models are ranked"
    size = option.deployed.model.size_bytes / baseline.footprint.size_bytes
    speedup = option.race_result.speedup if option.race_result else 0.0
    return preference(goal, size=size, speedup=speedup, status=option.status)


def changed_share(candidate: Candidate) -> float:
    """Return the share of the search images that only one of candidate and baseline classifies correctly."""
    drop = candidate.evaluation.drop
    return (drop.num_lost + drop.num_gained) / drop.num_images if drop else 0.0


@dataclass(frozen=True)
class Ranking:
    """Order of candidates that one race timed, by its results."""

    baseline: Evaluation
    goal: Goal
    results: Sequence[RaceResult] = ()

    def result_of(self, candidate: Candidate) -> RaceResult | None:
        """Return a candidate's race result, or None if it was in no race."""
        sha256 = candidate.evaluation.model.sha256
        return next((result for result in self.results if result.model.sha256 == sha256), None)

    def key(self, candidate: Candidate) -> SortKey:
        """Return a candidate's sort key; without a race it counts as too slow."""
        result, size = self.result_of(candidate), size_ratio(candidate.evaluation, self.baseline)
        return preference(self.goal, size=size, speedup=result.speedup if result else 0.0, status=candidate.status)

    def shows_faster(self, candidate: Candidate, other: Candidate) -> bool:
        """Return whether the race shows one candidate faster than another, by more than its noise."""
        own, its = self.result_of(candidate), self.result_of(other)
        return own is not None and its is not None and compare(own, its).low > 1

    def leaders(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return those that miss the fewest terms and have the best status of them, the ones that change the fewest answers first."""
        best = min(self.key(candidate)[:-1] for candidate in candidates)
        leaders = [candidate for candidate in candidates if self.key(candidate)[:-1] == best]
        return sorted(leaders, key=lambda each: (changed_share(each), each.evaluation.footprint.size_bytes))

    def best(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return the best candidate: of the leaders the one that changes the fewest answers, unless another is shown faster, or is smaller."""
        first, *others = self.leaders(candidates)
        if self.goal.objective == "size":
            return min((first, *others), key=self.key)
        for other in others:
            first = other if self.shows_faster(other, first) else first
        return first


def choose_option(options: Sequence[DeploymentOption], baseline: Evaluation, goal: Goal) -> DeploymentOption | None:
    """Return the best deployment that isn't rejected."""
    possible = [option for option in options if option.evaluation and option.status is not Status.REJECTED]
    rivals = [Candidate(evaluation=each.evaluation, status=each.status) for each in possible if each.evaluation]
    if not rivals:
        return None
    ranking = Ranking(baseline, goal, [option.race_result for option in possible if option.race_result])
    return possible[rivals.index(ranking.best(rivals))]


def rejudged(journal: Journal, goal: Goal) -> Journal:
    """Judge every measured attempt and deployment again by `goal`, which may have changed."""

    def judged(row: Attempt) -> Attempt:
        if row.deployed is None:
            return row
        result = judge(row.deployed, goal)
        return row.model_copy(update={"accepted": result.status is Status.ACCEPTED, "reason": result.reason})

    journal = journal.model_copy(update={"attempts": tuple(map(judged, journal.attempts))})
    if (search := journal.deployment_search) is None:
        return journal
    options = tuple(
        option.model_copy(update=judge(option.evaluation, goal).model_dump(include={"status", "reason"}))
        if option.evaluation
        else option
        for option in search.options
    )
    best = choose_option(options, journal.baseline, goal)
    search = search.model_copy(update={"options": options, "chosen": best.deployment if best else None})
    return journal.model_copy(update={"deployment_search": search})


def candidates(journal: Journal, goal: Goal) -> tuple[Candidate, ...]:
    """Return all candidates measured on the search images: deployments of the baseline, then attempts."""
    options = journal.deployment_search.options if journal.deployment_search else ()
    results = [judge(option.evaluation, goal) for option in options if option.evaluation]
    results += [
        judge(row.deployed, goal, row.number)
        for row in journal.attempts
        if row.deployed and row.deployed.variant in (Variant.PRUNED, Variant.BOTH)
    ]
    return tuple({candidate.evaluation.model.sha256: candidate for candidate in results}.values())


def may_be_returned(candidate: Candidate, baseline: Evaluation, goal: Goal) -> bool:
    """Return whether a candidate isn't shown to lose too much and is no larger than the contract or the baseline."""
    is_small = size_ratio(candidate.evaluation, baseline) <= max(goal.max_size_ratio, 1.0)
    return candidate.p_keeps >= TESTED_FROM and is_small


def papers_rank(evaluation: Evaluation, latency_ms: float | None) -> tuple[float, int, float]:
    """Return the sort key of the paper's Algorithm 1, best first: accuracy on the search images, params, latency."""
    return -evaluation.top1, evaluation.footprint.params, math.inf if latency_ms is None else latency_ms


def ranked(journal: Journal, goal: Goal) -> tuple[Candidate, ...]:
    """Return the accepted candidates, best first by what is known before a race: small enough, MACs, bytes.

    For the paper's selection: float32 pruned models by `papers_rank`, if they beat the baseline; latencies were measured once for the run.
    """
    baseline, measured = journal.baseline, candidates(journal, goal)
    if goal.selection == "paper":
        times = {attempt.number: attempt.latency_ms for attempt in journal.attempts}
        keys = {c.attempt: papers_rank(c.evaluation, times.get(c.attempt or 0)) for c in measured}
        pruned = [c for c in measured if c.evaluation.variant is Variant.PRUNED]
        better = [c for c in pruned if keys[c.attempt] < papers_rank(baseline, journal.baseline_latency_ms)]
        return tuple(sorted(better, key=lambda c: keys[c.attempt]))

    def key(candidate: Candidate) -> tuple[bool, int, int]:
        footprint = candidate.evaluation.footprint
        is_large = not goal.allows_size(size_ratio(candidate.evaluation, baseline))
        return is_large, footprint.macs, footprint.size_bytes

    accepted = [c for c in measured if c.status is Status.ACCEPTED and may_be_returned(c, baseline, goal)]
    return tuple(sorted(accepted, key=key))
