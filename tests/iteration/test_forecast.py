"""What is left of a run: counted by hand, with a pass of a tenth of a second."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from profiling_agent.iteration.budget import Budget
from profiling_agent.iteration.forecast import LAST, ROUND, Standing, Work, forecast, stage_seconds
from profiling_agent.jobs.timesheet import Timesheet

PASS_S = 0.1
WORK = Work(num_calibration=200, num_search=1000, num_heldout=4000, num_deployments=10, num_sessions=5, num_attempts=3)


def budget(root: Path, spent_s: float, limit_s: float | None = None) -> Budget:
    sheet = Timesheet(root / "timesheet.jsonl")
    sheet.go_on_from(spent_s)
    return Budget(sheet, PASS_S, limit_s)


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


def test_without_another_runtime_there_is_no_search():
    expected = stage_seconds(replace(WORK, num_deployments=0), PASS_S)
    assert expected["deployment_search"] == expected["quantization"] == 0.0


def test_a_run_has_its_round_its_report_and_as_many_attempts_as_there_is_time_for(tmp_path: Path):
    expected = stage_seconds(WORK, PASS_S)
    attempt, last = (sum(expected[stage] for stage in stages) for stages in (ROUND, LAST))

    # 1,200 s are the run's proportion: after 10 s and what is sure nothing of it is left for a second attempt.
    now = forecast(WORK, budget(tmp_path, 10.0), Standing(stage="profiling", in_stage_s=6.4))
    assert now.stage_s == pytest.approx(150.0)
    assert now.run_s == pytest.approx(150.0 + expected["deployment_search"] + attempt + last)
    # An hour has room for both.
    assert forecast(WORK, budget(tmp_path, 10.0, 3600.0), Standing(stage="analysis")).run_s == pytest.approx(
        3 * attempt + last
    )
    # What an attempt took replaces what was expected of it.
    told = forecast(
        WORK, budget(tmp_path, 10.0, 3600.0), Standing(stage="iterative_pruning", num_measured=1, longest_s=200.0)
    )
    assert told.run_s == pytest.approx(2 * 200.0 + last)


def test_no_more_is_left_than_the_budget_has(tmp_path: Path):
    late = forecast(WORK, budget(tmp_path, 3400.0, 3600.0), Standing(stage="pruning", num_measured=1, longest_s=100.0))

    assert late.run_s == pytest.approx(200.0)
    assert forecast(WORK, budget(tmp_path, 4000.0, 3600.0), Standing(stage="report", in_stage_s=1e6)).run_s == 0.0


@pytest.mark.parametrize(
    "stage",
    ["acquisition", "profiling", "deployment_search", "analysis", "approval", *ROUND, "iterative_pruning", *LAST],
)
def test_what_is_left_shrinks_as_a_stage_goes_on_and_is_never_less_than_nothing(stage: str, tmp_path: Path):
    spent = [forecast(WORK, budget(tmp_path, 0.0), Standing(stage=stage, in_stage_s=used)) for used in (0.0, 40.0, 1e6)]

    for kind in ("stage_s", "run_s"):
        told = [getattr(one, kind) for one in spent]
        assert told == sorted(told, reverse=True)
        assert all(0 <= seconds < math.inf for seconds in told)
    assert spent[-1].stage_s == 0.0
