"""The job runner on toy jobs: the worker and isolated processes, secrets, and jobs that fail, crash, hang, or lack memory."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pkgutil import resolve_name
from typing import get_type_hints

import in_process
import psutil
import pytest
from toy_job import AnewTask, Doubled, DoubleTask, HangTask, KillTask, LaterTask, SecretTask, WaitTask

from profiling_agent.errors import JobError, RequestError, RunError
from profiling_agent.jobs import tasks
from profiling_agent.jobs.runner import JOB_LOG, MAX_RESIDENT, Jobs, job_key
from profiling_agent.jobs.tasks import JobContext
from profiling_agent.processes.child import can_fork
from profiling_agent.schemas import Headline, LatencyStats

BASELINE = Headline(
    latency=LatencyStats(batch_size=1, median_ms=1.0, low_ms=1.0, high_ms=1.0, samples_ms=(1.0,)),
    peak_memory_bytes=2**30,
    forward_passes=1,
)


def workers() -> list[psutil.Process]:
    """Return the processes that do this one's jobs: children of its supervisors, but for the tracker of those started anew."""
    children = [child for supervisor in psutil.Process().children() for child in supervisor.children()]
    return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


def isolated(*numbers: int) -> list[DoubleTask]:
    return [DoubleTask(number=number, isolated=True) for number in numbers]


def test_a_job_that_several_others_need_is_done_once(toys: Jobs):
    heard = list[str]()
    toys.progress = lambda message, done, total: heard.append(message)

    assert toys.run(LaterTask(number=4)).twice == 8

    assert heard.count("doubling") == 4


def test_a_new_job_is_done_in_the_worker_and_isolated_and_read_back(toys: Jobs):
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
    # Where one fails, those before it stay.
    assert [(toys.workspace.jobs / job_key(task)).exists() for task in isolated(5, 0, 7)] == [True, False, False]


def test_a_process_that_is_killed_between_two_is_replaced_and_the_first_is_not_done_again(toys: Jobs):
    results = toys.run_each([KillTask(number=number, isolated=True) for number in (1, 2, 3)])

    # The second kills its first process.
    assert [result.twice for result in results] == [2, 4, 6]
    assert results[1].pid == results[2].pid != results[0].pid
    assert not list(toys.workspace.jobs.glob(".tmp-*"))


def test_a_job_that_is_killed_again_has_failed_and_the_next_one_gets_a_new_worker(toys: Jobs):
    with pytest.raises(JobError, match=r"died with exit status -9 \(SIGKILL"):
        toys.run(KillTask(number=0))

    assert list(toys.workspace.jobs.iterdir()) == []
    assert toys.run(KillTask(number=1)).twice == 2


def test_a_job_that_takes_too_long_is_ended(toys: Jobs):
    with pytest.raises(JobError, match="longer than 0 s"):
        toys.run(HangTask(number=1))

    # The supervisor goes on until nobody needs it any more.
    assert workers() == []
    assert list(toys.workspace.jobs.iterdir()) == []


def test_a_job_whose_supervisor_is_killed_goes_on_and_the_next_one_has_another(toys: Jobs):
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(toys.run, WaitTask(number=1))
        begun = toys.workspace.root / "begun-1"
        while not (begun.exists() and begun.read_text()):
            time.sleep(0.01)
        supervisor = psutil.Process(int(begun.read_text())).parent()
        assert supervisor is not None
        supervisor.kill()
        (toys.workspace.root / "go").touch()
        assert waiting.result(timeout=60).twice == 2

    assert toys.run(DoubleTask(number=2, isolated=True)).twice == 4


@pytest.mark.parametrize("isolated", [False, True])
def test_closing_from_another_thread_ends_the_job_under_way_and_starts_no_other(toys: Jobs, isolated: bool):
    begun = toys.workspace.root / "begun-1"
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(toys.run, WaitTask(number=1, isolated=isolated))
        while not (begun.exists() and begun.read_text()):
            time.sleep(0.01)
        toys.close()

        with pytest.raises(RunError, match="run 'run' was left before it ended: resume it"):
            waiting.result(timeout=20)

    assert not psutil.pid_exists(int(begun.read_text()))
    with pytest.raises(RunError, match="was left before it ended"):
        toys.run(DoubleTask(number=1))


