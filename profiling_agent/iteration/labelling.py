"""Labelling: do the data set's labels mean the classes that they were matched with? The baseline's answers are asked."""

from profiling_agent.acquisition.labels import is_by_place
from profiling_agent.errors import AcquisitionError
from profiling_agent.evaluation.relabelling import why_mislabelled
from profiling_agent.iteration.evaluator import Evaluator
from profiling_agent.records import SHARD, Acquired


def with_checked_labels(evaluator: Evaluator) -> Acquired:
    """Return what was acquired, with a note where the baseline's answers on the first search images say that labels are matched wrongly.

    Raises:
        AcquisitionError: they say so, and labels were matched by their places alone.
    """
    acquired = evaluator.acquired
    baseline = evaluator.evaluate_baseline(acquired.search, range(SHARD))
    if (why := why_mislabelled(evaluator.answers(baseline), acquired.labels)) is None:
        return acquired
    if any(is_by_place(match) for match in acquired.labels):
        raise AcquisitionError(why)
    return acquired.model_copy(update={"notes": (*acquired.notes, why)})
