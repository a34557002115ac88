"""Machine lock: one job at a time on a machine, as whoever measures while others compute measures them too."""

from collections.abc import Generator
from contextlib import contextmanager

from filelock import FileLock, Timeout

from profiling_agent.cache import cache_folder
from profiling_agent.progress import Progress, silent

# Two runs at once wait for each other's threads: on two cores each took not twice but ten times as long, and the latency
# table of either showed no width that saves time (LOG, 2026-11-22).
POLL_S = 0.2


@contextmanager
def machine_lock(progress: Progress = silent) -> Generator[None, None, None]:
    """Wait until no other process of this user's does a job; a process that dies lets go of it."""
    lock = _taken(progress)
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


def _taken(progress: Progress) -> FileLock | None:
    """Return the machine's lock, once it is ours; None where there is no cache to keep it in."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "machine.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            progress("waiting for another run on this machine", 0, 0)
            lock.acquire(poll_interval=POLL_S)
    except OSError:
        # Who can't write a cache can't wait for others either; acquisition tells of it where a cache is needed.
        return None
    return lock
