"""Three disjoint sets: how many, from where, which rows, and how a stream fills its quotas."""

import io
import itertools
import json
import re
import zipfile
from dataclasses import replace
from hashlib import sha256
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from data.image_sets import TEST, expected_sizes, images_of, is_heldout, png, pngs, sizes, table, train_and_test
from datasets import DatasetDict

from profiling_agent.data.dataset import DataQuery, choose_columns, open_data
from profiling_agent.data.images import SplitImages
from profiling_agent.data.splits import Pool, StoredImage, content_order, evaluation_sizes, stratified_order
from profiling_agent.errors import AcquisitionError
from profiling_agent.lib.logs import silent

NAMES = ["ant", "bee", "cow"]


def labels(split):
    return SplitImages(split.path).labels


def cycle(num_rows):
    """Return labels of three classes in turn."""
    return np.arange(num_rows) % 3


@pytest.fixture
def folder(parquet):
    return parquet(**train_and_test(cycle(600), NAMES, cycle(300)))


def test_calibration_comes_from_train_and_the_rest_from_test(folder, draw, capfd):
    drawn = draw(folder, NAMES)
    assert [part.source_split for part in (drawn.calibration, drawn.search, drawn.heldout)] == ["train", "test", "test"]
    assert sizes(drawn) == expected_sizes(pngs(300, TEST), 600)
    assert drawn.notes == ()
    assert capfd.readouterr() == ("", "")


def test_an_image_that_one_run_holds_out_is_searched_on_by_none(folder, draw):
    runs = [draw(folder, NAMES, seed=seed, num_samples=asked) for seed, asked in [(0, None), (1, 20), (2, 100), (3, 7)]]
    assert not any(map(is_heldout, images_of(*(run.search for run in runs))))
    assert all(map(is_heldout, images_of(*(run.heldout for run in runs))))


def test_a_few_copies_count_once_and_those_of_measured_images_are_left_out_of_the_train_split(parquet, draw):
    rows = train_and_test(cycle(257), NAMES, cycle(300))
    train = datasets.concatenate_datasets([rows["train"], rows["test"].select([7])])
    test = datasets.concatenate_datasets([rows["test"], rows["test"].select([4, 5])])
    drawn = draw(parquet(train=train, test=test), NAMES)
    assert "2 images of split 'test' are copies of others, and were counted once" in drawn.notes
    assert "1 images of split 'train' are in split 'test' too, and were left out" in drawn.notes
    assert drawn.search.num_images + drawn.heldout.num_images <= 300
    assert set(images_of(drawn.calibration)).isdisjoint(images_of(drawn.search, drawn.heldout))


def test_the_seed_alone_decides_which_rows(folder, draw):
    first, again, other = (draw(folder, NAMES, num_samples=50, num_recovery=100, seed=seed) for seed in (1, 1, 2))
    for name in ("calibration", "search", "heldout", "recovery"):
        assert getattr(first, name).path.read_bytes() == getattr(again, name).path.read_bytes()
    assert set(images_of(first.search)) != set(images_of(other.search))


def test_a_small_train_split_calibrates_as_a_whole_and_leaves_nothing_to_recover_with(parquet, draw, refusal):
    drawn = draw(folder := parquet(**train_and_test(cycle(60), NAMES)), NAMES)
    assert drawn.calibration.num_images == 60
    assert drawn.notes == ("only 60 images are there to calibrate with, not 256",)
    assert re.search(r"60 usable images.*none is left to recover with", refusal(folder, NAMES, num_recovery=10))


def three_splits(second, test=None):
    """Return a train split, one called `second` and a test split, which may have labels of its own."""
    found = {"train": cycle(270), second: cycle(270), "test": cycle(270) if test is None else test}
    return {name: table(held, NAMES, first=300 * i) for i, (name, held) in enumerate(found.items())}


def test_an_unlabelled_test_split_is_passed_over_unless_it_is_named(parquet, draw, refusal):
    folder = parquet(**three_splits("validation", test=[-1] * 100))
    assert draw(folder, NAMES).search.source_split == "validation"
    assert draw(folder, NAMES, split="train").search.source_split == "train"
    assert re.search(r"split 'test' has no labels", refusal(folder, NAMES, split="test"))


