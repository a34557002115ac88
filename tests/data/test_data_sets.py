"""Data sets in the shapes of the paper's, which of several is read, and the one line each kind of wrong data set gets."""

import re
import zipfile
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


LAYOUT = "lay images out as SPLIT/CLASS/IMAGE, such as test/cat/1.png"


def pictures(*folders, suffix="png"):
    """Return 60 pictures in each of these folders, by their paths."""
    return {
        f"{folder}/{row}.{suffix}": png(1000 * index + row) for index, folder in enumerate(folders) for row in range(60)
    }


@pytest.mark.parametrize("names", [("cat", "dog"), ("LABEL_0", "LABEL_1")])
@pytest.mark.parametrize(
    ("folders", "found"),
    [
        (["train", "test"], "60 .png in test, 60 .png in train"),
        (["train", "test", "validation"], "60 .png in test, 60 .png in train, 60 .png in validation"),
        (["photos/my-train", "photos/my-test"], "60 .png in photos/my-test, 60 .png in photos/my-train"),
        (["train/images", "test/images"], "60 .png in test/images, 60 .png in train/images"),
        (["train/cat/a", "train/dog/a", "test/cat/a", "test/dog/a"], "60 .png in test/cat/a, 60 .png in test/dog/a"),
        (["."], "60 .png at the top"),
        (["Train/cat", "Train/dog", "Test/cat", "Test/dog"], "60 .png in Test/cat, 60 .png in Test/dog"),
        (["cat", "dog"], "60 .png in cat, 60 .png in dog"),
    ],
)
def test_folders_that_are_no_classes_or_no_splits_are_told_with_a_layout(photographs, refusal, folders, found, names):
    message = refusal(photographs(pictures(*folders)), names)
    assert f"(found {found}" in message
    assert LAYOUT in message


def test_files_of_no_known_kind_and_archives_of_images_are_told_with_a_layout(photographs, refusal, tmp_path):
    folder = photographs(pictures("test/cat", "test/dog", suffix="heic"))
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "1.png").write_bytes(png(0))
    message = refusal(folder)
    assert "(found 60 .heic in test/cat, 60 .heic in test/dog): " + LAYOUT in message
    (tmp_path / "packed").mkdir()
    for split in ("train", "test"):
        with zipfile.ZipFile(tmp_path / "packed" / f"{split}.zip", "w") as packed:
            for path, image in pictures("cat", "dog").items():
                packed.writestr(path, image)
    assert "'test' of " in (message := refusal(tmp_path / "packed"))
    assert "has no folders of classes (found 2 .zip at the top): " + LAYOUT in message


ODD = {
    "__MACOSX/train/cat/._0.png": b"x",
    "test/Thumbs.db": b"x",
    "test/.DS_Store": b"x",
    "labels.csv": b"a,b",
    "1.png": b"x",
}


@pytest.mark.parametrize("names", [("crack", "good"), ("LABEL_0", "LABEL_1")])
@pytest.mark.parametrize(
    ("train", "label"), [("train/good", 1), ("train", -1), ("train/unlabelled", -1), ("my_training/x/good", 1)]
)
def test_a_train_split_of_one_class_or_of_none_calibrates(photographs, draw, train, label, names):
    folder = photographs(pictures(train, "test/crack", "test/good", "ground_truth/crack") | ODD)
    drawn = draw(folder, names)
    images = {image: index for index, image in enumerate(pngs(60, 1000) + pngs(60, 2000))}
    assert sorted(images_of(drawn.calibration)) == sorted(pngs(60))
    assert set(SplitImages(drawn.calibration.path).labels) == {label}
    for split in map(SplitImages, (drawn.search.path, drawn.heldout.path)):
        assert [images[split.encoded(row)] // 60 for row in range(len(split))] == split.labels.tolist()
    assert any("'train' has no labels that the model knows" in note for note in drawn.notes) == (label < 0)


def test_a_test_split_without_classes_gives_way_to_a_validation_split(photographs, draw, cats_and_dogs):
    folder = photographs(
        {path.replace("test/", "valid/"): image for path, image in cats_and_dogs.items()} | pictures("test")
    )
    assert draw(folder).search.source_split == "validation"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (b"", "look at test/metadata.csv"),
        (b"file_name,label\n", "IndexError ('list index out of range'): look at test/metadata.csv"),
        (b"file_name;label\n0.png;cat\n", "look at test/metadata.csv"),
        (
            b"file_name,caption\n0.png,a cat\n",
            "no label column of classes, texts or whole numbers: its columns are image",
        ),
        (b"file_name,label\n0.png,0\n1.png,\n", "label (float)"),
        (b"file_name,label\n0.png,cat\n9.png,dog\n99.png,cat\n", "test/99.png"),
    ],
)
def test_a_wrong_table_of_labels_is_told_by_its_name_or_its_columns(photographs, refusal, table, message):
    assert message in refusal(photographs(pictures("test") | {"test/metadata.csv": table}))


def test_rows_of_a_table_without_a_label_are_left_out(photographs, draw):
    rows = "".join(f"{row}.png,{('cat', '', 'dog')[row % 3]}\n" for row in range(60))
    drawn = draw(photographs(pictures("test") | {"test/metadata.csv": f"file_name,label\n{rows}".encode()}))
    assert "20 images of split 'test' have no label that the model knows" in drawn.notes


@pytest.mark.parametrize(
    ("names", "query"), [(("cats", "dogs"), {}), (("cat", "dog"), {"label_match": "number"}), (("a", "b", "c"), {})]
)
def test_a_sound_layout_is_not_blamed_for_other_names(photographs, cats_and_dogs, refusal, names, query):
    assert "lay images out" not in refusal(photographs(cats_and_dogs), names, **query)


def test_each_split_has_its_own_table_of_labels_or_folders(photographs, draw, cats_and_dogs):
    rows = "".join(f"{row}.png,{'cat' if row % 2 else 'dog'}\n" for row in range(60))
    test = {path: image for path, image in cats_and_dogs.items() if path.startswith("test")}
    folder = photographs(test | pictures("train") | {"train/metadata.csv": f"file_name,label\n{rows}".encode()})
    drawn = draw(folder)
    assert sorted(set(SplitImages(drawn.calibration.path).labels)) == [0, 1]
    assert set(images_of(drawn.search, drawn.heldout)) <= set(test.values())
