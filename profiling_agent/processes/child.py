"""Child process: one of our modules in a process of its own; records go in and come out, one JSON line each.

It is listened to with a deadline and a memory limit, an obituary says how it ended, and it leaves no process behind.
The child's own side is `serve`.
"""

import contextlib
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Generic, TypeVar

import psutil
from pydantic import ValidationError

from profiling_agent.errors import JobError, KilledError
from profiling_agent.memory import total_bytes
from profiling_agent.processes.started import Started
from profiling_agent.records import Record
from profiling_agent.stopping import end_if_asked

# How often a child that says nothing is looked after.
POLL_S = 0.25
# How long its end is waited for, once it was killed.
END_S = 1.0
# A child may take nearly everything: past this the machine would start to kill processes of its own choice.
MEMORY_FRACTION = 0.92
# What somebody else ends a process with; the others are crashes.
KILLED = frozenset({signal.SIGKILL, signal.SIGTERM})
# How much of what a dead child printed last goes into its obituary.
TAIL_LINES, TAIL_CHARACTERS = 3, 500
# How C++ says what an exception that nobody caught was about.
CAUSE = "what():"

AnswerT = TypeVar("AnswerT", bound=Record)


def ending(code: int) -> str:
    """Return how a process ended, after its exit status: by which signal, where it was one."""
    if code >= 0:
        return f"exit status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    meaning = {
        "SIGKILL": ", killed from outside, as the system does when memory runs out; lower batch_size or num_samples"
    }.get(name, "")
    return f"exit status {code} ({name}{meaning})"


def last_words(said: str) -> str:
    """Return what of all that a process printed says how it ended: its last lines, after what an exception of C++ was about, where one ended it."""
    lines = said.strip().splitlines()
    words = " | ".join(lines[-TAIL_LINES:])[-TAIL_CHARACTERS:]
    # Frames of the stack follow it, more than fit.
    causes = [cause for line in lines[:-TAIL_LINES] if (cause := line.strip()).startswith(CAUSE)]
    return " | ".join([*(cause[:TAIL_CHARACTERS] for cause in causes[-1:]), words])


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """What error messages call a child process and what it does, and what a user can do about its limits."""

    process: str
    work: str
    too_slow: str
    too_large: str


class Child(Generic[AnswerT]):
    """One child process whose answers are records of one type.

    It dies when this process does, because its standard input closes; `end` has to be called otherwise.
    """

    def __init__(
        self,
        start: Callable[[IO[bytes]], Started],
        answer: type[AnswerT],
        wording: Wording,
        *,
        log: Path | None = None,
    ) -> None:
        """Start it with what takes its standard error: `log`, where it and its libraries print, or nobody's file."""
        self._answer, self._wording = answer, wording
        # Closed with the process.
        self._stderr: IO[bytes] = log.open("a+b") if log is not None else tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = start(self._stderr)
        except OSError:
            self._stderr.close()
            raise
        self._is_ended = False
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int | None:
        """Return the child's process id; None where it is being started."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Return whether the process still runs."""
        return self._process.poll() is None

    def resident_bytes(self) -> int:
        """Return how many bytes the process holds; none where it has ended or wasn't started yet."""
        if self.pid is None or not self.is_alive:
            return 0
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).memory_info().rss
        return 0

    def send(self, record: Record) -> None:
        """Say one thing to the child; JobError where it is dead."""
        try:
            self._process.stdin.write(record.model_dump_json() + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None

    def receive(self, deadline: float, late: str) -> AnswerT:
        """Return the child's next answer.

        Raises:
            JobError: it crashed, or was killed (KilledError); it took too much memory, or until `deadline` (in
                `time.monotonic`'s seconds; `late` says what it did then), and was ended; or it said something else than
                an answer.
        """
        end_if_asked()
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, min(POLL_S, deadline - time.monotonic())))
                break
            except queue.Empty:
                end_if_asked()
            if time.monotonic() >= deadline:
                self.end()
                raise JobError(f"{self._wording.work} {late} and was ended: {self._wording.too_slow}")
            if (used := self.resident_bytes()) > MEMORY_FRACTION * total_bytes():
                self.end()
                raise JobError(
                    f"{self._wording.work} used {used / 2**30:.1f} GiB and was ended: {self._wording.too_large}"
                )
        if line is None:
            # A terminal's Ctrl-C is everybody's: what it ended is no failure of the work.
            end_if_asked()
            raise self._death()
        try:
            return self._answer.model_validate_json(line)
        except ValidationError:
            said = line[:TAIL_CHARACTERS]
            raise JobError(f"{self._wording.process} said {said!r}, which is no reply") from None

    def end(self) -> None:
        """Kill the process, if it still runs, wait until it is gone, and close its pipes."""
        self._is_ended = True
        self._process.kill()
        self._process.wait()
        # A copy that wasn't made yet holds its end of the pipe until its server has heard of all this.
        self._reader.join(END_S)
        for pipe in (self._process.stdin, self._stderr):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def _read(self) -> None:
        with self._process.stdout as said:
            for line in said:
                self._lines.put(line)
        self._lines.put(None)

    def _death(self) -> JobError:
        code = self._process.wait()
        if self._is_ended:
            # By another thread, which has closed its standard error.
            return JobError(f"{self._wording.process} was ended")
        self._stderr.seek(0)
        said = last_words(self._stderr.read().decode(errors="replace")) or "it said nothing"
        kind = KilledError if -code in KILLED else JobError
        return kind(f"{self._wording.process} died with {ending(code)}: {said}")