def test_a_test_split_without_the_label_column_is_passed_over(draw, refusal, tmp_path):
    rows: dict[Any, Any] = three_splits("dev")
    rows["test"] = rows["test"].remove_columns("label")
    DatasetDict(rows).save_to_disk(tmp_path / "held")
    assert draw(tmp_path / "held", NAMES).search.source_split == "dev"
    assert "no split 'devv': use one of train, dev, test" in refusal(tmp_path / "held", NAMES, split="devv")


@pytest.mark.parametrize("names", [NAMES, ["LABEL_0", "LABEL_1", "LABEL_2"]])
@pytest.mark.parametrize("saved", ["together", "apart", "parquet", "text"])
def test_splits_that_number_their_classes_differently_are_read_by_their_names(tmp_path, draw, parquet, names, saved):
    # The test split has no bee: what is number 1 there is number 2 in the train split.
    rows: dict[Any, Any] = {"train": table(cycle(90), NAMES), "test": table([0, 1] * 60, ["ant", "cow"], first=TEST)}
    if saved == "text":
        rows["test"] = table(["ant", "cow"] * 60, datasets.Value("string"), first=TEST)
    folder = tmp_path / "saved"
    if saved == "together":
        DatasetDict(rows).save_to_disk(folder)
    elif saved == "apart":
        for split, held in rows.items():
            held.save_to_disk(folder / split)
    else:
        folder = parquet(**rows)
    drawn = draw(folder, names)
    expected = {png(row): row % 3 for row in range(90)} | {png(TEST + row): 2 * (row % 2) for row in range(120)}
    for split in (drawn.calibration, drawn.search, drawn.heldout):
        assert labels(split).tolist() == [expected[image] for image in images_of(split)]
    assert drawn.calibration.num_images == 90


def test_a_train_split_without_the_labels_of_the_test_split_calibrates(tmp_path, draw, parquet, refusal):
    test = table([0, 1] * 60, ["ant", "bee"], first=TEST)
    others = {
        "unlabelled": table([-1] * 90, ["ant", "bee"]),
        "without": table(cycle(90), NAMES).remove_columns("label"),
        "of others": table(cycle(90), ["elk", "fox", "gnu"]),
    }
    for name, train in others.items():
        drawn = draw(parquet(name, train=train, test=test), ["ant", "bee"])
        assert drawn.notes[0] == "split 'train' has no labels that the model knows, and calibrates without"
        assert sorted(images_of(drawn.calibration)) == sorted(pngs(90))
        assert sizes(drawn) == expected_sizes(pngs(120, TEST), 90)
    folder = parquet("numbered", train=others["without"], test=table([0, 1] * 60, ["1", "0"], first=TEST))
    assert "'train' has none to choose by: set label_match to number or place" in refusal(folder, ["0", "1"])
    assert draw(folder, ["0", "1"], label_match="number").calibration.num_images == 90
    renamed = parquet("renamed", train=table(cycle(90), NAMES, image="photo"), test=test)
    assert "calibration images come from split 'test' too" in draw(renamed, NAMES).notes[0]


def test_saved_tables_that_were_damaged_or_have_no_rows_are_told(tmp_path, refusal):
    DatasetDict({"train": table(cycle(90), NAMES), "test": table([], NAMES)}).save_to_disk(tmp_path / "empty")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "dataset_dict.json").write_text("{}")
    for name in ("empty", "damaged"):
        assert "save it again with save_to_disk, with rows in every split" in refusal(tmp_path / name, NAMES)


def test_train_alone_is_an_error_unless_it_was_named(parquet, draw, refusal):
    folder = parquet(train=table(cycle(1200), NAMES))
    assert "no test or validation split" in refusal(folder, NAMES)
    drawn = draw(folder, NAMES, split="train")
    assert sizes(drawn) == expected_sizes(pngs(1200))
    assert len(set(images_of(drawn.calibration, drawn.search, drawn.heldout))) == sum(sizes(drawn))
    assert any("optimistic" in note for note in drawn.notes)
    assert "no train split besides 'train'" in refusal(folder, NAMES, split="train", num_recovery=10)


