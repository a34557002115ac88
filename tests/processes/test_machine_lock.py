import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from filelock import FileLock

from profiling_agent.cache import VARIABLE
from profiling_agent.holder import holder_said
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


def test_a_stopped_holder_is_named_with_what_lets_it_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    holder.stdout.readline()
    running = holder_said(tmp_path / HOLDER)
    holder.send_signal(signal.SIGSTOP)
    while psutil.Process(holder.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    heard = []

    def progress(message: str, done: int, total: int) -> None:
        heard.append(message)
        holder.kill()

    with machine_lock(progress):
        pass
    holder.wait()
    holder.stdout.close()

    assert re.fullmatch(rf"run 'a' \(process {holder.pid}, for \d+ s\)", running)
    assert len(heard) == 1
    assert f"which is stopped: `kill -CONT {holder.pid}` lets it go on" in heard[0]
    # Gone, so nobody's number stands for it.
    assert "run 'a'" not in holder_said(tmp_path / HOLDER)


@pytest.mark.parametrize(
    "content", ["", "{}", "[" * 5000, '{"pid": 1e300}', '{"pid": -1, "started": 0, "since": 0, "what": ""}']
)
def test_a_note_that_says_nothing_names_nobody(tmp_path: Path, content: str):
    (tmp_path / HOLDER).write_text(content)

    assert holder_said(tmp_path / HOLDER) == "another process"
