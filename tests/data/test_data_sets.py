"""Data sets in the shapes of the paper's, which of several is read, and the one line each kind of wrong data set gets."""

from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Value

from profiling_agent.data.dataset import choose_sibling_folder, depth_advice, patterns_without_duplicates
from profiling_agent.data.images import SplitImages
from profiling_agent.errors import AcquisitionError

CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
IMAGENETTE = ["tench", "English springer", "cassette player"]
IMAGENET = [
    "tench, Tinca tinca",
    "goldfish, Carassius auratus",
    "cassette player",
    "English springer, English springer spaniel",
]


def test_cifar10_with_its_img_column(parquet, make, draw):
    kind = ClassLabel(names=CIFAR10)
    rows = [make.table(np.arange(100) % 10, kind, image="img", first=first) for first in (0, 500)]
    drawn = draw(parquet(train=rows[0], test=rows[1]), CIFAR10)
    assert drawn.search.num_images == min(make.halves([make.png(500 + row) for row in range(100)]))
    assert {match.rule for match in drawn.labels} == {"id"}


def cifar100(make, rows, first):
    fine = make.table(
        np.arange(rows) % 4, ClassLabel(names=["apple", "pear", "trout", "shark"]), label="fine_label", first=first
    )
    coarse = datasets.Dataset.from_dict(
        {"coarse_label": [row % 4 // 2 for row in range(rows)]},
        features=datasets.Features({"coarse_label": ClassLabel(names=["fruit", "fish"])}),
    )
    return datasets.concatenate_datasets([fine, coarse], axis=1)


def test_cifar100_is_read_by_the_labels_that_map_best(parquet, make, draw):
    folder = parquet(train=cifar100(make, 80, 0), test=cifar100(make, 40, 500))
    fine = draw(folder, ["apple", "pear", "shark", "trout"])
    assert [match.model_id for match in fine.labels] == [0, 1, 3, 2]
    assert any("'fine_label'" in note and "not used: 'coarse_label'" in note for note in fine.notes)
    coarse = draw(folder, ["fish", "fruit"])
    assert [match.dataset_label for match in coarse.labels] == ["fruit", "fish"]
    assert any("'coarse_label', which maps best" in note for note in coarse.notes)


def test_a_named_label_column_is_used_even_where_another_maps_better(parquet, make, draw):
    folder = parquet(train=cifar100(make, 80, 0), test=cifar100(make, 40, 500))
    drawn = draw(folder, ["apple", "pear", "trout", "shark", "fruit", "fish"], label_column="coarse_label")
    assert [match.model_id for match in drawn.labels] == [4, 5]


@pytest.fixture
def imagenette(parquet, make, tmp_path):
    kind = ClassLabel(names=IMAGENETTE)
    for index, config in enumerate(("160px", "320px")):
        rows = [make.table(np.arange(60) % 3, kind, first=1000 * index + first) for first in (0, 500)]
        parquet(f"set-{config}", config, train=rows[0], validation=rows[1])
        (tmp_path / "imagenette").mkdir(exist_ok=True)
        (tmp_path / f"set-{config}" / config).rename(tmp_path / "imagenette" / config)
    card = "".join(f"- config_name: {name}\n  data_dir: {name}\n" for name in ("160px", "320px"))
    (tmp_path / "imagenette" / "README.md").write_text(f"---\nconfigs:\n{card}---\n")
    return tmp_path / "imagenette"


def test_imagenette_needs_a_config_and_lists_them(imagenette, draw):
    with pytest.raises(AcquisitionError, match="several configs, 160px, 320px: name one with dataset_config"):
        draw(imagenette, IMAGENET)
    with pytest.raises(AcquisitionError, match="no config '32px': use one of 160px, 320px"):
        draw(imagenette, IMAGENET, dataset_config="32px")


def test_a_card_that_reads_them_as_one_is_believed(imagenette, draw):
    card = "---\nconfigs:\n- config_name: all\n  data_files: [{split: train, path: '*/train*'}, {split: test, path: '*/val*'}]\n---\n"
    (imagenette / "README.md").write_text(card)
    assert draw(imagenette, IMAGENET, num_samples=40).search.num_images == 40


@pytest.mark.parametrize("where", ["160px", "sizes/160px"])
def test_folders_of_photographs_that_lie_side_by_side_are_never_read_as_one(tmp_path, make, draw, where):
    for size, first in ((where, 0), (where.replace("160", "320"), 1000)):
        for split in ("train", "val"):
            for index, name in enumerate(("tench", "cassette player")):
                place = tmp_path / "set" / size / split / name
                place.mkdir(parents=True)
                for row in range(20):
                    # What a file is called says nothing of its split.
                    (place / f"val-{row}.png").write_bytes(make.png(first + 500 * (split == "val") + 100 * index + row))
    with pytest.raises(AcquisitionError, match=f"several configs, {where}, {where.replace('160', '320')}: name one"):
        draw(tmp_path / "set", IMAGENET)
    drawn = draw(tmp_path / "set", IMAGENET, dataset_config=where)
    photographs = {make.png(500 + 100 * index + row) for index in range(2) for row in range(20)}
    held = SplitImages(drawn.heldout.path)
    assert len(held) > 5
    assert {held.encoded(row) for row in range(len(held))} <= photographs


@pytest.mark.parametrize("inside", ["set.py", "other.py"])
def test_a_data_set_that_needs_a_script_is_refused_and_not_run(tmp_path, draw, inside):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / inside).write_text("raise SystemExit('ran')")
    with pytest.raises(AcquisitionError, match=r"needs a Python script .*, which is never run"):
        draw(tmp_path / "set", CIFAR10)


def test_strings_are_labels_too(parquet, make, draw):
    names = np.array(["cat", "dog", "ant eater"])
    rows = [make.table(names[np.arange(60) % 3], Value("string"), first=first) for first in (0, 500)]
    drawn = draw(parquet(train=rows[0], test=rows[1]), ["dog", "Ant_Eater", "cat"])
    assert {match.dataset_label: match.model_id for match in drawn.labels} == {"ant eater": 1, "cat": 2, "dog": 0}


def test_plain_integers_are_class_ids_of_which_a_split_may_lack_some(parquet, make, draw):
    train = make.table(np.arange(60) % 4, Value("int64"))
    test = make.table(1 + np.arange(60) % 2, Value("int64"), first=500)
    drawn = draw(parquet(train=train, test=test), ["a", "b", "c", "d"])
    assert [match.model_id for match in drawn.labels] == [1, 2]
    assert set(SplitImages(drawn.heldout.path).labels) == {1, 2}
    assert set(SplitImages(drawn.calibration.path).labels) == {0, 1, 2, 3}
    # Counted from 1 they fit as well, until the model's answers, or a 0 in the train split, decide.
    assert [way.by for way in drawn.matchings] == ["number", "from-1"]


def test_a_train_split_of_numbers_that_the_model_lacks_is_refused_where_the_test_split_has_none(parquet, make, draw):
    train = make.table(1 + np.arange(60) % 4, Value("int64"))
    test = make.table(1 + np.arange(60) % 3, Value("int64"), first=500)
    with pytest.raises(AcquisitionError, match="'label' holds '4', which is no class of the model"):
        draw(parquet(train=train, test=test), ["a", "b", "c", "d"])


@pytest.fixture
def labelled(tmp_path, make):
    """Return a function that writes one picture over and over, with these labels as Arrow has them."""

    def write(labels):
        (tmp_path / "labelled").mkdir()
        cells = [{"bytes": make.png(0), "path": None}] * len(labels)
        for split in ("train", "test"):
            pq.write_table(pa.table({"image": cells, "label": labels}), tmp_path / f"labelled/{split}.parquet")
        return tmp_path / "labelled"

    return write


@pytest.mark.parametrize(
    ("labels", "seen"),
    [
        (pa.array([20_260_101, 20_261_122]), "as large as 20261122"),
        (pa.array(range(60)), "as large as 59"),
        (pa.array([0, 1, -7], pa.int8()), "as small as -7"),
        (pa.array([1, 2, 3]), "as large as 3"),
    ],
)
def test_whole_numbers_that_are_no_classes_of_the_model_are_refused_and_named(labelled, draw, labels, seen):
    with pytest.raises(AcquisitionError, match=f"label column 'label' holds .*{seen}.*the model has 3 classes, 0 to 2"):
        draw(labelled(labels), ["a", "b", "c"])


def test_numbers_that_classes_are_called_by_may_reach_beyond_the_last_class(labelled, draw):
    with pytest.raises(AcquisitionError, match=r"there more than once|no image"):
        draw(labelled(pa.array([1, 2, 3])), ["1", "2", "3"])


@pytest.mark.parametrize("wrong", [3, -2])
def test_a_class_label_that_the_data_set_has_no_name_for_is_refused(tmp_path, make, draw, wrong):
    (tmp_path / "set").mkdir()
    for split, first in (("train", 0), ("test", 500)):
        rows = make.table(np.arange(60) % 3, ClassLabel(names=["a", "b", "c"]), first=first)
        rows.to_parquet(tmp_path / "set" / f"{split}.parquet")
    table = pq.read_table(tmp_path / "set/test.parquet")
    labels = pa.array([wrong, *table["label"].to_pylist()[1:]])
    place = table.schema.get_field_index("label")
    pq.write_table(table.set_column(place, table.schema.field("label"), labels), tmp_path / "set/test.parquet")

    with pytest.raises(AcquisitionError, match=f"holds {wrong}, but the data set names 3 classes, 0 to 2: correct its"):
        draw(tmp_path / "set", ["a", "b", "c"])


@pytest.mark.parametrize(
    "labels",
    [
        pa.array([0.0, float("nan")]),
        pa.array([0, 1], pa.date32()),
        pa.array([b"a", b"b"]),
        pa.nulls(2),
    ],
)
def test_a_named_label_column_of_another_kind_is_refused(labelled, draw, labels):
    with pytest.raises(AcquisitionError, match="label_column 'label' holds neither class labels nor names"):
        draw(labelled(labels), ["a", "b"], label_column="label")


def test_a_column_of_captions_holds_no_names_of_classes(labelled, draw):
    captions = pa.array([f"a photo, number {row}" for row in range(25_001)])
    with pytest.raises(AcquisitionError, match="label column 'label' holds more than 25000 different values"):
        draw(labelled(captions), ["a", "b"])


@pytest.mark.parametrize("kind", [None, pa.binary(), pa.large_binary(), pa.binary_view()])
def test_parquet_that_datasets_did_not_write_is_read(tmp_path, make, draw, kind):
    (tmp_path / "plain").mkdir()
    for split, first in (("train", 0), ("test", 100)):
        held = [make.png(first + row) for row in range(60)]
        cells = pa.array(held, kind) if kind else [{"bytes": each, "path": ""} for each in held]
        pq.write_table(
            pa.table({"image": cells, "label": [row % 3 for row in range(60)]}), tmp_path / f"plain/{split}.parquet"
        )
    assert draw(tmp_path / "plain", ["a", "b", "c"]).search.num_images == min(
        make.halves([make.png(100 + row) for row in range(60)])
    )


@pytest.mark.parametrize("cat", ["train", "test tube", "eval-cat"])
@pytest.mark.parametrize("above", ["", "photos/"])
def test_a_class_may_be_called_as_a_split_is(photographs, cats_and_dogs, draw, cat, above):
    folder = photographs({above + path.replace("cat", cat): held for path, held in cats_and_dogs.items()})
    drawn = draw(folder, [cat, "dog"])
    assert [match.model_id for match in sorted(drawn.labels, key=lambda match: match.dataset_label == "dog")] == [0, 1]
    assert drawn.calibration.num_images == 80
    held = {
        (cats_and_dogs[f"test/{name}/{row}.png"], label)
        for label, name in enumerate(("cat", "dog"))
        for row in range(40)
    }
    split = SplitImages(drawn.search.path)
    assert {(split.encoded(row), split.labels[row]) for row in range(len(split))} <= held


@pytest.mark.parametrize("stray", ["train/cover.png", "test/cat/2023/0.png", "test/0.PNG"])
def test_an_image_that_lies_deeper_or_less_deep_than_most_is_named(photographs, cats_and_dogs, make, draw, stray):
    folder = photographs(cats_and_dogs | {stray: make.png(7777)})
    said = (
        rf"no label column: folders are labels only if.*1 of 161 don't lie as deep as 'train/cat/\d+\.png', "
        rf"the first is '{stray}': move it into its class's folder, or out"
    )
    with pytest.raises(AcquisitionError, match=said):
        draw(folder, ["cat", "dog"])
    (folder / stray).unlink()
    assert draw(folder, ["cat", "dog"]).calibration.num_images == 80


def test_what_is_no_image_may_lie_at_any_depth(photographs, cats_and_dogs, draw):
    folder = photographs(cats_and_dogs | {"train/notes.txt": b"", "README.txt": b"", "test/cat/more/notes.txt": b""})
    assert draw(folder, ["cat", "dog"]).calibration.num_images == 80


def test_images_without_folders_of_classes_have_no_label_column(photographs, cats_and_dogs, draw):
    folder = photographs({path.replace("cat/", "dog/1"): held for path, held in cats_and_dogs.items()})
    with pytest.raises(
        AcquisitionError, match=r"no label column: its columns are image \(.*\); name label_column, or .*metadata\.csv"
    ):
        draw(folder, ["cat", "dog"])


@pytest.mark.parametrize("together", [True, False])
def test_what_save_to_disk_wrote_is_read_in_place(tmp_path, make, draw, together):
    kind = ClassLabel(names=["cat", "dog"])
    rows: dict[Any, datasets.Dataset] = {
        split: make.table([0, 1] * 30, kind, first=first) for split, first in (("train", 0), ("test", 500))
    }
    saved = datasets.DatasetDict(rows) if together else rows["test"]
    saved.save_to_disk(tmp_path / "arrow")
    before = sorted(path.name for path in (tmp_path / "arrow").rglob("*"))
    drawn = draw(tmp_path / "arrow", ["cat", "dog"], split="test" if together else "train")
    num_search, num_heldout = make.halves([make.png(500 + row) for row in range(60)])
    calibrating = 0 if together else num_search // 2
    assert drawn.search.num_images == min(num_search - calibrating, num_heldout)
    assert sorted(path.name for path in (tmp_path / "arrow").rglob("*")) == before


def test_a_data_set_without_images_lists_its_columns(tmp_path, draw):
    (tmp_path / "set").mkdir()
    pq.write_table(pa.table({"text": ["a"], "label": [0]}), tmp_path / "set/test.parquet")
    with pytest.raises(AcquisitionError, match=r"no image column: its columns are text \(string\), label \(int64\)"):
        draw(tmp_path / "set", CIFAR10)


@pytest.mark.parametrize(
    ("kind", "column", "said"),
    [("csv", "image", "holds no images, as no CSV"), ("parquet", "image", "no image"), ("parquet", "path", "no image")],
)
def test_a_table_that_names_images_is_told_what_to_be_called(tmp_path, draw, kind, column, said):
    (tmp_path / "set").mkdir()
    rows = datasets.Dataset.from_dict({column: ["a/0.png", "a/1.png"], "label": ["cat", "dog"]})
    write = rows.to_csv if kind == "csv" else rows.to_parquet
    write(tmp_path / "set" / f"test.{kind}")
    with pytest.raises(AcquisitionError, match=rf"{said}.*called metadata\.csv, its column of paths file_name"):
        draw(tmp_path / "set", ["cat", "dog"])


def test_a_data_set_without_labels_lists_its_columns(parquet, make, draw):
    with pytest.raises(AcquisitionError, match=r"no label column: its columns are .*width"):
        draw(parquet(test=make.table([3, 4], Value("int64"), label="width")), CIFAR10)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"image_column": "picture"}, "image_column is 'picture', but the data set's columns are image"),
        ({"label_column": "picture"}, "label_column is 'picture', but the data set's columns are image"),
        ({"image_column": "label"}, "'label' holds no images"),
    ],
)
def test_a_named_column_that_is_not_there_or_holds_no_images_is_an_error(parquet, make, draw, query, said):
    folder = parquet(test=make.table([0, 1] * 30, ClassLabel(names=["cat", "dog"])))
    with pytest.raises(AcquisitionError, match=said):
        draw(folder, ["cat", "dog"], **query)


def test_an_empty_folder_and_an_unknown_reference_are_errors(tmp_path, draw):
    (tmp_path / "empty").mkdir()
    with pytest.raises(AcquisitionError, match="can't be read"):
        draw(tmp_path / "empty", CIFAR10)
    with pytest.raises(AcquisitionError, match="no reference data set 'reference:mnist': use reference:digits"):
        draw("reference:mnist", CIFAR10)


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
    said = (
        f"dataset 'x' has splits at {at} and others inside of it, which would be read as one: name one of photos/small"
    )
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


def test_of_images_at_two_depths_the_first_of_the_rarer_is_told():
    said = depth_advice(["train/a/0.png", "train/a/2/0.png", "train/a/1.png", "train/a/1/0.png", "train/a/2.png"])
    assert said is not None
    assert "2 of 5 don't lie as deep as 'train/a/0.png', the first is 'train/a/2/0.png'" in said
    assert depth_advice(["train/a/0.png", "test/b/0.png"]) is depth_advice([]) is None
