"""Data sets in the shapes of the paper's, which of several is read, and the one line each kind of wrong data set gets."""

import re
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data.image_sets import TEST, expected_sizes, images_of, png, pngs, sizes, train_and_test
from datasets import Value

from profiling_agent.data.images import SplitImages

IMAGENET = [
    "tench, Tinca tinca",
    "goldfish, Carassius auratus",
    "cassette player",
    "English springer, English springer spaniel",
]


def test_cifar100_is_read_by_the_named_labels_or_those_that_map_best(parquet, draw):
    fine = train_and_test(np.arange(80) % 4, ["apple", "pear", "trout", "shark"], label="fine_label")
    coarse = datasets.Dataset.from_dict(
        {"coarse_label": [row % 4 // 2 for row in range(80)]},
        features=datasets.Features({"coarse_label": datasets.ClassLabel(names=["fruit", "fish"])}),
    )
    folder = parquet(**{split: datasets.concatenate_datasets([rows, coarse], axis=1) for split, rows in fine.items()})

    drawn = draw(folder, ["apple", "pear", "shark", "trout"])
    assert [match.model_id for match in drawn.matchings[0].matches] == [0, 1, 3, 2]
    assert any("'fine_label'" in note and "not used: 'coarse_label'" in note for note in drawn.notes)
    drawn = draw(folder, ["fish", "fruit"])
    assert [match.dataset_label for match in drawn.matchings[0].matches] == ["fruit", "fish"]
    assert any("'coarse_label', which maps best" in note for note in drawn.notes)
    drawn = draw(folder, ["apple", "pear", "trout", "shark", "fruit", "fish"], label_column="coarse_label")
    assert [match.model_id for match in drawn.matchings[0].matches] == [4, 5]


def test_folders_of_photographs_that_lie_side_by_side_are_never_read_as_one(photographs, draw, refusal):
    # What a file is called says nothing of its split.
    pictures = {
        f"{size}/{split}/{name}/val-{row}.png": png(first + 500 * (split == "val") + 100 * index + row)
        for size, first in (("160px", 0), ("320px", 1000))
        for split in ("train", "val")
        for index, name in enumerate(("tench", "cassette player"))
        for row in range(20)
    }
    folder = photographs(pictures)
    assert "holds several data sets, 160px, 320px: name one with dataset_config" in refusal(folder, IMAGENET)
    assert "can't be read: ValueError" in refusal(folder, IMAGENET, dataset_config="32px")
    held = images_of(draw(folder, IMAGENET, dataset_config="160px").heldout)
    assert len(held) > 5
    assert set(held) <= {image for path, image in pictures.items() if path.startswith("160px/val/")}


def test_strings_are_labels_too(parquet, draw):
    labels = np.array(["cat", "dog", "ant eater"])[np.arange(60) % 3]
    drawn = draw(parquet(**train_and_test(labels, Value("string"))), ["dog", "Ant_Eater", "cat"])
    assert {match.dataset_label: match.model_id for match in drawn.matchings[0].matches} == {
        "ant eater": 1,
        "cat": 2,
        "dog": 0,
    }


def test_plain_integers_are_class_ids_of_which_a_split_may_lack_some(parquet, draw):
    drawn = draw(parquet(**train_and_test(np.arange(60) % 5, Value("int64"), 1 + np.arange(60) % 2)), "abcd")
    assert [match.model_id for match in drawn.matchings[0].matches] == [1, 2]
    assert set(SplitImages(drawn.heldout.path).labels) == {1, 2}
    # 4 is no class of the model, and has no label.
    assert set(SplitImages(drawn.calibration.path).labels) == {0, 1, 2, 3}
    # Counted from 1 they fit as well, until the model's answers, or a 0 in the train split, decide.
    assert [way.by for way in drawn.matchings] == ["number", "from-1"]


NUMBERS, OTHERS = (
    "labels are whole numbers from {}, but the model has 3 classes, 0 to 2",
    "label_column 'label' is no class or text or number",
)


@pytest.mark.parametrize(
    ("labels", "names", "said"),
    [
        (pa.array([20_260_101, 20_261_122]), "abc", NUMBERS.format("20260101 to 20261122")),
        (pa.array([0, 1, -7], pa.int8()), "abc", NUMBERS.format("-7 to 1")),
        (pa.array([1, 2, 3]), "abc", NUMBERS.format("1 to 3")),
        # Numbers that classes are called by may reach beyond the last class.
        (pa.array([1, 2, 3]), "123", "has 1 usable images"),
        (pa.array([0.0, float("nan")]), "ab", OTHERS),
        (pa.array([b"a", b"b"]), "ab", OTHERS),
        (pa.nulls(2), "ab", OTHERS),
        (pa.array([f"a photo, number {row}" for row in range(25)]), "ab", "is a class of the model"),
    ],
)
def test_a_label_column_of_other_values_than_classes_is_refused(tmp_path, refusal, labels, names, said):
    cells = [{"bytes": png(0), "path": None}] * len(labels)
    for split in ("train", "test"):
        pq.write_table(pa.table({"image": cells, "label": labels}), tmp_path / f"{split}.parquet")
    assert said in refusal(tmp_path, names, label_column="label")


@pytest.mark.parametrize("kind", [None, pa.binary(), pa.large_binary(), pa.binary_view()])
def test_parquet_that_datasets_did_not_write_is_read(tmp_path, draw, kind):
    labels = [row % 3 for row in range(60)]
    for split, first in (("train", 0), ("test", TEST)):
        held = pngs(60, first)
        cells = pa.array(held, kind) if kind else [{"bytes": each, "path": ""} for each in held]
        pq.write_table(pa.table({"image": cells, "label": labels}), tmp_path / f"{split}.parquet")
    assert sizes(draw(tmp_path, "abc")) == expected_sizes(pngs(60, TEST), 60)


@pytest.mark.parametrize("together", [True, False])
def test_what_save_to_disk_wrote_is_read_in_place(tmp_path, draw, together):
    rows: dict[Any, datasets.Dataset] = train_and_test([0, 1] * 30, ["cat", "dog"])
    (datasets.DatasetDict(rows) if together else rows["test"]).save_to_disk(tmp_path / "arrow")
    before = sorted(path.name for path in (tmp_path / "arrow").rglob("*"))
    drawn = draw(tmp_path / "arrow", split="test" if together else "train")
    assert sizes(drawn) == expected_sizes(pngs(60, TEST), 60 * together)
    assert sorted(path.name for path in (tmp_path / "arrow").rglob("*")) == before


CALLED = r".*called metadata\.csv, its column of paths file_name"


@pytest.mark.parametrize(
    ("kind", "column", "said"),
    [
        ("parquet", "text", r"no image column: its columns are text \(text\), label \(number\)"),
        ("csv", "image", "holds no images" + CALLED),
        ("parquet", "image", "no image" + CALLED),
    ],
)
def test_a_table_without_images_is_told_and_what_one_that_names_images_is_to_be_called(
    tmp_path, refusal, kind, column, said
):
    rows = datasets.Dataset.from_dict({column: ["a/0.png", "a/1.png"], "label": [0, 1]})
    write = rows.to_csv if kind == "csv" else rows.to_parquet
    write(tmp_path / f"test.{kind}")
    assert re.search(said, refusal(tmp_path))


@pytest.mark.parametrize("split", ["train", "test"])
def test_images_without_folders_of_classes_are_refused_with_how_to_lay_them(photographs, cats_and_dogs, refusal, split):
    """In `test` no folder of a class, or in `train` a single one."""
    pictures = {
        path.replace("test/cat/", "test/").replace("test/dog/", "test/1") if split == "test" else path: image
        for path, image in cats_and_dogs.items()
        if split == "test" or not path.startswith("train/dog")
    }
    folder = photographs(pictures)
    said = f"split '{split}' of '{folder}' has no folders of several classes: put its images into {split}/CLASS/"
    assert said in refusal(folder)


@pytest.mark.parametrize("names", [("cat", "dog"), ("LABEL_0", "LABEL_1")])
def test_folders_of_splits_are_no_classes(photographs, refusal, names):
    folder = photographs(
        {f"{split}/{row}.png": png(TEST * (split == "test") + row) for split in ("train", "test") for row in range(60)}
    )
    assert "has no folders of several classes" in refusal(folder, names)
