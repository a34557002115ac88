"""Data sets in the shapes of the paper's, which of several is read, and the one line each kind of wrong data set gets."""

import re
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data.image_sets import TEST, expected_sizes, images_of, png, pngs, sizes, table, train_and_test
from datasets import Value

from profiling_agent.data.dataset import choose_sibling_folder, patterns_without_duplicates
from profiling_agent.data.images import SplitImages
from profiling_agent.errors import AcquisitionError

CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
IMAGENET = [
    "tench, Tinca tinca",
    "goldfish, Carassius auratus",
    "cassette player",
    "English springer, English springer spaniel",
]


def test_cifar10_with_its_img_column(parquet, draw):
    drawn = draw(parquet(**train_and_test(np.arange(100) % 10, CIFAR10, image="img")), CIFAR10)
    assert sizes(drawn) == expected_sizes(pngs(100, TEST), 100)
    assert {match.rule for match in drawn.labels} == {"id"}


def test_cifar100_is_read_by_the_named_labels_or_those_that_map_best(parquet, draw):
    fine = train_and_test(np.arange(80) % 4, ["apple", "pear", "trout", "shark"], label="fine_label")
    coarse = datasets.Dataset.from_dict(
        {"coarse_label": [row % 4 // 2 for row in range(80)]},
        features=datasets.Features({"coarse_label": datasets.ClassLabel(names=["fruit", "fish"])}),
    )
    folder = parquet(**{split: datasets.concatenate_datasets([rows, coarse], axis=1) for split, rows in fine.items()})

    drawn = draw(folder, ["apple", "pear", "shark", "trout"])
    assert [match.model_id for match in drawn.labels] == [0, 1, 3, 2]
    assert any("'fine_label'" in note and "not used: 'coarse_label'" in note for note in drawn.notes)
    drawn = draw(folder, ["fish", "fruit"])
    assert [match.dataset_label for match in drawn.labels] == ["fruit", "fish"]
    assert any("'coarse_label', which maps best" in note for note in drawn.notes)
    drawn = draw(folder, ["apple", "pear", "trout", "shark", "fruit", "fish"], label_column="coarse_label")
    assert [match.model_id for match in drawn.labels] == [4, 5]


@pytest.fixture
def imagenette(parquet, tmp_path):
    kind = ["tench", "English springer", "cassette player"]
    for index, config in enumerate(("160px", "320px")):
        rows = [table(np.arange(60) % 3, kind, first=1000 * index + first) for first in (0, 500)]
        parquet("imagenette", config, train=rows[0], validation=rows[1])
    card = "".join(f"- config_name: {name}\n  data_dir: {name}\n" for name in ("160px", "320px"))
    (tmp_path / "imagenette" / "README.md").write_text(f"---\nconfigs:\n{card}---\n")
    return tmp_path / "imagenette"


def test_imagenette_needs_a_config_and_lists_them(imagenette, refusal):
    assert "several configs, 160px, 320px: name one with dataset_config" in refusal(imagenette, IMAGENET)
    assert "no config '32px': use one of 160px, 320px" in refusal(imagenette, IMAGENET, dataset_config="32px")


def test_a_card_that_reads_them_as_one_is_believed(imagenette, draw):
    card = "---\nconfigs:\n- config_name: all\n  data_files: [{split: train, path: '*/train*'}, {split: test, path: '*/val*'}]\n---\n"
    (imagenette / "README.md").write_text(card)
    assert draw(imagenette, IMAGENET, num_samples=40).search.num_images == 40


@pytest.mark.parametrize("where", ["160px", "sizes/160px"])
def test_folders_of_photographs_that_lie_side_by_side_are_never_read_as_one(photographs, draw, refusal, where):
    other = where.replace("160", "320")
    # What a file is called says nothing of its split.
    pictures = {
        f"{size}/{split}/{name}/val-{row}.png": png(first + 500 * (split == "val") + 100 * index + row)
        for size, first in ((where, 0), (other, 1000))
        for split in ("train", "val")
        for index, name in enumerate(("tench", "cassette player"))
        for row in range(20)
    }
    folder = photographs(pictures)
    assert f"several configs, {where}, {other}: name one" in refusal(folder, IMAGENET)
    held = images_of(draw(folder, IMAGENET, dataset_config=where).heldout)
    assert len(held) > 5
    assert set(held) <= {image for path, image in pictures.items() if path.startswith(f"{where}/val/")}


@pytest.mark.parametrize("inside", ["set.py", "other.py"])
def test_a_data_set_that_needs_a_script_is_refused_and_not_run(tmp_path, refusal, inside):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / inside).write_text("raise SystemExit('ran')")
    assert re.search(r"needs a Python script .*, which is never run", refusal(tmp_path / "set"))


def test_strings_are_labels_too(parquet, draw):
    labels = np.array(["cat", "dog", "ant eater"])[np.arange(60) % 3]
    drawn = draw(parquet(**train_and_test(labels, Value("string"))), ["dog", "Ant_Eater", "cat"])
    assert {match.dataset_label: match.model_id for match in drawn.labels} == {"ant eater": 1, "cat": 2, "dog": 0}


def test_plain_integers_are_class_ids_of_which_a_split_may_lack_some(parquet, draw):
    drawn = draw(parquet(**train_and_test(np.arange(60) % 4, Value("int64"), 1 + np.arange(60) % 2)), "abcd")
    assert [match.model_id for match in drawn.labels] == [1, 2]
    assert set(SplitImages(drawn.heldout.path).labels) == {1, 2}
    assert set(SplitImages(drawn.calibration.path).labels) == {0, 1, 2, 3}
    # Counted from 1 they fit as well, until the model's answers, or a 0 in the train split, decide.
    assert [way.by for way in drawn.matchings] == ["number", "from-1"]


def test_a_train_split_of_numbers_that_the_model_lacks_is_refused_where_the_test_split_has_none(parquet, refusal):
    folder = parquet(**train_and_test(1 + np.arange(60) % 4, Value("int64"), 1 + np.arange(60) % 3))
    assert "'label' holds '4', which is no class of the model" in refusal(folder, "abcd")


NUMBERS, OTHERS = (
    "label column 'label' holds .*{}.*the model has 3 classes, 0 to 2",
    "holds neither class labels nor names",
)


@pytest.mark.parametrize(
    ("labels", "names", "said"),
    [
        (pa.array([20_260_101, 20_261_122]), "abc", NUMBERS.format("as large as 20261122")),
        (pa.array([0, 1, -7], pa.int8()), "abc", NUMBERS.format("as small as -7")),
        (pa.array([1, 2, 3]), "abc", NUMBERS.format("as large as 3")),
        # Numbers that classes are called by may reach beyond the last class.
        (pa.array([1, 2, 3]), "123", "there more than once|no image"),
        (pa.array([0.0, float("nan")]), "ab", OTHERS),
        (pa.array([0, 1], pa.date32()), "ab", OTHERS),
        (pa.array([b"a", b"b"]), "ab", OTHERS),
        (pa.nulls(2), "ab", OTHERS),
        (pa.array([f"a photo, number {row}" for row in range(25_001)]), "ab", "holds more than 25000 different values"),
    ],
)
def test_a_label_column_of_other_values_than_classes_is_refused(tmp_path, refusal, labels, names, said):
    write_labels(tmp_path, labels)
    assert re.search(said, refusal(tmp_path, names, label_column="label"))


def write_labels(folder, labels):
    cells = [{"bytes": png(0), "path": None}] * len(labels)
    for split in ("train", "test"):
        pq.write_table(pa.table({"image": cells, "label": labels}), folder / f"{split}.parquet")


@pytest.mark.parametrize("labels", [pa.array([1, 2, 3]), pa.array([f"a photo, number {row}" for row in range(25_001)])])
def test_a_label_column_that_was_not_named_is_refused_as_well(tmp_path, refusal, labels):
    write_labels(tmp_path, labels)
    assert "label column 'label' holds " in refusal(tmp_path, "abc")


@pytest.mark.parametrize("wrong", [3, -2])
def test_a_class_label_that_the_data_set_has_no_name_for_is_refused(parquet, refusal, wrong):
    folder = parquet(**train_and_test(np.arange(60) % 3, ["a", "b", "c"]))
    (file,) = folder.rglob("test-*")
    rows = pq.read_table(file)
    place, labels = rows.schema.get_field_index("label"), pa.array([wrong, *rows["label"].to_pylist()[1:]])
    pq.write_table(rows.set_column(place, rows.schema.field("label"), labels), file)
    assert f"holds {wrong}, but the data set names 3 classes, 0 to 2: correct its" in refusal(folder, "abc")


@pytest.mark.parametrize("kind", [None, pa.binary(), pa.large_binary(), pa.binary_view()])
def test_parquet_that_datasets_did_not_write_is_read(tmp_path, draw, kind):
    labels = [row % 3 for row in range(60)]
    for split, first in (("train", 0), ("test", TEST)):
        held = pngs(60, first)
        cells = pa.array(held, kind) if kind else [{"bytes": each, "path": ""} for each in held]
        pq.write_table(pa.table({"image": cells, "label": labels}), tmp_path / f"{split}.parquet")
    assert sizes(draw(tmp_path, "abc")) == expected_sizes(pngs(60, TEST), 60)


@pytest.mark.parametrize("cat", ["train", "test tube", "eval-cat"])
@pytest.mark.parametrize("above", ["", "photos/"])
def test_a_class_may_be_called_as_a_split_is(photographs, cats_and_dogs, draw, cat, above):
    folder = photographs({above + path.replace("cat", cat): held for path, held in cats_and_dogs.items()})
    drawn = draw(folder, [cat, "dog"])
    assert {match.dataset_label: match.model_id for match in drawn.labels} == {cat: 0, "dog": 1}
    assert drawn.calibration.num_images == 80
    held = {(image, int("/dog/" in path)) for path, image in cats_and_dogs.items() if path.startswith("test/")}
    assert set(zip(images_of(drawn.search), SplitImages(drawn.search.path).labels, strict=True)) <= held


@pytest.mark.parametrize("stray", ["train/cover.png", "test/cat/2023/0.png", "test/0.PNG"])
def test_an_image_that_lies_deeper_or_less_deep_than_most_is_named(photographs, cats_and_dogs, draw, refusal, stray):
    folder = photographs(cats_and_dogs | {stray: png(7777)})
    said = (
        rf"no label column: folders are labels only if.*1 of 161 don't lie as deep as 'train/cat/\d+\.png', "
        rf"the first is '{stray}': move it into its class's folder, or out"
    )
    assert re.search(said, refusal(folder))
    # What is no image may lie at any depth.
    (folder / stray).rename(folder / stray.replace(".png", ".txt").replace(".PNG", ".txt"))
    assert draw(folder).calibration.num_images == 80


def test_images_without_folders_of_classes_have_no_label_column(photographs, cats_and_dogs, refusal):
    folder = photographs({path.replace("cat/", "dog/1"): held for path, held in cats_and_dogs.items()})
    said = r"no label column: its columns are image \(.*\); name label_column, or .*metadata\.csv"
    assert re.search(said, refusal(folder))


@pytest.mark.parametrize("together", [True, False])
def test_what_save_to_disk_wrote_is_read_in_place(tmp_path, draw, together):
    rows: dict[Any, datasets.Dataset] = train_and_test([0, 1] * 30, ["cat", "dog"])
    saved = datasets.DatasetDict(rows) if together else rows["test"]
    saved.save_to_disk(tmp_path / "arrow")
    before = sorted(path.name for path in (tmp_path / "arrow").rglob("*"))
    drawn = draw(tmp_path / "arrow", split="test" if together else "train")
    assert sizes(drawn) == expected_sizes(pngs(60, TEST), 60 * together)
    assert sorted(path.name for path in (tmp_path / "arrow").rglob("*")) == before


CALLED = r".*called metadata\.csv, its column of paths file_name"


@pytest.mark.parametrize(
    ("kind", "column", "said"),
    [
        ("parquet", "text", r"no image column: its columns are text \(string\), label \(int64\)"),
        ("csv", "image", "holds no images, as no CSV" + CALLED),
        ("parquet", "image", "no image" + CALLED),
        ("parquet", "path", "no image" + CALLED),
    ],
)
def test_a_table_without_images_is_told_and_what_one_that_names_images_is_to_be_called(
    tmp_path, refusal, kind, column, said
):
    rows = datasets.Dataset.from_dict({column: ["a/0.png", "a/1.png"], "label": [0, 1]})
    write = rows.to_csv if kind == "csv" else rows.to_parquet
    write(tmp_path / f"test.{kind}")
    assert re.search(said, refusal(tmp_path))


def test_a_data_set_without_labels_lists_its_columns(parquet, refusal):
    folder = parquet(test=table([3, 4], Value("int64"), label="width"))
    assert re.search(r"no label column: its columns are .*width", refusal(folder))


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"image_column": "picture"}, "image_column is 'picture', but the data set's columns are image"),
        ({"label_column": "picture"}, "label_column is 'picture', but the data set's columns are image"),
        ({"image_column": "label"}, "'label' holds no images"),
    ],
)
def test_a_named_column_that_is_not_there_or_holds_no_images_is_an_error(parquet, refusal, query, said):
    assert said in refusal(parquet(test=table([0, 1] * 30, ["cat", "dog"])), **query)


