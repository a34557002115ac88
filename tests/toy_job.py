"""Toy jobs: what a contributor writes to add one, by the words of CONTRIBUTING.md."""

import os
import signal
import sys
import time
from typing import Any, ClassVar

from profiling_agent.errors import RequestError
from profiling_agent.jobs.tasks import JobContext, JobRow, Task
from profiling_agent.schemas import ArtifactRef, Record


class Doubled(Record):
    """Twice a number, which process found it and how its threads wait, the secrets there, and how long a stream's end takes."""

    twice: int
    pid: int
    has_torch: bool
    wait_policy: str | None = None
    secrets: tuple[str, ...] = ()
    stream_ends_s: float | None = None


class DoubleTask(Task[Doubled]):
    """Double a number."""

    job: ClassVar = JobRow("toy_job:double", Doubled, torch=False, isolated_timeout_s=60.0)
    number: int


class AnewTask(DoubleTask):
    """Double a number in a process that is started anew."""

    job: ClassVar = JobRow("toy_job:double", Doubled, torch=False, anew=True)


class TimedTask(DoubleTask):
    """Double a number once the machine is idle."""

    job: ClassVar = JobRow("toy_job:double", Doubled, torch=False, anew=True, timed=True)


class LaterTask(DoubleTask):
    """Double a number after all smaller ones are doubled."""

    def needs(self, find: Any) -> dict[str, tuple[DoubleTask, ...]]:
        """Return the jobs of the smaller numbers; that of the next smaller one needs the others too."""
        if self.number == 1:
            return {}
        return {"smaller": (LaterTask(number=self.number - 1), *map(_later, range(1, self.number - 1)))}


def _later(number: int) -> LaterTask:
    return LaterTask(number=number)


class SecretTask(DoubleTask):
    """Double a number, with the Hub's token at hand."""

    job: ClassVar = JobRow("toy_job:double", Doubled, torch=False, secrets=("HF_TOKEN",))


def _doubled(number: int) -> Doubled:
    reads = sys.modules.get("datasets.config")
    return Doubled(
        twice=2 * number,
        pid=os.getpid(),
        has_torch="torch" in sys.modules,
        wait_policy=os.environ.get("OMP_WAIT_POLICY"),
        secrets=tuple(name for name in ("HF_TOKEN", "OPENAI_API_KEY") if name in os.environ),
        stream_ends_s=reads.SLEEP_TIME_ON_THREADS_SHUTDOWN if reads else None,
    )


def double(task: DoubleTask, job: JobContext) -> Doubled:
    """Return twice the number; what is refused and what is a bug are told apart."""
    if task.number < 0:
        raise RequestError(f"{task.number} is negative: give a number from 0")
    if task.number == 0:
        raise ZeroDivisionError("a bug of ours")
    job.progress("doubling", 1, 1)
    (job.folder / "working.txt").write_text(f"{task.number} + {task.number}", encoding="utf-8")
    return _doubled(task.number)


class KillTask(Task[Doubled]):
    """Double a number, in a process that is killed the first time that the number is 2, and whenever it is 0."""

    job: ClassVar = JobRow("toy_job:kill", Doubled, torch=False, isolated_timeout_s=60.0)
    number: int


def kill(task: KillTask, job: JobContext) -> Doubled:
    """Return twice the number, or be killed as by somebody else."""
    mark = job.root / "killed"
    if task.number == 0 or (task.number == 2 and not mark.exists()):
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return _doubled(task.number)


class WaitTask(Task[Doubled]):
    """Double a number once somebody says so."""

    job: ClassVar = JobRow("toy_job:wait", Doubled, torch=False, isolated_timeout_s=60.0)
    number: int


class HangTask(WaitTask):
    """Double a number, though there is no time for it."""

    job: ClassVar = JobRow("toy_job:wait", Doubled, torch=False, timeout_s=0.01)


def wait(task: WaitTask, job: JobContext) -> Doubled:
    """Say that it has begun, by a file with the process in it, and wait for the file `go`."""
    (job.root / f"begun-{task.number}").write_text(str(os.getpid()), encoding="utf-8")
    while not (job.root / "go").exists():
        time.sleep(0.05)
    return _doubled(task.number)


class Noted(Record):
    """A file that a job left."""

    file: ArtifactRef


class NoteTask(Task[Noted]):
    """Write a note."""

    job: ClassVar = JobRow("toy_job:note", Noted, torch=False, isolated_timeout_s=60.0)
    text: str


class CopyTask(Task[Noted]):
    """Write what another job's note says, so many times."""

    job: ClassVar = JobRow("toy_job:copy", Noted, torch=False, isolated_timeout_s=60.0)
    source: ArtifactRef
    times: int = 1


def note(task: NoteTask, job: JobContext) -> Noted:
    """Write a file."""
    path = job.folder / "note.txt"
    path.write_text(task.text, encoding="utf-8")
    return Noted(file=job.ref(path, "split"))


def copy(task: CopyTask, job: JobContext) -> Noted:
    """Write a file from another job's."""
    path = job.folder / "note.txt"
    path.write_text(job.path(task.source).read_text(encoding="utf-8") * task.times, encoding="utf-8")
    return Noted(file=job.ref(path, "split"))
