"""Child processes of a run: one warm worker for most jobs, a new process for each isolated batch, one at a time on a machine."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO

from profiling_agent.errors import JobError, KilledError, ProfilingAgentError, RunError
from profiling_agent.jobs.store import ERRORS, Message, Order, is_finished_job
from profiling_agent.jobs.tasks import MODULES, JobRow
from profiling_agent.lib.io import storage_problem, sweep
from profiling_agent.lib.logs import Progress, raise_if_stopped
from profiling_agent.lib.machine import PASSIVE, WAIT_POLICY, available_bytes, is_busy
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
from profiling_agent.workspace import Workspace

PROGRAM, JOB_LOG = "profiling_agent.jobs", "worker.log"
# Seconds that a run waits for an idle machine, in all, and between two checks. On one that is never idle it goes on.
PATIENCE_S, LOOK_S = 60.0, 1.0
# Bytes: imports take 0.5 GB, a full-size model and its job another 0.5. A profile with gradients never frees several GB.
MAX_RESIDENT = 2 * 2**30
# Bytes that the idle worker may hold during an isolated job: a race of a ViT-B/16 in six deployments takes gigabytes.
MAX_WAITING = 2**30
WORDING = Wording(
    process="the child process",
    work="the job",
    too_slow="lower num_samples",
    too_large="lower batch_size or num_samples",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Orders of one kind, which one process does in turn, each in at most `timeout_s` seconds.

    An `isolated` batch gets a process of its own. None begins with less than `least_bytes` of free memory.
    """

    orders: tuple[Order, ...]
    row: JobRow
    isolated: bool
    timeout_s: float
    least_bytes: int


# Called after each job with its key, the seconds from its order to its end (the start of its process included), and its error or None.
Listener = Callable[[str, float, ProfilingAgentError | None], None]


