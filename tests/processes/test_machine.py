"""The machine that several programs share: jobs of several runs take turns, and other programs are waited for."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import in_process
import pytest
from toy_job import DoubleTask, TimedTask

from profiling_agent.lib.io import CACHE_VARIABLE
from profiling_agent.lib.machine import available_threads, machine_lock


@pytest.mark.parametrize("cache", ["not/there/yet", "file/cache", "~nobody-of-that-name/cache"])
def test_where_the_machine_is_free_or_no_cache_can_be_written_work_goes_on_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(CACHE_VARIABLE, cache)
    heard = []

    for _ in range(2):
        with machine_lock(lambda message, done, total: heard.append((message, done, total))):
            pass

    assert heard == []


TAKE = """
import sys, time
from profiling_agent.lib.machine import machine_lock
with machine_lock(name=sys.argv[1]):
    print("has it", flush=True)
    time.sleep(60)
"""


@contextmanager
def taking(name: str) -> Iterator["subprocess.Popen[str]"]:
    """Yield a process that takes the machine, or waits for it."""
    with subprocess.Popen([sys.executable, "-c", TAKE, name], stdout=subprocess.PIPE, text=True) as taker:
        try:
            yield taker
        finally:
            taker.kill()


def wait_for_ticket(cache: Path, name: str) -> None:
    while not [*cache.glob(f"machine-*/*-{name}, *")]:
        time.sleep(0.01)


def test_a_holder_is_named_and_waited_for_and_one_that_dies_releases_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    heard = []
    with taking("run first") as holder:
        assert holder.stdout is not None
        holder.stdout.readline()

        def progress(message: str, done: int, total: int) -> None:
            heard.append(message)
            holder.kill()

        with machine_lock(progress):
            pass

    assert heard == [f"waiting for another job on this machine to end: run first, process {holder.pid}"]
    assert [path.name for path in tmp_path.glob("machine-*/*")] == ["lock"]


def test_jobs_are_served_in_the_order_of_their_requests_and_a_killed_one_that_waits_holds_up_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    served = list[str]()

    def take(name: str) -> None:
        with machine_lock(name=name):
            served.append(name)

    with ThreadPoolExecutor() as threads:
        with machine_lock(name="holder"):
            with taking("killed") as killed:
                wait_for_ticket(tmp_path, "killed")
            killed.wait()
            waiting = []
            for name in ("first", "second"):
                waiting.append(threads.submit(take, name))
                wait_for_ticket(tmp_path, name)
        # It asks again at once, as a run does for its next job.
        take("holder")
        for job in waiting:
            job.result(timeout=10)

    assert served == ["first", "second", "holder"]


# Work that leaves most of the cores to the tests.
SPIN = "import os\nos.nice(10)\nwhile True: pass"


@contextmanager
def busy_machine() -> Iterator[None]:
    """Have other programs use every core."""
    spinners = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(available_threads())]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()


@pytest.mark.usefixtures("_imported_once")
def test_a_run_waits_for_other_programs_before_it_times_a_model_but_no_more_than_a_tenth_of_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    heard = list[str]()

    def run(number: int, spent_s: float = 0.0, budget_s: float | None = None) -> float:
        """Do a timed job in a run that has spent so much; return the seconds that the run has waited in all."""
        with in_process.opened(tmp_path / "run") as jobs:
            jobs.progress = lambda message, _done, _total: heard.append(message)
            jobs.timesheet.resume_at(spent_s)
            jobs.time_budget_s = budget_s
            assert jobs.run(TimedTask(number=number)).twice == 2 * number
            assert jobs.run(DoubleTask(number=number)).twice == 2 * number
            _, waited_s = jobs.timesheet.by_kind().get("wait", (0, 0.0))
            assert waited_s <= 0.1 * max(jobs.timesheet.spent_s, budget_s or 0.0) + 0.3
            return waited_s

    # What has spent nothing yet waits for nothing.
    assert run(1) == 0.0
    with busy_machine():
        # Nothing of its tenth is left when it goes on after a break.
        assert run(2, spent_s=12.0) == run(3, spent_s=12.0) == pytest.approx(1.2, abs=0.3)
        assert run(4, budget_s=30.0) == pytest.approx(3.0, abs=0.3)

    waits = [message for message in heard if message.startswith("waiting")]
    assert [wait.rpartition(", which use ")[0] for wait in waits] == [
        "waiting up to 1 s for other programs",
        "waiting up to 2 s for other programs",
    ]
