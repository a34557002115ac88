"""The job runner on toy jobs: the worker and isolated processes, and jobs that fail, crash, hang, or lack memory or disk."""

import importlib.util
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import in_process
import psutil
import pytest
from toy_job import Doubled, DoubleTask, FillTask, HangTask, KillTask, LaterTask, SpawnedTask, WaitTask

from profiling_agent.errors import JobError, RequestError, RunError, StorageError
from profiling_agent.jobs import tasks
from profiling_agent.jobs.runner import JOB_LOG, MAX_RESIDENT, Jobs, job_key
from profiling_agent.processes.child import can_fork


def workers() -> list[psutil.Process]:
    """Return the processes that do this one's jobs: children of its supervisors, but for the tracker of those that are spawned."""
    children = [child for supervisor in psutil.Process().children() for child in supervisor.children()]
    return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


def isolated(*numbers: int) -> list[DoubleTask]:
    return [DoubleTask(number=number, isolated=True) for number in numbers]


@contextmanager
def waiting(jobs: Jobs, *, isolated: bool = False) -> Iterator[tuple[Future[Doubled], psutil.Process]]:
    """Yield a job that waits for the file "go", and its process."""
    begun = jobs.workspace.root / "begun-1"
    with ThreadPoolExecutor() as threads:
        job = threads.submit(jobs.run, WaitTask(number=1, isolated=isolated))
        while not (begun.exists() and begun.read_text()):
            time.sleep(0.01)
        yield job, psutil.Process(int(begun.read_text()))


def test_a_job_that_several_others_need_is_done_once(toys: Jobs):
    heard = list[str]()
    toys.progress = lambda message, done, total: heard.append(message)

    assert toys.run(LaterTask(number=4)).twice == 8

    assert heard.count("doubling") == 4


def test_a_new_job_is_done_in_the_worker_or_isolated_and_read_back(toys: Jobs):
    heard = list[tuple[str, int, int]]()
    toys.progress = lambda message, done, total: heard.append((message, done, total))

    warm, next_one = toys.run(DoubleTask(number=3)), toys.run(DoubleTask(number=4))
    alone = toys.run(DoubleTask(number=3, isolated=True))
    again = toys.run(DoubleTask(number=3, isolated=True))

    assert (warm.twice, next_one.twice, alone.twice) == (6, 8, 6)
    assert warm.pid == next_one.pid
    assert len({os.getpid(), warm.pid, alone.pid}) == 3
    assert again == alone
    assert heard.count(("doubling", 1, 1)) == 3
    folder = toys.workspace.jobs / job_key(DoubleTask(number=4))
    assert sorted(path.name for path in folder.iterdir()) == ["result.json", "task.json", "working.txt"]
    assert Doubled.model_validate_json((folder / "result.json").read_text()) == next_one


def test_what_a_new_job_refuses_is_raised_and_a_bug_leaves_its_traceback_in_the_log_and_the_worker_goes_on(toys: Jobs):
    before = toys.run(DoubleTask(number=1))
    with pytest.raises(RequestError, match="-1 is negative"):
        toys.run(DoubleTask(number=-1))
    with pytest.raises(JobError, match="ZeroDivisionError: a bug of ours"):
        toys.run(DoubleTask(number=0))

    log = (toys.workspace.root / JOB_LOG).read_text()
    assert "Traceback" in log
    assert "toy_job.py" in log
    assert toys.run(DoubleTask(number=2)).pid == before.pid
    done = {job_key(DoubleTask(number=number)) for number in (1, 2)}
    assert {path.name for path in toys.workspace.jobs.iterdir()} == done


def test_jobs_of_one_kind_share_a_process_of_their_own_and_only_those_that_are_missing_are_done(toys: Jobs):
    first = toys.run(DoubleTask(number=2, isolated=True))

    results = toys.run_each(isolated(1, 2, 3))

    assert [result.twice for result in results] == [2, 4, 6]
    assert results[1] == first
    assert results[0].pid == results[2].pid
    assert len({os.getpid(), first.pid, results[0].pid}) == 3
    assert toys.run_each([]) == []
    with pytest.raises(JobError, match="a bug of ours"):
        toys.run_each(isolated(5, 0, 7))
    # If one fails, those before it stay.
    assert [(toys.workspace.jobs / job_key(task)).exists() for task in isolated(5, 0, 7)] == [True, False, False]


