"""Held-out images: a candidate is tested on them once, and how many of them certify a drop of accuracy."""

from collections.abc import Iterator, Sequence

from profiling_agent.evaluation.intervals import (
    at_a_look,
    certain_perfect_bound,
    counts_of,
    images_to_certify,
    least_certain_images,
    least_images,
    one_sided_lower_bound,
    perfect_bound,
    pooled_drop,
    pooled_error,
)
from profiling_agent.evaluation.openings import share
from profiling_agent.evaluation.sequential import Counts, can_be_shown, decide, images_until_kept, upper_bound
from profiling_agent.iteration.budget import MIN_LOOK
from profiling_agent.iteration.evaluator import MAX_AT_ONCE, Evaluator
from profiling_agent.iteration.selection import SEARCH_CONFIDENCE
from profiling_agent.jobs.tasks import OpenHeldoutTask
from profiling_agent.records import SHARD, AccuracyDrop, Acquired, Evaluation, Goal, Opening, Predictions, Record

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


def why_unproven(acquired: Acquired, goal: Goal) -> str | None:
    """Return why no answers on so few images could show the accuracy kept, and what would do; None where they could.

    Counted is what a model takes that answers nothing differently: any other takes more.
    """
    asked, error = goal.max_accuracy_drop, ACCURACY_ERROR * share(1)
    num_search, num_heldout = acquired.search.num_images, acquired.heldout.num_images
    lines: list[str] = []
    if (bound := perfect_bound(num_search, SEARCH_CONFIDENCE)) > asked:
        lines.append(_too_few(num_search, "search", least_images(asked, SEARCH_CONFIDENCE), bound))
    if (bound := _heldout_bound(num_heldout, error)) > asked:
        lines.append(_too_few(num_heldout, "held-out", _least_heldout(num_heldout, asked, error), bound))
    return f"whatever is returned will be unproven: {'; '.join(lines)}" if lines else None


def images_that_certify(drop: AccuracyDrop, max_drop: float, error: float) -> int | None:
    """Return about how many held-out images would show the loss below `max_drop`, were all answered as those of `drop`, by the test that so many get.

    None where no number would.
    """
    needed = images_to_certify(drop, max_drop, 1 - error)
    if needed is None or needed <= MAX_AT_ONCE:
        return needed
    needed = images_until_kept(counts_of(drop), max_drop, error)
    return None if needed is None else max(needed, MAX_AT_ONCE + 1)


def _heldout_bound(num_images: int, error: float) -> float:
    """Return the least that a test of all held-out images can show: looked at once, or more and more of many."""
    if num_images <= MAX_AT_ONCE:
        return certain_perfect_bound(num_images, 1 - error)
    return upper_bound(Counts(0, 0, num_images), error)


def _least_heldout(num_images: int, max_drop: float, error: float) -> int | None:
    """Return how many images would do, at least as many as there are; the test of more than are looked at once is another."""
    least = least_certain_images(max_drop, 1 - error)
    if least is None or max(least, num_images) <= MAX_AT_ONCE:
        return least
    needed = images_until_kept(Counts(0, 0, MAX_AT_ONCE + 1), max_drop, error)
    return None if needed is None else max(needed, MAX_AT_ONCE + 1)


def _too_few(num_images: int, name: str, needed: int | None, bound: float) -> str:
    more = "" if needed is None else f"{needed - num_images:,} more {name} images or "
    return f"it takes {more}a bound of {bound * 100:.2g} points"
