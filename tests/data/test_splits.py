"""Three disjoint sets: how many, from where, which rows, and how a stream fills its quotas."""

import hashlib
import io
import itertools
import json
import re
import tempfile
import zipfile
from dataclasses import replace
from hashlib import sha256
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, DatasetDict
from scipy import stats

from profiling_agent.data.columns import choose_columns
from profiling_agent.data.dataset import DataQuery, open_data
from profiling_agent.data.images import SplitImages
from profiling_agent.data.splits import (
    ClassQuotas,
    content_order,
    evaluation_sizes,
    num_images_to_read,
    open_pool,
    partition_by_content,
    stratified_order,
)
from profiling_agent.errors import AcquisitionError
from profiling_agent.lib.progress import silent

NAMES = ["ant", "bee", "cow"]
KIND = ClassLabel(names=NAMES)


def digests(split):
    images = SplitImages(split.path)
    return [hashlib.sha256(images.encoded(row)).hexdigest() for row in range(len(images))]


def labels(split):
    return SplitImages(split.path).labels


@pytest.fixture
def folder(parquet, make):
    train = make.table(np.arange(600) % 3, KIND)
    test = make.table(np.arange(300) % 3, KIND, first=1000)
    return parquet(train=train, test=test)


def test_calibration_comes_from_train_and_the_rest_from_test(folder, draw, make):
    drawn = draw(folder, NAMES)
    num_search, num_heldout = make.halves([make.png(1000 + row) for row in range(300)])
    assert (drawn.calibration.source_split, drawn.calibration.num_images) == ("train", 256)
    assert (drawn.search.source_split, drawn.search.num_images) == ("test", min(num_search, num_heldout))
    assert (drawn.heldout.source_split, drawn.heldout.num_images) == ("test", num_heldout)
    assert drawn.notes == ()


def test_a_data_set_is_read_through_the_folder_that_the_images_go_to(folder, draw, tmp_path, monkeypatch):
    # What `datasets` makes of files is as large as they are, and /tmp may be memory.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    drawn = draw(folder, NAMES)
    assert {path.name for path in drawn.search.path.parent.iterdir()} == {
        f"{name}.parquet" for name in ("calibration", "search", "heldout")
    }
    assert tempfile.tempdir == str(tmp_path / "nowhere")


def test_an_image_that_one_run_holds_out_is_searched_on_by_none(folder, draw):
    runs = [draw(folder, NAMES, seed=seed, num_samples=asked) for seed, asked in [(0, None), (1, 20), (2, 100), (3, 7)]]
    searched = {digest for run in runs for digest in digests(run.search)}
    held = {digest for run in runs for digest in digests(run.heldout)}
    assert searched.isdisjoint(held)
    assert {digest[-1] in "13579bdf" for digest in held} == {True}


def test_images_that_are_there_twice_are_counted_once_and_said(parquet, make, draw):
    rows = make.table(np.arange(300) % 3, KIND, first=1000)
    twice = datasets.concatenate_datasets([rows, rows.select([4, 5])])
    drawn = draw(parquet(train=make.table(np.arange(600) % 3, KIND), test=twice), NAMES)
    assert "2 images of split 'test' are copies of others, and were counted once" in drawn.notes
    assert drawn.search.num_images + drawn.heldout.num_images <= 300


def test_images_of_the_train_split_that_are_measured_on_are_left_out(parquet, make, draw):
    train, test = make.table(np.arange(600) % 3, KIND), make.table(np.arange(300) % 3, KIND, first=1000)
    few = parquet("few", train=datasets.concatenate_datasets([train.select(range(257)), test.select([7])]), test=test)
    drawn = draw(few, NAMES)
    assert "1 images of split 'train' are in split 'test' too, and were left out" in drawn.notes
    assert set(digests(drawn.calibration)).isdisjoint({*digests(drawn.search), *digests(drawn.heldout)})


