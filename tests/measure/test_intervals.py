import numpy as np
import pytest
from scipy.stats import binom

from profiling_agent.measure.intervals import (
    certain_bound,
    certain_perfect_bound,
    compare,
    images_to_certify,
    least_certain_images,
    least_images,
    one_sided_bound,
    perfect_bound,
)
from profiling_agent.schemas import AccuracyDrop


def answers(num_lost: int, num_gained: int, num_images: int) -> AccuracyDrop:
    baseline, candidate = np.ones(num_images, dtype=bool), np.ones(num_images, dtype=bool)
    candidate[:num_lost] = False
    baseline[num_lost : num_lost + num_gained] = False
    return compare(baseline, candidate)


def test_lost_and_gained_images_are_counted_by_pairs():
    drop = compare(np.array([True, True, True, False, False]), np.array([True, False, False, True, False]))

    assert (drop.num_lost, drop.num_gained, drop.num_images) == (2, 1, 5)
    assert drop.drop == pytest.approx(0.2)


def test_the_interval_is_bonett_and_prices():
    # 10 lost, 2 gained, 98 images: 11/100 - 3/100 = 0.08, variance (0.14 - 0.0064)/100.
    drop = answers(10, 2, 98)

    assert drop.low == pytest.approx(0.08 - 1.959964 * 0.036551, abs=1e-5)
    assert drop.high == pytest.approx(0.08 + 1.959964 * 0.036551, abs=1e-5)


def test_the_p_value_is_the_exact_binomial_one():
    # Two of twelve tosses or fewer, both sides: 2 (1 + 12 + 66) / 4096.
    assert answers(10, 2, 98).p_value == pytest.approx(2 * 79 / 4096)


def test_equal_models_still_have_an_interval():
    drop = answers(0, 0, 1000)

    assert (drop.drop, drop.p_value) == (0.0, 1.0)
    assert drop.low < 0 < drop.high


def test_the_one_sided_bound_is_inside_the_two_sided_interval():
    drop = answers(30, 10, 2000)

    assert drop.drop < one_sided_bound(drop, 0.9) < one_sided_bound(drop, 0.95) < drop.high
    assert one_sided_bound(drop, 0.975) == pytest.approx(drop.high)


@pytest.mark.parametrize("error", [0.02, 0.0025, 0.0008])
@pytest.mark.parametrize("num_images", [344, 512, 1024])
def test_a_model_that_gains_nothing_is_certified_no_more_often_than_is_said(num_images: int, error: float):
    """A baseline that is right on every image, and a candidate that loses just more than a point of them: how many of the images is binomial."""
    certified = 0.0
    for lost in range(num_images):
        if certain_bound(answers(lost, 0, num_images), 1 - error) > 0.01:
            break
        certified += float(binom.pmf(lost, num_images, 0.0100001))

    assert certified <= error


def test_where_no_image_is_answered_otherwise_the_score_tests_bound_is_known():
    # z^2 / (n + z^2) for z = 2.0537, which leaves 2% above it.
    assert certain_perfect_bound(418, 0.98) == pytest.approx(2.0537489**2 / (418 + 2.0537489**2), rel=1e-6)
    assert least_certain_images(0.01, 0.98) == 418
    assert certain_perfect_bound(418, 0.98) <= 0.01 < certain_perfect_bound(417, 0.98)


def test_a_bound_below_nothing_is_that_of_the_interval():
    drop = answers(0, 40, 1000)

    assert certain_bound(drop, 0.98) == one_sided_bound(drop, 0.98) < 0


@pytest.mark.parametrize(("lost", "gained"), [(30, 20), (5, 40)])
def test_the_images_to_certify_are_the_fewest_that_do(lost: int, gained: int):
    drop, max_drop = answers(lost, gained, 1000), 0.011

    needed = images_to_certify(drop, max_drop)

    assert needed is not None

    def bound(num_images: int) -> float:
        # The bound's own formula, at fractions of images that no record can hold.
        p, q = (lost * num_images / 1000 + 1) / (num_images + 2), (gained * num_images / 1000 + 1) / (num_images + 2)
        return p - q + 1.6448536 * ((p + q - (p - q) ** 2) / (num_images + 2)) ** 0.5

    # The score test's bound is a hair above it here.
    assert bound(needed) <= max_drop < bound(needed - 1 - needed // 100)


def test_no_number_of_images_certifies_a_drop_that_is_too_large():
    assert images_to_certify(answers(30, 10, 1000), 0.02) is None
    assert images_to_certify(answers(30, 10, 1000), 0.019) is None


@pytest.mark.parametrize(("lost", "gained"), [(0.03, 0.02), (0.004, 0.001), (0.1, 0.1)])
def test_the_interval_covers_the_true_drop_as_often_as_it_says(lost: float, gained: float):
    rng, num_images, num_trials = np.random.default_rng(0), 500, 1500
    covered = below = 0
    for _ in range(num_trials):
        draws = rng.random(num_images)
        drop = compare(draws >= gained, (draws < gained) | (draws >= gained + lost))
        covered += drop.low <= lost - gained <= drop.high
        below += lost - gained <= one_sided_bound(drop, 0.95)

    # Four standard errors of 1500 options below 95% are 0.927; being too careful where images are few is allowed.
    assert covered / num_trials > 0.927
    assert below / num_trials > 0.927


def test_answers_to_different_images_are_refused():
    with pytest.raises(ValueError, match="paired"):
        compare(np.ones(3, dtype=bool), np.ones(4, dtype=bool))


@pytest.mark.parametrize("max_drop", [-0.01, 0.0, 5e-324, 1e-10])
def test_a_drop_that_no_data_set_could_show_takes_no_number_of_images(max_drop):
    assert least_images(max_drop, 0.95) is None


def test_the_least_images_are_the_first_whose_perfect_bound_is_low_enough():
    needed = least_images(0.01, 0.95)

    assert needed is not None
    assert perfect_bound(needed, 0.95) <= 0.01 < perfect_bound(needed - 1, 0.95)