def test_a_process_that_is_killed_between_two_is_replaced_and_the_first_is_not_done_again(toys: Jobs):
    results = toys.run_each([KillTask(number=number, isolated=True) for number in (1, 2, 3)])

    # The second kills its first process.
    assert [result.twice for result in results] == [2, 4, 6]
    assert results[1].pid == results[2].pid != results[0].pid
    assert not list(toys.workspace.jobs.glob(".tmp-*"))


def test_a_job_that_is_killed_again_has_failed_and_the_next_one_gets_a_new_worker(toys: Jobs):
    with pytest.raises(JobError, match=r"the job died with exit status -9 \(SIGKILL"):
        toys.run(KillTask(number=0))

    assert list(toys.workspace.jobs.iterdir()) == []
    assert toys.run(KillTask(number=1)).twice == 2


def test_a_job_that_takes_too_long_is_ended(toys: Jobs):
    with pytest.raises(JobError, match="longer than 0 s"):
        toys.run(HangTask(number=1))

    # The supervisor goes on until nothing needs it any more.
    assert workers() == []
    assert list(toys.workspace.jobs.iterdir()) == []


def test_a_full_disk_ends_in_one_line_and_leaves_nothing(toys: Jobs):
    with pytest.raises(StorageError, match=r"File too large.*resume") as full:
        toys.run(FillTask(number=1))

    assert "\n" not in str(full.value)
    assert list(toys.workspace.jobs.iterdir()) == []


def test_a_job_whose_supervisor_is_killed_goes_on_and_the_next_one_has_another(toys: Jobs):
    with waiting(toys) as (job, process):
        supervisor = process.parent()
        assert supervisor is not None
        supervisor.kill()
        (toys.workspace.root / "go").touch()
        assert job.result(timeout=60).twice == 2

    assert toys.run(DoubleTask(number=2, isolated=True)).twice == 4


@pytest.mark.parametrize("isolated", [False, True])
def test_closing_from_another_thread_ends_the_job_under_way_and_starts_no_other(toys: Jobs, isolated: bool):
    with waiting(toys, isolated=isolated) as (job, process):
        toys.close()

        with pytest.raises(RunError, match="run 'run' was left before it ended: resume it"):
            job.result(timeout=20)

    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    with pytest.raises(RunError, match="was left before it ended"):
        toys.run(DoubleTask(number=1))


@pytest.mark.skipif(not can_fork(), reason="nothing is forked here")
def test_forks_have_imported_torch_and_wait_for_no_stream_and_what_measures_itself_is_no_fork(toys: Jobs):
    forked, spawned = toys.run(DoubleTask(number=5)), toys.run(SpawnedTask(number=6, isolated=True))

    assert (forked.has_torch, spawned.has_torch) == (True, False)
    # No Python shuts down there, so that the end of a stream isn't waited for.
    assert forked.stream_ends_s == 0
    assert psutil.Process(forked.pid).memory_info().rss < MAX_RESIDENT


def test_the_hubs_token_reaches_a_job_and_a_language_models_key_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with in_process.opened(tmp_path) as jobs:
        assert jobs.run(SpawnedTask(number=1)).keys == ("HF_TOKEN",)


def test_equal_tasks_have_equal_keys_wherever_they_run():
    assert job_key(DoubleTask(number=1)) == job_key(DoubleTask.model_validate({"isolated": False, "number": 1}))
    keys = {job_key(DoubleTask(number=number, isolated=isolated)) for number in (1, 2) for isolated in (False, True)}
    assert len(keys) == 4


def test_what_forks_have_imported_exists():
    assert [name for name in tasks.MODULES if importlib.util.find_spec(name) is None] == []
