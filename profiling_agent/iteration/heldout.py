"""Held-out images: a candidate is tested on them, more and more of them, until they say enough of it."""

import math
from collections.abc import Iterator, Sequence

from profiling_agent.evaluation.intervals import at_a_look
from profiling_agent.evaluation.sequential import Counts, can_be_shown, decide
from profiling_agent.iteration.evaluator import MAX_AT_ONCE, Evaluator
from profiling_agent.jobs.tasks import OpenHeldoutTask
from profiling_agent.records import SHARD, AccuracyDrop, Evaluation, Opening, Predictions, Record

# Of the 5% that `certified` may be wrong in, half is for the accuracy, of all openings together, and half for the speed.
ACCURACY_ERROR = 0.025
# So many are looked at of a slow model whatever they say: a drop of so many images is known within a point or so.
MIN_HELDOUT = 2 * SHARD
# Of a normal distribution a tenth is further out, on one side.
CHANCE = 1.28


class HeldoutTest(Record):
    """The baseline and a candidate on the same held-out images, as many as were needed, and which test of them it was."""

    baseline: Evaluation
    candidate: Evaluation
    opening: Opening


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
    evaluator: Evaluator, candidate: Evaluation, *, fresh: str | None = None, at_once: bool = False
) -> HeldoutTest:
    """Look at held-out images until the drop is shown inside the contract, or outside, or there are no more of them.

    Of a slow model, without a time budget, no further than where those that are left could not show it inside even if they lost nothing, nor than such a run is worth: time
    knows nothing of the answers, so that stopping by it favours none.
    `candidate` was measured on the search images. The test is noted in the user's ledger first, which says how often it may
    be wrong; `fresh` says why no test before it is to count. The baseline sees the same images and no others.
    With `at_once` as many are looked at as the candidate was searched on, whatever they say: a sample of a fixed size, which says more.
    """
    heldout = evaluator.acquired.heldout
    task = OpenHeldoutTask(baseline=evaluator.baseline, candidate=candidate.model, heldout=heldout, fresh=fresh)
    opening = evaluator.jobs.run(task)
    baselines, candidates, counts = list[Evaluation](), list[Evaluation](), Counts(0, 0, 0)
    drop: AccuracyDrop | None = None
    seen, began_s = 0, evaluator.jobs.timesheet.spent_s
    # Whole shards.
    seen_in_search = -(-candidate.predictions.num_images // SHARD) * SHARD
    parts = iter([range(min(seen_in_search, heldout.num_images))]) if at_once else looks(heldout.num_images)
    for part in parts:
        part_s = _per_image_s(evaluator, seen, began_s) * len(part) if seen else 0.0
        if seen and not evaluator.budget.has_time_for(part_s):
            break
        if seen >= MIN_HELDOUT and not evaluator.budget.is_worth(part_s):
            break
        baselines.append(evaluator.evaluate_baseline(heldout, part))
        candidates.append(
            evaluator.evaluate(
                candidate.variant, candidate.model, heldout, baselines[-1], candidate.deployment, images=part
            )
        )
        drop = candidates[-1].drop
        assert drop is not None, "a candidate is always compared with the baseline"
        seen += len(part)
        counts = counts.with_more(drop.num_lost, drop.num_gained, drop.num_images)
        if len(part) < heldout.num_images and not at_once:
            # Whether there is to be another look was asked before each but the first, and is asked after it.
            drop = at_a_look(counts, len(baselines) + 1)
        if decide(counts, evaluator.goal.max_accuracy_drop, error_of(opening)) != "undecided":
            break
        left = heldout.num_images - seen
        if evaluator.budget.is_sparing and is_in_vain(
            counts, left, evaluator.goal.max_accuracy_drop, error_of(opening)
        ):
            break
    return HeldoutTest(baseline=_joined(baselines), candidate=_joined(candidates, drop), opening=opening)


def is_in_vain(counts: Counts, num_left: int, max_drop: float, error: float) -> bool:
    """Return whether the images that are left would be answered for nothing: what was seen keeps the contract, and they can't show it kept.

    A drop above the contract's must not come out below it by stopping where it happens to be, so that it has to be below by as much as chance does
    in nine of ten samples: in simulated worlds as many come out below as where all images are looked at (tests/iteration/test_heldout.py).
    """
    net, spread = counts.num_lost - counts.num_gained, math.sqrt(counts.num_lost + counts.num_gained)
    if counts.num_images < MIN_HELDOUT or net + CHANCE * spread > max_drop * counts.num_images:
        return False
    return not can_be_shown(counts, num_left, max_drop, error)


def _per_image_s(evaluator: Evaluator, seen: int, began_s: float) -> float:
    """Return what an image of both models has taken so far; of the baseline some were there before."""
    return max(evaluator.budget.pass_s, (evaluator.jobs.timesheet.spent_s - began_s) / seen)


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
