"""Toy jobs: what a contributor writes to add one, by the words of CONTRIBUTING.md."""

import os
import resource
import signal
import sys
import time
from typing import Any

from profiling_agent.errors import RequestError
from profiling_agent.jobs.tasks import JobContext, Task
from profiling_agent.schemas import ArtifactRef, Record


class Doubled(Record):
    """Twice a number, which process found it, the keys there, and how long a stream's end takes."""

    twice: int
    pid: int
    has_torch: bool
    keys: tuple[str, ...] = ()
    stream_ends_s: float | None = None


def _doubled(number: int) -> Doubled:
    reads = sys.modules.get("datasets.config")
    return Doubled(
        twice=2 * number,
        pid=os.getpid(),
        has_torch="torch" in sys.modules,
        keys=tuple(name for name in ("HF_TOKEN", "OPENAI_API_KEY") if name in os.environ),
        stream_ends_s=reads.SLEEP_TIME_ON_THREADS_SHUTDOWN if reads else None,
    )


class DoubleTask(Task[Doubled]):
    """Double a number."""

    sets_torch = False
    timeout_s = 60.0
    number: int

    def run(self, context: JobContext) -> Doubled:
        """Return twice the number; what is refused and what is a bug are told apart."""
        if self.number < 0:
            raise RequestError(f"{self.number} is negative: give a number from 0")
        if self.number == 0:
            raise ZeroDivisionError("a bug of ours")
        context.progress("doubling", 1, 1)
        (context.folder / "working.txt").write_text(f"{self.number} + {self.number}", encoding="utf-8")
        return _doubled(self.number)


class SpawnedTask(DoubleTask):
    """Double a number in a process that is no fork."""

    spawned = True


class TimedTask(DoubleTask):
    """Double a number while no other program uses the cores, if possible."""

    is_timed = True


class LaterTask(DoubleTask):
    """Double a number after all smaller ones are doubled."""

    def needs(self, find: Any) -> dict[str, tuple[DoubleTask, ...]]:
        """Return the jobs of the smaller numbers; that of the next smaller one needs the others too."""
        return {"smaller": tuple(LaterTask(number=number) for number in range(self.number - 1, 0, -1))}


class KillTask(DoubleTask):
    """Double a number, in a process that is killed the first time that the number is 2, and whenever it is 0."""

    def run(self, context: JobContext) -> Doubled:
        """Return twice the number, or be killed as from outside."""
        mark = context.root / "killed"
        if self.number == 0 or (self.number == 2 and not mark.exists()):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return _doubled(self.number)


class WaitTask(DoubleTask):
    """Say that it has begun, by a file with the process in it, and wait for the file `go`."""

    def run(self, context: JobContext) -> Doubled:
        """Return twice the number once it may."""
        (context.root / f"begun-{self.number}").write_text(str(os.getpid()), encoding="utf-8")
        while not (context.root / "go").exists():
            time.sleep(0.05)
        return _doubled(self.number)


class HangTask(WaitTask):
    """Wait, though there is no time for it."""

    timeout_s = 0.01


class FillTask(DoubleTask):
    """Write more bytes than the disk has room for."""

    isolated: bool = True

    def run(self, context: JobContext) -> Doubled:
        """Fail as on a full disk."""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        (context.folder / "large").write_bytes(b"x" * 200_000)
        return _doubled(self.number)


class Noted(Record):
    """A file that a job left."""

    file: ArtifactRef


class NoteTask(Task[Noted]):
    """Write a note."""

    sets_torch = False
    text: str

    def run(self, context: JobContext) -> Noted:
        """Write a file."""
        path = context.folder / "note.txt"
        path.write_text(self.text, encoding="utf-8")
        return Noted(file=context.ref(path))


class CopyTask(Task[Noted]):
    """Write what another job's note says, so many times."""

    sets_torch = False
    source: ArtifactRef
    times: int = 1

    def run(self, context: JobContext) -> Noted:
        """Write a file from another job's."""
        path = context.folder / "note.txt"
        path.write_text(context.path(self.source).read_text(encoding="utf-8") * self.times, encoding="utf-8")
        return Noted(file=context.ref(path))
