"""Three disjoint sets: how many, from where, which rows."""

import hashlib
import itertools
import re
import tempfile
from typing import Any

import datasets
import numpy as np
import pytest
from datasets import ClassLabel, DatasetDict

from profiling_agent.acquisition.images import SplitImages
from profiling_agent.errors import AcquisitionError

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
