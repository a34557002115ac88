"""Stopping: whether somebody told this process to end, for threads that wait; a signal is heard by the main one alone.

A graph's nodes run in threads of LangGraph's, which it waits for when the main thread is stopped: so whoever waits in one
has to look. Process-wide, as signals are.
"""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

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
