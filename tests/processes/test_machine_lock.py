import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from profiling_agent.lib.io import VARIABLE, holder_said
from profiling_agent.processes.machine_lock import HOLDER, LOCK, machine_lock

BOOT = Path("/proc/sys/kernel/random/boot_id")


def test_a_job_waits_for_the_one_of_another_run_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    heard, waits = [], threading.Event()

    def progress(message: str, done: int, total: int) -> None:
        heard.append(message)
        waits.set()

    def work() -> None:
        with machine_lock(progress):
            heard.append("worked")

    with FileLock(tmp_path / LOCK):
        other = threading.Thread(target=work)
        other.start()
        assert waits.wait(timeout=60)
        heard.append("let go")
    other.join(timeout=60)

    assert heard == ["waiting for the machine, held by another process", "let go", "worked"]


@pytest.mark.skipif(not BOOT.exists(), reason="the kernel tells no boot id")
def test_a_machine_is_told_by_its_start_which_no_other_shares():
    assert f"machine-{BOOT.read_bytes()[:8].decode()}.lock" == LOCK


def test_nothing_is_said_where_the_machine_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "not" / "there" / "yet"))
    heard = []

    for _ in range(2):
        with machine_lock(lambda message, done, total: heard.append((message, done, total))):
            pass

    assert heard == []


@pytest.mark.parametrize("cache", ["file/cache", "~nobody-of-that-name/cache"])
def test_without_a_cache_that_can_be_written_work_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, cache)

    with machine_lock():
        done = True

    assert done


HOLD = """
import pathlib, sys, time
from profiling_agent.processes.machine_lock import machine_lock
with machine_lock(what="run 'a'"):
    print("has it", flush=True)
    time.sleep(60)
"""


def test_a_holder_is_named_with_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    holder.stdout.readline()
    heard = []

    def progress(message: str, done: int, total: int) -> None:
        heard.append(message)
        holder.kill()

    with machine_lock(progress):
        own = holder_said(tmp_path / HOLDER)
    holder.wait()
    holder.stdout.close()

    assert len(heard) == 1
    said = rf"waiting for the machine, held by run 'a' \(process {holder.pid}, since \d\d:\d\d:\d\d\)"
    assert re.fullmatch(said, heard[0])
    assert own == "another graph of this process"


def test_a_note_that_cannot_be_read_names_nobody(tmp_path: Path):
    (tmp_path / HOLDER).write_bytes(b"\xff")

    assert holder_said(tmp_path / HOLDER) == holder_said(tmp_path / "none") == "another process"
