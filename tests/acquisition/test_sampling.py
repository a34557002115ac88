"""Drawing in proportion, and filling quotas from a stream."""

import numpy as np
import pytest

from profiling_agent.acquisition.sampling import ClassQuotas, evaluation_sizes, stratified_order, stream_target
from profiling_agent.errors import AcquisitionError


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
    ("available", "asked", "expected"),
    [(10_000, None, (2000, 8000)), (1000, None, (500, 500)), (50_000, None, (2000, 8000)), (5000, None, (2000, 3000)),
     (1000, 100, (100, 400)), (200, 100, (100, 100)), (7, None, (3, 4))],
)  # fmt: skip
def test_half_is_searched_on_and_at_most_four_times_as_many_held_out(available, asked, expected):
    assert evaluation_sizes(available, asked, "test") == expected


def test_a_split_too_small_to_hold_out_as_many_says_how_many_there_are():
    with pytest.raises(AcquisitionError, match=r"'test' has 120 usable images.*at most 60"):
        evaluation_sizes(120, 100, "test")


def test_a_split_of_one_image_is_too_small():
    with pytest.raises(AcquisitionError, match="has 1 usable images"):
        evaluation_sizes(1, None, "test")


def test_a_stream_is_read_for_five_times_what_is_searched_on():
    assert (stream_target(None), stream_target(100)) == (10_000, 500)


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
