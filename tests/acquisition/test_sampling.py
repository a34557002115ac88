"""Drawing in proportion, and filling quotas from a stream."""

import hashlib

import numpy as np
import pytest
from scipy import stats

from profiling_agent.acquisition.splits import (
    ClassQuotas,
    content_order,
    evaluation_sizes,
    num_looked_at,
    sides,
    stratified_order,
)
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
    wanted, num_rows = asked or 2000, num_looked_at(asked, num_calibration)
    most = max(4 * wanted, wanted + num_calibration)
    # Half of them is most + 3 sqrt(2 most), six standard deviations of a fair coin above most.
    assert stats.binom.cdf(most - 1, num_rows, 0.5) < 2e-3
    assert num_rows < 2.5 * most + 20


def test_the_content_decides_the_side_whoever_is_beside_it():
    digests = [hashlib.sha256(bytes([number])).digest() for number in range(100)]
    found = sides(range(100), digests)
    assert sorted([*found.search, *found.heldout]) == list(range(100))
    assert all(digests[row][-1] % 2 == 1 for row in found.heldout)
    assert all(digests[row][-1] % 2 == 0 for row in found.search)
    assert sides(range(50, 100), digests[50:]).heldout == [row for row in found.heldout if row >= 50]


def test_the_first_of_equal_images_counts_and_a_row_without_one_is_nobodys_copy():
    same = hashlib.sha256(b"same").digest()
    found = sides([7, 3, 9, 1], [same, None, same, None])
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
