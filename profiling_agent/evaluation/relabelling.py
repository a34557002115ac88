"""Relabelling: whether a model's answers fit a data set far better were its labels other classes of the model.

Labels that were matched wrongly make a good model look bad, and all that is measured of it worth nothing: what is right by chance may be lost for free.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from profiling_agent.documents import MAX_QUOTED
from profiling_agent.evaluation.predictions import NO_CLASS, Answers
from profiling_agent.records import LabelMatch

# Fewer tell no gain of this size from chance: its standard error is seven points of 100 images at most.
MIN_JUDGED = 100
MIN_GAIN = 0.2
NUM_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Relabelled:
    """The shares that are right as matched, and as a one-to-one match of the answers' own has it; `moved` are the true classes that it takes for others."""

    right: float
    otherwise: float
    moved: tuple[tuple[int, int], ...]


def fits_otherwise(answers: Answers) -> Relabelled | None:
    """Return what another match of labels to classes would make of the answers; None where that gains less than a fifth of them, or of too few.

    The match is the best one of every other image, and is judged on the rest, where chance gains it nothing.
    """
    has_answer = answers.predicted != NO_CLASS
    predicted, true = answers.predicted[has_answer], answers.true[has_answer]
    if len(predicted) // 2 < MIN_JUDGED:
        return None
    classes, places = np.unique(np.concatenate([predicted, true]), return_inverse=True)
    said, is_true = np.split(places, 2)
    # What neither half has an answer for stays what it is.
    counts = np.identity(len(classes)) * 0.5
    np.add.at(counts, (is_true[::2], said[::2]), 1.0)
    _, becomes = linear_sum_assignment(counts, maximize=True)
    right = float(np.mean(said[1::2] == is_true[1::2]))
    otherwise = float(np.mean(said[1::2] == becomes[is_true[1::2]]))
    if otherwise - right < MIN_GAIN:
        return None
    seen = np.unique(is_true)
    moved = tuple((int(classes[one]), int(classes[becomes[one]])) for one in seen if becomes[one] != one)
    return Relabelled(right, otherwise, moved)


def why_mislabelled(answers: Answers, matches: Sequence[LabelMatch]) -> str | None:
    """Return in words that the labels seem to be matched with other classes than the model's answers mean; None where nothing says so."""
    if (found := fits_otherwise(answers)) is None:
        return None
    label_of = {match.model_id: match.dataset_label for match in matches}
    name_of = {match.model_id: match.model_label for match in matches}

    def told(true: int, other: int) -> str:
        label, own, better = label_of.get(true, str(true)), name_of.get(true), name_of.get(other) or f"class {other}"
        return f"{label[:MAX_QUOTED]!r} as {better[:MAX_QUOTED]!r} and not {(own or str(true))[:MAX_QUOTED]!r}"

    more = f" and {len(found.moved) - NUM_SHOWN} more" if len(found.moved) > NUM_SHOWN else ""
    return (
        f"the model answers {100 * found.right:.0f}% of the images right as labels and classes are matched, and {100 * found.otherwise:.0f}% with "
        f"{', '.join(told(*pair) for pair in found.moved[:NUM_SHOWN])}{more}: correct the names of its classes in config.json (id2label, or timm's "
        "label_names), or those of the data set"
    )
