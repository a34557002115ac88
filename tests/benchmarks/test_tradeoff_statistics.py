import numpy as np
import pytest
from tradeoff_statistics import against, cell, checks, holm, summaries, two_way

NUM_DRAWS, NUM_IMAGES, WORLDS = 5, 400, 400


def test_holm_by_hand():
    # Sorted: 0.01 * 4 = 0.04, 0.02 * 3 = 0.06, 0.03 * 2 = 0.06, 0.04 * 1 = 0.04, which the running maximum lifts to 0.06.
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("of_draws", "of_images", "of_both"),
    [(0.0, 0.2, 0.2), (0.005, 0.2, 0.1), (0.01, 0.2, 0.1), (0.03, 0.2, 0.1), (0.03, 0.02, 0.1)],
)
def test_intervals_cover_the_mean_of_worlds_whose_draws_share_their_images(of_draws, of_images, of_both):
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(WORLDS):
        values = 0.01 + rng.normal(0, of_draws, (NUM_DRAWS, 1)) + rng.normal(0, of_images, (1, NUM_IMAGES))
        interval = two_way(values + rng.normal(0, of_both, (NUM_DRAWS, NUM_IMAGES))).estimate
        covered += interval.low <= 0.01 <= interval.high

    assert covered / WORLDS >= 0.93


def test_equal_methods_are_called_different_in_one_of_twenty_worlds():
    rng = np.random.default_rng(2)
    shared = [rng.normal(0, 0.3, (1, NUM_IMAGES)) + rng.normal(0, 0.01, (NUM_DRAWS, 1)) for _ in range(WORLDS)]
    called = [two_way(world + rng.normal(0, 0.1, (NUM_DRAWS, NUM_IMAGES))).p_value < 0.05 for world in shared]

    assert np.mean(called) <= 0.07


def test_one_draw_has_the_interval_of_its_images():
    values = np.random.default_rng(3).normal(0.1, 0.3, (1, 2000))
    interval = two_way(values).estimate
    error = values.std(ddof=1) / np.sqrt(2000)

    assert (interval.high - interval.low) / 2 == pytest.approx(1.961 * error, rel=0.06)


def test_what_never_differs_has_no_width():
    assert two_way(np.zeros((5, 10))).p_value == 1.0
    assert two_way(np.ones((5, 10))).estimate.low == pytest.approx(1.0)


def row(method: str, share: float, seed: int | None, right: list[int], saved: float = 0.1) -> dict:
    stamp = {"commit": "abc", "measured_at": "2026-01-01T00:00:00+00:00"}
    return {"model": "vit", "share": share, "method": method, "seed": seed, "right": right, "saved": saved, **stamp}


def rows() -> list[dict]:
    # Twenty images, the first tenth of which was looked at.
    wrong, all_right = [0] * 2, [1] * 18
    return [
        row("baseline", 0.0, None, wrong + all_right),
        row("ours", 0.1, 1, wrong + [0] + [1] * 17),
        row("ours", 0.1, 0, wrong + all_right),
        row("uniform l1", 0.1, None, wrong + [0] * 9 + [1] * 9, saved=0.115),
    ]


def test_images_that_were_looked_at_are_left_out_and_draws_are_in_order():
    assert cell(rows(), "vit", 0.1, "ours").tolist() == [[True] * 18, [False] + [True] * 17]


def test_drops_and_gains_by_hand():
    ours, uniform = summaries(rows())
    (test,) = against(rows())

    assert ours["drop"] == pytest.approx(1 / 36)
    assert ours["num_draws"] == 2
    assert uniform["drop"] == pytest.approx(1 / 2)
    # Ours is right where L1 isn't on nine images of the first draw and on eight of the second, of 18 each.
    assert test["gain"] == pytest.approx(17 / 36)


def test_a_check_fails_where_another_method_may_be_far_above_or_was_cut_less():
    table, tests = summaries(rows()), against(rows())
    found = {check.name: check for check in checks(table, tests)}
    by_start = {name.split(":")[0]: check for name, check in found.items()}

    assert by_start["vit at 10%"].holds
    assert found["largest difference to ours in params removed, share"].value == pytest.approx(0.015)
    assert not found["largest difference to ours in params removed, share"].holds

    lower = [{**test, "gain": 0.001, "low": -0.004, "high": 0.006} for test in tests]
    assert not {check.name.split(":")[0]: check for check in checks(table, lower)}["vit at 10%"].holds
