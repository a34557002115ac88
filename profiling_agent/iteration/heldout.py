"""Held-out images: a candidate is tested on them, more and more of them, until they say enough of it."""

from collections.abc import Iterator, Sequence

import numpy as np

from profiling_agent.evaluation.intervals import at_a_look, compare
from profiling_agent.evaluation.sequential import Counts, decide
from profiling_agent.iteration.evaluator import Evaluator
from profiling_agent.jobs.tasks import OpenHeldoutTask
from profiling_agent.records import AccuracyDrop, ArtifactRef, Deployment, Evaluation, Opening, Record, Variant

# Of the 5% that `certified` may be wrong in, half is for the accuracy, of all openings together, and half for the speed.
ACCURACY_ERROR = 0.025
SHARD = 512
# So few are looked at once: of them a sample of fixed size says more than a test that may be looked at whenever one likes.
MAX_AT_ONCE = 2 * SHARD


class HeldoutTest(Record):
    """The baseline and a candidate on the same held-out images, as many as were needed, and which test of them it was."""

    baseline: Evaluation
    candidate: Evaluation
    opening: Opening

    @property
    def error(self) -> float:
        """Return how often the test may show what isn't so."""
        return ACCURACY_ERROR * self.opening.share


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
    evaluator: Evaluator,
    variant: Variant,
    model: ArtifactRef,
    deployment: Deployment,
    *,
    fresh: str | None = None,
) -> HeldoutTest:
    """Look at held-out images until the drop is shown inside the contract, or outside, or there are no more of them.

    The test is noted in the user's ledger first, which says how often it may be wrong; `fresh` says why no test before it
    is to count. The baseline sees the same images and no others.
    """
    heldout = evaluator.acquired.heldout
    task = OpenHeldoutTask(baseline=evaluator.baseline, candidate=model, heldout=heldout, fresh=fresh)
    opening = evaluator.jobs.run(task)
    num_images, error = heldout.num_images, ACCURACY_ERROR * opening.share
    baselines, candidates, drops = list[Evaluation](), list[Evaluation](), list[AccuracyDrop]()
    for part in looks(num_images):
        baselines.append(_part(evaluator, Variant.BASELINE, evaluator.baseline, None, part))
        candidates.append(_part(evaluator, variant, model, deployment, part))
        drops.append(_drop(evaluator, baselines, candidates, is_only=len(part) == num_images))
        counts = Counts(drops[-1].num_lost, drops[-1].num_gained, drops[-1].num_images)
        if decide(counts, evaluator.goal.max_accuracy_drop, error) != "undecided":
            break
    return HeldoutTest(baseline=_joined(baselines), candidate=_joined(candidates, drops[-1]), opening=opening)


def opening_notes(opening: Opening) -> tuple[str, ...]:
    """Return what a reader of the verdict should know of openings before this one."""
    said = (
        (opening.note is not None, opening.note or ""),
        (opening.fresh is not None, f"openings of the held-out images are counted afresh: {opening.fresh}"),
        (
            opening.number > 1,
            f"held-out images were opened for test number {opening.number} of what is made of this model: that it is "
            f"certified may be wrong in {ACCURACY_ERROR * opening.share:.2%} for the accuracy, of {ACCURACY_ERROR:.1%} in all",
        ),
    )
    return tuple(text for holds, text in said if holds)


def first_look(evaluator: Evaluator) -> Evaluation:
    """Return the baseline on the images of the first look: where it is what is returned, there is nothing to test."""
    part = next(looks(evaluator.acquired.heldout.num_images))
    return _part(evaluator, Variant.BASELINE, evaluator.baseline, None, part)


def _part(
    evaluator: Evaluator, variant: Variant, model: ArtifactRef, deployment: Deployment | None, part: range
) -> Evaluation:
    heldout = evaluator.acquired.heldout
    return evaluator.evaluate(variant, model, heldout, deployment=deployment, images=part)


def _drop(
    evaluator: Evaluator, baselines: Sequence[Evaluation], candidates: Sequence[Evaluation], *, is_only: bool
) -> AccuracyDrop:
    before, after = (
        np.concatenate([evaluator.correct(evaluation.predictions) for evaluation in seen])
        for seen in (baselines, candidates)
    )
    if is_only:
        return compare(before, after)
    counts = Counts(int(np.sum(before & ~after)), int(np.sum(~before & after)), len(before))
    # Whether there is to be another look was asked before each but the first, and is asked after it.
    return at_a_look(counts, len(baselines) + 1)


def _joined(parts: Sequence[Evaluation], drop: AccuracyDrop | None = None) -> Evaluation:
    predictions = [part.predictions for part in parts]
    joined = predictions[0].model_copy(
        update={
            "num_images": sum(one.num_images for one in predictions),
            "num_correct": sum(one.num_correct for one in predictions),
            "files": tuple(file for one in predictions for file in one.files),
        }
    )
    return parts[0].model_copy(update={"predictions": joined, "drop": drop})
