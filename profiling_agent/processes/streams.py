"""Standard output kept for what this program writes: a library that prints in C ends on standard error instead."""

import os
import sys
from typing import TextIO


def private_stdout() -> TextIO:
    """Return standard output for ourselves alone; what else this process writes there goes to standard error."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    return channel


def keep_stdout() -> None:
    """Leave standard output to Python's prints, to the end: scipy's HiGHS now and then says a line there, which is no JSON.

    For good, as C flushes its buffer when the process ends.
    """
    # A stream that somebody put in its place, as a test's, gets nothing from C.
    if sys.stdout is sys.__stdout__:
        sys.stdout.flush()
        sys.stdout = private_stdout()
