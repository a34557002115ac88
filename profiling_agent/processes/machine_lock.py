"""Machine lock: one job at a time on a machine, as whoever measures while others compute measures them too."""

import platform
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from profiling_agent.lib.io import cache_folder, holder_said, note_holder
from profiling_agent.lib.progress import Progress, end_if_asked, silent

# Two runs at once wait for each other's threads: on two cores each took not twice but ten times as long, and the latency
# table of either showed no width that saves time (LOG, 2026-11-22).
POLL_S = 0.2
# When it is said anew who has it, and for how long: after this, and then each time after twice as long.
FIRST_S = 5


def _machine() -> str:
    """Return a name of this machine since it was started, which its containers share and no other machine has; its host's where it tells none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")[:8]
    except OSError:
        return re.sub(r"[^A-Za-z0-9.-]", "-", platform.node())[:60]


# Of each machine its own, as several may share the folder.
MACHINE = _machine()
LOCK, HOLDER = f"machine-{MACHINE}.lock", f"machine-{MACHINE}.txt"


@contextmanager
def machine_lock(progress: Progress = silent, what: str = "another run") -> Generator[None, None, None]:
    """Wait until no other process of this user's does a job; a process that dies lets go of it.

    `what` is what others are told of this one while they wait.
    """
    lock = _taken(progress, what)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _taken(progress: Progress, what: str) -> FileLock | None:
    """Return the machine's lock, once it is ours; None where there is no cache to keep it in."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK)
        _acquire(lock, folder / HOLDER, progress)
    except OSError:
        # Who can't write a cache can't wait for others either; acquisition tells of it where a cache is needed.
        return None
    note_holder(folder / HOLDER, what)
    return lock


def _acquire(lock: FileLock, holder: Path, progress: Progress) -> None:
    waited_s, said_at_s = 0, 0
    while True:
        try:
            lock.acquire(timeout=min(waited_s, 1), poll_interval=POLL_S)
        except Timeout:
            end_if_asked()
            if waited_s >= said_at_s:
                progress(f"waiting for the machine, held by {holder_said(holder)}", 0, 0)
                said_at_s = max(FIRST_S, 2 * said_at_s)
            waited_s += 1
        else:
            return
