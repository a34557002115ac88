"""A toy job, added as CONTRIBUTING.md says: one record and one handler (`toy_job.py`), and one row, here."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pkgutil import resolve_name
from typing import get_type_hints

import psutil
import pytest
from in_process import TOYS
from toy_job import Doubled, DoubleTask, WaitTask

from profiling_agent.errors import JobError, RequestError, RunError
from profiling_agent.jobs import tasks
from profiling_agent.jobs.runner import Jobs, job_key
from profiling_agent.jobs.tasks import TABLE, JobContext
from profiling_agent.processes.child import can_fork

ROW = TOYS[DoubleTask]


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
    assert sorted(path.name for path in folder.iterdir()) == ["hashes.json", "result.json", "task.json", "working.txt"]
    assert Doubled.model_validate_json((folder / "result.json").read_text()) == next_one


def test_what_a_new_job_refuses_is_raised_and_a_bug_leaves_its_traceback_in_the_log_and_the_worker_goes_on(toys: Jobs):
    before = toys.run(DoubleTask(number=1))
    with pytest.raises(RequestError, match="-1 is negative"):
        toys.run(DoubleTask(number=-1))
    with pytest.raises(JobError, match="ZeroDivisionError: a bug of ours"):
        toys.run(DoubleTask(number=0))

    log = (toys.workspace.root / "worker.log").read_text()
    assert "Traceback" in log
    assert "toy_job.py" in log
    assert toys.run(DoubleTask(number=2)).pid == before.pid
    done = {job_key(DoubleTask(number=number)) for number in (1, 2)}
    assert {path.name for path in toys.workspace.jobs.iterdir()} == done


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


def test_a_job_that_measures_its_own_process_has_one_that_is_started_anew(toys: Jobs):
    copied = toys.run(DoubleTask(number=5, isolated=True))
    toys._table = {**TOYS, DoubleTask: replace(ROW, anew=True)}
    anew = toys.run(DoubleTask(number=6, isolated=True))

    assert (copied.has_torch, anew.has_torch) == (True, False)


@pytest.mark.skipif(not can_fork(), reason="what isn't copied has imported no library that reads streams")
def test_the_end_of_a_stream_is_not_waited_for_where_no_python_shuts_down(toys: Jobs):
    assert toys.run(DoubleTask(number=7)).stream_ends_s == 0


def test_equal_tasks_have_equal_keys_wherever_they_run():
    assert job_key(DoubleTask(number=1)) == job_key(DoubleTask.model_validate({"isolated": False, "number": 1}))
    keys = {job_key(DoubleTask(number=number, isolated=isolated)) for number in (1, 2) for isolated in (False, True)}
    assert len(keys) == 4


def test_every_task_has_a_row_whose_handler_takes_it_and_returns_its_result():
    kinds = {kind for kind in vars(tasks).values() if isinstance(kind, type) and issubclass(kind, tasks.Task)}
    kinds = {kind for kind in kinds if hasattr(kind, "result")}

    assert kinds == set(TABLE)
    for kind, row in TABLE.items():
        taken, context, returned = get_type_hints(resolve_name(row.handler)).values()
        assert (taken, context, returned) == (kind, JobContext, kind.result)


def test_a_secret_is_seen_by_the_jobs_that_may_and_the_worker_that_saw_it_does_no_other(
    toys: Jobs, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    toys._table = {**TOYS, DoubleTask: replace(ROW, secrets=("HF_TOKEN",))}
    one, next_one = toys.run(DoubleTask(number=11)), toys.run(DoubleTask(number=12))
    seen = psutil.Process(one.pid).environ()
    assert toys.here._copied == {}, "it is no copy, as others would be of the same"
    toys._table = {**TOYS, DoubleTask: ROW}
    after = psutil.Process(toys.run(DoubleTask(number=13)).pid).environ()

    assert one.pid == next_one.pid
    assert not psutil.pid_exists(one.pid)
    assert seen["HF_TOKEN"] == "hf_secret"
    assert "HF_TOKEN" not in after
    assert not {"OPENAI_API_KEY"} & (seen.keys() | after.keys())


def test_where_there_is_no_secret_one_worker_does_all(toys: Jobs):
    first = toys.run(DoubleTask(number=21))
    toys._table = {**TOYS, DoubleTask: replace(ROW, secrets=("HF_TOKEN",))}

    assert toys.run(DoubleTask(number=22)).pid == first.pid
