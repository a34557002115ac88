"""Holder: who has a lock, and since when, noted beside it, so that whoever waits can be told; and what those left who were killed."""

import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
from pydantic import Field

from profiling_agent.documents import DocumentError, read_record
from profiling_agent.files import write_text
from profiling_agent.records import Record

UNKNOWN = "another process"


class Holder(Record):
    """The process that took a lock, when, and what it says it does; `started` tells it from a later one of its number."""

    pid: int = Field(ge=1, lt=2**31)
    started: float
    since: float
    what: str


def note_holder(path: Path, what: str) -> None:
    """Note this process as the holder; nothing happens where that can't be written, as nothing depends on it."""
    holder = Holder(pid=os.getpid(), started=psutil.Process().create_time(), since=time.time(), what=what[:200])
    try:
        write_text(path, holder.model_dump_json() + "\n")
    except OSError:
        return


def holder_said(path: Path) -> str:
    """Return who holds a lock and for how long, as a part of a sentence, without a name where nobody is noted.

    A stopped process (Ctrl-Z) goes on holding its lock, so that is said with what to do about it.
    """
    try:
        holder = read_record(Holder, path)
        process = psutil.Process(holder.pid)
        is_stopped = process.status() == psutil.STATUS_STOPPED
        is_same = abs(process.create_time() - holder.started) < 1
    except (OSError, DocumentError, psutil.Error, OverflowError):
        return UNKNOWN
    if not is_same:
        return UNKNOWN
    if holder.pid == os.getpid():
        return "another graph of this process"
    said = f"{holder.what} (process {holder.pid}, for {max(0.0, time.time() - holder.since):.0f} s)"
    return f"{said}, which is stopped: `kill -CONT {holder.pid}` lets it go on" if is_stopped else said


def remove_left(folders: Iterable[Path]) -> None:
    """Remove those of the folders whose process is gone, by the number at the end of their names; what can't be removed stays."""
    for folder in folders:
        number = folder.name.rpartition("-")[2]
        if number.isdecimal() and not psutil.pid_exists(int(number)):
            shutil.rmtree(folder, ignore_errors=True)
