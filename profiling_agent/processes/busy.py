"""Whether others want this machine's cores: then threads that spin while they wait for each other take what they wait for.

Beside one spinning process, on two cores, a batch of 32 small images has taken 839 ms instead of 20. Threads that sleep while they wait take twice as
long there, but on a quiet machine a little longer too, and not what a user's own process would take: so nothing that is timed waits like that.
"""

import os
import time
from pathlib import Path

from profiling_agent.reproducibility import available_cores, available_threads

# What OpenMP's threads, which are torch's, do at the end of a piece of work; ONNX Runtime is told by us where this is set.
WAIT_POLICY, PASSIVE = "OMP_WAIT_POLICY", "PASSIVE"
# So many looks at what runs, and the time between them: a process that wakes up now and then isn't seen in all of them.
NUM_LOOKS, PAUSE_S = 3, 0.01


def is_busy() -> bool:
    """Say whether more others run, whenever one looks, than there is room for beside us; for whoever has no process of its own at work.

    False where the system doesn't tell, as of others in a container that take of our quota.
    """
    allowed = len(os.sched_getaffinity(0))
    room = num_spare(os.cpu_count() or allowed, allowed, available_cores(), available_threads())
    for look in range(NUM_LOOKS):
        if look:
            time.sleep(PAUSE_S)
        if _num_running() - 1 <= room:
            return False
    return True


def num_spare(num_all: int, num_allowed: int, num_cores: int, num_threads: int) -> int:
    """Return how many threads of others have room beside `num_threads` of ours, each on one of the `num_cores` that we may use.

    Which is on all processors but those of our threads' cores, and on half of these cores' second threads. Where a quota keeps us to fewer threads than there are
    cores, what runs is still counted on the whole machine: other tenants have the cores that the quota leaves idle.
    """
    num_ours = num_allowed * num_threads // num_cores
    return num_all - num_ours + (num_ours - num_threads) // 2


def _num_running() -> int:
    """Return how many threads of the whole machine run or want to; this one is one of them."""
    try:
        running, _, _ = Path("/proc/loadavg").read_text(encoding="utf-8").split()[3].partition("/")
        return int(running)
    except (OSError, IndexError, ValueError):
        return 1


def waits_passively() -> bool:
    """Say whether this process was started to sleep while it waits."""
    return os.environ.get(WAIT_POLICY, "").upper() == PASSIVE
