"""Which of several data sets that lie side by side is read; `test_hub.py` and `test_data_sets.py` have them on disk."""

import pytest

from profiling_agent.acquisition.data import beside_others, each_once
from profiling_agent.errors import AcquisitionError


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a/train/0.parquet", "b/train/0.parquet"),
        ("a/train-00000-of-00001.parquet", "b/train-00000-of-00001.parquet"),
        ("a/train.csv.gz", "b/training.csv.gz"),
        ("a/partial-train/0.parquet", "b/train/0.parquet"),
        ("a/train/cat/0.png", "b/train/cat/0.png"),
    ],
)
def test_folders_with_the_same_split_are_told_apart(first, second):
    with pytest.raises(AcquisitionError, match="dataset 'x' has several configs, a, b: name one with dataset_config"):
        beside_others("x", None, {"train": [first, second]})
    assert beside_others("x", "b", {"train": [first, second]}) == "b"


@pytest.mark.parametrize(
    ("outer", "at"),
    [("train/cat/0.png", "the top"), ("photos/train/cat/0.png", "photos"), ("photos/test.parquet", "photos")],
)
def test_one_inside_another_may_be_read_and_not_the_other_with_it(outer, at):
    files = {"train": [outer, "photos/small/train/cat/0.png"]}
    said = (
        f"dataset 'x' has splits at {at} and others inside of it, which would be read as one: name one of photos/small"
    )
    for asked in (None, "photos", "elsewhere"):
        with pytest.raises(AcquisitionError, match=said):
            beside_others("x", asked, files)
    assert beside_others("x", "photos/small", files) == "photos/small"


@pytest.mark.parametrize(
    "files",
    [
        {"train": ["train/cat/0.png", "train/dog/0.png"], "test": ["test/cat/0.png"]},
        {"train": ["cat/train-0.png", "dog/train-0.png"]},
        {"train": ["train_0/0.parquet", "train_1/0.parquet"]},
        {"train": ["a/train/0.parquet"], "test": ["b/test/0.parquet"]},
        {"train": ["2024/0.parquet", "2025/0.parquet"]},
        {"train": ["data/train-0.parquet", "data/train-1.parquet"]},
    ],
)
def test_parts_of_one_data_set_are_left_together(files):
    assert beside_others("x", None, files) is None


@pytest.mark.parametrize(
    ("both", "patterns"),
    [
        ("test/train/0[1].png", {"train": ["train/**"], "test": ["test/**"]}),
        ("a/val 2/train/0.png", {"train": ["train/**"], "validation": ["a/val 2/**"]}),
        ("train-test/cat/0.png", None),
        ("test[1]/train/0.png", None),
        ("test-train.zip", None),
    ],
)
def test_what_two_splits_have_is_left_to_the_one_that_its_first_folder_names(both, patterns):
    assert each_once({"train": ["train/cat/0.png", both], "test": [both]}) == patterns
    assert each_once({"train": ["train/cat/0.png"], "test": [both]}) is None
