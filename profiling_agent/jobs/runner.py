"""Jobs as the parent sees them: a task in, its record out, done at most once in a run."""

import hashlib
import json
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from profiling_agent.errors import JobError
from profiling_agent.jobs.table import TABLE, Table
from profiling_agent.jobs.tasks import Task
from profiling_agent.jobs.wire import ERRORS, Message, Order
from profiling_agent.processes.child import Child, Wording, child_command
from profiling_agent.processes.environment import withheld
from profiling_agent.processes.machine_lock import machine_lock
from profiling_agent.progress import Progress, silent
from profiling_agent.records import Record
from profiling_agent.reproducibility import environment
from profiling_agent.workspace import Workspace

ResultT = TypeVar("ResultT", bound=Record)
WORDING = Wording(
    process="the child process",
    work="the job",
    too_slow="lower num_samples",
    too_large="lower batch_size or num_samples",
)


def job_key(task: Task[ResultT]) -> str:
    """Return the name of a job: its kind and a hash over its inputs, our code, the libraries and the machine."""
    inputs = {"task": task.model_dump(mode="json"), "environment": environment().model_dump(mode="json")}
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    return f"{type(task).__name__.removesuffix('Task').lower()}-{digest[:20]}"


class Jobs:
    """Runs the jobs of one run folder: most in one warm worker, isolated ones in a process of their own."""

    def __init__(self, workspace: Workspace, progress: Progress = silent, table: Table = TABLE) -> None:
        """Use `workspace`; nothing is started before the first job. `table` has a row for every task that will be run."""
        self.workspace = workspace
        self.progress = progress
        self._table = table
        self._worker: Child[Message] | None = None
        self._given: dict[str, str] = {}

    def run(self, task: Task[ResultT]) -> ResultT:
        """Return the task's result, from disk where this run has it.

        Raises what the stage raised, or JobError for a crash, a hang or too much memory.
        """
        key, kind, row = job_key(task), type(task), self._table[type(task)]
        path = self.workspace.jobs / key / "result.json"
        try:
            return _read(task, path)
        except (OSError, ValueError):
            # What is there and can't be read is damaged; a job is done again rather than believed.
            shutil.rmtree(path.parent, ignore_errors=True)
        order = Order(
            root=str(self.workspace.root.resolve()),
            key=key,
            record=f"{kind.__module__}:{kind.__qualname__}",
            task=task.model_dump(mode="json"),
            handler=row.handler,
            torch=row.torch,
        )
        timeout_s = row.isolated_timeout_s if task.isolated else row.timeout_s
        with machine_lock(self.progress), self._process(row.secrets, isolated=task.isolated) as process:
            process.send(order)
            deadline, late = time.monotonic() + timeout_s, f"took longer than {timeout_s:.0f} s"
            while (message := process.receive(deadline, late)).kind == "progress":
                self.progress(message.text, message.done, message.total)
        if message.kind == "failed":
            raise ERRORS.get(message.error, JobError)(message.text)
        return _read(task, path)

    @contextmanager
    def _process(self, secrets: tuple[str, ...], *, isolated: bool) -> Generator[Child[Message], None, None]:
        """Give the process that does one job, which ends with the job where it is isolated.

        A worker that was given secrets does jobs that may see them, and ends before the first that may not.
        """
        given = withheld(secrets)
        if isolated:
            process = self._start(given)
        else:
            if self._worker is None or not self._worker.is_alive or given != self._given:
                self.close()
                self._worker, self._given = self._start(given), given
            process = self._worker
        try:
            yield process
        finally:
            if isolated:
                process.end()
            # A killed or crashed process leaves its folder; nobody else writes here while this run is locked.
            self.workspace.sweep()

    def _start(self, given: dict[str, str]) -> Child[Message]:
        log = self.workspace.root / "worker.log"
        return Child(child_command("profiling_agent.jobs"), Message, WORDING, log=log, environment=given)

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None


def _read(task: Task[ResultT], path: Path) -> ResultT:
    """Return the result in `path`; OSError or ValueError where there is none."""
    result: Any = task.result.model_validate_json(path.read_text(encoding="utf-8"))
    return result
