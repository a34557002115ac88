"""Machine lock: one job at a time on a machine, as work of others distorts measurements."""

import platform
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from profiling_agent.lib.io import cache_folder, make_folders, note_holder, read_holder
from profiling_agent.lib.logs import Progress, raise_if_stopped, silent

# One lock per machine, as several machines may share the folder: by the id of this boot, which the machine's containers share.
BOOT = Path("/proc/sys/kernel/random/boot_id")


def _machine_id() -> str:
    try:
        return BOOT.read_text(encoding="utf-8")[:8]
    except OSError:
        return re.sub(r"[^A-Za-z0-9.-]", "-", platform.node())[:60]


MACHINE = _machine_id()
LOCK, HOLDER = f"machine-{MACHINE}.lock", f"machine-{MACHINE}.txt"


@contextmanager
def machine_lock(
    progress: Progress = silent, what: str = "another run", check: Callable[[], None] = raise_if_stopped
) -> Generator[None]:
    """Wait until no other process of this user runs a job; a process that dies releases the lock.

    `what` is what waiting processes report of this one; `check` raises what ends the wait. Two runs at once wait for each other's threads: on two cores each
    took ten times as long instead of twice (LOG, 2026-11-22).
    """
    try:
        folder = cache_folder()
        make_folders(folder)
        lock = FileLock(folder / LOCK)
        with suppress(Timeout):
            lock.acquire(timeout=0)
    except OSError:
        # A user who can't write a cache can't wait for others either; acquisition reports it if a cache is needed.
        yield
        return
    if not lock.is_locked:
        progress(f"waiting for the machine, held by {read_holder(folder / HOLDER)}", 0, 0)
    while not lock.is_locked:
        raise_if_stopped()
        check()
        with suppress(Timeout):
            lock.acquire(timeout=1, poll_interval=0.2)
    note_holder(folder / HOLDER, what)
    try:
        yield
    finally:
        lock.release()
