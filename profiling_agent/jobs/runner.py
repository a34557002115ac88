"""Job runner: returns the result of a task, which is done at most once in a run; also jobs without a run.

One warm worker does most jobs, a process of its own each isolated batch; one at a time on a machine.
"""

import hashlib
import itertools
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from profiling_agent import errors
from profiling_agent.data.images import PIXELS
from profiling_agent.errors import AcquisitionError, KilledError, ProfilingAgentError, RequestError, RunError
from profiling_agent.jobs.base import PrepareTask, Task
from profiling_agent.jobs.store import RESULT, TIMESHEET_FILE, JobRequest, Message, Timesheet, artifacts_of
from profiling_agent.jobs.tasks import (
    MODULES,
    EvidenceTask,
    HeadlineTask,
    MatchLabelsTask,
    Profiled,
    ProfileTask,
    ResolveShapeTask,
)
from profiling_agent.lib.io import DocumentError, read_record, remove_partial_files
from profiling_agent.lib.logs import Progress, raise_if_stopped, silent
from profiling_agent.lib.machine import available_bytes, environment, is_busy
from profiling_agent.processes.child import Child, can_fork, fork_server
from profiling_agent.processes.machine_lock import machine_lock
from profiling_agent.request import Request
from profiling_agent.schemas import ArtifactRef, Environment, Headline, ModelProfile, Record, SplitInfo
from profiling_agent.workspace import Workspace

ResultT = TypeVar("ResultT", bound=Record)
# What the child processes and their libraries print.
JOB_LOG = "worker.log"
# Free memory before a job, in peaks of the baseline: it holds at least two models. Short of memory, the kernel may kill any process.
MIN_FREE_PEAKS = 1.5
# Bytes that the idle worker may hold, where another one is forked within moments: imports take 0.5 GB, a full-size model and its job another
# 0.5. A profile with gradients never frees several GB, and a race of a ViT-B/16 in six deployments needs them.
MAX_RESIDENT = 3 * 2**29
# Seconds that a run waits for an idle machine, in all, or another number of the environment. On one that is never idle it goes on.
PATIENCE_VARIABLE, PATIENCE_S = "PROFILING_AGENT_PATIENCE_S", 60.0


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


def _patience_s() -> float:
    text = os.environ.get(PATIENCE_VARIABLE, str(PATIENCE_S))
    try:
        return float(text)
    except ValueError:
        raise RequestError(f"{PATIENCE_VARIABLE} is {text!r}: give a number of seconds") from None


