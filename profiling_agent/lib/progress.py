"""Progress callbacks of long work, and the request to stop it.

Only the main thread receives signals. Threads that wait, such as LangGraph's nodes, poll this request, which holds for the process.
"""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

# Called by long work with a message, how much is done, and the total, which is 0 if unknown.
Progress = Callable[[str, int, int], None]


def silent(message: str, done: int, total: int) -> None:
    """Report nothing."""


_stop_requested = threading.Event()


class _Interrupt:
    """Whether the main thread was interrupted; no Event, as a handler interrupted by another signal can't take its lock twice."""

    interrupted = False


def request_stop() -> None:
    """Make everything that waits in this process end; this can't be undone."""
    _stop_requested.set()


def raise_if_stopped() -> None:
    """Raise KeyboardInterrupt in this thread if the process has to stop."""
    if _stop_requested.is_set() or _Interrupt.interrupted:
        raise KeyboardInterrupt


@contextmanager
def interruptible() -> Generator[None]:
    """Let an interrupt of the main thread, such as a notebook's, end waits in other threads too.

    The previous SIGINT handler still runs; after the block the process continues as before. Does nothing outside the main thread.
    """
    previous_handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous_handler):
        yield
        return

    def handle_interrupt(number: int, frame: FrameType | None) -> None:
        _Interrupt.interrupted = True
        previous_handler(number, frame)

    signal.signal(signal.SIGINT, handle_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
        _Interrupt.interrupted = False
