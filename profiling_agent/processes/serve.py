"""A child process's own side: its parent's records come in, its answers go out, and it dies with its parent."""

import os
import queue
import signal
import sys
import threading
from typing import TypeVar

from profiling_agent.processes.streams import private_stdout
from profiling_agent.records import Record

RequestT = TypeVar("RequestT", bound=Record)


class Parent:
    """The parent, as its child sees it: made once in a process, which ends when the parent's end of its input closes.

    Standard output is the parent's from then on; what libraries print there goes to standard error.
    """

    def __init__(self) -> None:
        """Begin to listen, and leave a terminal's Ctrl-C, which is sent to children too, to the parent."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._channel = private_stdout()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def receive(self, kind: type[RequestT]) -> RequestT:
        """Wait for the parent's next line and return what it asks for."""
        return kind.model_validate_json(self._lines.get())

    def send(self, record: Record) -> None:
        """Say one thing to the parent."""
        self._channel.write(record.model_dump_json() + "\n")

    def _listen(self) -> None:
        """Keep what is said; the parent's end closing, however it died, ends this process at once, amid any work."""
        for line in sys.stdin:
            self._lines.put(line)
        os._exit(1)
