"""Jobs as the parent sees them: a task in, its record out, done at most once in a run, by an engine."""

import hashlib
import itertools
import json
import math
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from profiling_agent.acquisition.prepared import PIXELS
from profiling_agent.artifacts.recipe import RECIPE
from profiling_agent.documents import DocumentError
from profiling_agent.errors import ProfilingAgentError, RunError
from profiling_agent.files import file_sha256
from profiling_agent.jobs.engine import Batch, Ended, Engine
from profiling_agent.jobs.local import LocalEngine
from profiling_agent.jobs.store import TIMED, JobStore, artifacts_of, key_of
from profiling_agent.jobs.table import TABLE, Table
from profiling_agent.jobs.tasks import PrepareTask, Task
from profiling_agent.jobs.timesheet import SHEET, Timesheet
from profiling_agent.jobs.wire import Order
from profiling_agent.memory import available_bytes
from profiling_agent.progress import Progress, silent
from profiling_agent.records import ArtifactRef, Headline, Record
from profiling_agent.reproducibility import environment
from profiling_agent.workspace import Workspace

ResultT = TypeVar("ResultT", bound=Record)
# A job holds the model twice at least, and what passes through it; of memory that isn't free the kernel ends processes, and not always ours.
LEAST_MEMORY = 1.5


def job_key(task: Task[ResultT]) -> str:
    """Return the name of a job: its kind and a hash over its inputs, our code, the libraries and the machine."""
    here = environment().model_dump(mode="json", exclude=None if task.uses_runtimes else {"runtimes"})
    inputs = {"task": task.model_dump(mode="json"), "environment": here}
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    return f"{_name(type(task))}-{digest[:20]}"


def _name(kind: type[Task[Any]]) -> str:
    return kind.__name__.removesuffix("Task").lower()


