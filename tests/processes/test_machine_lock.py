import threading
from pathlib import Path

import pytest
from filelock import FileLock

from profiling_agent.cache import VARIABLE
from profiling_agent.processes.machine_lock import machine_lock


def test_a_job_waits_for_the_one_of_another_run_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    heard, waits = [], threading.Event()

    def progress(message: str, done: int, total: int) -> None:
        heard.append(message)
        waits.set()

    def work() -> None:
        with machine_lock(progress):
            heard.append("worked")

    with FileLock(tmp_path / "machine.lock"):
        other = threading.Thread(target=work)
        other.start()
        assert waits.wait(timeout=60)
        heard.append("let go")
    other.join(timeout=60)

    assert heard == ["waiting for another run on this machine", "let go", "worked"]


def test_nothing_is_said_where_the_machine_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "not" / "there" / "yet"))
    heard = []

    for _ in range(2):
        with machine_lock(lambda message, done, total: heard.append((message, done, total))):
            pass

    assert heard == []


def test_without_a_cache_that_can_be_written_work_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "cache"))

    with machine_lock():
        done = True

    assert done