def test_a_copy_and_what_it_is_a_copy_of_are_named_by_their_files(photographs, cats_and_dogs, draw):
    folder = photographs(cats_and_dogs | {"test/cat/again.png": cats_and_dogs["test/cat/7.png"]})
    with pytest.raises(AcquisitionError, match=r"1 of 81 images of split 'test'") as caught:
        draw(folder, ["cat", "dog"])
    (pair,) = re.findall(r"the first copy is '(\S+)', of '(\S+)': remove", str(caught.value))
    assert set(pair) == {"test/cat/7.png", "test/cat/again.png"}


def test_an_image_of_both_splits_is_named_by_its_file_in_each(photographs, cats_and_dogs, draw):
    folder = photographs(cats_and_dogs | {"train/dog/leaked.png": cats_and_dogs["test/dog/7.png"]})
    said = r"1 of 81 images.*in split 'test' too, the first is 'train/dog/leaked\.png', there 'test/dog/7\.png': acc"
    with pytest.raises(AcquisitionError, match=said):
        draw(folder, ["cat", "dog"])


def test_fewer_images_than_classes_are_said(parquet, make, draw):
    kind = ClassLabel(names=[f"c{number}" for number in range(50)])
    drawn = draw(parquet(test=make.table(np.arange(100) % 50, kind)), kind.names)
    assert any("are fewer than the data set's 50 classes" in note for note in drawn.notes)


def test_the_seed_alone_decides_which_rows(folder, draw):
    first, again, other = (draw(folder, NAMES, num_samples=50, seed=seed) for seed in (1, 1, 2))
    assert digests(first.search) == digests(again.search)
    assert digests(first.calibration) == digests(again.calibration)
    assert set(digests(first.search)) != set(digests(other.search))


def test_a_small_train_split_is_used_whole_and_said_so(parquet, make, draw):
    drawn = draw(
        parquet(train=make.table([0, 1, 2] * 20, KIND), test=make.table([0, 1, 2] * 20, KIND, first=100)), NAMES
    )
    assert drawn.calibration.num_images == 60
    assert drawn.notes == ("only 60 images are there to calibrate with, not 256",)


def test_the_named_split_goes_before_test(parquet, make, draw):
    rows = {
        name: make.table([0, 1, 2] * 90, KIND, first=300 * i) for i, name in enumerate(("train", "validation", "test"))
    }
    assert draw(parquet(**rows), NAMES, split="validation").heldout.source_split == "validation"


def test_an_unlabelled_test_split_is_passed_over(parquet, make, draw):
    rows = [make.table([0, 1, 2] * 90, KIND, first=300 * i) for i in range(2)]
    hidden = make.table([-1] * 100, KIND, first=900)
    assert draw(parquet(train=rows[0], validation=rows[1], test=hidden), NAMES).search.source_split == "validation"


@pytest.mark.parametrize("on_disk", ["parquet", "arrow"])
def test_a_test_split_without_the_label_column_is_passed_over(parquet, make, draw, tmp_path, on_disk):
    rows: dict[Any, Any] = {
        name: make.table([0, 1, 2] * 90, KIND, first=300 * i) for i, name in enumerate(("train", "dev", "test"))
    }
    rows["test"] = rows["test"].remove_columns("label")
    if on_disk == "parquet":
        folder = parquet(**rows)
    else:
        folder = tmp_path / "arrow"
        DatasetDict(rows).save_to_disk(folder)
    assert draw(folder, NAMES).search.source_split == "dev"


def test_an_unlabelled_split_that_was_named_is_an_error(parquet, make, draw):
    folder = parquet(train=make.table([0, 1, 2], KIND), test=make.table([-1] * 9, KIND, first=9))
    with pytest.raises(AcquisitionError, match=r"'test'.*has no labels"):
        draw(folder, NAMES, split="test")


def test_a_split_with_a_typo_gets_a_suggestion(parquet, make, draw):
    folder = parquet(train=make.table([0, 1, 2] * 20, KIND), validation=make.table([0, 1, 2] * 20, KIND, first=100))
    with pytest.raises(AcquisitionError, match="use one of train, validation; did you mean 'validation'"):
        draw(folder, NAMES, split="validaton")