class Jobs:
    """The jobs of one run folder: those that the run has are read back, the others are done by an engine."""

    def __init__(
        self,
        workspace: Workspace,
        progress: Progress = silent,
        table: Table = TABLE,
        available: Callable[[], int] = available_bytes,
        cluster: Engine | None = None,
    ) -> None:
        """Use `workspace`; nothing is started before the first job.

        `table` has a row for every task that will be run; `available` tells the bytes of memory that are free. With a `cluster`, which is
        the caller's to close, all but what reads the user's own files is done there.
        """
        self.workspace = workspace
        self.progress = progress
        self._table = table
        self._store = JobStore(workspace, table)
        self.timesheet = Timesheet(workspace.root / SHEET)
        # What the baseline takes for an image: a job may take as long as its passes would of a slow one. None before it was timed.
        self.pass_s: float | None = None
        # And the memory of a process that does nothing else.
        self.peak_bytes: int | None = None
        self.here = LocalEngine(workspace, available=available)
        self._there = cluster
        # What was found by doing it ahead of time.
        self._failed: dict[str, ProfilingAgentError] = {}

    def learn(self, headline: Headline, device: str) -> None:
        """Let limits of time and memory go by what the baseline took on `device`; a device's own memory isn't the machine's."""
        self.pass_s = headline.pass_s
        self.peak_bytes = headline.peak_memory_bytes if device == "cpu" else None

    def run(self, task: Task[ResultT]) -> ResultT:
        """Return the task's result, from disk where this run has it; what it needs is done before it.

        Raises what the stage raised, JobError for a crash, a hang or too much memory, or RunError where too little is free to begin.
        """
        key = job_key(task)
        if (known := self._known(key, task)) is not None:
            return known
        for error in self._make({key: task}).values():
            raise error
        return self._store.result(key, task)

    def run_each(self, tasks: Sequence[Task[ResultT]]) -> list[ResultT]:
        """Return the results of tasks of one kind, in their order; those that aren't on disk are done in one process, or one of each machine.

        Where the tasks are isolated, that process ends with the last of them. Raises as `run`: what was done before stays.
        """
        assert len({(type(task), task.isolated) for task in tasks}) <= 1, "jobs that share a process are of one kind"
        keyed = [(job_key(task), task) for task in tasks]
        known = {key: result for key, task in keyed if (result := self._known(key, task)) is not None}
        for error in self._make({key: task for key, task in keyed if key not in known}).values():
            raise error
        return [known[key] if key in known else self._store.result(key, task) for key, task in keyed]

    def _known(self, key: str, task: Task[ResultT]) -> ResultT | None:
        """Return the result that is there of a task that is asked for; raises what kept it from being done ahead."""
        result = self._stored(key, task)
        if result is not None or key in self._failed:
            self._reach(key, task)
        if key in self._failed:
            raise self._failed[key]
        return result

    def _reach(self, key: str, task: Task[Any]) -> None:
        """Count the time of a job that is there; of one that was done ahead, that of what it needed too."""
        if self.timesheet.is_aside(key):
            for need in itertools.chain.from_iterable(task.needs(self.path).values()):
                self._reach(job_key(need), need)
        self.timesheet.reach(key)

    @property
    def does_ahead(self) -> bool:
        """Return whether several machines work for the run, so that what will be asked for is done side by side."""
        return self._there is not None and self._there.num_at_once > 1

    def found(self, task: Task[ResultT]) -> ResultT | None:
        """Return what the run has of a task, without asking for it."""
        return self._stored(job_key(task), task)

    def ahead(self, tasks: Sequence[Task[Any]]) -> None:
        """Do tasks side by side that will be asked for one by one, where there is a cluster; what fails does so for whoever asks.

        Raises RunError where nothing can be done any more.
        """
        if not self.does_ahead:
            return
        keyed = {job_key(task): task for task in tasks}
        missing = {key: task for key, task in keyed.items() if self._stored(key, task) is None}
        for key, error in self._make(missing, ahead=True).items():
            if isinstance(error, RunError):
                raise error
            if key in missing:
                self._failed[key] = error

    def _make(self, tasks: Mapping[str, Task[Any]], *, ahead: bool = False) -> dict[str, ProfilingAgentError]:
        """Do tasks, after what they need and isn't there; return what went wrong, by the jobs with which it did, needed ones first.

        The artifacts that each reads are there by then, made again where they were damaged. Done `ahead`, what is isolated
        shares its process with nothing, and what lacks nothing is done whatever became of the others.
        """
        waves, needing = [dict(tasks)], dict[str, list[str]]()
        while waves[-1]:
            waves.append(self._needed(waves[-1], needing))
        errors: dict[str, ProfilingAgentError] = {}
        for wave in reversed(waves):
            # What lacks something can't be done.
            errors |= {key: errors[need] for key in wave for need in reversed(needing[key]) if need in errors}
            if errors and not ahead:
                break
            # One task's need may be another of the tasks, and done by now.
            left = {key: task for key, task in wave.items() if key not in errors and self._stored(key, task) is None}
            for engine in filter(None, (self.here, self._there)):
                own = {key: task for key, task in left.items() if self._engine(task) is engine}
                end = partial(self._end, errors, self.timesheet.set_aside if ahead else self.timesheet.note)
                engine.carry_out(self._batches(engine, own, are_apart=ahead), self.progress, end)
        # In an order that doesn't depend on who was done first.
        return {key: errors[key] for wave in reversed(waves) for key in wave if key in errors}

    def _needed(self, tasks: Mapping[str, Task[Any]], needing: dict[str, list[str]]) -> dict[str, Task[Any]]:
        """Return what tasks need and isn't there, and note who needs what; the artifacts that they read are there then."""
        needed: dict[str, Task[Any]] = {}
        for key, task in tasks.items():
            for ref in artifacts_of(task):
                self.path(ref)
            needs = {job_key(need): need for need in itertools.chain.from_iterable(task.needs(self.path).values())}
            needing[key] = list(needs)
            needed |= {name: need for name, need in needs.items() if self._stored(name, need) is None}
        return needed

    def _end(self, errors: dict[str, ProfilingAgentError], note: Callable[..., None], ended: Ended) -> None:
        # What was refused took its time all the same.
        note(ended.key, ended.seconds, at=ended.at, node=ended.node, tries=ended.tries)
        if ended.error is None:
            self._store.believe(ended.key)
        else:
            errors[ended.key] = ended.error

    def _engine(self, task: Task[Any]) -> Engine:
        return self.here if self._there is None or self._table[type(task)].here else self._there

    def _batches(self, engine: Engine, tasks: Mapping[str, Task[Any]], *, are_apart: bool) -> list[Batch]:
        """Return the tasks by kind, those of one kind in as many batches as are done at once."""
        kinds: dict[tuple[type[Task[Any]], bool], list[Order]] = {}
        for key, task in tasks.items():
            self._store.remove(key)
            kinds.setdefault((type(task), task.isolated), []).append(self._order(task))
        batches: list[Batch] = []
        for (kind, isolated), orders in kinds.items():
            row = self._table[kind]
            size = 1 if are_apart and isolated else math.ceil(len(orders) / engine.num_at_once)
            batches += [
                Batch(
                    orders=tuple(orders[start : start + size]),
                    timeout_s=row.limit_s(isolated=isolated, pass_s=self.pass_s),
                    isolated=isolated,
                    secrets=row.secrets,
                    anew=row.anew,
                    timed=row.timed,
                    least_bytes=int(LEAST_MEMORY * (self.peak_bytes or 0)),
                )
                for start in range(0, len(orders), size)
            ]
        return batches

    def _stored(self, key: str, task: Task[ResultT]) -> ResultT | None:
        if not self._store.is_whole(key):
            return None
        try:
            return self._store.result(key, task)
        except (OSError, DocumentError):
            # Whole, and not what this version takes for a result: somebody wrote the hashes too.
            return None

    def _order(self, task: Task[Any]) -> Order:
        """Return what a process is told of a job, and note it."""
        key, kind = job_key(task), type(task)
        self._store.keep_order(key, task)
        return Order(
            root=str(self.workspace.root.resolve()),
            key=key,
            record=f"{kind.__module__}:{kind.__qualname__}",
            task=task.model_dump(mode="json"),
            handler=self._table[kind].handler,
            given={name: tuple(map(job_key, needed)) for name, needed in task.needs(self.path).items()},
            torch=self._table[kind].torch,
        )

    def path(self, ref: ArtifactRef) -> Path:
        """Return where an artifact lies; what is gone or damaged since an earlier process made it is made again first.

        Raises what doing that does, and RunError where it comes out differently.
        """
        key = key_of(ref)
        if key is not None and not (self._store.is_whole(key) or self._store.is_foreign(key)):
            task = self._store.order(key)
            if job_key(task) != key:
                raise RunError(
                    f"{ref.path!r} is gone or damaged, and this machine or its libraries are not those that made it: "
                    "start a new run"
                )
            self.run(task)
            path = self.workspace.path(ref)
            if ref.kind not in TIMED and file_sha256(path / RECIPE if path.is_dir() else path) != ref.sha256:
                raise RunError(
                    f"{ref.path!r} was damaged, and came out differently when it was made again: start a new run"
                )
        return self.workspace.path(ref)

    def forget_images(self) -> None:
        """Remove the images that were prepared, which take most of a run's space; whoever needs some has them made again."""
        for folder in self.workspace.jobs.glob(f"{_name(PrepareTask)}-*"):
            self._store.forget(folder.name, PIXELS)

    def close(self) -> None:
        """End what was started on this machine."""
        self.here.close()


@contextmanager
def jobs_in(folder: Path, progress: Progress = silent) -> Generator[Jobs]:
    """Give jobs of no run, whose results lie in a folder that is the caller's to remove."""
    workspace = Workspace(folder)
    workspace.jobs.mkdir(parents=True)
    jobs = Jobs(workspace, progress)
    try:
        yield jobs
    finally:
        jobs.close()


@contextmanager
def scratch_jobs(progress: Progress = silent) -> Generator[Jobs]:
    """Give jobs whose results nobody keeps."""
    with tempfile.TemporaryDirectory(prefix="profiling-agent-") as folder, jobs_in(Path(folder), progress) as jobs:
        yield jobs
