"""Labels that are matched with other classes than a model's answers mean."""

import numpy as np
import pytest

from profiling_agent.evaluation.predictions import NO_CLASS, Answers
from profiling_agent.evaluation.relabelling import fits_otherwise, why_mislabelled
from profiling_agent.records import LabelMatch

TRUE = np.arange(400) % 5


def answering(predicted: np.ndarray, true: np.ndarray = TRUE) -> Answers:
    return Answers(predicted.astype(np.int64), true.astype(np.int64), np.zeros(len(true), np.float32))


def test_two_classes_that_are_each_others_are_found():
    found = fits_otherwise(answering(np.array([0, 2, 1, 3, 4])[TRUE]))

    assert found is not None
    # Three classes of five are right as they are.
    assert (found.right, found.otherwise) == (0.6, 1.0)
    assert found.moved == ((1, 2), (2, 1))


def test_a_model_that_is_merely_bad_is_no_other_match():
    random = np.random.default_rng(0)
    always, guessed = np.zeros(400), random.integers(0, 5, 400)
    half = np.where(random.random(400) < 0.5, TRUE, guessed)

    for predicted in (always, guessed, half, np.full(400, NO_CLASS)):
        assert fits_otherwise(answering(predicted)) is None


def test_many_classes_of_an_image_or_two_each_prove_nothing():
    true = np.arange(400) % 300

    assert fits_otherwise(answering(np.random.default_rng(0).permutation(true), true)) is None


def test_few_images_prove_nothing():
    swapped = np.array([1, 0, 3, 4, 2])

    assert fits_otherwise(answering(swapped[TRUE[:199]], TRUE[:199])) is None
    assert fits_otherwise(answering(swapped[TRUE[:200]], TRUE[:200])) is not None


@pytest.mark.parametrize("shift", [0, 1])
def test_it_is_told_with_the_labels_own_names(shift: int):
    names = ["Apple", "Cherry", "banana", "fig", "pear"]
    matches = [
        LabelMatch(dataset_label=name, model_id=index, model_label=f"LABEL_{index}", rule="id")
        for index, name in enumerate(names)
    ]

    said = why_mislabelled(answering((TRUE + shift) % 5), matches)

    if not shift:
        assert said is None
        return
    assert said is not None
    assert said.startswith(
        "the model answers 0% of the images right as labels and classes are matched, and 100% with 'Apple' as 'LABEL_1' and not 'LABEL_0', "
        "'Cherry' as 'LABEL_2' and not 'LABEL_1', 'banana' as 'LABEL_3' and not 'LABEL_2' and 2 more: "
    )
