"""Stopping: whether somebody told this process to end, for threads that wait; a signal is heard by the main one alone.

A graph's nodes run in threads of LangGraph's, which it waits for when the main thread is stopped: so whoever waits in one
has to look. Process-wide, as signals are.
"""

import threading

_asked = threading.Event()


def ask_to_stop() -> None:
    """Have whatever waits in this process end; there is no way back."""
    _asked.set()


def end_if_asked() -> None:
    """Raise KeyboardInterrupt in this thread where the process was told to end."""
    if _asked.is_set():
        raise KeyboardInterrupt
