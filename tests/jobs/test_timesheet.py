"""What a run has used of its time: along its jobs in their order, however often it was resumed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from toy_job import DoubleTask

from profiling_agent.errors import RequestError, RunError
from profiling_agent.jobs.runner import Jobs, job_key
from profiling_agent.jobs.store import SHEET, Timesheet
from profiling_agent.jobs.tasks import TABLE, JobRow
from profiling_agent.workspace import Workspace

ROW = JobRow(handler="toy_job:double", torch=False)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    made = Workspace(tmp_path / "run")
    made.jobs.mkdir(parents=True)
    return made


@pytest.fixture
def jobs(workspace: Workspace) -> Iterator[Jobs]:
    opened = Jobs(workspace, table={DoubleTask: ROW})
    yield opened
    opened.close()


def test_time_is_counted_up_to_the_latest_job_that_was_asked_for(tmp_path: Path):
    sheet = Timesheet(tmp_path / SHEET)
    for key, seconds in (("prepare-1", 1.0), ("evaluate-1", 2.0), ("evaluate-2", 4.0)):
        sheet.note(key, seconds)
    assert sheet.spent_s == 7.0

    resumed = Timesheet(tmp_path / SHEET)
    assert resumed.spent_s == 0.0
    resumed.reach("evaluate-1")
    resumed.reach("prepare-1")
    assert resumed.spent_s == 3.0
    resumed.go_on_from(6.5)
    assert resumed.spent_s == 6.5
    resumed.reach("evaluate-2")
    resumed.reach("nobody's")
    assert resumed.spent_s == 7.0
    assert resumed.by_kind() == {"evaluate": (2, 6.0), "prepare": (1, 1.0)}


def test_a_job_that_is_done_again_counts_once_and_one_that_is_tried_again_both_times(tmp_path: Path):
    sheet = Timesheet(tmp_path / SHEET)
    sheet.note("prepare-1", 1.0)
    sheet.note("deploy-1", 2.0)
    sheet.note("prepare-1", 100.0)
    assert (sheet.spent_s, Timesheet(tmp_path / SHEET).by_kind()) == (3.0, {"deploy": (1, 2.0), "prepare": (1, 1.0)})

    resumed = Timesheet(tmp_path / SHEET)
    resumed.reach("prepare-1")
    resumed.note("deploy-1", 500.0)
    assert resumed.spent_s == 503.0


def test_a_fork_is_not_charged_for_what_the_other_branch_did(tmp_path: Path):
    sheet = Timesheet(tmp_path / SHEET)
    for key, seconds in (("prune-1", 100.0), ("prune-2", 80.0)):
        sheet.note(key, seconds)
    fork = Timesheet(tmp_path / SHEET)
    fork.go_on_from(100.0)
    fork.note("prune-3", 5.0)

    assert fork.spent_s == 105.0


@pytest.mark.parametrize("line", ["", "{", '{"key": "a"}'])
def test_a_damaged_line_counts_nothing(tmp_path: Path, line: str):
    (tmp_path / SHEET).write_text(f'{line}\n{{"key": "deploy-1", "seconds": 2.5, "up_to": 2.5}}\n')
    sheet = Timesheet(tmp_path / SHEET)
    sheet.reach("deploy-1")

    assert sheet.spent_s == 2.5


def test_jobs_are_noted_those_that_failed_too_and_read_back_they_cost_what_they_did(jobs: Jobs, workspace: Workspace):
    jobs.run(DoubleTask(number=1))
    with pytest.raises(RequestError):
        jobs.run(DoubleTask(number=-1))
    spent_s = jobs.timesheet.spent_s
    jobs.run(DoubleTask(number=1))
    jobs.run_each([DoubleTask(number=1)])

    assert jobs.timesheet.spent_s == spent_s > 0
    assert list(jobs.timesheet._up_to) == [job_key(DoubleTask(number=number)) for number in (1, -1)]
    later = Jobs(workspace, table={DoubleTask: ROW})
    later.run_each([DoubleTask(number=1)])
    assert 0 < later.timesheet.spent_s < spent_s
    with pytest.raises(RequestError):
        later.run(DoubleTask(number=-1))
    # Nothing came after it, so that the second try counts too.
    assert later.timesheet.spent_s > spent_s
    later.close()


def test_a_sheet_that_can_not_be_written_is_a_line(jobs: Jobs, workspace: Workspace):
    (workspace.root / SHEET).mkdir()
    with pytest.raises(RunError, match=r"timesheet\.jsonl' can't be written .*: move it away, and resume"):
        jobs.run(DoubleTask(number=1))


def test_what_a_slow_model_takes_is_no_hang():
    row = replace(ROW, timeout_s=100.0, isolated_timeout_s=10.0, passes=50)

    assert row.limit_s(isolated=True) == 10.0
    assert row.limit_s(isolated=True, pass_s=0.1) == 10.0
    assert row.limit_s(isolated=True, pass_s=60.0) == 3000.0
    assert row.limit_s(isolated=False, pass_s=0.1) == 100.0
    # A pass of a minute: the 512 images of a shard may take nine hours.
    assert all(row.limit_s(isolated=True, pass_s=60.0) > 512 * 60 for row in TABLE.values())
