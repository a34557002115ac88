"""Where something else wants the machine, threads sleep while they wait, and what is timed waits for a quieter moment."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from toy_job import DoubleTask

from profiling_agent.jobs.runner import Jobs
from profiling_agent.jobs.tasks import TABLE, JobRow
from profiling_agent.lib.machine import PASSIVE, WAIT_POLICY, is_busy, num_spare, waits_passively
from profiling_agent.workspace import Workspace

ROW = JobRow(handler="toy_job:double", torch=False)


@pytest.fixture
def _spinning() -> Iterator[None]:
    # As many as keep every core busy, wherever the tests are kept to.
    with ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            stack.enter_context(_spinner())
        yield


@contextmanager
def _spinner() -> Iterator[None]:
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        yield
        other.kill()


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    monkeypatch.delenv(WAIT_POLICY, raising=False)
    workspace = Workspace(tmp_path / "run")
    workspace.jobs.mkdir(parents=True)
    opened = Jobs(workspace, table={DoubleTask: ROW})
    yield opened
    opened.close()


def policy(pid: int) -> str | None:
    return psutil.Process(pid).environ().get(WAIT_POLICY)


@pytest.mark.parametrize(
    ("num_all", "num_allowed", "num_cores", "num_threads", "room"),
    [
        # Two cores of this machine, all of it; kept to one; eight cores of two threads each, all and half of them; nobody's second threads.
        (2, 2, 2, 2, 0),
        (2, 1, 1, 1, 1),
        (16, 16, 8, 8, 4),
        (16, 8, 4, 4, 10),
        (8, 8, 8, 8, 0),
        # A quota of eight CPUs on 64 cores, of one thread and of two each; of one CPU on half of eight cores.
        (64, 64, 64, 8, 56),
        (128, 128, 64, 8, 116),
        (16, 8, 4, 1, 14),
    ],
)
def test_others_have_room_where_we_are_not_and_on_half_of_our_second_threads(
    num_all: int, num_allowed: int, num_cores: int, num_threads: int, room: int
):
    assert num_spare(num_all, num_allowed, num_cores, num_threads) == room


@pytest.mark.usefixtures("_spinning")
def test_processes_that_never_rest_are_seen_and_beside_them_what_is_not_timed_sleeps_while_it_waits(jobs: Jobs):
    assert is_busy()
    worker = jobs.run(DoubleTask(number=1))

    assert policy(worker.pid) == PASSIVE


@pytest.mark.slow
@pytest.mark.usefixtures("_spinning")
def test_what_is_timed_waits_for_a_quieter_moment_says_so_and_is_left_as_a_user_would_run_it(jobs: Jobs):
    said: list[str] = []
    jobs.progress = lambda message, done, total: said.append(message)
    jobs.here._patience_s = 2.0
    jobs._table = {**TABLE, DoubleTask: replace(ROW, timed=True)}
    worker = jobs.run(DoubleTask(number=1))
    jobs.run(DoubleTask(number=2))

    assert policy(worker.pid) is None
    # It waits so long in all, and not again for each.
    assert [message.startswith("waiting for a quieter moment") for message in said].count(True) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("_spinning")
def test_what_is_given_a_secret_sleeps_too_and_is_nobodys_copy(jobs: Jobs, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    jobs._table = {**TABLE, DoubleTask: replace(ROW, secrets=("HF_TOKEN",))}
    worker = jobs.run(DoubleTask(number=1))

    assert (policy(worker.pid), psutil.Process(worker.pid).environ()["HF_TOKEN"]) == (PASSIVE, "hf_secret")
    assert jobs.here._copied == {}


@pytest.mark.slow
@pytest.mark.usefixtures("_spinning")
def test_what_the_user_says_of_it_counts(jobs: Jobs, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(WAIT_POLICY, "ACTIVE")

    assert policy(jobs.run(DoubleTask(number=1)).pid) == "ACTIVE"


@pytest.mark.parametrize(
    ("value", "expected"), [("passive", True), ("PASSIVE", True), ("active", False), (None, False)]
)
def test_a_process_knows_how_it_waits(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool):
    monkeypatch.delenv(WAIT_POLICY, raising=False)
    if value is not None:
        monkeypatch.setenv(WAIT_POLICY, value)

    assert waits_passively() == expected
