"""Judgement: whether an attempt is good enough to be deployed, with the reason."""

from profiling_agent.evaluation.intervals import (
    largest_shown,
    likelihood,
    one_sided_bound,
    one_sided_lower_bound,
    perfect_bound,
)
from profiling_agent.records import AccuracyDrop, Attempt, Evaluation, Goal, Journal, Record

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