def test_test_alone_calibrates_on_test_images_that_are_not_measured_on(parquet, draw, refusal):
    folder = parquet(test=table(cycle(400), NAMES))
    drawn = draw(folder, NAMES)
    assert sizes(drawn) == expected_sizes(pngs(400))
    assert "come from split 'test' too" in drawn.notes[0]
    assert re.search(r"no train split besides 'test'.*set recover_epochs to 0", refusal(folder, NAMES, num_recovery=10))


def test_images_to_recover_with_come_from_train_and_are_in_no_other_set(folder, draw):
    plain, drawn = draw(folder, NAMES), draw(folder, NAMES, num_recovery=300)
    assert plain.recovery is None
    assert (drawn.recovery.source_split, drawn.recovery.num_images) == ("train", 300)
    assert np.bincount(labels(drawn.recovery)).tolist() == [100, 100, 100]
    assert set(images_of(drawn.recovery)) <= set(pngs(600)) - set(images_of(drawn.calibration))
    for name in ("calibration", "search", "heldout"):
        assert images_of(getattr(plain, name)) == images_of(getattr(drawn, name))
    # Asked for more, all that calibration leaves.
    assert draw(folder, NAMES, num_recovery=5000).recovery.num_images == 600 - 256


def test_images_without_a_known_label_are_left_out_and_counted(parquet, draw):
    drawn = draw(parquet(**train_and_test(cycle(600), ["cow", "ant", "unicorn"], cycle(300))), NAMES)
    known = [png(TEST + row) for row in range(300) if row % 3 != 2]
    assert sizes(drawn) == expected_sizes(known, 400)
    assert sorted(set(labels(drawn.search).tolist())) == [0, 2]
    assert "100 images of split 'test' have no label that the model knows" in drawn.notes
    assert "images of labels that match no class of the model or several were left out: 'unicorn'" in drawn.notes
    assert [match.rule for match in drawn.matchings[0].matches] == ["name", "name", "unmapped"]


def test_a_damaged_image_is_skipped_and_counted(parquet, draw):
    images = [b"damaged 10" if row == 10 else png(TEST + row) for row in range(300)]
    assert is_heldout(images[10])
    test = table(cycle(300), NAMES, first=TEST, broken=[10])
    drawn = draw(parquet(train=table(cycle(600), NAMES), test=test), NAMES)
    num_calibrating, num_search, num_heldout = expected_sizes(images, 600)
    assert sizes(drawn) == (num_calibrating, num_search, num_heldout - 1)
    assert (drawn.search.num_skipped, drawn.heldout.num_skipped) == (0, 1)


def test_more_than_one_damaged_image_in_a_hundred_is_an_error(photographs, cats_and_dogs, refusal):
    # All that are to be held out are drawn.
    damaged = filter(is_heldout, (f"damaged {n}".encode() for n in itertools.count()))
    bad = {f"test/cat/bad{n}.png": data for n, data in enumerate(itertools.islice(damaged, 7))}
    message = refusal(photographs(cats_and_dogs | bad))
    why = "its beginning is damaged, or of no format that is read: repair"
    assert re.search(rf"7 of \d+ images of split 'test'.*'test/cat/bad\d\.png'\): {why}", message)


CLASSES = np.repeat([0, 1, 2], [600, 300, 100])
DIGESTS = [sha256(str(number).encode()).digest() for number in range(1000)]


def by_content(rows):
    """Return these rows in the order of their images' content."""
    images = [StoredImage(int(CLASSES[row]), 0, 0, DIGESTS[row], str(row)) for row in rows]
    return [int(image.location) for image in content_order(images)]


@pytest.mark.parametrize("order", [stratified_order(CLASSES, seed=3), by_content(range(1000))])
def test_every_prefix_holds_each_class_in_its_share(order):
    assert sorted(order) == list(range(1000))
    for size in (10, 50, 500):
        counts = np.bincount(CLASSES[order[:size]], minlength=3)
        assert np.abs(counts - size * np.array([0.6, 0.3, 0.1])).max() <= 1