class Jobs:
    """The jobs of one run folder: finished ones are read from disk, others are done in child processes."""

    def __init__(
        self,
        workspace: Workspace,
        progress: Progress = silent,
        *,
        available: Callable[[], int] = available_bytes,
        patience_s: float | None = None,
    ) -> None:
        """Use `workspace`; nothing is started before the first job.

        `available` returns the bytes of memory that are free; timed jobs wait for an idle machine for `patience_s` in all.
        """
        self.workspace = workspace
        self.progress = progress
        self.timesheet = Timesheet(workspace.root / TIMESHEET_FILE)
        # The baseline's seconds for an image, from which a slow model's time limits follow; None before it was timed.
        self.pass_s: float | None = None
        # The baseline's peak memory in bytes, in a process that does nothing else; None on a GPU.
        self.peak_bytes: int | None = None
        self._available_bytes = available
        # Seconds that timed jobs still wait for an idle machine.
        self.patience_s = _patience_s() if patience_s is None else patience_s
        # A limit on all time limits of jobs.
        self.max_limit_s = math.inf
        self._worker: Child[Message] | None = None
        self._running: Child[Message] | None = None
        self._is_closed = False
        self._stack = ExitStack()
        self._supervisor = self._stack.enter_context(fork_server(MODULES))

    def set_limits_from(self, headline: Headline, device: str) -> None:
        """Set time and memory limits from the baseline's `headline` on `device`; a GPU's memory sets none, as it isn't the machine's."""
        self.pass_s = headline.pass_s
        self.peak_bytes = headline.peak_memory_bytes if device == "cpu" else None

    def run(self, task: Task[ResultT]) -> ResultT:
        """Return the task's result, from disk if this run has it; jobs that it needs are done first.

        Raises what the stage raised, JobError for a crash, a hang or too much memory, or RunError if too little is free to begin.
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
        return [self._result(job_key(task), task) for task in tasks]

    def _is_done(self, key: str, task: Task[Any]) -> bool:
        folder = self.workspace.jobs / key
        return (folder / RESULT).exists() and (not isinstance(task, PrepareTask) or (folder / PIXELS).exists())

    def _result(self, key: str, task: Task[Any]) -> Any:
        try:
            return read_record(task.result_type(), self.workspace.jobs / key / RESULT)
        except DocumentError as error:
            raise RunError(f"{str(self.workspace.jobs / key)!r} is damaged: delete it, and resume") from error

    def path(self, ref: ArtifactRef) -> Path:
        """Return an artifact's path; RunError if it is missing."""
        path = self.workspace.path(ref)
        if not path.exists():
            raise RunError(
                f"{str(path)!r} is missing: delete {str(self.workspace.checkpoints)!r} and go on with `profiling-agent resume "
                f"{self.workspace.root}`, which does again only what is missing"
            )
        return path

    def _do(self, tasks: Mapping[str, Task[Any]]) -> None:
        """Do tasks that aren't done, after the jobs that they need; raises the first error."""
        missing = {key: task for key, task in tasks.items() if not self._is_done(key, task)}
        needs: dict[str, Task[Any]] = {}
        for task in missing.values():
            for ref in artifacts_of(task):
                self.path(ref)
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
                with machine_lock(self.progress, f"run {self.workspace.root.name!r}", self._check_open):
                    self._check_open()
                    self._check_memory()
                    self._run_batch(batch)

    def _run_batch(self, tasks: dict[str, Task[Any]]) -> None:
        """Do tasks of one kind in one process; one whose process was killed is done once more. Raises the first error."""
        was_killed, started = False, time.monotonic()
        while tasks:
            error: ProfilingAgentError | None = None
            try:
                with self._process(next(iter(tasks.values()))) as process:
                    while tasks and error is None:
                        key, task = next(iter(tasks.items()))
                        try:
                            self._carry_out(key, task, process)
                        except ProfilingAgentError as raised:
                            self._check_open()
                            # The process may have ended just after finishing the job.
                            error = None if self._is_done(key, task) else raised
                        if error is None:
                            del tasks[key]
                            self.timesheet.note(key, time.monotonic() - started)
                            was_killed, started = False, time.monotonic()
            finally:
                # A killed or crashed process leaves temporary folders; other jobs' folders may be in use on another machine.
                for key in tasks:
                    remove_partial_files(self.workspace.jobs, key)
            # One kill must not count against the candidate that the job measures; a second may be for its memory.
            if error is not None and (was_killed or not isinstance(error, KilledError)):
                # A failed job used its time too.
                self.timesheet.note(next(iter(tasks)), time.monotonic() - started)
                raise error
            was_killed = error is not None

    def _carry_out(self, key: str, task: Task[Any], process: Child[Message]) -> None:
        shutil.rmtree(self.workspace.jobs / key, ignore_errors=True)
        request = JobRequest(
            root=str(self.workspace.root.resolve()),
            key=key,
            record=f"{type(task).__module__}:{type(task).__qualname__}",
            task=task.model_dump(mode="json"),
            given={name: tuple(map(job_key, needs)) for name, needs in task.needs(self.path).items()},
        )
        process.send(request)
        limit_s = min(task.limit_s(self.pass_s), self.max_limit_s)
        deadline = time.monotonic() + limit_s
        while (message := process.receive(deadline, f"took longer than {limit_s:.0f} s")).kind == "progress":
            self.progress(message.text, message.done, message.total)
        if message.kind == "failed":
            raise getattr(errors, message.error)(message.text)

    def _check_open(self) -> None:
        """Raise RunError after `close`, which another thread may call while a job runs."""
        if self._is_closed:
            raise RunError(f"run {self.workspace.root.name!r} was left before it ended: resume it")

    def _check_memory(self) -> None:
        """Raise RunError if a job needs more memory than is free, even without the idle worker."""
        needed = int(MIN_FREE_PEAKS * (self.peak_bytes or 0))
        if self._available_bytes() < needed:
            self._end_worker()
        if (free := self._available_bytes()) < needed:
            raise RunError(
                f"{free / 2**30:.1f} GiB of memory are free, and a job on this model takes {needed / 2**30:.1f} at least: end other "
                "programs and resume, or start a new run with a lower batch_size"
            )

    @contextmanager
    def _process(self, task: Task[Any]) -> Generator[Child[Message]]:
        """Yield the process that does one batch of jobs like `task`, the worker unless they are isolated."""
        while task.timed and self.patience_s > 0 and is_busy():
            self.progress("waiting for a quieter moment to time in: something else is running on this machine", 0, 0)
            self.patience_s -= 1
            time.sleep(1)
            raise_if_stopped()
        if (worker := self._worker) is not None:
            is_large = can_fork() and worker.resident_bytes() > MAX_RESIDENT
            if is_large or not worker.is_alive:
                self._end_worker()
        process = None if task.isolated else self._worker
        if process is None:
            try:
                process = Child(
                    self._supervisor,
                    ["profiling_agent.jobs.worker:serve"],
                    Message,
                    log=self.workspace.root / JOB_LOG,
                    spawned=task.spawned,
                )
            except KilledError as error:
                # The machine's fault, or that of a `close` meanwhile; no candidate's.
                self._check_open()
                raise RunError(str(error)) from error
        if not task.isolated:
            self._worker = process
        self._running, is_reusable = process, False
        try:
            self._check_open()
            yield process
            is_reusable = not task.isolated and process.is_alive
        finally:
            self._running = None
            if not is_reusable:
                process.end()
                self._worker = None if process is self._worker else self._worker

    def forget_images(self) -> None:
        """Delete prepared images, most of a run's disk space; they are prepared again when needed."""
        for pixels in self.workspace.jobs.glob(f"{PrepareTask.kind()}-*/{PIXELS}"):
            pixels.unlink()

    def close(self) -> None:
        """End the processes that were started on this machine; a running job's error is RunError."""
        self._is_closed = True
        if (process := self._running) is not None:
            process.kill()
        if process is not self._worker:
            self._end_worker()
        self._stack.close()

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None


