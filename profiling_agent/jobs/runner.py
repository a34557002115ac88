"""Jobs as the parent sees them: a task in, its record out, done at most once in a run."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import TypeVar

from profiling_agent.jobs.process import JobProcess
from profiling_agent.jobs.tasks import Task
from profiling_agent.jobs.wire import Order, result_of
from profiling_agent.processes.machine_lock import machine_lock
from profiling_agent.progress import Progress, silent
from profiling_agent.records import Record
from profiling_agent.reproducibility import environment
from profiling_agent.workspace import Workspace

ResultT = TypeVar("ResultT", bound=Record)


def job_key(task: Task[ResultT]) -> str:
    """Return the name of a job: its kind and a hash over its inputs, our code, the libraries and the machine."""
    inputs = {"task": task.model_dump(mode="json"), "environment": environment().model_dump(mode="json")}
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    return f"{type(task).__name__.removesuffix('Task').lower()}-{digest[:20]}"


def _read(task: Task[ResultT], path: Path) -> ResultT | None:
    try:
        return result_of(task, path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


class Jobs:
    """Runs the jobs of one run folder: most in one warm worker, `fresh` ones in a process of their own."""

    def __init__(self, workspace: Workspace, progress: Progress = silent) -> None:
        """Use `workspace`; nothing is started before the first job."""
        self.workspace = workspace
        self.progress = progress
        self._worker: JobProcess | None = None

    def run(self, task: Task[ResultT]) -> ResultT:
        """Return the task's result, from disk where this run has it; raises what the stage raised, or JobError."""
        key = job_key(task)
        result = self.workspace.jobs / key / "result.json"
        if (known := _read(task, result)) is not None:
            return known
        # What is there and can't be read is damaged; a job is done again rather than believed.
        shutil.rmtree(result.parent, ignore_errors=True)
        self._carry_out(task, key)
        return result_of(task, result.read_text(encoding="utf-8"))

    def _carry_out(self, task: Task[ResultT], key: str) -> None:
        order = Order(
            root=str(self.workspace.root.resolve()),
            key=key,
            kind=type(task).__name__,
            task=task.model_dump(mode="json"),
        )
        with machine_lock(self.progress):
            child = self._start() if task.fresh else self._warm()
            try:
                child.carry_out(order, timeout_s=task.timeout_s, progress=self.progress)
            finally:
                if task.fresh:
                    child.end()
                # A killed or crashed child leaves its folder; nobody else writes here while this run is locked.
                self.workspace.sweep()

    def _start(self) -> JobProcess:
        return JobProcess(self.workspace.root / "worker.log")

    def _warm(self) -> JobProcess:
        if self._worker is not None and not self._worker.is_alive:
            self.close()
        self._worker = self._worker or self._start()
        return self._worker

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None
