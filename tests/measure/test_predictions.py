"""A model's answers: what logits say, and what is read back."""

import os
from pathlib import Path

import numpy as np
import pytest

from profiling_agent.errors import ArtifactError
from profiling_agent.measure.predictions import (
    NO_CLASS,
    Answers,
    answers_of,
    joined,
    read_predictions,
    write_predictions,
)


def said(*rows: list[float]) -> Answers:
    return answers_of(np.array(rows, np.float32), np.zeros(len(rows), np.int64))


def test_the_top_logit_is_the_answer_the_first_of_equal_ones():
    answers = said([3.0, 1.0, 2.5], [-1.0, -4.0, -1.0], [0.0, 5.0, 1.0])

    assert answers.predicted.tolist() == [0, 0, 1]
    assert answers.right.tolist() == [True, True, False]


@pytest.mark.parametrize("logits", [[np.nan, 0.0], [0.0, np.nan], [np.inf, 0.0], [-np.inf, -np.inf], [np.inf, -np.inf]])
def test_logits_that_name_no_class_are_counted_wrong(logits: list[float]):
    answers = said([1.0, 0.0], logits)

    assert answers.predicted.tolist() == [0, NO_CLASS]
    assert answers.right.tolist() == [True, False]


def test_a_class_that_is_ruled_out_leaves_the_others(tmp_path: Path):
    answers = said([2.0, -np.inf, 1.0], [2.0, -np.inf, -np.inf], [3e38, -3e38, -3e38])

    assert answers.predicted.tolist() == [0, 0, 0]
    write_predictions(tmp_path / "answers", answers)
    assert read_predictions(tmp_path / "answers").predicted.tolist() == answers.predicted.tolist()


def test_as_many_logits_as_labels():
    with pytest.raises(ValueError, match="a row for each image"):
        answers_of(np.zeros((2, 3), np.float32), np.zeros(1, np.int64))


def test_parts_stand_in_the_order_given():
    parts = [said([1.0, 0.0]), said([0.0, 3.0], [2.0, 0.0])]

    assert joined(parts).predicted.tolist() == [0, 1, 0]


def test_a_missing_or_damaged_file_is_one_line(tmp_path: Path):
    write_predictions(tmp_path / "cut", said([1.0, 0.0], [0.0, 2.0]))
    os.truncate(tmp_path / "cut", 40)

    for name in ("cut", "missing"):
        with pytest.raises(ArtifactError, match="evaluate again") as refused:
            read_predictions(tmp_path / name)
        assert "\n" not in str(refused.value)
