"""A toy job, added as CONTRIBUTING.md says: one record and one handler (`toy_job.py`), and one row, here."""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import get_type_hints

import psutil
import pytest
from toy_job import Doubled, DoubleTask, WaitTask

from profiling_agent.errors import JobError, RequestError, RunError
from profiling_agent.jobs import tasks
from profiling_agent.jobs.runner import Jobs, job_key
from profiling_agent.jobs.tasks import TABLE, JobContext, JobRow
from profiling_agent.processes.child import can_fork
from profiling_agent.workspace import Workspace

ROW = JobRow(handler="toy_job:double", torch=False, isolated_timeout_s=60.0)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    workspace = Workspace(tmp_path / "run")
    workspace.jobs.mkdir(parents=True)
    opened = Jobs(workspace, table={**TABLE, DoubleTask: ROW})
    yield opened
    opened.close()


def test_a_new_job_is_done_in_the_worker_and_isolated_and_read_back(jobs: Jobs):
    heard = list[tuple[str, int, int]]()
    jobs.progress = lambda message, done, total: heard.append((message, done, total))

    warm, next_one = jobs.run(DoubleTask(number=3)), jobs.run(DoubleTask(number=4))
    alone = jobs.run(DoubleTask(number=3, isolated=True))
    again = jobs.run(DoubleTask(number=3, isolated=True))

    assert (warm.twice, next_one.twice, alone.twice) == (6, 8, 6)
    assert warm.pid == next_one.pid
    assert len({os.getpid(), warm.pid, alone.pid}) == 3
    assert again == alone
    assert heard.count(("doubling", 1, 1)) == 3
    folder = jobs.workspace.jobs / job_key(DoubleTask(number=4))
    assert sorted(path.name for path in folder.iterdir()) == ["hashes.json", "result.json", "task.json", "working.txt"]
    assert Doubled.model_validate_json((folder / "result.json").read_text()) == next_one


def test_what_a_new_job_refuses_is_raised_and_a_bug_leaves_its_traceback_in_the_log(jobs: Jobs):
    with pytest.raises(RequestError, match="-1 is negative"):
        jobs.run(DoubleTask(number=-1))
    with pytest.raises(JobError, match="ZeroDivisionError: a bug of ours"):
        jobs.run(DoubleTask(number=0))

    log = (jobs.workspace.root / "worker.log").read_text()
    assert "Traceback" in log
    assert "toy_job.py" in log
    assert list(jobs.workspace.jobs.iterdir()) == []


@pytest.mark.parametrize("isolated", [False, True])
def test_closing_from_another_thread_ends_the_job_under_way_and_starts_no_other(tmp_path: Path, isolated: bool):
    workspace = Workspace(tmp_path / "run")
    workspace.jobs.mkdir(parents=True)
    rows = {DoubleTask: ROW, WaitTask: replace(ROW, handler="toy_job:wait")}
    jobs, begun = Jobs(workspace, table={**TABLE, **rows}), workspace.root / "begun-1"
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(jobs.run, WaitTask(number=1, isolated=isolated))
        while not (begun.exists() and begun.read_text()):
            time.sleep(0.01)
        jobs.close()

        with pytest.raises(RunError, match="run 'run' was left before it ended: resume it"):
            waiting.result(timeout=20)

    assert not psutil.pid_exists(int(begun.read_text()))
    with pytest.raises(RunError, match="was left before it ended"):
        jobs.run(DoubleTask(number=1))


def test_a_job_that_measures_its_own_process_has_one_that_is_started_anew(jobs: Jobs):
    copied = jobs.run(DoubleTask(number=5, isolated=True))
    jobs._table = {**TABLE, DoubleTask: replace(ROW, anew=True)}
    anew = jobs.run(DoubleTask(number=6, isolated=True))

    assert (copied.has_torch, anew.has_torch) == (True, False)


@pytest.mark.skipif(not can_fork(), reason="what isn't copied has imported no library that reads streams")
def test_the_end_of_a_stream_is_not_waited_for_where_no_python_shuts_down(jobs: Jobs):
    assert jobs.run(DoubleTask(number=7)).stream_ends_s == 0


def test_equal_tasks_have_equal_keys_wherever_they_run():
    assert job_key(DoubleTask(number=1)) == job_key(DoubleTask.model_validate({"isolated": False, "number": 1}))
    assert len({job_key(DoubleTask(number=1, isolated=isolated)) for isolated in (False, True)}) == 2


def test_every_task_has_a_row_whose_handler_takes_it_and_returns_its_result():
    kinds = {kind for kind in vars(tasks).values() if isinstance(kind, type) and issubclass(kind, tasks.Task)}
    kinds = {kind for kind in kinds if hasattr(kind, "result")}

    assert kinds == set(TABLE)
    for kind, row in TABLE.items():
        taken, context, returned = get_type_hints(resolve_name(row.handler)).values()
        assert (taken, context, returned) == (kind, JobContext, kind.result)


def test_a_secret_is_seen_by_the_jobs_that_may_and_the_worker_that_saw_it_does_no_other(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    table = {**TABLE, DoubleTask: replace(ROW, secrets=("HF_TOKEN",))}
    trusted = Jobs(jobs.workspace, table=table)
    one, next_one = trusted.run(DoubleTask(number=11)), trusted.run(DoubleTask(number=12))
    seen = psutil.Process(one.pid).environ()
    trusted._table = {**TABLE, DoubleTask: ROW}
    another = trusted.run(DoubleTask(number=13))
    after = psutil.Process(another.pid).environ()
    is_gone = not psutil.pid_exists(one.pid)
    trusted.close()

    assert (one.pid, is_gone) == (next_one.pid, True)
    assert seen["HF_TOKEN"] == "hf_secret"
    assert "HF_TOKEN" not in after
    assert not {"OPENAI_API_KEY"} & (seen.keys() | after.keys())


def test_where_there_is_no_secret_one_worker_does_all(jobs: Jobs):
    first = jobs.run(DoubleTask(number=21))
    jobs._table = {**TABLE, DoubleTask: replace(ROW, secrets=("HF_TOKEN",))}

    assert jobs.run(DoubleTask(number=22)).pid == first.pid
