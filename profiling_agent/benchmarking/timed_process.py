"""Timed process: one model in a process of its own, seen from the parent. No torch here."""

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from profiling_agent.benchmarking.gpu_state import NO_NVML
from profiling_agent.benchmarking.worker import Reply, SampleRequest, Start
from profiling_agent.errors import JobError
from profiling_agent.processes.child import Child, Wording
from profiling_agent.processes.environment import child_environment
from profiling_agent.processes.memory import own_memory_bytes, peak_memory_bytes
from profiling_agent.processes.started import ForkServer, Started, child_command, start

# Importing torch and reading a large model takes a minute on a busy machine; a hang takes for ever. A turn is ten passes at most, of a slow
# model one or two, and what is to be slower than the baseline by more than that is not worth waiting for.
LOAD_TIMEOUT_S, SAMPLE_TIMEOUT_S, MAX_PASSES = 600.0, 300.0, 20
# A turn under a slowdown of the GPU is void; it is taken again so often, after a pause to cool down.
MAX_VOID_TURNS, COOL_S = 3, 2.0


def worker_command(folder: Path) -> list[str]:
    """Return the command line that times a saved model."""
    return child_command("profiling_agent.benchmarking.worker", str(folder))


class TimedProcess:
    """One child process with one model; a context manager that leaves no process behind."""

    def __init__(
        self,
        command: Sequence[str],
        first: Start,
        *,
        server: ForkServer | None = None,
        pass_s: float = 0.0,
        cool_s: float = COOL_S,
    ) -> None:
        """Note what to run; nothing runs before `start` or `wait_until_ready`. `pass_s` is what a batch is known to take.

        A GPU that was slowed down rests for `cool_s` before a turn is measured again.

        The allocator's settings are those that a process has which loads the model for its own use, though others would
        be steadier (docs/decisions/0016). A copy that a `server` makes, which has imported more than the model needs, takes
        as long for a pass and is ready seconds earlier, but holds more memory.
        """
        self._command, self._first, self._server = command, first, server
        self._sample_timeout_s = max(SAMPLE_TIMEOUT_S, MAX_PASSES * pass_s)
        self._cool_s = cool_s
        self._started: Child[Reply] | None = None
        self.device_bytes: int | None = None
        # What disturbed its samples, each once.
        self.notes: dict[str, None] = {}

    def start(self) -> None:
        """Start the process, once; it loads while others do."""
        if self._started is not None:
            return
        name = self._command[-1]
        wording = Wording(
            process=f"the process that raced {name!r}",
            work=f"the race of {name!r}",
            too_slow="lower batch_size",
            too_large="lower batch_size",
        )

        def begin(stderr: IO[bytes]) -> Started:
            return start(self._command, child_environment(), stderr, self._server)

        self._started = Child(begin, Reply, wording)
        self._started.send(self._first)

    @property
    def _child(self) -> Child[Reply]:
        assert self._started is not None, "it was started"
        return self._started

    @property
    def pid(self) -> int:
        """Return the process id of the child."""
        pid = self._child.pid
        assert pid is not None, "it was ready"
        return pid

    def wait_until_ready(self, timeout_s: float = LOAD_TIMEOUT_S) -> None:
        """Wait until the model is loaded; JobError where the child crashes, takes too long or too much memory."""
        self.start()
        self._receive(timeout_s)

    def take_sample(self, runs: int, timeout_s: float | None = None) -> list[float]:
        """Return the milliseconds of `runs` forward passes; JobError where the child crashes or takes too long."""
        void = 0
        while True:
            self._child.send(SampleRequest(runs=runs))
            reply = self._receive(timeout_s or self._sample_timeout_s)
            self.device_bytes = reply.device_bytes
            if not (slowdowns := ", ".join(reply.gpu.slowdowns) if reply.gpu else ""):
                break
            if void == MAX_VOID_TURNS:
                self._note(f"the GPU was slowed down all the time: {slowdowns}")
                break
            self._note(f"turns under a slowdown of the GPU were measured again: {slowdowns}")
            void += 1
            time.sleep(self._cool_s)
        if reply.gpu is None and self._first.device == "cuda":
            self._note(NO_NVML)
        if reply.gpu is not None and reply.gpu.neighbours:
            self._note(f"other programs used the GPU: {', '.join(reply.gpu.neighbours)}")
        return list(reply.samples_ms)

    def _note(self, text: str) -> None:
        self.notes[text] = None

    def peak_bytes(self) -> int | None:
        """Return the most that the child has held of its device, or else resident, of a copy what it holds by itself; None where nobody tells.

        Of a device it is known once a sample was taken.
        """
        if self.device_bytes is not None:
            return self.device_bytes
        try:
            return peak_memory_bytes(self.pid) if self._server is None else own_memory_bytes(self.pid)
        except JobError:
            return None

    def _receive(self, timeout_s: float) -> Reply:
        return self._child.receive(time.monotonic() + timeout_s, f"said nothing for {timeout_s:g} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._started is not None:
            self._started.end()
