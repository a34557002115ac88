"""What a run does with its time, and what is left of it: counted by hand, with a pass of a tenth of a second."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from profiling_agent.errors import RequestError
from profiling_agent.graph.session import LAST, ROUND, Forecast, RunPosition, WorkLimits, forecast, stage_seconds
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


WORK = WorkLimits(
    num_calibration=200, num_search=1000, num_heldout=4000, num_deployments=10, num_sessions=5, num_attempts=3
)


def test_stages_cost_passes_and_seconds():
    expected = stage_seconds(WORK, PASS_S)

    # 200 images of 3.5 passes and 24 units of 36; 740 passes; a conversion is 2.5 s and 150 passes.
    assert expected["profiling"] == pytest.approx(156.4)
    assert expected["pruning"] == pytest.approx(74.0)
    # Ten conversions, a race, the baseline on 1,000 images, one deployment on them at half of its pass and two on 512.
    assert expected["deployment_search"] == pytest.approx(15 + 10 * 17.5 + 50 + 100 + 50 + 2 * 25.6)
    assert expected["quantization"] == pytest.approx(17.5)
    assert expected["evaluation"] == pytest.approx(50.0)
    # The race of the finalists, five sessions of 28 s, both models on 2,048 images; then the winner's profile.
    assert expected["verdict"] == pytest.approx(50 + 140 + 2048 * 0.15)
    assert expected["report"] == pytest.approx(32)
    # Without another runtime there is no search.
    expected = stage_seconds(replace(WORK, num_deployments=0), PASS_S)
    assert expected["deployment_search"] == expected["quantization"] == 0.0


def test_a_run_has_its_round_its_report_and_as_many_attempts_as_there_is_time_for(tmp_path: Path):
    expected = stage_seconds(WORK, PASS_S)
    attempt, last = (sum(expected[stage] for stage in stages) for stages in (ROUND, LAST))

    def left(spent_s: float, limit_s: float | None = None, **position: Any) -> Forecast:
        return forecast(WORK, budget(tmp_path, spent_s, limit_s), RunPosition(**position))

    # 1,200 s are the run's proportion: after 10 s and what is sure nothing of it is left for a second attempt.
    now = left(10.0, stage="profiling", in_stage_s=6.4)
    assert now.stage_s == pytest.approx(150.0)
    assert now.run_s == pytest.approx(150.0 + expected["deployment_search"] + attempt + last)
    # An hour has room for both.
    assert left(10.0, 3600.0, stage="analysis").run_s == pytest.approx(3 * attempt + last)
    # What an attempt took replaces what was expected of it.
    told = left(10.0, 3600.0, stage="iterative_pruning", num_measured=1, longest_s=200.0)
    assert told.run_s == pytest.approx(2 * 200.0 + last)
    # No more is left than the budget has.
    late = left(3400.0, 3600.0, stage="pruning", num_measured=1, longest_s=100.0)
    assert late.run_s == pytest.approx(200.0)
    assert left(4000.0, 3600.0, stage="report", in_stage_s=1e6).run_s == 0.0


@pytest.mark.parametrize(
    "stage",
    ["acquisition", "profiling", "deployment_search", "analysis", "approval", *ROUND, "iterative_pruning", *LAST],
)
def test_what_is_left_shrinks_as_a_stage_goes_on_and_is_never_less_than_nothing(stage: str, tmp_path: Path):
    spent = [
        forecast(WORK, budget(tmp_path, 0.0), RunPosition(stage=stage, in_stage_s=used)) for used in (0.0, 40.0, 1e6)
    ]

    for kind in ("stage_s", "run_s"):
        told = [getattr(one, kind) for one in spent]
        assert told == sorted(told, reverse=True)
        assert all(0 <= seconds < math.inf for seconds in told)
    assert spent[-1].stage_s == 0.0
