"""Job runner: returns the result of a task, which is done at most once in a run; also jobs without a run.

One warm worker does most jobs, a process of its own each isolated batch; one at a time on a machine.
"""

import hashlib
import itertools
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from profiling_agent import errors
from profiling_agent.data.images import PIXELS
from profiling_agent.errors import AcquisitionError, JobError, KilledError, ProfilingAgentError, RunError
from profiling_agent.jobs.base import PrepareTask, Task
from profiling_agent.jobs.tasks import MODULES, HeadlineTask, MatchLabelsTask, Profiled, ProfileTask, ResolveShapeTask
from profiling_agent.jobs.worker import RESULT, JobRequest, Message
from profiling_agent.lib.io import read_record, remove_partial_files
from profiling_agent.lib.logs import Progress, raise_if_stopped, silent
from profiling_agent.lib.machine import available_threads, cores_missing, environment, machine_lock
from profiling_agent.processes.child import Child, can_fork, fork_server
from profiling_agent.request import Request
from profiling_agent.schemas import ArtifactRef, Environment, Headline, ModelProfile, Record
from profiling_agent.workspace import TIMESHEET_FILE, Timesheet, Workspace

ResultT = TypeVar("ResultT", bound=Record)
# What the child processes and their libraries print.
JOB_LOG = "worker.log"
# Bytes that the idle worker may hold, where another one is forked within moments: imports take 0.5 GB, a full-size model and its job another
# 0.5. A profile with gradients never frees several GB, and a race of a ViT-B/16 in six deployments needs them.
MAX_RESIDENT = 3 * 2**29
# Share of a run's time that it may wait for other programs before it times models, the least that is worth it, and the cores they may use.
WAIT_SHARE, MIN_WAIT_S, MAX_CORES_MISSING = 0.1, 1.0, 0.25
WAIT = "wait"


def job_key(task: Task[ResultT], describe: Callable[[str], Environment] = environment) -> str:
    """Return a job's key: its kind and a hash of its inputs, and of the code, libraries, machine and GPU from `describe`."""
    # A task without a device computes on the CPU; with "auto" it may use the GPU.
    device: str = getattr(task, "device", "cpu")
    ignored = None if task.uses_runtimes else {"runtimes"}
    inputs = {
        "task": task.model_dump(mode="json"),
        "environment": describe(device).model_dump(mode="json", exclude=ignored),
    }
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    return f"{task.kind()}-{digest[:20]}"


