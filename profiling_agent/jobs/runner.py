"""Jobs as the parent sees them: a task in, its record out, done at most once in a run."""

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from profiling_agent.acquisition.prepared import PIXELS
from profiling_agent.artifacts.recipe import RECIPE
from profiling_agent.documents import DocumentError
from profiling_agent.errors import JobError, KilledError, ProfilingAgentError, RunError
from profiling_agent.files import file_sha256, storage_problem
from profiling_agent.jobs.store import TIMED, JobStore, artifacts_of, key_of
from profiling_agent.jobs.table import MODULES, TABLE, JobRow, Table
from profiling_agent.jobs.tasks import PrepareTask, Task
from profiling_agent.jobs.timesheet import SHEET, Timesheet
from profiling_agent.jobs.wire import ERRORS, Message, Order
from profiling_agent.memory import available_bytes
from profiling_agent.processes.busy import PASSIVE, WAIT_POLICY, is_busy
from profiling_agent.processes.child import Child, Wording
from profiling_agent.processes.environment import child_environment, withheld
from profiling_agent.processes.machine_lock import machine_lock
from profiling_agent.processes.started import ForkServer, OwnForkServer, Started, child_command, fork_server, start
from profiling_agent.progress import Progress, silent
from profiling_agent.records import ArtifactRef, Record
from profiling_agent.reproducibility import environment
from profiling_agent.stopping import end_if_asked
from profiling_agent.workspace import Workspace

ResultT = TypeVar("ResultT", bound=Record)
PROGRAM = "profiling_agent.jobs"
# How long a run waits for a quieter moment, in all, and how often it looks: on a machine that is never quiet it goes on.
PATIENCE_S, LOOK_S = 60.0, 1.0
# A job holds the model twice at least, and what passes through it; of memory that isn't free the kernel ends processes, and not always ours.
LEAST_MEMORY = 1.5
# The imports take 0.5 GB, and a full-size model with what a job needs of it another. A profile with gradients holds several for good.
MAX_RESIDENT = 2 * 2**30
# What the worker may hold while another process does an isolated job: a race of a ViT-B/16 in six deployments takes gigabytes itself.
MAX_WAITING = 2**30
WORDING = Wording(
    process="the child process",
    work="the job",
    too_slow="lower num_samples",
    too_large="lower batch_size or num_samples",
)


def job_key(task: Task[ResultT]) -> str:
    """Return the name of a job: its kind and a hash over its inputs, our code, the libraries and the machine."""
    here = environment().model_dump(mode="json", exclude=None if task.uses_runtimes else {"runtimes"})
    inputs = {"task": task.model_dump(mode="json"), "environment": here}
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
    return f"{_name(type(task))}-{digest[:20]}"


def _name(kind: type[Task[Any]]) -> str:
    return kind.__name__.removesuffix("Task").lower()


