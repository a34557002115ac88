"""What a run does with its time, and what is left of it: counted by hand, with a pass of a tenth of a second."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from profiling_agent.errors import RequestError
from profiling_agent.jobs.store import Timesheet
from profiling_agent.search.budget import Budget, affordable_images

PASS_S = 0.1
# 50 s and 450 passes; 1,024 held-out images of the baseline and the first candidate; 30 s, 600 passes and 1,024 images of a second one.
END = 50 + 45 + 1024 * 0.15 + 30 + 60 + 1024 * 0.05


def budget(root: Path, spent_s: float, limit_s: float | None = None, pass_s: float = PASS_S) -> Budget:
    sheet = Timesheet(root / "timesheet.jsonl")
    sheet.resume_at(spent_s)
    return Budget(sheet, pass_s, limit_s)


def test_without_a_limit_there_is_room_for_everything_but_what_is_out_of_proportion(tmp_path: Path):
    free = budget(tmp_path, 1e6, None)

    assert free.left_s == math.inf
    assert free.has_room_for(1e9)
    assert free.has_time_for(1e9)
    assert not free.allows_slow_conversion()


def test_what_is_left_keeps_enough_for_the_end(tmp_path: Path):
    few = replace(budget(tmp_path, 0.0, 1000.0), num_heldout=100)
    assert few.end_s == pytest.approx(50 + 45 + 15 + 30 + 60 + 5)

    held = budget(tmp_path, 400.0, 1000.0)
    assert held.left_s == 600.0
    assert held.has_room_for(600.0 - END)
    assert not held.has_room_for(601.0 - END)
    # 300 passes of 0.1 s and 15 s.
    assert held.has_time_for(555.0)
    assert not held.has_time_for(556.0)


def test_a_conversion_of_minutes_is_worth_it_in_a_run_that_is_long_anyway(tmp_path: Path):
    # 8,000 passes are 800 s, half of which may be used up by then.
    assert budget(tmp_path, 310.0, None).allows_slow_conversion()
    assert not budget(tmp_path, 311.0, None).allows_slow_conversion()
    # A model of 5 ms would be done in a minute; its run is given five.
    assert budget(tmp_path, 50.0, None, 0.005).allows_slow_conversion()
    assert not budget(tmp_path, 70.0, None, 0.005).allows_slow_conversion()
    assert budget(tmp_path, 70.0, 3600.0, 0.005).allows_slow_conversion()


def test_attempts_go_on_as_long_as_the_run_is_in_proportion_to_its_model(tmp_path: Path):
    # 800 s without a limit, of which 290 are for the end.
    assert budget(tmp_path, 400.0, None).allows_attempt(110.0, is_optional=True)
    assert not budget(tmp_path, 400.0, None).allows_attempt(111.0, is_optional=True)
    # Where nothing was accepted yet, another one is what the run is for.
    assert budget(tmp_path, 400.0, None).allows_attempt(111.0, is_optional=False)
    for is_optional in (False, True):
        assert budget(tmp_path, 800.0, 3600.0).allows_attempt(111.0, is_optional=is_optional)
        assert not budget(tmp_path, 200.0, 380.0).allows_attempt(20.0, is_optional=is_optional)
    # Of a model of a millisecond five minutes.
    assert budget(tmp_path, 188.0, None, 0.001).allows_attempt(20.0, is_optional=True)
    assert not budget(tmp_path, 189.0, None, 0.001).allows_attempt(20.0, is_optional=True)


def test_the_search_among_deployments_has_a_fifth(tmp_path: Path):
    assert budget(tmp_path, 250.0, 1000.0).allows_search(100.0, 50.0)
    assert not budget(tmp_path, 250.0, 1000.0).allows_search(100.0, 51.0)
    # Without a limit a quarter of 800 s.
    assert budget(tmp_path, 250.0, None).allows_search(100.0, 50.0)
    assert not budget(tmp_path, 250.0, None).allows_search(100.0, 51.0)
    assert budget(tmp_path, 250.0, None, 0.025).allows_search(100.0, 1e9)


def test_fewer_images_calibrate_where_evidence_would_take_more_than_a_quarter():
    assert affordable_images(None, 60.0, 256) == 256
    assert affordable_images(3600.0, PASS_S, 256) == 256
    # 256 images and 24 units are 1,760 passes: 176 s.
    assert affordable_images(704.0, PASS_S, 100) == 100
    # And two attempts of 3.7 passes for each image 1,894 more, which together may have two fifths.
    assert affordable_images(914.0, PASS_S, 256) == 256
    assert affordable_images(913.0, PASS_S, 256) == 128


def test_another_test_needs_its_sessions_and_its_images(tmp_path: Path):
    # 30 s and 600 passes, half a one for each of 400 images, and 15 s and 300 passes for the report.
    assert replace(budget(tmp_path, 400.0, 555.1), num_heldout=400).has_time_for_a_test()
    assert not replace(budget(tmp_path, 400.0, 554.9), num_heldout=400).has_time_for_a_test()
    # Without a limit a refusal is no reason to return the baseline.
    assert budget(tmp_path, 1e6, None).has_time_for_a_test()


def test_a_budget_for_nothing_says_what_would_do():
    with pytest.raises(
        RequestError,
        match=r"time_budget is 300 s, and a model that takes 1 s for an image needs at least 56m: .*, or a smaller model",
    ):
        affordable_images(300.0, 1.0, 256)
    # 170 s are any model's, and 2.4 s are its passes.
    with pytest.raises(RequestError, match=r"takes 0\.001 s for an image needs at least 3m: give it so much$"):
        affordable_images(120.0, 0.001, 256)
    assert affordable_images(56 * 60.0, 1.0, 256) == 128
    # A pass that looked ten times as slow as the fastest of them is no reason; how many images it allows is of the usual one.
    assert affordable_images(56 * 60.0, 10.0, 256, quietest_s=1.0) == 128
    with pytest.raises(RequestError, match=r"takes 1 s for an image needs at least 56m"):
        affordable_images(300.0, 10.0, 256, quietest_s=1.0)