def test_a_job_that_there_is_no_memory_for_is_not_begun_and_goes_on_when_there_is(tmp_path: Path):
    free = [2**30]
    with in_process.opened(tmp_path, available=lambda: free[0]) as jobs:
        jobs.set_limits_from(BASELINE, "cpu")
        with pytest.raises(
            RunError, match=r"1\.0 GiB of memory are free, and a job on this model takes 1\.5 at least: end other"
        ):
            jobs.run(DoubleTask(number=1))
        assert workers() == []

        # What a device allocates is no memory of the machine's.
        jobs.set_limits_from(BASELINE, "cuda")
        jobs.run(DoubleTask(number=3))
        jobs.set_limits_from(BASELINE, "cpu")
        # What the worker holds is the run's own, and free for the next job.
        free[0] = int(1.5 * 2**30) - 2**20
        jobs.run(DoubleTask(number=2))
        # A process of its own has no use for that, so that the worker makes way, which frees nothing here.
        with pytest.raises(RunError, match=r"1\.5 GiB of memory are free"):
            jobs.run(DoubleTask(number=1, isolated=True))
        assert workers() == []


@pytest.mark.skipif(not can_fork(), reason="nothing is forked here")
def test_forks_have_imported_torch_and_wait_for_no_stream_and_what_measures_itself_is_no_fork(toys: Jobs):
    forked, anew = toys.run(DoubleTask(number=5)), toys.run(AnewTask(number=6, isolated=True))

    assert (forked.has_torch, anew.has_torch) == (True, False)
    # No Python shuts down there, so that the end of a stream isn't waited for.
    assert forked.stream_ends_s == 0
    assert psutil.Process(forked.pid).memory_info().rss < MAX_RESIDENT


def test_a_secret_is_seen_by_the_jobs_that_may_and_the_worker_that_saw_it_does_no_other(
    toys: Jobs, monkeypatch: pytest.MonkeyPatch
):
    first, other = toys.run(DoubleTask(number=10)), toys.run(SecretTask(number=10))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    one, next_one = toys.run(SecretTask(number=11)), toys.run(SecretTask(number=12))
    after = toys.run(DoubleTask(number=13))

    assert other.pid == first.pid, "where there is no secret one worker does all"
    assert (one.secrets, one.has_torch) == (("HF_TOKEN",), False), "it is no fork, as others would be of the same"
    assert one.pid == next_one.pid
    assert not psutil.pid_exists(one.pid)
    assert after.secrets == ()


def test_equal_tasks_have_equal_keys_wherever_they_run():
    assert job_key(DoubleTask(number=1)) == job_key(DoubleTask.model_validate({"isolated": False, "number": 1}))
    keys = {job_key(DoubleTask(number=number, isolated=isolated)) for number in (1, 2) for isolated in (False, True)}
    assert len(keys) == 4


def test_every_task_has_a_handler_that_takes_it_and_returns_its_result():
    kinds = [kind for kind in vars(tasks).values() if isinstance(kind, type) and issubclass(kind, tasks.Task)]
    kinds = [kind for kind in kinds if hasattr(kind, "job")]

    assert len({kind.job.handler for kind in kinds}) == len(kinds) > 20
    for kind in kinds:
        taken, context, returned = get_type_hints(resolve_name(kind.job.handler)).values()
        assert (taken, context, returned) == (kind, JobContext, kind.job.result)


def test_what_a_slow_model_takes_is_no_hang():
    row = tasks.JobRow("toy_job:double", Doubled, timeout_s=100.0, isolated_timeout_s=10.0, passes=50)

    assert row.limit_s(isolated=True) == 10.0
    assert row.limit_s(isolated=True, pass_s=0.1) == 10.0
    assert row.limit_s(isolated=True, pass_s=60.0) == 3000.0
    assert row.limit_s(isolated=False, pass_s=0.1) == 100.0
    # A pass of a minute: the 512 images of a shard may take nine hours.
    assert tasks.EvaluateTask.job.limit_s(isolated=True, pass_s=60.0) > 512 * 60