def test_splits_that_number_their_classes_differently_are_read_by_their_names(tmp_path, make, draw):
    # The test split has no cow: what is number 1 there is number 2 in the train split.
    rows: dict[Any, Any] = {
        "train": make.table([0, 1, 2] * 30, ClassLabel(names=["ant", "bee", "cow"])),
        "test": make.table([0, 1] * 60, ClassLabel(names=["ant", "cow"]), first=500),
    }
    DatasetDict(rows).save_to_disk(tmp_path / "set")
    drawn = draw(tmp_path / "set", NAMES)
    names = {hashlib.sha256(make.png(row)).hexdigest(): row % 3 for row in range(90)}
    names |= {hashlib.sha256(make.png(500 + row)).hexdigest(): 2 * (row % 2) for row in range(120)}
    for split in (drawn.calibration, drawn.search, drawn.heldout):
        assert labels(split).tolist() == [names[digest] for digest in digests(split)]
    assert drawn.calibration.num_images == 90


def renamed(pictures, **names):
    """Return pictures in other top folders."""
    return {
        path.replace(top, names.get(top, top), 1): held
        for path, held in pictures.items()
        for top in [path.split("/")[0]]
    }


def test_folders_that_would_be_splits_but_for_their_case_are_told(photographs, cats_and_dogs, draw):
    folder = photographs(renamed(cats_and_dogs, train="Train", test="Val"))
    train, val = (f"its folder '{name}' isn't read as a split: call it '{name.lower()}'" for name in ("Train", "Val"))
    with pytest.raises(AcquisitionError, match=rf"validation split \(it has train\): {train}; {val}$"):
        draw(folder, ["cat", "dog"])
    with pytest.raises(AcquisitionError, match=f"has no split 'val': use one of train; {train}; {val}$"):
        draw(folder, ["cat", "dog"], split="val")


def test_a_train_folder_in_capitals_is_told_where_one_is_needed_to_recover(photographs, cats_and_dogs, draw):
    folder = photographs(renamed(cats_and_dogs, train="TRAIN"))
    said = "no train split besides 'test'.*its folder 'TRAIN' isn't read as a split: call it 'train'$"
    with pytest.raises(AcquisitionError, match=said):
        draw(folder, ["cat", "dog"], num_recovery=10)


def test_train_alone_is_an_error_unless_it_was_named(parquet, make, draw):
    folder = parquet(train=make.table(np.arange(1200) % 3, KIND))
    with pytest.raises(AcquisitionError, match="no labelled test or validation split"):
        draw(folder, NAMES)
    drawn = draw(folder, NAMES, split="train")
    num_search, num_heldout = make.halves([make.png(row) for row in range(1200)])
    sizes = (drawn.calibration.num_images, drawn.search.num_images, drawn.heldout.num_images)
    assert sizes == (256, num_search - 256, num_heldout)
    everything = [*digests(drawn.calibration), *digests(drawn.search), *digests(drawn.heldout)]
    assert len(set(everything)) == 1200
    assert "optimistic" in drawn.notes[0]


