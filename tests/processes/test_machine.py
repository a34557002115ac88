"""Busy cores, and the lock of the machine."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import in_process
import pytest
from toy_job import AnewTask, TimedTask

from profiling_agent.jobs.runner import Jobs
from profiling_agent.lib.io import CACHE_VARIABLE, read_holder
from profiling_agent.lib.machine import PASSIVE, WAIT_POLICY, is_busy, num_spare, waits_passively
from profiling_agent.processes.machine_lock import HOLDER, machine_lock


@pytest.fixture
def _spinning() -> Iterator[None]:
    # As many as keep every core busy, wherever the tests are kept to.
    with ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            spin = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
            spinner = stack.enter_context(subprocess.Popen(spin, stdout=subprocess.PIPE))
            assert spinner.stdout is not None
            spinner.stdout.readline()
            stack.callback(spinner.kill)
        yield


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Jobs]:
    monkeypatch.delenv(WAIT_POLICY, raising=False)
    with in_process.opened(tmp_path / "run", patience_s=2.0) as jobs:
        yield jobs


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


@pytest.mark.slow
@pytest.mark.usefixtures("_spinning")
def test_on_a_busy_machine_what_is_timed_waits_for_a_while_and_what_is_not_sleeps_while_it_waits(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
):
    said: list[str] = []
    jobs.progress = lambda message, done, total: said.append(message)
    assert is_busy()

    assert jobs.run(AnewTask(number=1, isolated=True)).wait_policy == PASSIVE
    assert said == ["doubling"]
    # It waits so long in all, and not again for each; it is left as a user would run it.
    assert [jobs.run(TimedTask(number=number, isolated=True)).wait_policy for number in (1, 2)] == [None, None]
    assert [message.startswith("waiting for a quieter moment") for message in said].count(True) == 2
    monkeypatch.setenv(WAIT_POLICY, "ACTIVE")
    with in_process.opened(jobs.workspace.root) as told:
        assert told.run(AnewTask(number=3, isolated=True)).wait_policy == "ACTIVE", "what the user says of it counts"


@pytest.mark.parametrize(
    ("value", "expected"), [("passive", True), ("PASSIVE", True), ("active", False), (None, False)]
)
def test_a_process_knows_how_it_waits(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool):
    monkeypatch.delenv(WAIT_POLICY, raising=False)
    if value is not None:
        monkeypatch.setenv(WAIT_POLICY, value)

    assert waits_passively() == expected


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


HOLD = """
import time
from profiling_agent.processes.machine_lock import machine_lock
with machine_lock(what="run 'a'"):
    print("has it", flush=True)
    time.sleep(60)
"""


def test_a_holder_is_named_with_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    holder.stdout.readline()
    heard = []

    def progress(message: str, done: int, total: int) -> None:
        heard.append(message)
        holder.kill()

    with machine_lock(progress):
        own = read_holder(tmp_path / HOLDER)
    holder.wait()
    holder.stdout.close()

    (line,) = heard
    assert re.fullmatch(
        rf"waiting for the machine, held by run 'a' \(process {holder.pid}, since \d\d:\d\d:\d\d\)", line
    )
    assert own == "another graph of this process"


def test_a_note_that_cannot_be_read_names_nobody(tmp_path: Path):
    (tmp_path / HOLDER).write_bytes(b"\xff")

    assert read_holder(tmp_path / HOLDER) == read_holder(tmp_path / "none") == "another process"