class Jobs:
    """The jobs of one run folder: finished ones are read from disk, others are done in child processes."""

    def __init__(self, workspace: Workspace, progress: Progress = silent) -> None:
        """Use `workspace`; nothing is started before the first job."""
        self.workspace = workspace
        self.progress = progress
        self.timesheet = Timesheet(workspace.root / TIMESHEET_FILE)
        # The baseline's seconds for an image, from which a slow model's time limits follow; None before it was timed.
        self.pass_s: float | None = None
        # A limit on all time limits of jobs.
        self.max_limit_s = math.inf
        self.time_budget_s: float | None = None
        # The process of isolated jobs, and the worker, which does the others.
        self._processes: dict[bool, Child[Message]] = {}
        self._running: Child[Message] | None = None
        self._is_closed = False
        self._stack = ExitStack()
        self._supervisor = self._stack.enter_context(fork_server(MODULES))

    def run(self, task: Task[ResultT]) -> ResultT:
        """Return the task's result, from disk if this run has it; jobs that it needs are done first.

        Raises what the stage raised, or JobError for a crash, a hang or too much memory.
        """
        return self.run_each([task])[0]

    def run_each(self, tasks: Sequence[Task[ResultT]]) -> list[ResultT]:
        """Return the results of tasks of one kind, in their order; those not on disk are done in one process.

        If the tasks are isolated, that process ends with the last. Raises as `run` does; results before the error stay.
        """
        keyed = {job_key(task): task for task in tasks}
        for key, task in keyed.items():
            if self._is_done(key, task):
                self.timesheet.reach(key)
        self._do(keyed)
        results: list[Any] = [
            read_record(task.result_type(), self.workspace.jobs / job_key(task) / RESULT) for task in tasks
        ]
        return results

    def _is_done(self, key: str, task: Task[Any]) -> bool:
        folder = self.workspace.jobs / key
        return (folder / RESULT).exists() and (not isinstance(task, PrepareTask) or (folder / PIXELS).exists())

    def path(self, ref: ArtifactRef) -> Path:
        """Return an artifact's path; RunError if it is missing."""
        return self.workspace.path(ref)

    def _do(self, tasks: Mapping[str, Task[Any]]) -> None:
        """Do tasks that aren't done, after the jobs that they need; raises the first error."""
        missing = {key: task for key, task in tasks.items() if not self._is_done(key, task)}
        needs: dict[str, Task[Any]] = {}
        for task in missing.values():
            needs |= {job_key(need): need for need in itertools.chain(*task.needs(self.path).values())}
        if needs:
            self._do(needs)
        for kind in dict.fromkeys((type(task), task.isolated) for task in missing.values()):
            # A job may need one that others here need too, which then is done by now.
            batch = {
                key: task
                for key, task in missing.items()
                if (type(task), task.isolated) == kind and not self._is_done(key, task)
            }
            if batch:
                # Locked by batch, so that another run waits for one batch at most.
                with machine_lock(self.progress, self._check_open, name=f"run {self.workspace.root.name}"):
                    self._check_open()
                    if kind[0].is_timed:
                        self._await_quiet(next(iter(batch)))
                    self._run_batch(batch)

    def _await_quiet(self, key: str) -> None:
        """Wait while other programs use the cores, up to a tenth of the run's time in all: its budget's, or what it has spent."""
        sheet, started, waited_s = self.timesheet, time.monotonic(), 0.0
        free_s = WAIT_SHARE * max(sheet.spent_s, self.time_budget_s or 0.0) - sheet.by_kind().get(WAIT, (0, 0.0))[1]
        if free_s < MIN_WAIT_S:
            return
        while waited_s < free_s and (missing := cores_missing(min(0.1, free_s - waited_s))) > MAX_CORES_MISSING:
            self._check_open()
            raise_if_stopped()
            if not waited_s:
                cores = f"{missing:.1f} of the {available_threads()} cores"
                self.progress(f"waiting up to {free_s:.0f} s for other programs, which use {cores}", 0, 0)
            waited_s = time.monotonic() - started
        if waited_s:
            sheet.note(f"{WAIT}-{key}", waited_s)

    def _run_batch(self, tasks: Mapping[str, Task[Any]]) -> None:
        """Do tasks of one kind in one process; one whose process was killed is done once more. Raises the first error."""
        if (worker := self._processes.get(False)) is not None and can_fork() and worker.resident_bytes() > MAX_RESIDENT:
            self._end(isolated=False)
        try:
            for key, task in tasks.items():
                started, error = time.monotonic(), self._try_job(key, task)
                if isinstance(error, KilledError):
                    # One kill must not count against the candidate that the job measures; a second may be for its memory.
                    error = self._try_job(key, task)
                # A failed job used its time too.
                self.timesheet.note(key, time.monotonic() - started)
                if error is not None:
                    raise error
        finally:
            self._end(isolated=True)

    def _try_job(self, key: str, task: Task[Any]) -> ProfilingAgentError | None:
        """Have a process do a job; return what it raised, or how the process ended before it was done."""
        shutil.rmtree(self.workspace.jobs / key, ignore_errors=True)
        request = JobRequest(
            root=str(self.workspace.root.resolve()),
            key=key,
            record=f"{type(task).__module__}:{type(task).__qualname__}",
            task=task.model_dump(mode="json"),
            given={name: tuple(map(job_key, needs)) for name, needs in task.needs(self.path).items()},
        )
        limit_s = min(task.limit_s(self.pass_s), self.max_limit_s)
        message = Message()
        self._running = process = self._process(task)
        try:
            process.send(request)
            deadline = time.monotonic() + limit_s
            while not (message := process.receive(deadline, f"took longer than {limit_s:.0f} s")).is_end:
                self.progress(message.text, message.done, message.total)
        except JobError as error:
            self._check_open()
            # The process may have ended just after finishing the job.
            return None if self._is_done(key, task) else error
        finally:
            self._running = None
            if not message.is_end:
                self._end(isolated=task.isolated)
                # A killed or crashed process leaves a temporary folder; other jobs' may be in use on another machine.
                remove_partial_files(self.workspace.jobs, key)
        return getattr(errors, message.error)(message.text) if message.error else None

    def _check_open(self) -> None:
        """Raise RunError after `close`, which another thread may call while a job runs."""
        if self._is_closed:
            raise RunError(f"run {self.workspace.root.name!r} was left before it ended: resume it")

    def _process(self, task: Task[Any]) -> Child[Message]:
        """Return the process that does jobs like `task`, which is started if there is none."""
        process = self._processes.get(task.isolated)
        if process is not None and process.is_alive:
            return process
        self._end(isolated=task.isolated)
        call, log = ["profiling_agent.jobs.worker:serve"], self.workspace.root / JOB_LOG
        try:
            process = Child(self._supervisor, call, Message, log=log, spawned=task.spawned)
        except KilledError as error:
            # The machine's fault, or that of a `close` meanwhile; no candidate's.
            self._check_open()
            raise RunError(str(error)) from error
        self._processes[task.isolated] = process
        if self._is_closed:
            process.kill()
        return process

    def _end(self, *, isolated: bool) -> None:
        if (process := self._processes.pop(isolated, None)) is not None:
            process.end()

    def forget_images(self) -> None:
        """Delete prepared images, most of a run's disk space; they are prepared again when needed."""
        for pixels in self.workspace.jobs.glob(f"{PrepareTask.kind()}-*/{PIXELS}"):
            pixels.unlink()

    def close(self) -> None:
        """End the processes that were started on this machine; a running job's error is RunError."""
        self._is_closed = True
        for isolated, process in list(self._processes.items()):
            # The thread that waits for an answer ends the process itself.
            process.kill() if process is self._running else self._end(isolated=isolated)
        self._stack.close()


