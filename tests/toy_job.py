"""Toy job: what a contributor writes to add one, by the words of CONTRIBUTING.md; its row is in `test_new_job.py`."""

import os
import sys
from typing import ClassVar

from profiling_agent.errors import RequestError
from profiling_agent.jobs.context import JobContext
from profiling_agent.jobs.tasks import Task
from profiling_agent.records import Record


class Doubled(Record):
    """Twice a number, and which process found it."""

    twice: int
    pid: int
    has_torch: bool


class DoubleTask(Task[Doubled]):
    """Double a number."""

    result: ClassVar[type[Record]] = Doubled
    number: int


def double(task: DoubleTask, job: JobContext) -> Doubled:
    """Return twice the number; what is refused and what is a bug are told apart."""
    if task.number < 0:
        raise RequestError(f"{task.number} is negative: give a number from 0")
    if task.number == 0:
        raise ZeroDivisionError("a bug of ours")
    job.progress("doubling", 1, 1)
    (job.folder / "working.txt").write_text(f"{task.number} + {task.number}", encoding="utf-8")
    return Doubled(twice=2 * task.number, pid=os.getpid(), has_torch="torch" in sys.modules)