@pytest.mark.parametrize(
    ("there", "asked", "expected"),
    [((5040, 4960), None, (2000, 4960)), ((490, 510), None, (490, 510)), ((510, 490), None, (490, 490)),
     ((25_000, 25_000), None, (2000, 8000)), ((500, 500), 100, (100, 400)), ((95, 105), 100, (95, 105)),
     ((3, 4), None, (3, 4)), ((64, 56), 100, "'test' has 120 usable images.*at most 60"),
     ((1, 0), None, "has 1 usable images.*name a larger split or data set"), ((0, 5), None, "has 5 usable images")],
)  # fmt: skip
def test_as_many_are_held_out_as_are_searched_on_and_at_most_four_times_as_many(
    there: tuple[int, int], asked, expected
):
    if isinstance(expected, tuple):
        assert evaluation_sizes(*there, asked, "test") == expected
    else:
        with pytest.raises(AcquisitionError, match=expected):
            evaluation_sizes(*there, asked, "test")


POOLS = ["ant", "bee"]
NUM_IMAGES = 200
IMAGES = pngs(NUM_IMAGES)


@pytest.fixture
def opened(tmp_path_factory):
    """Return a function that opens a folder and its columns, as one of this machine or as a repository."""

    def call(folder, *, streamed, names=POOLS):
        data = open_data(DataQuery(dataset=str(folder)), cache=tmp_path_factory.mktemp("cache"), progress=silent)
        if streamed:
            data = replace(data, folder=None)
        return data, choose_columns(data, dict(enumerate(names)))

    return call


@pytest.mark.parametrize("streamed", [False, True])
def test_images_of_an_archive_come_with_their_labels_their_digests_and_their_files(opened, tmp_path, streamed):
    lines = [json.dumps({"file_name": f"{row:04}.png", "label": POOLS[row % 2]}) for row in range(NUM_IMAGES)]
    with zipfile.ZipFile(tmp_path / "test.zip", "w") as packed:
        for row, image in enumerate(IMAGES):
            packed.writestr(f"{row:04}.png", image)
        packed.writestr("metadata.jsonl", "\n".join(lines))
    data, columns = opened(tmp_path, streamed=streamed)
    pool = Pool.read(data, columns, NUM_IMAGES, io.BytesIO(), silent)

    for image in pool.images:
        pool.spool.seek(image.offset)
        encoded = pool.spool.read(image.size)
        number = IMAGES.index(encoded)
        assert (image.label, image.digest) == (number % 2, sha256(encoded).digest())
        assert re.fullmatch(rf"row \d+ \('zip://{number:04}.png::test.zip'\)", image.location)
    assert {image.digest for image in pool.images} == {sha256(image).digest() for image in IMAGES}


def test_a_label_that_the_first_rows_of_a_stream_lack_is_noted_and_left_out(opened, tmp_path):
    (tmp_path / "test").mkdir()
    labels = [POOLS[row % 1000 == 0] for row in range(2100)] + ["cat"] * 900
    rows = pa.table({"image": [{"bytes": png(0), "path": None}] * len(labels), "label": labels})
    with pa.ipc.new_stream(str(tmp_path / "test" / "0.arrow"), rows.schema) as stream:
        stream.write_table(rows)
    data, columns = opened(tmp_path, streamed=True, names=[*POOLS, "cat"])
    (note,) = columns.notes
    assert "the first 2000 rows of split 'test', a stream, have 2 labels: the verdict is about no" in note
    pool = Pool.read(data, columns, NUM_IMAGES, io.BytesIO(), silent)
    assert {image.label for image in pool.images} == {0, 1}


def test_a_stream_is_drawn_in_equal_numbers_per_class_and_filled_with_spare_images(opened, tmp_path):
    table([*[0] * 60, *[1] * 4, *[0] * 60], POOLS).to_parquet(tmp_path / "test.parquet")
    data, columns = opened(tmp_path, streamed=True)
    for num_rows, expected in ((6, [3, 3]), (20, [16, 4]), (300, [120, 4])):
        pool = Pool.read(data, columns, num_rows, io.BytesIO(), silent)
        assert np.bincount([image.label for image in pool.images]).tolist() == expected
