"""A child process of ours, seen from the parent: started, spoken to, limited, ended."""

import contextlib
import queue
import subprocess
import threading
import time
from pathlib import Path

import psutil

from profiling_agent.errors import JobError
from profiling_agent.jobs.wire import ERRORS, Message, Order
from profiling_agent.processes.children import child_command, child_environment, ending
from profiling_agent.progress import Progress

POLL_S = 0.25
# A child may take nearly everything: past this the machine would start to kill processes of its own choice.
MEMORY_FRACTION = 0.92


class Child:
    """One `python -m profiling_agent.jobs`; it dies when this process does, because its standard input closes."""

    def __init__(self, log: Path) -> None:
        """Start it; `log` takes what it and its libraries print."""
        self._log = log
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(
                child_command("profiling_agent.jobs"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=child_environment(),
                text=True,
                encoding="utf-8",
            )
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None, "the pipe was asked for"
        for line in self._process.stdout:
            self._messages.put(Message.model_validate_json(line))
        self._messages.put(None)

    @property
    def is_alive(self) -> bool:
        """Return whether the process still runs."""
        return self._process.poll() is None

    def carry_out(self, order: Order, *, timeout_s: float, progress: Progress) -> None:
        """Have one job done; raises what the job raised, or JobError for a crash, a hang or too much memory."""
        assert self._process.stdin is not None, "the pipe was asked for"
        try:
            self._process.stdin.write(order.model_dump_json() + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise JobError(self._obituary()) from None
        deadline = time.monotonic() + timeout_s
        while (message := self._next(deadline, timeout_s)).kind == "progress":
            progress(message.text, message.done, message.total)
        if message.kind == "failed":
            raise ERRORS.get(message.error, JobError)(message.text)

    def _next(self, deadline: float, timeout_s: float) -> Message:
        while True:
            try:
                message = self._messages.get(timeout=POLL_S)
            except queue.Empty:
                self._enforce(deadline, timeout_s)
                continue
            if message is None:
                raise JobError(self._obituary())
            return message

    def _enforce(self, deadline: float, timeout_s: float) -> None:
        if time.monotonic() > deadline:
            self.end()
            raise JobError(f"the job took longer than {timeout_s:.0f} s and was ended: lower num_samples")
        limit = MEMORY_FRACTION * psutil.virtual_memory().total
        if self.is_alive and (used := psutil.Process(self._process.pid).memory_info().rss) > limit:
            self.end()
            raise JobError(f"the job used {used / 2**30:.1f} GiB and was ended: lower batch_size or num_samples")

    def _obituary(self) -> str:
        code = self._process.wait()
        tail = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
        return f"the child process died with {ending(code)}: {' | '.join(tail) or 'it said nothing'}"

    def end(self) -> None:
        """Kill the process, if it still runs, wait until it is gone, and close its pipes."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None, "the pipes were asked for"
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
