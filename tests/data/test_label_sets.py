"""Several labels an image: lists, 0 or 1 for each class, or one; and what a model with one label an image makes of them."""

import re
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import zoo
from data.image_sets import images_of, table
from in_process import run

from profiling_agent.data.images import SplitImages
from profiling_agent.data.labels import label_set_id, why_doubtful
from profiling_agent.errors import AcquisitionError
from profiling_agent.jobs.tasks import AcquireTask, MatchLabelsTask
from profiling_agent.schemas import LabelMatch

ANIMALS = ("cat", "dog", "bird")
# The data set has its names in another order than the model.
NAMES = ["bird", "cat", "dog"]
SETS = [[0], [2, 0], [], [1], [0, 1, 2]] * 40
INTEGERS = datasets.List(datasets.Value("int64"))


def flags(kind, sets=SETS):
    return [[kind(index in labels) for index in range(len(ANIMALS))] for labels in sets]


def of_animals(write):
    return [[write(ANIMALS[index]) for index in labels] for labels in SETS]


FORMS = {
    "classes": (of_animals(NAMES.index), datasets.List(datasets.ClassLabel(names=NAMES))),
    "names": (of_animals(str), datasets.List(datasets.Value("string"))),
    "numbers": (SETS, INTEGERS),
    "floats": (flags(float), datasets.List(datasets.Value("float32"))),
    "bits": (flags(int), datasets.List(datasets.Value("int8"), length=3)),
    "booleans": (flags(bool), datasets.LargeList(datasets.Value("bool"))),
}


def label_by_image(drawn):
    splits = (drawn.calibration, drawn.search, drawn.heldout)
    labels = np.concatenate([SplitImages(split.path).labels for split in splits]).tolist()
    return dict(zip(images_of(*splits), labels, strict=True))


def expected_of(rows, sets):
    images = rows.cast_column("image", datasets.Image(decode=False))["image"]
    return {cell["bytes"]: label_set_id(labels) for cell, labels in zip(images, sets, strict=True)}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_several_labels_is_the_set_of_the_models_classes(parquet, draw, form):
    cells, kind = FORMS[form]
    rows = table(cells, kind, label="labels")

    drawn = draw(parquet(test=rows), ANIMALS, multi_label=True)

    found = label_by_image(drawn)
    assert found.items() <= expected_of(rows, SETS).items()
    assert len(set(found.values())) == 5
    assert any("an image is right if exactly its labels have a sigmoid of at least 0.5" in note for note in drawn.notes)


@pytest.mark.parametrize(
    ("kind", "cells"),
    [(NAMES, [1, 0, 2]), (datasets.Value("string"), ["cat", "bird", "dog"]), (datasets.Value("int64"), [0, 2, 1])],
)
def test_one_label_an_image_is_a_set_of_one(parquet, draw, kind, cells):
    rows = table(cells * 60, kind)
    drawn = draw(parquet(train=rows, test=table(cells * 60, kind, first=1000)), ANIMALS, multi_label=True)
    assert (
        label_by_image(drawn).items()
        <= {
            **expected_of(rows, [[0], [2], [1]] * 60),
            **expected_of(table(cells * 60, kind, first=1000), [[0], [2], [1]] * 60),
        }.items()
    )
    assert len(set(label_by_image(drawn).values())) == 3


def test_images_with_a_label_that_is_no_class_or_with_other_numbers_than_0_and_1_are_left_out(parquet, draw):
    names = [["cat", "cow"], ["cat"], ["dog", "cat"]] * 50
    kind = datasets.List(datasets.Value("string"))
    drawn = draw(parquet("names", test=table(names, kind, label="labels")), ANIMALS, multi_label=True)
    assert set(label_by_image(drawn).values()) == {label_set_id([0]), label_set_id([0, 1])}
    assert any("match no class of the model or several were left out: 'cow'" in note for note in drawn.notes)

    cells = [*flags(float), *[[0.0, -1.0, 1.0], [0.3, 0.7, 0.0], [1.0, 0.0], None] * 5]
    rows = table(cells, datasets.List(datasets.Value("float64")), label="labels")
    drawn = draw(parquet("flags", test=rows), ANIMALS, multi_label=True)
    assert set(label_by_image(drawn).values()) == set(map(label_set_id, SETS))
    assert "20 images of split 'test' have no label that the model knows" in drawn.notes


@pytest.mark.parametrize(
    ("cells", "kind", "names", "text"),
    [
        ([[0.2, 0.8, 0.0]] * 9, datasets.List(datasets.Value("float32")), ANIMALS, "but not 3 of 0 or 1 each, one for"),
        (
            [[0.0, 1.0]] * 9,
            datasets.List(datasets.Value("float32")),
            ANIMALS,
            "but not 3 of 0 or 1 each, one for a class",
        ),
        ([[1], [1, 2]] * 9, INTEGERS, ANIMALS, "'labels' fit in several ways: set label_match to number or from-1"),
        ([[7], [1, 2]] * 9, INTEGERS, ANIMALS, "labels are whole numbers from 1 to 7, but the model has 3 classes"),
        (
            [["cow"]] * 9,
            datasets.List(datasets.Value("string")),
            ANIMALS,
            r"no label of the data set \('cow'\) is a class",
        ),
        ([[[1]]] * 9, datasets.List(INTEGERS), ANIMALS, r"labels \(list of list of number\); name label_column"),
    ],
)
def test_lists_that_are_no_labels_are_one_line(parquet, refusal, cells, kind, names, text):
    folder = parquet(test=table(cells, kind, label="labels"))
    assert re.search(text, refusal(folder, names, multi_label=True))


