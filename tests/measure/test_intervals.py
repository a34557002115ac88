"""Intervals of the accuracy lost, the sequential test, predictions on disk, and the ledger of openings."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from profiling_agent.errors import ArtifactError
from profiling_agent.measure import intervals
from profiling_agent.measure.intervals import (
    NO_CLASS,
    STAKES,
    VARIABLE,
    Counts,
    certain_bound,
    decide,
    images_to_certify,
    images_until_kept,
    least_images,
    lower_bound,
    note_opening,
    one_sided_bound,
    paired_bound,
    paired_drop,
    score_bound,
    share,
    upper_bound,
)
from profiling_agent.schemas import AccuracyDrop


def answers(num_lost: int, num_gained: int, num_images: int) -> AccuracyDrop:
    baseline, candidate = np.ones(num_images, dtype=bool), np.ones(num_images, dtype=bool)
    candidate[:num_lost] = False
    baseline[num_lost : num_lost + num_gained] = False
    return paired_drop(baseline, candidate)


def test_lost_and_gained_images_are_counted_by_pairs():
    drop = paired_drop(np.array([True, True, True, False, False]), np.array([True, False, False, True, False]))

    assert (drop.num_lost, drop.num_gained, drop.num_images) == (2, 1, 5)
    assert drop.drop == pytest.approx(0.2)


def test_the_interval_is_bonett_and_prices_and_the_p_value_the_exact_binomial_one():
    # 10 lost, 2 gained, 98 images: 11/100 - 3/100 = 0.08, variance (0.14 - 0.0064)/100.
    drop, reach = answers(10, 2, 98), 1.959964 * 0.036551

    assert (drop.low, drop.high) == pytest.approx((0.08 - reach, 0.08 + reach), abs=1e-5)
    # Two of twelve tosses or fewer, both sides: 2 (1 + 12 + 66) / 4096.
    assert drop.p_value == pytest.approx(2 * 79 / 4096)

    equal = answers(0, 0, 1000)
    assert (equal.drop, equal.p_value) == (0.0, 1.0)
    assert equal.low < 0 < equal.high


def test_the_one_sided_bound_is_inside_the_two_sided_interval():
    drop = answers(30, 10, 2000)

    assert drop.drop < one_sided_bound(drop, 0.9) < one_sided_bound(drop, 0.95) < drop.high
    assert one_sided_bound(drop, 0.975) == pytest.approx(drop.high)
    # A bound below nothing is that of the interval.
    gained = answers(0, 40, 1000)
    assert certain_bound(gained, 0.98) == one_sided_bound(gained, 0.98) < 0


@pytest.mark.parametrize(("num_images", "error"), [(344, 0.02), (512, 0.0025), (1024, 0.0008)])
def test_a_model_that_gains_nothing_is_certified_no_more_often_than_is_allowed(num_images: int, error: float):
    """A baseline that is right on every image, and a candidate that loses just more than a point of them: how many of the images is binomial."""
    certified = 0.0
    for lost in range(num_images):
        if certain_bound(answers(lost, 0, num_images), 1 - error) > 0.01:
            break
        certified += float(binom.pmf(lost, num_images, 0.0100001))

    assert certified <= error


def test_if_no_image_is_answered_otherwise_the_score_tests_bound_is_known():
    # z^2 / (n + z^2) for z = 2.0537, which leaves 2% above it.
    assert score_bound(0, 0, 418, 0.98) == pytest.approx(2.0537489**2 / (418 + 2.0537489**2), rel=1e-6)
    assert score_bound(0, 0, 418, 0.98) <= 0.01 < score_bound(0, 0, 417, 0.98)


@pytest.mark.parametrize(("lost", "gained"), [(30, 20), (5, 40)])
def test_the_images_to_certify_are_the_fewest_that_do(lost: int, gained: int):
    drop, max_drop = answers(lost, gained, 1000), 0.011

    needed = images_to_certify(drop, max_drop)

    assert needed is not None
    bounds = [score_bound(lost * num / 1000, gained * num / 1000, num, 0.95) for num in (needed, needed - 1)]
    assert bounds[0] <= max_drop < bounds[1]
    # No number of images certifies a drop that is too large.
    assert [images_to_certify(answers(30, 10, 1000), allowed) for allowed in (0.02, 0.019)] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "gained"), [(0.004, 0.001), (0.1, 0.1)])
def test_the_interval_covers_the_true_drop_as_often_as_it_says(lost: float, gained: float):
    rng, num_images, num_trials = np.random.default_rng(0), 500, 1500
    covered = below = 0
    for _ in range(num_trials):
        draws = rng.random(num_images)
        drop = paired_drop(draws >= gained, (draws < gained) | (draws >= gained + lost))
        covered += drop.low <= lost - gained <= drop.high
        below += lost - gained <= one_sided_bound(drop, 0.95)

    # Four standard errors of 1500 trials below 95% are 0.927; being too careful where images are few is allowed.
    assert covered / num_trials > 0.927
    assert below / num_trials > 0.927


def test_the_least_images_are_the_first_whose_bound_is_low_enough_if_none_differs():
    needed = least_images(0.01, 0.95)

    assert needed is not None
    assert paired_bound(0, 0, needed, 0.95) <= 0.01 < paired_bound(0, 0, needed - 1, 0.95)
    # A drop that no data set could show takes no number of images.
    assert [least_images(max_drop, 0.95) for max_drop in (-0.01, 0.0, 5e-324, 1e-10)] == [None] * 4


SHARD = 512
ERROR = 0.05


def looks(drop, discordant, num_images, rng):
    """Return the counts after each shard of a world in which that share of images is lost or gained."""
    outcomes = rng.choice([1, -1, 0], num_images, p=[(discordant + drop) / 2, (discordant - drop) / 2, 1 - discordant])
    ends = [*range(SHARD, num_images, SHARD), num_images]
    return [Counts(int((outcomes[:end] == 1).sum()), int((outcomes[:end] == -1).sum()), end) for end in ends]


def test_bounds_mirror_each_other_and_reach_from_all_lost_to_all_gained():
    # Without a discordant image the bound is where the gamblers have twenty.
    assert np.mean((1 + STAKES * upper_bound(Counts(0, 0, 600), ERROR)) ** 600) == pytest.approx(1 / ERROR, rel=1e-2)
    assert (lower_bound(Counts(0, 0, 0), ERROR), upper_bound(Counts(0, 0, 0), ERROR)) == (-1.0, 1.0)
    assert lower_bound(Counts(30, 10, 2000), ERROR) == -upper_bound(Counts(10, 30, 2000), ERROR)
    assert lower_bound(Counts(500, 0, 500), ERROR) > 0.9
    assert upper_bound(Counts(0, 500, 500), ERROR) < -0.9


@pytest.mark.parametrize(
    ("counts", "decision"), [((5, 5, 3000), "kept"), ((60, 5, 1000), "lost"), ((8, 3, 512), "undecided")]
)
def test_the_bounds_decide(counts, decision):
    assert decide(Counts(*counts), 0.01, ERROR) == decision


def test_the_images_until_kept_are_as_many_like_them_as_show_it():
    enough = images_until_kept(Counts(8, 3, 512), 0.02, ERROR)
    assert enough is not None
    bounds = [upper_bound(Counts(round(n / 64), round(3 * n / 512), round(n)), ERROR) for n in (enough, 0.8 * enough)]
    assert bounds[0] <= 0.02 + 1e-3 < bounds[1]
    assert images_until_kept(Counts(30, 3, 512), 0.02, ERROR) is None


@pytest.mark.slow
@pytest.mark.parametrize(("drop", "discordant"), [(0.01, 0.012), (0.01, 0.15), (-0.01, 0.06), (0.0, 0.06)])
def test_at_any_look_the_bounds_hold_the_drop_in_ninety_five_of_a_hundred_worlds(drop: float, discordant: float):
    rng = np.random.default_rng([7, round(1000 * (drop + discordant + 1))])
    below = outside = 0
    for _ in range(200):
        seen = looks(drop, discordant, 16 * SHARD, rng)
        below += any(upper_bound(counts, ERROR) <= drop for counts in seen)
        outside += any(not lower_bound(counts, ERROR / 2) <= drop <= upper_bound(counts, ERROR / 2) for counts in seen)
    # Of 200 worlds with an error of 5%, 19 or more in one of two hundred.
    assert below <= 18
    assert outside <= 18


def test_a_hopeless_candidate_is_known_after_the_first_shards_and_a_good_one_after_a_few_thousand_images():
    rng = np.random.default_rng(9)

    def median_images(decision: str, drop: float, discordant: float, num_shards: int) -> float:
        """Return the images after which the decision falls, or all of them, in the median of 40 worlds."""
        worlds = [looks(drop, discordant, num_shards * SHARD, rng) for _ in range(40)]
        decided = [(counts for counts in seen if decide(counts, 0.01, ERROR) == decision) for seen in worlds]
        return float(
            np.median([next(counts, seen[-1]).num_images for counts, seen in zip(decided, worlds, strict=True)])
        )

    assert median_images("lost", 0.05, 0.09, 20) <= 2 * SHARD
    assert median_images("kept", 0.0, 0.04, 100) <= 8 * SHARD


@pytest.mark.parametrize(
    ("logits", "predicted"),
    [
        ([3.0, 1.0, 2.5], 0),
        # The first of equal ones.
        ([-1.0, -4.0, -1.0], 0),
        ([0.0, 5.0, 1.0], 1),
        # A class that is ruled out leaves the others.
        ([-np.inf, 2.0, -np.inf], 1),
        ([-3e38, 3e38, -3e38], 1),
        *(
            (logits, NO_CLASS)
            for logits in ([np.nan, 0.0], [0.0, np.nan], [np.inf, 0.0], [-np.inf, -np.inf], [np.inf, -np.inf])
        ),
    ],
)
def test_the_top_logit_is_the_answer_and_logits_without_one_are_counted_wrong(
    tmp_path: Path, logits: list[float], predicted: int
):
    rows = (np.array([each], np.float32) for each in (logits, [0.0, 1.0]))
    both = intervals.concatenate([intervals.answers_of(row, np.zeros(1, np.int64)) for row in rows])

    assert both.predicted.tolist() == [predicted, 1]
    assert both.right.tolist() == [predicted == 0, False]
    intervals.write_predictions(tmp_path / "answers", both)
    assert intervals.read_predictions(tmp_path / "answers").predicted.tolist() == [predicted, 1]
    # A missing or damaged file is one line.
    os.truncate(tmp_path / "answers", 40)
    for name in ("answers", "missing"):
        with pytest.raises(ArtifactError, match="evaluate again") as refused:
            intervals.read_predictions(tmp_path / name)
        assert "\n" not in str(refused.value)


IMAGES = [bytes([number]) for number in range(50)]


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path / "heldout" / "model.json"


def test_shares_add_up_to_one_however_many_there_are():
    shares = [share(number) for number in range(1, 100_000)]
    assert shares[0] == 0.8
    assert shares == sorted(shares, reverse=True)
    assert 0.9999 < sum(shares) < 1


@pytest.mark.usefixtures("ledger")
def test_each_candidate_is_another_opening_and_the_same_one_again_is_not():
    numbers = [note_opening("model", name, IMAGES[:20]).number for name in ("a", "b", "a", "c", "b")]
    assert numbers == [1, 2, 1, 3, 2]
    # Another model and other images have openings of their own.
    assert note_opening("another", "b", IMAGES[:20]).number == 1
    assert note_opening("model", "b", IMAGES[20:]).number == 1
    assert note_opening("model", "d", IMAGES[19:21]).number == 5

    # A fresh begin has a reason that stays.
    openings = [note_opening("model", "c", IMAGES, fresh="new photographs"), note_opening("model", "e", IMAGES)]
    assert [(each.number, each.fresh) for each in openings] == [(1, "new photographs"), (2, "new photographs")]


def test_a_ledger_holds_no_image_and_no_path_and_a_damaged_line_costs_no_other(ledger: Path):
    note_opening("model", "a", IMAGES)
    assert sorted(path.name for path in ledger.parent.iterdir()) == ["ledgers.lock", "model.json"]
    test = json.loads(ledger.read_text())
    assert (sorted(test), len(test["images"])) == (["candidate", "fresh", "images"], len(IMAGES))

    with ledger.open("a") as stream:
        stream.write('{"candidate": 7}\n{"cand\n')
    opening = note_opening("model", "b", IMAGES)
    assert opening.number == 2
    assert opening.note is not None
    assert "damaged" in opening.note
    assert note_opening("model", "c", IMAGES).number == 3


def test_if_no_ledger_can_be_written_the_run_goes_on_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    opening = note_opening("model", "a", IMAGES, fresh="new photographs")
    assert (opening.number, opening.share, opening.fresh) == (1, share(1), "new photographs")
    assert opening.note is not None
    assert VARIABLE in opening.note
