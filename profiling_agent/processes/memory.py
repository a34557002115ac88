"""Peak memory of a process. No torch here."""

import resource
import sys
from pathlib import Path

import psutil

from profiling_agent.errors import JobError


def peak_memory_bytes(pid: int | None = None) -> int:
    """Return the most memory that a process has had resident, by default this one.

    Raises:
        JobError: this system doesn't tell what another process held.
    """
    status = Path(f"/proc/{pid or 'self'}/status")
    if status.exists():
        # Linux hands a parent's ru_maxrss on to the child it starts; VmHWM begins anew with the program.
        line = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    if pid is not None:
        raise JobError("what another process held at most is told by Linux alone (/proc): measure memory there")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def own_memory_bytes(pid: int) -> int:
    """Return what a process holds resident that no other process shares.

    Raises:
        JobError: it is gone.
    """
    try:
        return psutil.Process(pid).memory_full_info().uss
    except psutil.Error as error:
        raise JobError(f"what process {pid} held can't be told: it is gone") from error
