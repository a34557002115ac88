"""Progress of long work, and the request to stop it.

A graph's nodes run in LangGraph's threads, which it waits for when the main thread is stopped; only the main thread receives a signal. So a thread that
waits has to look. The request to stop belongs to the whole process, as signals do.
"""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

# Called now and then by long work with what it does, and how much of how much is done; the last is 0 where the end isn't known.
Progress = Callable[[str, int, int], None]


def silent(message: str, done: int, total: int) -> None:
    """Say nothing."""


_asked = threading.Event()


class _Heard:
    """Whether the main thread was interrupted. No Event: its lock isn't one that a handler, which may interrupt itself, can take twice."""

    interrupted = False


def ask_to_stop() -> None:
    """Have whatever waits in this process end; there is no way back."""
    _asked.set()


def end_if_asked() -> None:
    """Raise KeyboardInterrupt in this thread where the process was told to end."""
    if _asked.is_set() or _Heard.interrupted:
        raise KeyboardInterrupt


@contextmanager
def interruptible() -> Generator[None]:
    """Have an interrupt of the main thread, as a notebook sends it, end what waits in other threads too; once this is left, the process goes on as before.

    Whoever else handles SIGINT still does. Elsewhere than in the main thread, which alone hears of signals, nothing changes.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def hear(number: int, frame: FrameType | None) -> None:
        _Heard.interrupted = True
        before(number, frame)

    signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        _Heard.interrupted = False
