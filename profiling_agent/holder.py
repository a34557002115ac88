"""Holder: a line beside a lock about the process that has it, for those who wait."""

import os
import time
from contextlib import suppress
from pathlib import Path

from profiling_agent.files import write_text

MAX_LINE = 300


def note_holder(path: Path, what: str) -> None:
    """Note that this process has the lock, and what it does; nothing happens where that can't be written, as nothing depends on it."""
    with suppress(OSError):
        write_text(path, f"{what} (process {os.getpid()}, since {time.strftime('%H:%M:%S')})")


def holder_said(path: Path) -> str:
    """Return the line about who has a lock, "another process" where there is none."""
    try:
        line = path.read_text(encoding="utf-8")[:MAX_LINE]
    except (OSError, UnicodeDecodeError):
        return "another process"
    return "another graph of this process" if f"(process {os.getpid()}, " in line else line