def test_test_alone_calibrates_on_test_images_that_are_not_measured_on(parquet, make, draw):
    drawn = draw(parquet(test=make.table(np.arange(400) % 3, KIND)), NAMES)
    num_search, num_heldout = make.halves([make.png(row) for row in range(400)])
    sizes = (drawn.calibration.num_images, drawn.search.num_images, drawn.heldout.num_images)
    assert sizes == (num_search // 2, num_search - num_search // 2, num_heldout)
    assert "come from split 'test' too" in drawn.notes[0]


def test_images_to_recover_with_come_from_train_and_are_in_no_other_set(folder, draw, make):
    plain, drawn = draw(folder, NAMES), draw(folder, NAMES, num_recovery=300)
    train = {hashlib.sha256(make.png(row)).hexdigest() for row in range(600)}
    assert plain.recovery is None
    assert drawn.notes == ("pruned models are trained on 300 images of split 'train', which are in no other set",)
    assert (drawn.recovery.source_split, drawn.recovery.num_images) == ("train", 300)
    assert np.bincount(labels(drawn.recovery)).tolist() == [100, 100, 100]
    assert set(digests(drawn.recovery)) <= train - set(digests(drawn.calibration))
    for name in ("calibration", "search", "heldout"):
        assert digests(getattr(plain, name)) == digests(getattr(drawn, name))


def test_all_that_calibration_leaves_of_train_is_recovered_with_where_more_was_asked_for(folder, draw):
    assert draw(folder, NAMES, num_recovery=5000).recovery.num_images == 600 - 256


@pytest.mark.parametrize(("split", "query"), [("test", {}), ("train", {"split": "train"})])
def test_recovery_never_trains_on_the_split_that_is_measured_on(parquet, make, draw, split, query):
    folder = parquet(**{split: make.table(np.arange(1200) % 3, KIND)})
    with pytest.raises(AcquisitionError, match=f"no train split besides '{split}'.*set recover_epochs to 0"):
        draw(folder, NAMES, num_recovery=10, **query)


def test_a_train_split_that_calibration_uses_up_leaves_nothing_to_recover_with(parquet, make, draw):
    rows = {"train": make.table(np.arange(256) % 3, KIND), "test": make.table(np.arange(100) % 3, KIND, first=500)}
    with pytest.raises(AcquisitionError, match=r"256 usable images.*none is left to recover with"):
        draw(parquet(**rows), NAMES, num_recovery=10)


def test_images_without_a_known_label_are_left_out_and_counted(parquet, make, draw):
    kind = ClassLabel(names=["cow", "ant", "unicorn"])
    test = make.table(np.arange(300) % 3, kind, first=1000)
    drawn = draw(parquet(train=make.table(np.arange(600) % 3, kind), test=test), NAMES)
    num_search, num_heldout = make.halves([make.png(1000 + row) for row in range(300) if row % 3 != 2])
    assert (drawn.search.num_images, drawn.heldout.num_images) == (min(num_search, num_heldout), num_heldout)
    assert sorted(set(labels(drawn.search).tolist())) == [0, 2]
    assert "100 images of split 'test' have no label that the model knows" in drawn.notes
    left_out = (
        "1 of the data set's 3 labels match no class of the model or several, and their images were left out: 'unicorn'"
    )
    assert left_out in drawn.notes
    assert [match.rule for match in drawn.labels] == ["name", "name", "unmapped"]


def test_a_damaged_image_is_skipped_and_counted(parquet, make, draw):
    test = make.table(np.arange(300) % 3, KIND, first=1000, broken=[7])
    drawn = draw(parquet(train=make.table(np.arange(600) % 3, KIND), test=test), NAMES)
    used = drawn.search.num_images + drawn.heldout.num_images
    skipped = drawn.search.num_skipped + drawn.heldout.num_skipped
    images = [b"damaged 7" if row == 7 else make.png(1000 + row) for row in range(300)]
    num_search, num_heldout = make.halves(images)
    assert used + skipped == min(num_search, num_heldout) + num_heldout
    assert skipped == (1 if num_search <= num_heldout or make.is_heldout(images[7]) else drawn.search.num_skipped)


def test_more_than_one_damaged_image_in_a_hundred_is_an_error(parquet, make, draw):
    test = make.table(np.arange(300) % 3, KIND, first=1000, broken=range(11, 21))
    folder = parquet(train=make.table(np.arange(600) % 3, KIND), test=test)
    why = "its beginning is damaged, or of no format that is read"
    said = rf"\d+ of \d+ images.*'test'.*the first is row 1\d \({why}\), others are row \d\d(, row \d\d){{,3}}: repair"
    with pytest.raises(AcquisitionError, match=said):
        draw(folder, NAMES)


@pytest.mark.parametrize(("called", "shown"), [("bad", "bad"), ("b\x1b", r"b\x1b"), ("b\u202e", r"b\u202e")])
def test_five_damaged_images_are_named_by_their_files(photographs, cats_and_dogs, make, draw, called, shown):
    # All that are to be held out are drawn.
    damaged = (data for data in (f"damaged {n}".encode() for n in itertools.count()) if make.is_heldout(data))
    bad = {f"test/cat/{called}{n}.png": data for n, data in enumerate(itertools.islice(damaged, 7))}
    with pytest.raises(AcquisitionError, match=r"7 of \d+ images drawn from split 'test' can't be decoded") as caught:
        draw(photographs(cats_and_dogs | bad), ["cat", "dog"])
    named = re.findall(rf"'test/cat/{re.escape(shown)}\d\.png'", str(caught.value))
    assert len(named) == len(set(named)) == 5
    assert " row " not in str(caught.value)


def test_the_same_draw_writes_the_same_files(folder, draw):
    first, again = (draw(folder, NAMES, num_recovery=100) for _ in range(2))
    for name in ("calibration", "search", "heldout", "recovery"):
        assert getattr(first, name).path.read_bytes() == getattr(again, name).path.read_bytes()
    assert sorted(path.stem for path in first.search.path.parent.iterdir()) == [
        "calibration",
        "heldout",
        "recovery",
        "search",
    ]


def test_nothing_is_printed_while_drawing(folder, draw, capfd):
    draw(folder, NAMES)
    assert capfd.readouterr() == ("", "")


def test_every_prefix_holds_each_class_in_its_share():
    labels = np.repeat([0, 1, 2], [600, 300, 100])
    drawn = labels[stratified_order(labels, seed=3)]
    for size in (10, 50, 500):
        counts = np.bincount(drawn[:size], minlength=3)
        assert np.abs(counts - size * np.array([0.6, 0.3, 0.1])).max() <= 1


def test_the_order_is_a_permutation_that_the_seed_decides():
    labels = np.tile([0, 1, 2, 3], 25)
    first, again, other = (stratified_order(labels, seed) for seed in (0, 0, 1))
    assert sorted(first) == list(range(100))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_same_images_are_drawn_whatever_order_the_classes_come_in():
    names = np.array([f"{label}/{number}" for label in range(3) for number in range(30)])
    labels = np.repeat([0, 1, 2], 30)
    moved = np.concatenate([np.arange(60, 90), np.arange(0, 30), np.arange(30, 60)])
    here = names[stratified_order(labels, 7)]
    there = names[moved][stratified_order(labels[moved], 7)]
    assert here.tolist() == there.tolist()


@pytest.mark.parametrize(
    ("there", "asked", "expected"),
    [((5040, 4960), None, (2000, 4960)), ((490, 510), None, (490, 510)), ((510, 490), None, (490, 490)),
     ((25_000, 25_000), None, (2000, 8000)), ((500, 500), 100, (100, 400)), ((95, 105), 100, (95, 105)),
     ((3, 4), None, (3, 4))],
)  # fmt: skip
def test_as_many_are_held_out_as_are_searched_on_and_at_most_four_times_as_many(there, asked, expected):
    num_search, num_heldout = there
    assert evaluation_sizes(num_search, num_heldout, asked, "test") == expected


def test_a_split_too_small_to_hold_out_as_many_says_how_many_there_are():
    with pytest.raises(AcquisitionError, match=r"'test' has 120 usable images.*at most 60"):
        evaluation_sizes(64, 56, 100, "test")


@pytest.mark.parametrize("there", [(1, 0), (0, 1), (5, 0)])
def test_a_split_of_which_nothing_can_be_held_out_or_searched_on_is_too_small(there):
    with pytest.raises(AcquisitionError, match=f"has {sum(there)} usable images"):
        evaluation_sizes(there[0], there[1], None, "test")


@pytest.mark.parametrize(("asked", "num_calibration"), [(None, 0), (100, 0), (100, 256), (1, 0)])
def test_so_many_are_looked_at_that_chance_leaves_enough_on_either_side(asked, num_calibration):
    wanted, num_rows = asked or 2000, num_images_to_read(asked, num_calibration)
    most = max(4 * wanted, wanted + num_calibration)
    # Half of them is most + 3 sqrt(2 most), six standard deviations of a fair coin above most.
    assert stats.binom.cdf(most - 1, num_rows, 0.5) < 2e-3
    assert num_rows < 2.5 * most + 20


def test_the_content_decides_the_side_whoever_is_beside_it():
    digests = [hashlib.sha256(bytes([number])).digest() for number in range(100)]
    found = partition_by_content(range(100), digests)
    assert sorted([*found.search, *found.heldout]) == list(range(100))
    assert all(digests[row][-1] % 2 == 1 for row in found.heldout)
    assert all(digests[row][-1] % 2 == 0 for row in found.search)
    assert partition_by_content(range(50, 100), digests[50:]).heldout == [row for row in found.heldout if row >= 50]


def test_the_first_of_equal_images_counts_and_a_row_without_one_is_nobodys_copy():
    same = hashlib.sha256(b"same").digest()
    found = partition_by_content([7, 3, 9, 1], [same, None, same, None])
    assert found.repeated == [9]
    assert sorted([*found.search, *found.heldout]) == [1, 3, 7]


def test_an_order_by_content_is_stratified_and_the_same_wherever_the_images_lie():
    labels = np.repeat([0, 1, 2], [600, 300, 100])
    digests = [hashlib.sha256(str(number).encode()).digest() for number in range(1000)]
    order = content_order(labels, digests)
    for size in (10, 50, 500):
        counts = np.bincount(labels[order[:size]], minlength=3)
        assert np.abs(counts - size * np.array([0.6, 0.3, 0.1])).max() <= 1
    moved = np.random.default_rng(0).permutation(1000)
    again = content_order(labels[moved], [digests[row] for row in moved])
    assert moved[again].tolist() == order.tolist()


def test_quotas_stop_as_soon_as_every_class_has_its_share():
    quotas, labels = ClassQuotas(6, 3), [0, 0, 0, 0, 1, 1, 2, 0, 2, 1, 1]
    read = []
    for key, label in enumerate(labels):
        quotas.offer(key, label)
        read.append(key)
        if quotas.is_full:
            break
    assert read[-1] == 8
    assert quotas.drawn() == [0, 1, 4, 5, 6, 8]


def test_spares_fill_the_shares_of_classes_that_never_come():
    quotas = ClassQuotas(6, 3)
    dropped = [key for index, label in enumerate([0, 0, 0, 0, 0, 0, 0, 1]) for key in quotas.offer(index, label)]
    assert quotas.drawn() == [0, 1, 7, 2, 3, 4]
    assert sorted({*quotas.drawn(), *dropped}) == list(range(8))


def test_a_stream_never_keeps_more_images_than_are_wanted():
    quotas, kept = ClassQuotas(10, 5), set()
    for key in range(1000):
        kept.add(key)
        kept -= set(quotas.offer(key, 0 if key < 990 else 1))
        assert len(kept) <= 10
    assert set(quotas.drawn()) <= kept


POOLS = ["ant", "bee"]
NUM_IMAGES = 200


@pytest.fixture
def pictures(tmp_path, make):
    """Return a folder of pictures in folders of their classes."""
    for row in range(NUM_IMAGES):
        place = tmp_path / "pictures" / "test" / POOLS[row % 2] / f"{row:04}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(make.png(row))
    return tmp_path / "pictures"


@pytest.fixture
def archived(tmp_path, make):
    """Return a folder with an archive of pictures."""
    (tmp_path / "archived").mkdir()
    with zipfile.ZipFile(tmp_path / "archived" / "test.zip", "w") as packed:
        for row in range(NUM_IMAGES):
            packed.writestr(f"{row:04}.png", make.png(row))
        lines = [json.dumps({"file_name": f"{row:04}.png", "label": POOLS[row % 2]}) for row in range(NUM_IMAGES)]
        packed.writestr("metadata.jsonl", "\n".join(lines))
    return tmp_path / "archived"


@pytest.fixture
def table(parquet, make):
    """Return a folder with a table that holds pictures."""
    return parquet(test=make.table(np.arange(NUM_IMAGES) % 2, ClassLabel(names=POOLS)))


@pytest.fixture
def opened(tmp_path):
    """Return a function that opens a folder and its columns, as one of this machine or as a repository."""
    (tmp_path / "cache").mkdir()

    def call(folder, *, streamed, names=POOLS):
        data = open_data(DataQuery(dataset=str(folder)), cache=tmp_path / "cache", progress=silent)
        if streamed:
            data = replace(data, place=replace(data.place, folder=None))
        return data, choose_columns(data, "test", dict(enumerate(names)))

    return call


@pytest.fixture
def pool(opened):
    """Return a function that opens a folder's pool, its images read."""

    def call(folder, *, streamed):
        data, columns = opened(folder, streamed=streamed)
        made = open_pool(data, "test", columns, target=NUM_IMAGES, spool=io.BytesIO(), progress=silent)
        if not streamed:
            made.read(range(NUM_IMAGES), columns.image, silent)
        return made

    return call


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("pictures", "'test/{name}/{number:04}.png'"),
        ("archived", "'test.zip/{number:04}.png'"),
        ("table", "row {row}"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_images_come_with_their_labels_their_digests_and_their_files(pool, request, make, kind, form, streamed):
    made = pool(request.getfixturevalue(kind), streamed=streamed)
    pictures = [make.png(row) for row in range(NUM_IMAGES)]
    rows = np.random.default_rng(0).permutation(NUM_IMAGES).tolist()

    images = [made.image(row) for row in rows]

    assert set(images) == set(pictures)
    assert [made.digests[row] for row in rows] == [sha256(image).digest() for image in images]
    numbers = [pictures.index(image) for image in images]
    assert [number % 2 for number in numbers] == made.labels[rows].tolist()
    assert [made.where(row) for row in rows] == [
        form.format(name=POOLS[number % 2], number=number, row=row) for row, number in zip(rows, numbers, strict=True)
    ]


@pytest.mark.parametrize("streamed", [False, True])
def test_an_image_in_a_table_is_found_by_its_row_and_its_name_there(pool, tmp_path, make, streamed):
    cells = [{"bytes": make.png(row), "path": f"{row}.png"} for row in range(NUM_IMAGES)]
    (tmp_path / "named").mkdir()
    labels = [POOLS[row % 2] for row in range(NUM_IMAGES)]
    pq.write_table(pa.table({"image": cells, "label": labels}), tmp_path / "named" / "test.parquet")
    made = pool(tmp_path / "named", streamed=streamed)
    for row in range(5):
        number = next(number for number in range(NUM_IMAGES) if made.image(row) == cells[number]["bytes"])
        assert made.where(row) == (f"'{number}.png'" if streamed else f"'{number}.png' in row {row}")


def test_of_a_stream_whose_labels_are_cheap_all_are_read(opened, tmp_path, make):
    (tmp_path / "named" / "test").mkdir(parents=True)
    (tmp_path / "named" / "test" / "0.png").write_bytes(make.png(0))
    lines = [json.dumps({"file_name": "0.png", "label": POOLS[row // 2100]}) for row in range(2400)]
    (tmp_path / "named" / "test" / "metadata.jsonl").write_text("\n".join(lines))
    _, columns = opened(tmp_path / "named", streamed=True)
    assert columns.class_of == {"ant": 0, "bee": 1}


def test_a_label_that_the_first_rows_of_a_stream_lack_is_noted_or_refused(opened, tmp_path, make):
    (tmp_path / "set" / "test").mkdir(parents=True)
    labels = [POOLS[row % 1000 == 0] for row in range(2100)] + ["cat"] * 900
    rows = pa.table({"image": [{"bytes": make.png(0), "path": None}] * len(labels), "label": labels})
    with pa.ipc.new_stream(str(tmp_path / "set" / "test" / "0.arrow"), rows.schema) as stream:
        stream.write_table(rows)
    data, columns = opened(tmp_path / "set", streamed=True, names=[*POOLS, "cat"])
    (note,) = columns.notes
    assert "the first 2000 rows of split 'test' have 2: the verdict is about no others" in note
    with pytest.raises(AcquisitionError, match="'label' holds 'cat', which none of the first 2000 rows"):
        open_pool(data, "test", columns, target=NUM_IMAGES, spool=io.BytesIO(), progress=silent)