@contextmanager
def jobs_in(folder: Path, progress: Progress = silent) -> Generator[Jobs]:
    """Yield jobs of no run, whose results lie in a folder that the caller removes."""
    workspace = Workspace(folder)
    workspace.jobs.mkdir(parents=True)
    with closing(Jobs(workspace, progress)) as jobs:
        yield jobs


@contextmanager
def scratch_jobs(progress: Progress = silent) -> Generator[Jobs]:
    """Yield jobs whose results are deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="profiling-agent-") as folder, jobs_in(Path(folder), progress) as jobs:
        yield jobs


def check_match(jobs: Jobs, fields: Mapping[str, Any]) -> None:
    """Raise AcquisitionError if a request's model or data set can't be loaded, or a label is no class of the model."""
    matched = jobs.run(MatchLabelsTask.model_validate(fields))
    if unknown := [label.dataset_label for label in matched.labels if label.model_id is None]:
        shown = ", ".join([*map(repr, unknown[:5]), *(["..."] if len(unknown) > 5 else [])])
        raise AcquisitionError(
            f"{len(unknown)} of the {len(matched.labels)} labels of split {matched.split!r} are no class of the model "
            f"({shown}): use the data that it was trained for"
        )


def check_matches(requests: Iterable[Request], progress: Progress = silent) -> None:
    """Raise AcquisitionError, naming both, if a request's model and data set can't be loaded or don't match."""
    names = tuple(name for name in MatchLabelsTask.model_fields if name in Request.model_fields)
    combinations = {tuple(getattr(request, name) for name in names) for request in requests}
    with scratch_jobs(progress) as jobs:
        for values in sorted(combinations, key=str):
            fields = dict(zip(names, values, strict=True))
            try:
                check_match(jobs, fields)
            except AcquisitionError as error:
                raise AcquisitionError(f"{fields['model']} on {fields['dataset']}: {error}") from error


def profile_artifact(
    jobs: Jobs,
    model: ArtifactRef,
    *,
    batch_size: int,
    device: str,
    calibration: SplitInfo | None = None,
    seed: int = 0,
    cache: bool = True,
    headline: Headline | None = None,
) -> Profiled:
    """Return the reference to `model`'s profile, and its totals; `calibration` images add evidence on its units.

    With `cache`, evidence of an earlier run on the same model, images and machine is used. `headline` is measured if it isn't given.
    """
    headline = headline or measure_headline(jobs, model, batch_size=batch_size, device=device)
    inputs: dict[str, Any] = {"model": model, "batch_size": batch_size, "device": device, "headline": headline}
    if calibration is None:
        return jobs.run(ProfileTask(**inputs))
    return jobs.run(EvidenceTask(**inputs, calibration=calibration, seed=seed, cache=cache))


def measure_headline(jobs: Jobs, model: ArtifactRef, *, batch_size: int, device: str) -> Headline:
    """Return the latency and memory of `model`; the first in a run is the baseline's, which sets its jobs' limits."""
    headline = jobs.run(HeadlineTask(model=model, batch_size=batch_size, device=device))
    if jobs.pass_s is None:
        jobs.set_limits_from(headline, device)
    return headline


def read_profile(jobs: Jobs, profiled: Profiled) -> ModelProfile:
    """Return the full profile that a job wrote; RunError if the file is missing or damaged."""
    path = jobs.path(profiled.profile)
    try:
        return read_record(ModelProfile, path)
    except (OSError, DocumentError) as error:
        raise RunError(f"{str(path)!r} is damaged: delete {str(path.parent)!r}, and resume") from error


def profile_source(request: Request, folder: Path, *, batch_size: int, progress: Progress = silent) -> ModelProfile:
    """Return the profile of the request's model, without a data set; work files go to `folder`, which the caller removes."""
    with jobs_in(folder, progress) as jobs:
        resolved = jobs.run(ResolveShapeTask(model=request.model, revision=request.revision, device=request.device))
        profiled = profile_artifact(jobs, resolved.baseline, batch_size=batch_size, device=resolved.device)
        return read_profile(jobs, profiled)
