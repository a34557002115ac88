"""Three disjoint sets: how many, from where, which rows."""

import hashlib
from typing import Any

import numpy as np
import pytest
from datasets import ClassLabel, DatasetDict

from profiling_agent.acquisition.batches import read_split
from profiling_agent.errors import AcquisitionError

NAMES = ["ant", "bee", "cow"]
KIND = ClassLabel(names=NAMES)


def digests(split):
    return [hashlib.sha256(cell.as_py()).hexdigest() for cell in read_split(split.path).encoded]


def labels(split):
    return read_split(split.path).labels


@pytest.fixture
def folder(parquet, make):
    train = make.table(np.arange(600) % 3, KIND)
    test = make.table(np.arange(300) % 3, KIND, first=1000)
    return parquet(train=train, test=test)


def test_calibration_comes_from_train_and_the_rest_from_test(folder, draw):
    drawn = draw(folder, NAMES)
    assert (drawn.calibration.source_split, drawn.calibration.num_images) == ("train", 256)
    assert (drawn.search.source_split, drawn.search.num_images) == ("test", 150)
    assert (drawn.heldout.source_split, drawn.heldout.num_images) == ("test", 150)
    assert drawn.notes == ()
    assert np.bincount(labels(drawn.search)).tolist() == [50, 50, 50]


def test_no_image_is_in_two_sets(folder, draw):
    drawn = draw(folder, NAMES)
    everything = [*digests(drawn.calibration), *digests(drawn.search), *digests(drawn.heldout)]
    assert len(everything) == len(set(everything)) == 256 + 300


def test_every_image_keeps_its_own_label(folder, draw, make):
    drawn = draw(folder, NAMES, num_samples=60)
    truth = {hashlib.sha256(make.png(1000 + row)).hexdigest(): row % 3 for row in range(300)}
    assert [truth[digest] for digest in digests(drawn.heldout)] == labels(drawn.heldout).tolist()
    assert (drawn.search.num_images, drawn.heldout.num_images) == (60, 240)


def test_the_seed_alone_decides_which_rows(folder, draw):
    first, again, other = (draw(folder, NAMES, num_samples=50, seed=seed) for seed in (1, 1, 2))
    assert digests(first.search) == digests(again.search)
    assert digests(first.calibration) == digests(again.calibration)
    assert set(digests(first.search)) != set(digests(other.search))


def test_sets_are_stratified_where_classes_come_one_after_another(parquet, make, draw):
    ordered = make.table(np.repeat([0, 1, 2], [100, 50, 50]), KIND, first=1000)
    drawn = draw(parquet(train=make.table(np.repeat([2, 0, 1], 100), KIND), test=ordered), NAMES, num_samples=40)
    assert np.bincount(labels(drawn.search)).tolist() == [20, 10, 10]
    assert np.abs(np.bincount(labels(drawn.calibration)[:30]) - 10).max() <= 1


def test_a_small_train_split_is_used_whole_and_said_so(parquet, make, draw):
    drawn = draw(
        parquet(train=make.table([0, 1, 2] * 20, KIND), test=make.table([0, 1, 2] * 20, KIND, first=100)), NAMES
    )
    assert drawn.calibration.num_images == 60
    assert drawn.notes == ("only 60 images are there to calibrate with, not 256",)


def test_validation_serves_where_there_is_no_test(parquet, make, draw):
    rows = make.table([0, 1, 2] * 20, KIND, first=100)
    assert (
        draw(parquet(train=make.table([0, 1, 2] * 99, KIND), validation=rows), NAMES).search.source_split
        == "validation"
    )


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


def test_a_split_that_is_not_there_lists_those_that_are(folder, draw):
    with pytest.raises(AcquisitionError, match="no split 'dev': use one of train, test"):
        draw(folder, NAMES, split="dev")


def test_train_alone_is_an_error_unless_it_was_named(parquet, make, draw):
    folder = parquet(train=make.table(np.arange(1200) % 3, KIND))
    with pytest.raises(AcquisitionError, match="no labelled test or validation split"):
        draw(folder, NAMES)
    drawn = draw(folder, NAMES, split="train")
    assert (drawn.calibration.num_images, drawn.search.num_images, drawn.heldout.num_images) == (256, 472, 472)
    everything = [*digests(drawn.calibration), *digests(drawn.search), *digests(drawn.heldout)]
    assert len(set(everything)) == 1200
    assert "optimistic" in drawn.notes[0]


def test_test_alone_calibrates_on_test_images_that_are_not_measured_on(parquet, make, draw):
    drawn = draw(parquet(test=make.table(np.arange(400) % 3, KIND)), NAMES)
    assert (drawn.calibration.num_images, drawn.search.num_images, drawn.heldout.num_images) == (100, 150, 150)
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
    with pytest.raises(AcquisitionError, match=f"no train split beside '{split}'.*set recover_epochs to 0"):
        draw(folder, NAMES, num_recovery=10, **query)


def test_a_train_split_that_calibration_uses_up_leaves_nothing_to_recover_with(parquet, make, draw):
    rows = {"train": make.table(np.arange(256) % 3, KIND), "test": make.table(np.arange(100) % 3, KIND, first=500)}
    with pytest.raises(AcquisitionError, match=r"256 usable images.*none is left to recover with"):
        draw(parquet(**rows), NAMES, num_recovery=10)


def test_a_data_set_smaller_than_asked_says_how_many_there_are(folder, draw):
    with pytest.raises(AcquisitionError, match=r"has 300 usable images.*at most 150"):
        draw(folder, NAMES, num_samples=151)


def test_images_without_a_known_label_are_left_out_and_counted(parquet, make, draw):
    kind = ClassLabel(names=["cow", "ant", "unicorn"])
    test = make.table(np.arange(300) % 3, kind, first=1000)
    drawn = draw(parquet(train=make.table(np.arange(600) % 3, kind), test=test), NAMES)
    assert drawn.search.num_images + drawn.heldout.num_images == 200
    assert sorted(set(labels(drawn.search).tolist())) == [0, 2]
    assert "100 images of split 'test' have no label that the model knows" in drawn.notes
    assert [match.rule for match in drawn.labels] == ["name", "name", "unmapped"]


def test_a_damaged_image_is_skipped_and_counted(parquet, make, draw):
    test = make.table(np.arange(300) % 3, KIND, first=1000, broken=[7])
    drawn = draw(parquet(train=make.table(np.arange(600) % 3, KIND), test=test), NAMES)
    assert drawn.search.num_images + drawn.heldout.num_images == 299
    assert drawn.search.num_skipped + drawn.heldout.num_skipped == 1


def test_more_than_one_damaged_image_in_a_hundred_is_an_error(parquet, make, draw):
    test = make.table(np.arange(300) % 3, KIND, first=1000, broken=[250, 11, 12, 13])
    folder = parquet(train=make.table(np.arange(600) % 3, KIND), test=test)
    with pytest.raises(AcquisitionError, match=r"4 of 300 images.*'test'.*the first is row 11"):
        draw(folder, NAMES)


def test_nothing_of_a_local_data_set_is_left_in_a_cache(folder, draw, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    draw(folder, NAMES)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_nothing_is_printed_while_drawing(folder, draw, capfd):
    draw(folder, NAMES)
    assert capfd.readouterr() == ("", "")