def test_numbers_of_lists_are_counted_from_1_on_request(parquet, draw):
    rows = table([[1], [2, 1], [2]] * 60, INTEGERS, label="labels")
    drawn = draw(parquet(test=rows), ANIMALS, multi_label=True, label_match="from-1")
    assert label_by_image(drawn).items() <= expected_of(rows, [[0], [1, 0], [1]] * 60).items()


@pytest.mark.parametrize("form", FORMS)
def test_a_model_of_one_label_an_image_is_given_no_lists(parquet, refusal, form):
    cells, kind = FORMS[form]
    folder = parquet(test=table(cells, kind, label="labels"))
    said = refusal(folder, ANIMALS)
    assert (
        "the model answers with one; if it answers with several, set problem_type to 'multi_label_classification'"
        in said
    )
    assert "label_column 'labels' is no class or text or number: its columns are" in refusal(
        folder, ANIMALS, label_column="labels"
    )


def test_lists_next_to_one_label_an_image_are_not_read(parquet, draw):
    rows = table(np.arange(120) % 2, ["cat", "dog"])
    rows = datasets.concatenate_datasets([rows, datasets.Dataset.from_dict({"labels": [[2.0]] * 120})], axis=1)
    assert set(label_by_image(draw(parquet(test=rows))).values()) == {0, 1}


def test_float_labels_are_named_as_such(parquet, refusal):
    assert "label (float); name label_column" in refusal(parquet(test=table([0.5] * 9, datasets.Value("float32"))))


def multi_label_model(folder, **changes):
    names = dict(enumerate(ANIMALS))
    return zoo.save(zoo.vit(id2label=names, problem_type="multi_label_classification", **changes), folder)


def test_the_problem_type_of_the_config_decides(parquet, tmp_path):
    rows = table(SETS, INTEGERS, label="labels")
    asked: dict[str, Any] = {"model": str(multi_label_model(tmp_path / "model")), "dataset": str(parquet(test=rows))}

    acquired = run(AcquireTask(**asked, device="cpu"), tmp_path, "acquire")

    labels = SplitImages(tmp_path / acquired.search.file.path).labels
    assert set(labels.tolist()) == set(map(label_set_id, SETS))
    assert run(MatchLabelsTask(**asked), tmp_path, "match").labels == acquired.labels
    assert [match.model_label for match in acquired.labels] == list(ANIMALS)


def test_images_that_all_have_the_same_labels_show_no_loss(parquet, tmp_path):
    folder = parquet(test=table([[1.0, 0.0, 1.0]] * 90, datasets.List(datasets.Value("float32")), label="labels"))
    task = AcquireTask(model=str(multi_label_model(tmp_path / "model")), dataset=str(folder), device="cpu")
    with pytest.raises(
        AcquisitionError, match=r"images to search on have the same labels, so that no loss of accuracy"
    ):
        run(task, tmp_path, "acquire")


def test_where_only_one_class_is_matched_the_labels_that_are_none_are_named(parquet, tmp_path):
    model = zoo.save(zoo.vit(id2label=dict(enumerate(["mask", "no mask"]))), tmp_path / "model")
    folder = parquet(test=table(np.arange(120) % 2, ["with_mask", "without_mask"]))
    with pytest.raises(
        AcquisitionError, match=r"one class \('no mask'\), as 'with_mask' match none of the model's, so"
    ):
        run(AcquireTask(model=str(model), dataset=str(folder), device="cpu"), tmp_path, "acquire")


def test_sets_of_classes_are_judged_by_chance_only():
    """Answers that are all wrong in the same way are no names in another order, as those of single classes are."""
    matches = [
        LabelMatch(dataset_label=name, model_id=i, model_label=name, rule="place") for i, name in enumerate("abc")
    ]
    true = np.array([label_set_id([index % 3]) for index in range(600)])
    predicted = np.array([label_set_id([(index + 1) % 3]) for index in range(600)])
    assert "answers 0 of 600 search images right, which chance does too" in (
        why_doubtful(predicted, true, matches) or ""
    )
    with pytest.raises(AcquisitionError, match="correct the names"):
        why_doubtful((np.arange(600) + 1) % 3, np.arange(600) % 3, matches)
    assert why_doubtful(true, true, matches) is None


def test_an_id_is_that_of_a_set():
    assert label_set_id([2, 0, 2]) == label_set_id(np.array([0, 2])) != label_set_id([0, 1])
    assert label_set_id([]) != label_set_id([0])
    assert len({label_set_id(torch.nonzero(row)[:, 0].tolist()) for row in torch.eye(500)}) == 500
    assert min(label_set_id([index]) for index in range(500)) >= 0
