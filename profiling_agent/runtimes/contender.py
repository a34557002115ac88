"""A racer seen from the parent: started, given turns, listened to with a deadline, ended."""

import queue
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from profiling_agent.children import child_command, child_environment
from profiling_agent.errors import JobError
from profiling_agent.runtimes.turns import Reply, Start, Turn

# Importing torch and reading a large model takes a minute on a busy machine; a hang takes for ever.
LOAD_TIMEOUT_S, TURN_TIMEOUT_S = 600.0, 300.0
MAX_TAIL = 500


def racer_command(folder: Path) -> list[str]:
    """Return the command line that races a saved model."""
    return child_command("profiling_agent.runtimes.racer", str(folder))


class Contender:
    """One child process with one model; a context manager that leaves no process behind."""

    def __init__(self, command: Sequence[str], start: Start) -> None:
        """Start it; it loads while others do, and says so when `wait_until_ready` asks."""
        self._name = command[-1]
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=child_environment(),
            text=True,
            encoding="utf-8",
        )
        self._replies: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self._say(start)

    @property
    def pid(self) -> int:
        """Return the process id of the child."""
        return self._process.pid

    def wait_until_ready(self, timeout_s: float = LOAD_TIMEOUT_S) -> None:
        """Wait until the model is loaded; JobError where the child crashes or takes too long."""
        self._hear(timeout_s)

    def take_turn(self, runs: int, timeout_s: float = TURN_TIMEOUT_S) -> list[float]:
        """Return the milliseconds of `runs` forward passes; JobError where the child crashes or takes too long."""
        self._say(Turn(runs=runs))
        return list(self._hear(timeout_s).samples_ms)

    def _say(self, message: Start | Turn) -> None:
        assert self._process.stdin is not None, "the pipe was asked for"
        try:
            self._process.stdin.write(message.model_dump_json() + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise JobError(self._obituary()) from None

    def _read(self) -> None:
        assert self._process.stdout is not None, "the pipe was asked for"
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put(None)

    def _hear(self, timeout_s: float) -> Reply:
        try:
            line = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            self._process.kill()
            raise JobError(
                f"the race of {self._name!r} was ended: it said nothing for {timeout_s:g} s; lower batch_size"
            ) from None
        if line is None:
            raise JobError(self._obituary())
        return Reply.model_validate_json(line)

    def _obituary(self) -> str:
        code = self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        said = " | ".join(lines[-3:])[-MAX_TAIL:] or "it said nothing"
        return f"the process that raced {self._name!r} died with exit status {code}: {said}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._stderr.close()