@contextmanager
def scratch_jobs(progress: Progress = silent) -> Generator[Jobs]:
    """Yield jobs of no run, whose results are deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="profiling-agent-") as folder:
        workspace = Workspace(Path(folder))
        workspace.jobs.mkdir()
        with closing(Jobs(workspace, progress)) as jobs:
            yield jobs


def check_matches(requests: Iterable[Request], progress: Progress = silent) -> None:
    """Raise AcquisitionError, naming both, if a request's model and data set can't be loaded or don't match."""
    fields = set(MatchLabelsTask.model_fields)
    tasks = [MatchLabelsTask.model_validate(request.model_dump(include=fields)) for request in requests]
    with scratch_jobs(progress) as jobs:
        for _, task in sorted({str(task): task for task in tasks}.items()):
            try:
                jobs.run(task)
            except AcquisitionError as error:
                raise AcquisitionError(f"{task.model} on {task.dataset}: {error}") from error


def measure_headline(jobs: Jobs, model: ArtifactRef, *, batch_size: int, device: str) -> Headline:
    """Return the latency and memory of `model`; the first in a run is the baseline's, which sets its jobs' limits."""
    headline = jobs.run(HeadlineTask(model=model, batch_size=batch_size, device=device))
    if jobs.pass_s is None:
        jobs.pass_s = headline.pass_s
    return headline


def read_profile(jobs: Jobs, profiled: Profiled) -> ModelProfile:
    """Return the full profile that a job wrote; RunError if the file is missing."""
    return read_record(ModelProfile, jobs.path(profiled.profile))


def profile_source(request: Request, progress: Progress = silent) -> ModelProfile:
    """Return the profile of the request's model, without a data set."""
    with scratch_jobs(progress) as jobs:
        resolved = jobs.run(ResolveShapeTask(model=request.model, revision=request.revision, device=request.device))
        settings: dict[str, Any] = {"batch_size": request.batch_size, "device": resolved.device}
        headline = measure_headline(jobs, resolved.baseline, **settings)
        return read_profile(jobs, jobs.run(ProfileTask(model=resolved.baseline, headline=headline, **settings)))
