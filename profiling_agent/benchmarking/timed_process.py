"""A worker seen from the parent: started, given turns, listened to with a deadline, ended."""

import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import psutil
from pydantic import ValidationError

from profiling_agent.benchmarking.turns import Reply, SampleRequest, Start
from profiling_agent.errors import JobError
from profiling_agent.processes.children import child_command, child_environment, ending

# Importing torch and reading a large model takes a minute on a busy machine; a hang takes for ever.
LOAD_TIMEOUT_S, SAMPLE_TIMEOUT_S = 600.0, 300.0
MAX_TAIL = 500
# How often a worker that says nothing is looked after, and how much of the machine it may hold.
POLL_S, MEMORY_FRACTION = 0.5, 0.92
# glibc hands large buffers back to the system and fetches them again, pass after pass, or doesn't, by what a process
# happened to allocate before: processes of equal models differed by 12% for as long as they lived, and by 1.4% where all
# keep their memory. (Runtimes with arenas of their own keep it anyway.)
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def worker_command(folder: Path) -> list[str]:
    """Return the command line that races a saved model."""
    return child_command("profiling_agent.benchmarking.worker", str(folder))


class TimedProcess:
    """One child process with one model; a context manager that leaves no process behind."""

    def __init__(self, command: Sequence[str], start: Start, *, keeps_memory: bool = True) -> None:
        """Note what to run; nothing runs before `start` or `wait_until_ready`.

        `keeps_memory` is for times; without it the process holds what it would hold on its own.
        """
        self._command, self._name, self._start = command, command[-1], start
        self._environment = child_environment() | (KEEP_MEMORY if keeps_memory else {})
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._running: subprocess.Popen[str] | None = None
        self._replies: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Start the process, once; it loads while others do."""
        if self._running is not None:
            return
        self._running = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=self._environment,
            text=True,
            encoding="utf-8",
        )
        threading.Thread(target=self._read, args=(self._running,), daemon=True).start()
        self._say(self._start)

    @property
    def _process(self) -> "subprocess.Popen[str]":
        assert self._running is not None, "it was started"
        return self._running

    @property
    def pid(self) -> int:
        """Return the process id of the child."""
        return self._process.pid

    def wait_until_ready(self, timeout_s: float = LOAD_TIMEOUT_S) -> None:
        """Wait until the model is loaded; JobError where the child crashes, takes too long or too much memory."""
        self.start()
        self._hear(timeout_s)

    def take_sample(self, runs: int, timeout_s: float = SAMPLE_TIMEOUT_S) -> list[float]:
        """Return the milliseconds of `runs` forward passes; JobError where the child crashes or takes too long."""
        self._say(SampleRequest(runs=runs))
        return list(self._hear(timeout_s).samples_ms)

    def _say(self, message: Start | SampleRequest) -> None:
        assert self._process.stdin is not None, "the pipe was asked for"
        try:
            self._process.stdin.write(message.model_dump_json() + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise JobError(self._obituary()) from None

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None, "the pipe was asked for"
        for line in process.stdout:
            self._replies.put(line)
        self._replies.put(None)

    def _hear(self, timeout_s: float) -> Reply:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._replies.get(timeout=max(0.0, min(POLL_S, deadline - time.monotonic())))
                break
            except queue.Empty:
                self._enforce(deadline, timeout_s)
        if line is None:
            raise JobError(self._obituary())
        try:
            return Reply.model_validate_json(line)
        except ValidationError:
            raise JobError(
                f"the process that raced {self._name!r} said {line[:MAX_TAIL]!r}, which is no reply"
            ) from None

    def _enforce(self, deadline: float, timeout_s: float) -> None:
        if time.monotonic() >= deadline:
            self._process.kill()
            raise JobError(
                f"the race of {self._name!r} was ended: it said nothing for {timeout_s:g} s; lower batch_size"
            )
        limit = MEMORY_FRACTION * psutil.virtual_memory().total
        if self._process.poll() is None and (used := psutil.Process(self.pid).memory_info().rss) > limit:
            self._process.kill()
            raise JobError(f"the race of {self._name!r} was ended: it used {used / 2**30:.1f} GiB; lower batch_size")

    def _obituary(self) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        said = " | ".join(lines[-3:])[-MAX_TAIL:] or "it said nothing"
        return f"the process that raced {self._name!r} died with {ending(code)}: {said}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._running is not None:
            self._running.kill()
            self._running.communicate()
        self._stderr.close()
