"""Proof: whether there are images enough to show a contract kept, said before any work."""

from profiling_agent.evaluation.intervals import least_images, perfect_bound
from profiling_agent.evaluation.openings import share
from profiling_agent.iteration.heldout import ACCURACY_ERROR
from profiling_agent.iteration.judge import SEARCH_CONFIDENCE
from profiling_agent.records import Acquired, Goal, SplitInfo


def why_unproven(acquired: Acquired, goal: Goal) -> str | None:
    """Return why no answers on so few images could show the accuracy kept, and what would do; None where they could.

    Counted is what a model takes that answers nothing differently: any other takes more.
    """
    lines = [
        _too_few(acquired.search, "search", goal.max_accuracy_drop, SEARCH_CONFIDENCE),
        _too_few(acquired.heldout, "held-out", goal.max_accuracy_drop, 1 - ACCURACY_ERROR * share(1)),
    ]
    said = [line for line in lines if line]
    return f"whatever is returned will be unproven: {'; '.join(said)}" if said else None


def _too_few(split: SplitInfo, name: str, max_drop: float, confidence: float) -> str | None:
    bound = perfect_bound(split.num_images, confidence)
    if bound <= max_drop:
        return None
    needed = least_images(max_drop, confidence)
    more = "" if needed is None else f"{needed - split.num_images:,} more {name} images or "
    return f"it takes {more}a bound of {bound * 100:.2g} points"
