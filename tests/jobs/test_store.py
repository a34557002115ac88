"""Results of jobs on disk, and how long each took."""

import shutil
from pathlib import Path

import pytest
from in_process import opened
from toy_job import CopyTask, DoubleTask, NoteTask

from profiling_agent.errors import ArtifactError, RequestError, RunError
from profiling_agent.jobs.runner import Jobs, job_key
from profiling_agent.schemas import ArtifactRef
from profiling_agent.workspace import TIMESHEET_FILE, Timesheet


def test_a_job_whose_folder_was_deleted_is_done_again_when_it_is_run_and_named_when_another_reads_it(tmp_path: Path):
    root = tmp_path / "run"
    with opened(root) as jobs:
        note = jobs.run(NoteTask(text="twelve"))
        copied = jobs.run(CopyTask(source=note.file))
    shutil.rmtree(root / "jobs" / job_key(NoteTask(text="twelve")))

    with opened(root) as jobs:
        # As the checkpoint of a graph has it: the note's own job isn't run again.
        with pytest.raises(RunError, match=r"note\.txt' is missing: delete .*checkpoints\.sqlite.* resume"):
            jobs.run(CopyTask(source=note.file, times=2))
        assert jobs.run(NoteTask(text="twelve")) == note
        assert jobs.run(CopyTask(source=note.file)) == copied
        assert jobs.path(note.file).read_text() == "twelve"


@pytest.mark.parametrize("path", ["../secret.txt", "/etc/hostname", "jobs/../../secret.txt", "out/secret.txt"])
def test_a_reference_that_leads_out_of_the_run_is_refused_here_and_in_the_child(tmp_path: Path, path: str):
    (tmp_path / "secret.txt").write_text("s")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "out").symlink_to(tmp_path)
    ref = ArtifactRef(path=path, sha256="0", size_bytes=1)

    with opened(tmp_path / "run") as jobs, pytest.raises(ArtifactError, match="isn't in the run folder"):
        jobs.run(CopyTask(source=ref))


def timesheet(folder: Path, **seconds: float) -> Timesheet:
    """Return the timesheet of a run that is resumed after jobs that took so long."""
    sheet = Timesheet(folder / TIMESHEET_FILE)
    for name, job_s in seconds.items():
        sheet.note(name.replace("_", "-"), job_s)
    assert sheet.spent_s == sum(seconds.values())
    return Timesheet(folder / TIMESHEET_FILE)


def test_time_is_counted_up_to_the_latest_job_that_was_requested(tmp_path: Path):
    resumed = timesheet(tmp_path, prepare_1=1.0, evaluate_1=2.0, evaluate_2=4.0)

    assert resumed.spent_s == 0.0
    resumed.reach("evaluate-1")
    resumed.reach("prepare-1")
    assert resumed.spent_s == 3.0
    resumed.resume_at(6.5)
    assert resumed.spent_s == 6.5
    resumed.reach("evaluate-2")
    resumed.reach("unknown")
    assert resumed.spent_s == 7.0
    assert resumed.by_kind() == {"evaluate": (2, 6.0), "prepare": (1, 1.0)}


def test_a_job_that_is_done_again_counts_once_and_the_last_one_both_times(tmp_path: Path):
    resumed = timesheet(tmp_path, prepare_1=1.0, deploy_1=2.0)
    resumed.note("prepare-1", 100.0)
    assert resumed.by_kind() == {"deploy": (1, 2.0), "prepare": (1, 1.0)}

    resumed.note("deploy-1", 500.0)
    assert resumed.spent_s == 503.0


def test_a_fork_is_not_charged_for_what_the_other_branch_did(tmp_path: Path):
    fork = timesheet(tmp_path, prune_1=100.0, prune_2=80.0)
    fork.resume_at(100.0)
    fork.note("prune-3", 5.0)

    assert fork.spent_s == 105.0


@pytest.mark.parametrize("line", ["", "{", '{"key": "a"}'])
def test_a_damaged_line_counts_nothing(tmp_path: Path, line: str):
    (tmp_path / TIMESHEET_FILE).write_text(f'{line}\n{{"key": "deploy-1", "seconds": 2.5, "up_to": 2.5}}\n')
    sheet = Timesheet(tmp_path / TIMESHEET_FILE)
    sheet.reach("deploy-1")

    assert sheet.spent_s == 2.5


def test_jobs_are_noted_those_that_failed_too_and_read_back_they_cost_what_they_did(toys: Jobs):
    toys.run(DoubleTask(number=1))
    with pytest.raises(RequestError):
        toys.run(DoubleTask(number=-1))
    spent_s = toys.timesheet.spent_s
    toys.run(DoubleTask(number=1))
    toys.run_each([DoubleTask(number=1)])

    assert toys.timesheet.spent_s == spent_s > 0
    assert list(toys.timesheet._up_to) == [job_key(DoubleTask(number=number)) for number in (1, -1)]
    with opened(toys.workspace.root) as later:
        later.run_each([DoubleTask(number=1)])
        assert 0 < later.timesheet.spent_s < spent_s
        with pytest.raises(RequestError):
            later.run(DoubleTask(number=-1))
        # Nothing came after it, so that the second try counts too.
        assert later.timesheet.spent_s > spent_s