class LocalEngine:
    """The processes that do the jobs of one run folder on this machine."""

    def __init__(
        self, workspace: Workspace, *, available: Callable[[], int] = available_bytes, log: str = JOB_LOG
    ) -> None:
        """Work in `workspace`; nothing is started before the first job.

        `available` returns the bytes of free memory; `log` names the file to which the processes and their libraries print.
        """
        self.workspace = workspace
        self._log = workspace.root / log
        self._available_bytes = available
        self._worker: Child[Message] | None = None
        self._running: Child[Message] | None = None
        self._is_closed = False
        self._worker_variables: dict[str, str] = {}
        self._servers = ExitStack()
        self._copied: dict[str | None, OwnForkServer | None] = {}
        self._patience_s = PATIENCE_S

    def carry_out(self, batches: Sequence[Batch], progress: Progress, ended: Listener) -> None:
        """Do batches in turn; raises the first job's error, or RunError if too little memory is free to begin."""
        for batch in batches:
            # Locked by batch, so that another run waits for one batch at most.
            with machine_lock(progress, f"run {self.workspace.root.name!r}"):
                self._check_open()
                self._check_memory(batch)
                self._run_batch(batch, progress, ended)

    def _run_batch(self, batch: Batch, progress: Progress, ended: Listener) -> None:
        """Do one batch; a job whose process was killed is done once more. Raises the first job's error."""
        orders, was_killed, started = list(batch.orders), False, time.monotonic()
        while orders:
            error: ProfilingAgentError | None = None
            with self._process(batch, progress) as process:
                while orders and error is None:
                    key = orders[0].key
                    try:
                        # A process that was killed may have done it without reporting.
                        if not is_finished_job(self.workspace.jobs / key):
                            process.send(orders[0])
                            timeout_message = f"took longer than {batch.timeout_s:.0f} s"
                            deadline = time.monotonic() + batch.timeout_s
                            while (message := process.receive(deadline, timeout_message)).kind == "progress":
                                progress(message.text, message.done, message.total)
                            if message.kind == "failed":
                                raise ERRORS.get(message.error, JobError)(message.text)
                    except ProfilingAgentError as raised:
                        self._check_open()
                        # The process may have ended just after finishing the job.
                        error = None if is_finished_job(self.workspace.jobs / key) else raised
                    if error is None:
                        del orders[0]
                        ended(key, time.monotonic() - started, None)
                        was_killed, started = False, time.monotonic()
            # One kill must not count against the candidate that the job measures; a second may be for its memory.
            if isinstance(error, KilledError) and not was_killed:
                was_killed = True
            elif error is not None:
                ended(orders[0].key, time.monotonic() - started, error)
                raise error

    def _check_open(self) -> None:
        """Raise RunError after `close`, which another thread may call while a job runs."""
        if self._is_closed:
            raise RunError(f"run {self.workspace.root.name!r} was left before it ended: resume it")

    def _check_memory(self, batch: Batch) -> None:
        """Raise RunError if the batch needs more memory than is free.

        The worker's memory counts as free for its own jobs. If memory is short for an isolated batch, the worker is ended.
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
        """Yield the process that does one batch, and end it afterwards if the batch is isolated.

        A worker that was given secrets ends before the first batch that may not see them.
        """
        secrets, wait_variables = withheld(batch.row.secrets), self._wait_variables(batch, progress)
        variables = secrets | wait_variables
        if batch.isolated:
            if self._worker is not None and self._is_bloated(self._worker, MAX_WAITING):
                self._end_worker()
            process = self._start(variables, anew=batch.row.anew or bool(secrets))
        else:
            is_usable = (
                self._worker is not None and self._worker.is_alive and not self._is_bloated(self._worker, MAX_RESIDENT)
            )
            if not is_usable or variables != self._worker_variables:
                self._end_worker()
                self._worker, self._worker_variables = self._start(variables, anew=bool(secrets)), variables
            assert self._worker is not None, "it was started"
            process = self._worker
        self._running = process
        try:
            self._check_open()
            yield process
        finally:
            self._running = None
            if batch.isolated or self._is_closed:
                process.end()
            # A killed or crashed process leaves temporary folders; other jobs' folders may be in use on another machine.
            for order in batch.orders:
                sweep(self.workspace.jobs, order.key)

    def _is_bloated(self, worker: Child[Message], max_bytes: int) -> bool:
        """Return whether a worker holds more than `max_bytes` and a fork server can replace it within moments."""
        is_replaceable = any(server is not None and server.is_alive for server in self._copied.values())
        return is_replaceable and worker.resident_bytes() > max_bytes

    def _start(self, variables: dict[str, str], *, anew: bool) -> Child[Message]:
        """Start a job process: a fork of a server that has imported what jobs need, or a new one with `anew`.

        Secrets need `anew`: no other process may hold them.
        """
        environment = child_environment() | variables

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
        """Return the fork server for an environment; None if one died before its first fork, as an imported library may make it."""
        # A wait policy is fixed before a process has threads, so each policy has a server of its own.
        policy = environment.get(WAIT_POLICY)
        server = self._copied.get(policy)
        if server is not None and not server.is_alive and not server.has_started:
            return None
        if server is None or not server.serves(environment):
            self._copied[policy] = self._servers.enter_context(fork_server(MODULES, environment))
        return self._copied[policy]

    def _wait_variables(self, batch: Batch, progress: Progress) -> dict[str, str]:
        """Return the variables that set how threads wait on a busy machine; a timed batch first waits for an idle one."""
        if WAIT_POLICY in child_environment() or not is_busy():
            return {}
        if not batch.row.timed:
            return {WAIT_POLICY: PASSIVE}
        while self._patience_s > 0 and is_busy():
            progress("waiting for a quieter moment to time in: something else is running on this machine", 0, 0)
            self._patience_s -= LOOK_S
            time.sleep(LOOK_S)
            raise_if_stopped()
        return {}

    def close(self) -> None:
        """End the worker, a running isolated job, and the fork servers that no other run uses."""
        self._is_closed = True
        if (process := self._running) is not None:
            process.end()
        self._end_worker()
        self._copied.clear()
        self._servers.close()

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.end()
            self._worker = None