def test_an_empty_folder_and_an_unknown_reference_are_errors(tmp_path, refusal):
    (tmp_path / "empty").mkdir()
    assert "can't be read" in refusal(tmp_path / "empty")
    assert "no reference data set 'reference:mnist': use reference:digits" in refusal("reference:mnist")


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
        choose_sibling_folder("x", None, {"train": [first, second]})
    assert choose_sibling_folder("x", "b", {"train": [first, second]}) == "b"


@pytest.mark.parametrize(
    ("outer", "at"),
    [("train/cat/0.png", "the top"), ("photos/train/cat/0.png", "photos"), ("photos/test.parquet", "photos")],
)
def test_one_inside_another_may_be_read_and_not_the_other_with_it(outer, at):
    files = {"train": [outer, "photos/small/train/cat/0.png"]}
    said = f"has splits at {at} and others inside of it, which would be read as one: name one of photos/small"
    for asked in (None, "photos", "elsewhere"):
        with pytest.raises(AcquisitionError, match=said):
            choose_sibling_folder("x", asked, files)
    assert choose_sibling_folder("x", "photos/small", files) == "photos/small"


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
    assert choose_sibling_folder("x", None, files) is None


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
    assert patterns_without_duplicates({"train": ["train/cat/0.png", both], "test": [both]}) == patterns
    assert patterns_without_duplicates({"train": ["train/cat/0.png"], "test": [both]}) is None
