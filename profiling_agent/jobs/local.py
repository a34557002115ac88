"""Child processes of a run: most jobs in one warm worker, isolated ones in a process of their own, one at a time on a machine."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO

from pydantic import Field

from profiling_agent.errors import JobError, KilledError, ProfilingAgentError, RunError
from profiling_agent.jobs.store import ERRORS, Message, Order, holds
from profiling_agent.jobs.tasks import MODULES
from profiling_agent.lib.io import storage_problem, sweep
from profiling_agent.lib.machine import PASSIVE, WAIT_POLICY, available_bytes, is_busy
from profiling_agent.lib.progress import Progress, end_if_asked
from profiling_agent.processes.child import (
    Child,
    ForkServer,
    OwnForkServer,
    Started,
    Wording,
    child_command,
    child_environment,
    fork_server,
    start,
    withheld,
)
from profiling_agent.processes.machine_lock import machine_lock
from profiling_agent.schemas import Record
from profiling_agent.workspace import Workspace

PROGRAM, JOB_LOG = "profiling_agent.jobs", "worker.log"
# How long a run waits for a quieter moment, in all, and how often it looks: on a machine that is never quiet it goes on.
PATIENCE_S, LOOK_S = 60.0, 1.0
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


class Batch(Record):
    """Orders of one kind, which one process does one after the other, and what it may take for each.

    An `isolated` one has a process of its own. `secrets` are variables of the environment that it may see; where it starts `anew` it
    measures its own process; what is `timed` waits for a quieter moment. Nothing is begun where less than `least_bytes` of memory are free.
    """

    orders: tuple[Order, ...]
    timeout_s: float
    isolated: bool = False
    secrets: tuple[str, ...] = ()
    anew: bool = False
    timed: bool = False
    least_bytes: int = Field(default=0, ge=0)


# Called after each job with its key, the seconds from its order to its end (the start of its process included), and its error.
Listener = Callable[[str, float, ProfilingAgentError | None], None]


class LocalEngine:
    """The processes that do the jobs of one run folder on this machine."""

    def __init__(
        self, workspace: Workspace, *, available: Callable[[], int] = available_bytes, log: str = JOB_LOG
    ) -> None:
        """Work in `workspace`; nothing is started before the first job.

        `available` tells the bytes of memory that are free; `log` is the file where the processes and their libraries print.
        """
        self.workspace = workspace
        self._log = workspace.root / log
        self._available_bytes = available
        self._worker: Child[Message] | None = None
        self._at_work: Child[Message] | None = None
        self._is_closed = False
        self._given: dict[str, str] = {}
        self._servers = ExitStack()
        self._copied: dict[str | None, OwnForkServer | None] = {}
        self._patience_s = PATIENCE_S

    def carry_out(self, batches: Sequence[Batch], progress: Progress, ended: Listener) -> None:
        """Do one batch after the other; raises the first job's error, and RunError where too little memory is free to begin."""
        for batch in batches:
            # Others wait no longer than one batch takes.
            with machine_lock(progress, f"run {self.workspace.root.name!r}"):
                self._check_open()
                self._check_memory(batch)
                self._do(batch, progress, ended)

    def _do(self, batch: Batch, progress: Progress, ended: Listener) -> None:
        """Do one batch; raises the first job's error."""
        orders, was_killed, started = list(batch.orders), False, time.monotonic()
        while orders:
            error: ProfilingAgentError | None = None
            with self._process(batch, progress) as process:
                while orders and error is None:
                    key = orders[0].key
                    try:
                        # It may have been done by somebody who could not say so any more.
                        if not holds(self.workspace.jobs / key):
                            process.send(orders[0])
                            late = f"took longer than {batch.timeout_s:.0f} s"
                            deadline = time.monotonic() + batch.timeout_s
                            while (message := process.receive(deadline, late)).kind == "progress":
                                progress(message.text, message.done, message.total)
                            if message.kind == "failed":
                                raise ERRORS.get(message.error, JobError)(message.text)
                    except ProfilingAgentError as raised:
                        self._check_open()
                        # Or its process ended just after it.
                        error = None if holds(self.workspace.jobs / key) else raised
                    if error is None:
                        del orders[0]
                        ended(key, time.monotonic() - started, None)
                        was_killed, started = False, time.monotonic()
            # A kill says nothing of the job, and must not count against what it measures; twice it may be the memory.
            if isinstance(error, KilledError) and not was_killed:
                was_killed = True
            elif error is not None:
                ended(orders[0].key, time.monotonic() - started, error)
                raise error

    def _check_open(self) -> None:
        """Raise RunError after `close`, which another thread may call while jobs are done."""
        if self._is_closed:
            raise RunError(f"run {self.workspace.root.name!r} was left before it ended: resume it")

    def _check_memory(self, batch: Batch) -> None:
        """Refuse to begin where the job would take memory that others have.

        The worker's own is there for what it does itself; for a process beside it the worker ends where memory is short.
        """
        if not batch.least_bytes:
            return
        free = self._available_bytes()
        if self._worker is not None and batch.isolated and free < batch.least_bytes:
            self._end_worker()
            free = self._available_bytes()
        elif self._worker is not None and not batch.isolated:
            free += self._worker.resident_bytes()
        if free < batch.least_bytes:
            raise RunError(
                f"{free / 2**30:.1f} GiB of memory are free, and a job on this model takes {batch.least_bytes / 2**30:.1f} at least: end other "
                "programs and resume, or start anew with a lower batch_size"
            )

    @contextmanager
    def _process(self, batch: Batch, progress: Progress) -> Generator[Child[Message], None, None]:
        """Give the process that does one batch, which ends with it where it is isolated.

        A worker that was given secrets does jobs that may see them, and ends before the first that may not.
        """
        secrets, waits = withheld(batch.secrets), self._waits(batch, progress)
        given = secrets | waits
        if batch.isolated:
            if self._worker is not None and self._is_bloated(self._worker, MAX_WAITING):
                self._end_worker()
            process = self._start(given, anew=batch.anew or bool(secrets))
        else:
            is_fit = (
                self._worker is not None and self._worker.is_alive and not self._is_bloated(self._worker, MAX_RESIDENT)
            )
            if not is_fit or given != self._given:
                self._end_worker()
                self._worker, self._given = self._start(given, anew=bool(secrets)), given
            assert self._worker is not None, "it was started"
            process = self._worker
        self._at_work = process
        try:
            self._check_open()
            yield process
        finally:
            self._at_work = None
            if batch.isolated or self._is_closed:
                process.end()
            # A killed or crashed process leaves its folder. Those of other jobs are their machines' own.
            for order in batch.orders:
                sweep(self.workspace.jobs, order.key)

    def _is_bloated(self, worker: Child[Message], most: int) -> bool:
        """Say whether a worker holds more than `most` bytes of what it did before: a copy takes its place in a moment, without them."""
        is_replaced = any(server is not None and server.is_alive for server in self._copied.values())
        return is_replaced and worker.resident_bytes() > most

    def _start(self, given: dict[str, str], *, anew: bool) -> Child[Message]:
        """Start a process that does jobs: as a copy of one that has imported what they need, or `anew`.

        Anew where it is given secrets, which no other process is to hold.
        """
        environment = child_environment() | given

        def begin(stderr: IO[bytes]) -> Started:
            server = None if anew else self._fork_server(environment)
            return start(child_command(PROGRAM), environment, stderr, server)

        try:
            return Child(begin, Message, WORDING, log=self._log)
        except OSError as error:
            if storage_problem(error) is not None or error.filename != str(self._log):
                raise
            raise RunError(
                f"{str(self._log)!r} can't be written ({error.strerror}): move it away, and resume"
            ) from error

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

    def _waits(self, batch: Batch, progress: Progress) -> dict[str, str]:
        """Return how the threads of a job's process are to wait, where others want the machine; what is timed waits for them a while."""
        if WAIT_POLICY in child_environment() or not is_busy():
            return {}
        if not batch.timed:
            return {WAIT_POLICY: PASSIVE}
        while self._patience_s > 0 and is_busy():
            progress("waiting for a quieter moment to time in: something else is running on this machine", 0, 0)
            self._patience_s -= LOOK_S
            time.sleep(LOOK_S)
            end_if_asked()
        return {}

    def close(self) -> None:
        """End the worker, an isolated job, and what they were copies of unless others use that."""
        self._is_closed = True
        if (process := self._at_work) is not None:
            process.end()
        self._end_worker()
        self._copied.clear()
        self._servers.close()

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None
