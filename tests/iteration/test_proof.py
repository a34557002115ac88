"""Whether there are images enough, said before any work: by the test that as many held-out images get."""

import re

import made
import pytest
from iteration.scripted import acquired

from profiling_agent.evaluation.intervals import images_to_certify
from profiling_agent.evaluation.sequential import Counts, upper_bound
from profiling_agent.iteration.heldout import images_that_certify, why_unproven


def said(num_heldout: int, max_drop: float, num_search: int = 10**6) -> str | None:
    return why_unproven(acquired(num_heldout, num_search), made.GOAL.model_copy(update={"max_accuracy_drop": max_drop}))


def test_enough_images_leave_nothing_to_say():
    assert said(418, 0.01) is None


def test_what_is_missing_is_said_in_images_and_in_points():
    # z^2 / (n + z^2) for z = 2.0537: 418 images for one point, and 344 bound 1.2.
    assert said(344, 0.01) == (
        "whatever is returned will be unproven: it takes 74 more held-out images or a bound of 1.2 points"
    )
    # 1.2816 sqrt(2) / (n + 2) for 100 search images.
    assert "it takes 80 more search images or a bound of 1.8 points; " in (said(344, 0.01, num_search=100) or "")


@pytest.mark.parametrize("max_drop", [0.002, 0.0045, 0.005, 0.0058, 0.01])
@pytest.mark.parametrize("num_heldout", [100, 600, 1024, 1025, 1100, 2000])
def test_as_many_as_are_said_to_be_missing_suffice_and_are_never_less_than_none(num_heldout: int, max_drop: float):
    """Up to 1,024 images are looked at once; what more and more are looked at of takes twice as many to show as much."""
    text = said(num_heldout, max_drop)
    if text is None:
        return
    missing = re.search(r"it takes ([\d,]+) more held-out images", text)

    assert missing is not None
    needed = int(missing[1].replace(",", ""))
    assert needed > 0
    # The sequential test's number is within a hundredth.
    assert said(round(1.02 * (num_heldout + needed)), max_drop) is None


@pytest.mark.parametrize(("lost", "gained", "num_images"), [(30, 24, 1000), (12, 2, 1024), (1, 0, 300)])
def test_as_many_as_are_said_to_certify_do_by_the_test_that_so_many_get(lost: int, gained: int, num_images: int):
    """What 1,024 images are looked at once for takes more where another run would look at more and more of them."""
    drop = made.drop(lost, gained, num_images)
    needed = images_that_certify(drop, 0.02, 0.02)
    at_once = images_to_certify(drop, 0.02, 0.98)

    assert needed is not None
    assert at_once is not None
    if at_once <= 1024:
        assert needed == at_once
        return
    times = 1.02 * needed / num_images
    assert needed > at_once
    assert upper_bound(Counts(round(times * lost), round(times * gained), round(times * num_images)), 0.02) <= 0.02


def test_a_contract_of_nothing_is_never_proven_and_asks_for_no_number():
    assert (
        said(5000, 0.0)
        == "whatever is returned will be unproven: it takes a bound of 0.00018 points; it takes a bound of 0.12 points"
    )
