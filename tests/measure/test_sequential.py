"""Bounds that hold whenever they are looked at."""

import math

import numpy as np
import pytest

from profiling_agent.measure.intervals import STAKES, Counts, decide, images_until_kept, lower_bound, upper_bound

SHARD = 512
ERROR = 0.05


def looks(drop, discordant, num_images, rng):
    """Return the counts after each shard of a world in which that share of images is lost or gained."""
    outcomes = rng.choice([1, -1, 0], num_images, p=[(discordant + drop) / 2, (discordant - drop) / 2, 1 - discordant])
    ends = [*range(SHARD, num_images, SHARD), num_images]
    return [Counts(int((outcomes[:end] == 1).sum()), int((outcomes[:end] == -1).sum()), end) for end in ends]


def test_nothing_seen_bounds_nothing():
    assert (lower_bound(Counts(0, 0, 0), ERROR), upper_bound(Counts(0, 0, 0), ERROR)) == (-1.0, 1.0)


def test_without_a_discordant_image_the_bound_is_where_the_gamblers_have_twenty():
    bound = upper_bound(Counts(0, 0, 600), ERROR)
    wealth = np.mean((1 + STAKES * bound) ** 600)
    assert wealth == pytest.approx(1 / ERROR, rel=1e-2)


def test_what_is_lost_and_gained_mirrors_itself():
    assert lower_bound(Counts(30, 10, 2000), ERROR) == -upper_bound(Counts(10, 30, 2000), ERROR)


def test_more_images_of_the_same_kind_narrow_the_interval_round_the_drop_that_was_seen():
    widths = []
    for times in (1, 4, 16, 64):
        counts = Counts(15 * times, 10 * times, 1000 * times)
        low, high = lower_bound(counts, 0.025), upper_bound(counts, 0.025)
        assert low < 0.005 < high
        widths.append(high - low)
    assert widths == sorted(widths, reverse=True)
    # A fixed sample of 64,000 has an interval 0.0025 wide: looking whenever one likes costs less than twice that.
    assert widths[-1] < 2 * 2 * 1.96 * math.sqrt(0.025 / 64_000)


def test_all_images_lost_or_gained_are_taken_as_they_are():
    assert lower_bound(Counts(500, 0, 500), ERROR) > 0.9
    assert upper_bound(Counts(0, 500, 500), ERROR) < -0.9


@pytest.mark.parametrize(
    ("counts", "said"), [((5, 5, 3000), "kept"), ((60, 5, 1000), "lost"), ((8, 3, 512), "undecided")]
)
def test_a_decision_is_what_the_bounds_say(counts, said):
    assert decide(Counts(*counts), 0.01, ERROR) == said


def test_how_many_images_it_takes_is_what_as_many_like_them_show():
    counts = Counts(8, 3, 512)
    enough = images_until_kept(counts, 0.02, ERROR)
    assert enough is not None

    def bound(num_images):
        times = num_images / 512
        return upper_bound(Counts(round(8 * times), round(3 * times), round(num_images)), ERROR)

    assert bound(enough) <= 0.02 + 1e-3 < bound(0.8 * enough)
    assert images_until_kept(Counts(30, 3, 512), 0.02, ERROR) is None


@pytest.mark.parametrize("discordant", [0.012, 0.04, 0.15])
def test_a_drop_of_exactly_the_bound_is_called_kept_in_at_most_five_of_a_hundred_worlds(discordant):
    rng = np.random.default_rng([7, round(1000 * discordant)])
    wrong = sum(
        any(upper_bound(counts, ERROR) <= 0.01 for counts in looks(0.01, discordant, 20 * SHARD, rng))
        for _ in range(300)
    )
    # Of 300 worlds with an error of 5%, 25 or more in one of a hundred thousand.
    assert wrong <= 25


@pytest.mark.parametrize("drop", [-0.01, 0.0, 0.02])
def test_the_interval_holds_the_drop_at_every_look_in_ninety_five_of_a_hundred_worlds(drop):
    rng = np.random.default_rng([8, round(1000 * (drop + 1))])
    missed = sum(
        any(
            not lower_bound(counts, ERROR / 2) <= drop <= upper_bound(counts, ERROR / 2)
            for counts in looks(drop, 0.06, 10 * SHARD, rng)
        )
        for _ in range(200)
    )
    assert missed <= 18


def test_a_hopeless_candidate_is_known_after_the_first_shards_and_a_good_one_after_a_few_thousand_images():
    rng = np.random.default_rng(9)
    hopeless = [
        next(
            counts.num_images for counts in looks(0.05, 0.09, 20 * SHARD, rng) if decide(counts, 0.01, ERROR) == "lost"
        )
        for _ in range(40)
    ]
    good = [
        next(
            (
                counts.num_images
                for counts in looks(0.0, 0.04, 100 * SHARD, rng)
                if decide(counts, 0.01, ERROR) == "kept"
            ),
            100 * SHARD,
        )
        for _ in range(40)
    ]
    assert np.median(hopeless) <= 2 * SHARD
    assert np.median(good) <= 8 * SHARD
