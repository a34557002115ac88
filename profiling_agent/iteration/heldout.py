"""Held-out test of one candidate: more and more images, until they decide or end; then with the search images."""

from collections.abc import Iterator, Sequence

from profiling_agent.evaluation.intervals import (
    at_a_look,
    one_sided_lower_bound,
    pooled_drop,
    pooled_error,
)
from profiling_agent.evaluation.sequential import Counts, can_be_shown, decide
from profiling_agent.iteration.budget import MIN_LOOK
from profiling_agent.iteration.evaluator import MAX_AT_ONCE, Evaluator
from profiling_agent.jobs.tasks import OpenHeldoutTask
from profiling_agent.records import SHARD, AccuracyDrop, Evaluation, Opening, Predictions, Record

# Of the 5% that `certified` may be wrong in, half is for the accuracy, of all openings together, and half for the speed.
ACCURACY_ERROR = 0.025
# Held-out images alone refuse a candidate where this one-sided bound of its drop is above the contract.
REFUSAL_CONFIDENCE = 0.95
# The odds are open where the contract's drop is within so many standard errors of what was measured: the middle eight tenths.
OPEN_ERRORS = 1.28


class HeldoutTest(Record):
    """The baseline and a candidate on the same held-out images, which test of them it was, and what it decided.

    `together` is the drop on search and held-out images, corrected for having chosen the candidate by the former.
    """

    baseline: Evaluation
    candidate: Evaluation
    opening: Opening
    together: float
    keeps_accuracy: bool


def error_of(opening: Opening) -> float:
    """Return how often a test with this share of the error may show what isn't so."""
    return ACCURACY_ERROR * opening.share


def looks(num_images: int) -> Iterator[range]:
    """Yield which images to look at next: those of a shard, then a third to a half more than were seen, in whole shards.

    A look may start two processes, and whatever is seen past the decision is seen for nothing.
    """
    start, end = 0, num_images if num_images <= MAX_AT_ONCE else SHARD
    while start < num_images:
        yield range(start, end)
        seen = end // SHARD
        start, end = end, min(end + SHARD * max(1, 2 ** (seen.bit_length() - 2)), num_images)


def run_heldout_test(
    evaluator: Evaluator, candidate: Evaluation, *, bias: float = 0.0, fresh: str | None = None
) -> HeldoutTest:
    """Look at held-out images until they decide, or they or the time end; then search images decide with them.

    At least MIN_LOOK images are looked at whatever the time. The test is noted in the user's ledger first, which gives its share of the
    error; `fresh` is why earlier tests don't count. `bias` is what the candidate's drop on the search images is raised by.
    """
    heldout, budget = evaluator.acquired.heldout, evaluator.budget
    searched, allowed = candidate.drop, evaluator.goal.max_accuracy_drop
    assert searched is not None, "a candidate was compared with the baseline on the search images"
    task = OpenHeldoutTask(baseline=evaluator.baseline, candidate=candidate.model, heldout=heldout, fresh=fresh)
    opening = evaluator.jobs.run(task)
    error = error_of(opening)
    baselines, candidates, counts = list[Evaluation](), list[Evaluation](), Counts(0, 0, 0)
    drop, decision = searched, "undecided"
    began_s = evaluator.jobs.timesheet.spent_s
    for part in looks(heldout.num_images):
        seen = counts.num_images
        if seen >= MIN_LOOK:
            per_image_s = max(budget.pass_s, (evaluator.jobs.timesheet.spent_s - began_s) / seen)
            part_s = per_image_s * len(part)
            if not budget.has_time_for(part_s):
                break
            # What is left of a slow model's images is for an open question, or for a certificate that is within reach.
            distance = abs(pooled_drop(searched, drop, bias) - allowed)
            is_open = distance <= OPEN_ERRORS * pooled_error(searched, drop)
            is_reachable = can_be_shown(counts, heldout.num_images - seen, allowed, error)
            if budget.is_sparing and not is_open and not (is_reachable and budget.is_worth(part_s)):
                break
        baselines.append(evaluator.evaluate_baseline(heldout, part))
        candidates.append(
            evaluator.evaluate(
                candidate.variant, candidate.model, heldout, baselines[-1], candidate.deployment, images=part
            )
        )
        seen_now = candidates[-1].drop
        assert seen_now is not None, "a candidate is always compared with the baseline"
        counts = counts.with_more(seen_now.num_lost, seen_now.num_gained, seen_now.num_images)
        # Whether there is to be another look was asked before each but the first, and is asked after it.
        drop = seen_now if len(part) == heldout.num_images else at_a_look(counts, len(baselines) + 1)
        decision = decide(counts, allowed, error)
        if decision != "undecided":
            break
    together = pooled_drop(searched, drop, bias)
    is_refuted = decision == "lost" or one_sided_lower_bound(drop, REFUSAL_CONFIDENCE) > allowed
    return HeldoutTest(
        baseline=_joined(baselines),
        candidate=_joined(candidates, drop),
        opening=opening,
        together=together,
        keeps_accuracy=decision == "kept" or (together <= allowed and not is_refuted),
    )


def opening_notes(opening: Opening) -> tuple[str, ...]:
    """Return what a reader of the verdict should know of openings before this one."""
    said = (
        (opening.note is not None, opening.note or ""),
        (opening.fresh is not None, f"openings of the held-out images are counted afresh: {opening.fresh}"),
        (
            opening.number > 1,
            f"held-out images were opened for test number {opening.number} of what is made of this model: that it is "
            f"certified may be wrong in {error_of(opening):.2%} for the accuracy, of {ACCURACY_ERROR:.1%} in all",
        ),
    )
    return tuple(text for holds, text in said if holds)


def first_look(evaluator: Evaluator) -> Evaluation:
    """Return the baseline on the images of the first look: where it is what is returned, there is nothing to test."""
    heldout = evaluator.acquired.heldout
    return evaluator.evaluate_baseline(heldout, next(looks(heldout.num_images)))


def _joined(parts: Sequence[Evaluation], drop: AccuracyDrop | None = None) -> Evaluation:
    predictions = Predictions.joined([part.predictions for part in parts])
    return parts[0].model_copy(update={"predictions": predictions, "drop": drop})
