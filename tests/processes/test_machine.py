"""The lock of the machine."""

import subprocess
import sys
from pathlib import Path

import pytest

from profiling_agent.lib.io import CACHE_VARIABLE
from profiling_agent.lib.machine import machine_lock


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
from profiling_agent.lib.machine import machine_lock
with machine_lock():
    print("has it", flush=True)
    time.sleep(60)
"""


def test_a_holder_is_waited_for_and_one_that_dies_releases_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        heard = []

        def progress(message: str, done: int, total: int) -> None:
            heard.append(message)
            holder.kill()

        with machine_lock(progress):
            pass

    assert heard == ["waiting for another run's job to end on this machine"]
