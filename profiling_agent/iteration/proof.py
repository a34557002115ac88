"""Proof: whether there are images enough to show a contract kept, said before any work, and how many would have been after it."""

from profiling_agent.evaluation.intervals import (
    certain_perfect_bound,
    counts_of,
    images_to_certify,
    least_certain_images,
    least_images,
    perfect_bound,
)
from profiling_agent.evaluation.openings import share
from profiling_agent.evaluation.sequential import Counts, images_until_kept, upper_bound
from profiling_agent.iteration.evaluator import MAX_AT_ONCE
from profiling_agent.iteration.heldout import ACCURACY_ERROR
from profiling_agent.iteration.judge import SEARCH_CONFIDENCE
from profiling_agent.records import AccuracyDrop, Acquired, Goal


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
