"""A run in this process: its id, and the time that it still takes, counted by hand with a pass of a tenth of a second."""

import math
from pathlib import Path
from typing import Any

import pytest

from profiling_agent.graph.run import LAST, ROUND, STAGES, choose_run_id, forecast
from profiling_agent.jobs.store import Timesheet
from profiling_agent.request import Request
from profiling_agent.search.budget import Budget

# 200 images for calibration, 1,000 to search on, and 4,000 held out, of which a test needs 2,048.
IMAGES = (200, 1000, 4000)
# 740 passes; 2.5 s and 150 passes; 500 passes. Then 45 s, 1,450 passes and 1.5 for each held-out image; 12 s and 200 passes.
ATTEMPT_S, LAST_S = 74.0 + 17.5 + 50.0, 45 + 145 + 2048 * 0.15 + 12 + 20


def left(root: Path, stage: str, *, spent_s: float = 10.0, limit_s: float | None = None, **known: Any):
    sheet = Timesheet(root / "timesheet.jsonl")
    sheet.resume_at(spent_s)
    known = {"in_stage_s": 0.0, "num_more": 2, "longest_s": 0.0} | known
    return forecast(Budget(sheet, 0.1, limit_s), stage, IMAGES, **known)


def test_a_run_has_its_round_its_report_and_as_many_attempts_as_there_is_time_for(tmp_path: Path):
    # 800 s are the run's proportion: after 10 s and what is sure nothing of it is left for a second attempt.
    stage_s, run_s = left(tmp_path, "profiling", in_stage_s=6.4)
    assert stage_s == pytest.approx(200 * 0.35 + 86.4 - 6.4)
    assert run_s == pytest.approx(stage_s + 60 + 180 + 200 + ATTEMPT_S + LAST_S)
    # An hour has room for both.
    assert left(tmp_path, "analysis", limit_s=3600.0)[1] == pytest.approx(3 * ATTEMPT_S + LAST_S)
    # What an attempt took replaces what was expected of it.
    measured = left(tmp_path, "iterative_pruning", limit_s=3600.0, longest_s=200.0)
    assert measured[1] == pytest.approx(2 * 200.0 + LAST_S)
    # No more is left than the budget has.
    assert left(tmp_path, "pruning", spent_s=3400.0, limit_s=3600.0, longest_s=100.0)[1] == pytest.approx(200.0)
    assert left(tmp_path, "report", spent_s=4000.0, limit_s=3600.0, in_stage_s=1e6)[1] == 0.0
    assert left(tmp_path, "report")[1] == pytest.approx(32.0)


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_left_shrinks_as_a_stage_goes_on_and_is_never_less_than_nothing(stage: str, tmp_path: Path):
    seconds = [left(tmp_path, stage, in_stage_s=used) for used in (0.0, 40.0, 1e6)]

    for kind in zip(*seconds, strict=True):
        assert list(kind) == sorted(kind, reverse=True)
        assert all(0 <= each < math.inf for each in kind)
    assert seconds[-1][0] == 0.0
    assert {*ROUND, *LAST} < {*STAGES}


def test_a_request_without_a_name_has_the_folder_of_its_hash():
    first, other = Request(model="a", dataset="d"), Request(model="b", dataset="d")

    assert choose_run_id(first, None) == choose_run_id(first.model_copy(), None) != choose_run_id(other, None)
    assert choose_run_id(first, None).startswith("run-")
