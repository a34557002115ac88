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
from toy_job import DoubleTask, TimedTask

from profiling_agent.lib.io import CACHE_VARIABLE, read_holder
from profiling_agent.lib.machine import is_busy
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


@pytest.mark.slow
@pytest.mark.usefixtures("_spinning")
def test_on_a_busy_machine_what_is_timed_waits_for_a_while_and_says_so_and_other_jobs_do_not(tmp_path: Path):
    heard: list[str] = []
    assert is_busy()

    with in_process.opened(tmp_path / "run", patience_s=2.0) as jobs:
        jobs.progress = lambda message, done, total: heard.append(message)
        jobs.run(DoubleTask(number=1))
        assert heard == ["doubling"]
        # It waits so long in all, and not again for each.
        for number in (1, 2):
            jobs.run(TimedTask(number=number))
    assert [message.startswith("waiting for a quieter moment") for message in heard].count(True) == 2


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