class Jobs:
    """Runs the jobs of one run folder: most in one warm worker, isolated ones in a process of their own."""

    def __init__(
        self,
        workspace: Workspace,
        progress: Progress = silent,
        table: Table = TABLE,
        available: Callable[[], int] = available_bytes,
    ) -> None:
        """Use `workspace`; nothing is started before the first job.

        `table` has a row for every task that will be run; `available` tells the bytes of memory that are free.
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
        self._available_bytes = available
        self._worker: Child[Message] | None = None
        self._given: dict[str, str] = {}
        self._servers = ExitStack()
        self._copied: dict[str | None, OwnForkServer | None] = {}
        self._patience_s = PATIENCE_S

    def run(self, task: Task[ResultT], *, together: Sequence[Task[Any]] = ()) -> ResultT:
        """Return the task's result, from disk where this run has it; what it needs is done before it.

        The process that does it also does those `together` with it, of its kind, one after the other.

        Raises what the stage raised, JobError for a crash, a hang or too much memory, or RunError where too little is free to begin.
        """
        key = job_key(task)
        if (known := self._stored(key, task)) is not None:
            self.timesheet.reach(key)
            return known
        for group in self._in_order([task, *together]):
            row, isolated, was_killed = self._table[type(group[0])], group[0].isolated, False
            orders = [self._order(each) for each in group]
            with machine_lock(self.progress, f"run {self.workspace.root.name!r}"):
                self._check_memory(isolated=isolated)
                while orders:
                    started, key_now = time.monotonic(), orders[0].key
                    try:
                        with self._process(row, isolated=isolated) as process:
                            while orders:
                                key_now = orders[0].key
                                self._store.remove(key_now)
                                process.send(orders[0])
                                self._hear(process, row.limit_s(isolated=isolated, pass_s=self.pass_s))
                                self._store.believe(key_now)
                                del orders[0]
                                self.timesheet.note(key_now, time.monotonic() - started)
                                was_killed, started = False, time.monotonic()
                    except ProfilingAgentError as error:
                        # A kill says nothing of the job, and must not count against what it measures; twice it may be the memory.
                        if isinstance(error, KilledError) and not was_killed:
                            was_killed = True
                            continue
                        # What was refused took its time all the same.
                        self.timesheet.note(key_now, time.monotonic() - started)
                        raise
        return self._store.result(key, task)

    def _check_memory(self, *, isolated: bool) -> None:
        """Refuse to begin where the job would take memory that others have.

        The worker's own is there for what it does itself; for a process beside it the worker ends where memory is short.
        """
        if self.peak_bytes is None:
            return
        free, needed = self._available_bytes(), LEAST_MEMORY * self.peak_bytes
        if self._worker is not None and isolated and free < needed:
            self._end_worker()
            free = self._available_bytes()
        elif self._worker is not None and not isolated:
            free += self._worker.resident_bytes()
        if free < needed:
            raise RunError(
                f"{free / 2**30:.1f} GiB of memory are free, and a job on this model takes {needed / 2**30:.1f} at least: end other programs "
                "and resume, or start anew with a lower batch_size"
            )

    def run_each(self, tasks: Sequence[Task[ResultT]]) -> list[ResultT]:
        """Return the results of tasks of one kind, in their order; those that aren't on disk are done in one process.

        Where the tasks are isolated, that process ends with the last of them. Raises as `run`: what was done before stays.
        """
        assert len({(type(task), task.isolated) for task in tasks}) <= 1, "jobs that share a process are of one kind"
        keyed = [(job_key(task), task) for task in tasks]
        known = {key: result for key, task in keyed if (result := self._stored(key, task)) is not None}
        for key in known:
            self.timesheet.reach(key)
        if missing := [task for key, task in keyed if key not in known]:
            self.run(missing[0], together=missing[1:])
        return [known[key] if key in known else self._store.result(key, task) for key, task in keyed]

    def _hear(self, process: Child[Message], timeout_s: float) -> None:
        """Wait until a process has done its job; raises what the stage raised."""
        late, deadline = f"took longer than {timeout_s:.0f} s", time.monotonic() + timeout_s
        while (message := process.receive(deadline, late)).kind == "progress":
            self.progress(message.text, message.done, message.total)
        if message.kind == "failed":
            raise ERRORS.get(message.error, JobError)(message.text)

    def _in_order(self, tasks: Sequence[Task[Any]]) -> Iterator[Sequence[Task[Any]]]:
        """Yield what the tasks need and isn't there, each by itself and after what it needs, then the tasks together.

        The artifacts that each reads are there by then, made again where they were damaged.
        """
        for task in tasks:
            for ref in artifacts_of(task):
                self.path(ref)
            for needed in task.needs(self.path).values():
                for need in needed:
                    # One task's need may be another's, and done by now.
                    if self._stored(job_key(need), need) is None:
                        yield from self._in_order([need])
        yield tasks

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

    @contextmanager
    def _process(self, row: JobRow, *, isolated: bool) -> Generator[Child[Message], None, None]:
        """Give the process that does one job, which ends with the job where it is isolated.

        A worker that was given secrets does jobs that may see them, and ends before the first that may not.
        """
        secrets, waits = withheld(row.secrets), self._waits(row)
        given = secrets | waits
        if isolated:
            if self._worker is not None and self._is_bloated(self._worker, MAX_WAITING):
                self._end_worker()
            process = self._start(given, anew=row.anew or bool(secrets))
        else:
            is_fit = (
                self._worker is not None and self._worker.is_alive and not self._is_bloated(self._worker, MAX_RESIDENT)
            )
            if not is_fit or given != self._given:
                self._end_worker()
                self._worker, self._given = self._start(given, anew=bool(secrets)), given
            assert self._worker is not None, "it was started"
            process = self._worker
        try:
            yield process
        finally:
            if isolated:
                process.end()
            # A killed or crashed process leaves its folder; nobody else writes here while this run is locked.
            self.workspace.sweep()

    def _is_bloated(self, worker: Child[Message], most: int) -> bool:
        """Say whether a worker holds more than `most` bytes of what it did before: a copy takes its place in a moment, without them."""
        is_replaced = any(server is not None and server.is_alive for server in self._copied.values())
        return is_replaced and worker.resident_bytes() > most

    def _start(self, given: dict[str, str], *, anew: bool) -> Child[Message]:
        """Start a process that does jobs: as a copy of one that has imported what they need, or `anew`.

        Anew where it is given secrets, which no other process is to hold.
        """
        environment, log = child_environment() | given, self.workspace.root / "worker.log"

        def begin(stderr: IO[bytes]) -> Started:
            server = None if anew else self._fork_server(environment)
            return start(child_command(PROGRAM), environment, stderr, server)

        try:
            return Child(begin, Message, WORDING, log=log)
        except OSError as error:
            if storage_problem(error) is not None or error.filename != str(log):
                raise
            raise RunError(f"{str(log)!r} can't be written ({error.strerror}): move it away, and resume") from error

    def _fork_server(self, environment: dict[str, str]) -> ForkServer | None:
        """Return whom to ask for a copy; nobody where one died before it had made any, as by a library that it imported."""
        # Threads wait as their process was told before it had any, so that there is one for each way.
        way = environment.get(WAIT_POLICY)
        died = self._copied.get(way)
        if died is not None and not died.is_alive and not died.has_started:
            return None
        if died is None or not died.serves(environment):
            self._copied[way] = self._servers.enter_context(fork_server(MODULES, environment))
        return self._copied[way]

    def _waits(self, row: JobRow) -> dict[str, str]:
        """Return how the threads of a job's process are to wait, where others want the machine; what is timed waits for them a while."""
        if WAIT_POLICY in child_environment() or not is_busy():
            return {}
        if not row.timed:
            return {WAIT_POLICY: PASSIVE}
        while self._patience_s > 0 and is_busy():
            self.progress("waiting for a quieter moment to time in: something else is running on this machine", 0, 0)
            self._patience_s -= LOOK_S
            time.sleep(LOOK_S)
            end_if_asked()
        return {}

    def forget_images(self) -> None:
        """Remove the images that were prepared, which take most of a run's space; whoever needs some has them made again."""
        for folder in self.workspace.jobs.glob(f"{_name(PrepareTask)}-*"):
            self._store.forget(folder.name, PIXELS)

    def close(self) -> None:
        """End the worker, and what it was a copy of unless others use that."""
        self._end_worker()
        self._copied.clear()
        self._servers.close()

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None


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
