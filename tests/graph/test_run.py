"""A run in this process: its id, and the time that it still takes, counted by hand with a pass of a tenth of a second."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sample_records import attempt

from profiling_agent.graph.run import STAGES, choose_run_id, seconds_left
from profiling_agent.graph.state import RunState
from profiling_agent.request import Request
from profiling_agent.schemas import Acquired, SplitInfo
from profiling_agent.workspace import Timesheet

TRIED = attempt(1, 0.25, accepted=True)
# 740 passes; 2.5 s and 150 passes; 500 passes. Then 45 s, 1,450 passes and 1.5 for each held-out image; 12 s and 200 passes.
EVIDENCE_S = 200 * 0.35 + 56.4
ATTEMPT_S, LAST_S = 74.0 + 17.5 + 50.0, 45 + 145 + 2048 * 0.15 + 12 + 20


def left(
    root: Path,
    stage: str,
    *,
    spent_s: float = 10.0,
    in_stage_s: float = 0.0,
    time_budget: str | None = None,
    **known: Any,
):
    """Return what is left with 200 images for calibration, 1,000 to search on, 4,000 held out, and three attempts at most."""
    timesheet = Timesheet(root / "timesheet.jsonl")
    timesheet.resume_at(spent_s)
    calibration, search, heldout = (SplitInfo.model_construct(num_images=number) for number in (200, 1000, 4000))
    acquired = Acquired.model_construct(calibration=calibration, search=search, heldout=heldout)
    request = Request(max_iterations=3, time_budget=time_budget)
    state = RunState(request=request, **known).model_copy(update={"acquired": acquired})
    jobs: Any = SimpleNamespace(timesheet=timesheet, pass_s=0.1)
    seconds = seconds_left(state, stage, jobs, in_stage_s)
    assert seconds is not None
    return seconds


def test_a_run_has_its_round_its_report_and_as_many_attempts_as_there_is_time_for(tmp_path: Path):
    # 800 s are the search's proportion: a first attempt fits after 10 s, and part of a second; then the run ends.
    stage_s, run_s = left(tmp_path, "profiling", in_stage_s=6.4)
    assert stage_s == pytest.approx(30.0 - 6.4)
    assert stage_s + 60 + 180 + 200 + EVIDENCE_S + ATTEMPT_S < 800 - 10
    assert run_s == pytest.approx(800 - 10 + LAST_S)
    # An hour has room for both.
    assert left(tmp_path, "analysis", time_budget="1h")[1] == pytest.approx(EVIDENCE_S + 3 * ATTEMPT_S + LAST_S)
    # What an attempt took replaces what was expected of it.
    measured = left(tmp_path, "iterative_pruning", time_budget="1h", longest_s=200.0, attempts=(TRIED,))
    assert measured[1] == pytest.approx(2 * 200.0 + LAST_S)
    # No more is left than the budget has.
    late = left(tmp_path, "pruning", spent_s=3400.0, time_budget="1h", longest_s=100.0, attempts=(TRIED,))
    assert late[1] == pytest.approx(200.0)
    assert left(tmp_path, "report", spent_s=4000.0, time_budget="1h", in_stage_s=1e6)[1] == 0.0
    assert left(tmp_path, "report")[1] == pytest.approx(32.0)


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_left_shrinks_as_a_stage_goes_on_and_is_never_less_than_nothing(stage: str, tmp_path: Path):
    seconds = [left(tmp_path, stage, in_stage_s=used) for used in (0.0, 40.0, 1e6)]

    for kind in zip(*seconds, strict=True):
        assert list(kind) == sorted(kind, reverse=True)
        assert all(0 <= each < math.inf for each in kind)
    assert seconds[-1][0] == 0.0


def test_a_request_without_a_name_has_the_folder_of_its_hash():
    first, other = Request(model="a", dataset="d"), Request(model="b", dataset="d")

    assert choose_run_id(first, None) == choose_run_id(first.model_copy(), None) != choose_run_id(other, None)
    assert choose_run_id(first, None).startswith("run-")
