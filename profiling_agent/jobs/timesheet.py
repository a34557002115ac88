"""Timesheet of a run: how long each job took, in the order in which they were done, and so how much of its time a run has used.

What a run decides by the time that it has used has to come out the same when it is resumed. So that is counted along the sheet: up to the
latest job that was asked for, whoever did it and when.
"""

from contextlib import suppress
from pathlib import Path

from pydantic import Field

from profiling_agent.documents import DocumentError, parse_record
from profiling_agent.errors import RunError
from profiling_agent.files import append_line, read_bytes, storage_problem
from profiling_agent.records import Record

# The second has what was done ahead.
SHEET, ASIDE = "timesheet.jsonl", "ahead.jsonl"
# Thirty years.
MAX_S = 1e9
MAX_NODE, MAX_TRIES = 100, 1000


class Entry(Record):
    """One job: its key, the seconds from its order to its end, the start of its process included, and what the run had used by then.

    `at` is when it ended, in seconds since 1970. On a cluster also the machine that did it, and how many were tried.
    """

    key: str
    seconds: float = Field(ge=0, le=MAX_S)
    up_to: float = Field(ge=0, le=MAX_S)
    at: float = Field(default=0.0, ge=0)
    node: str = Field(default="", max_length=MAX_NODE)
    tries: int = Field(default=1, ge=1, le=MAX_TRIES)


class NodeWork(Record):
    """What one machine of a cluster did for a run: jobs, their seconds, and how many of the tries were made again."""

    jobs: int
    seconds: float
    again: int


class Timesheet:
    """The timesheet of one run folder; a line that can't be read counts nothing."""

    def __init__(self, path: Path) -> None:
        """Read what is there."""
        self._path, self._aside_path = path, path.with_name(ASIDE)
        self._aside = {entry.key: entry for entry in _entries(self._aside_path)}
        self._up_to: dict[str, float] = {}
        self.spent_s = 0.0
        for entry in _entries(path):
            self._up_to[entry.key] = entry.up_to

    def note(self, key: str, seconds: float, *, at: float = 0.0, node: str = "", tries: int = 1) -> None:
        """Write down that a job was done, or tried.

        One that is done again, as its artifact was damaged, was counted; one that failed last of all and is tried again takes longer.
        """
        if key not in self._up_to or key == next(reversed(self._up_to)):
            before = max(self.spent_s, self._up_to.get(key, 0.0))
            up_to = round(before + seconds, 3)
            entry = Entry(key=key, seconds=round(seconds, 3), up_to=up_to, at=at, node=node[:MAX_NODE], tries=tries)
            self._append(entry, self._path)
            self._up_to[key] = entry.up_to
        self.reach(key)

    def _append(self, entry: Entry, path: Path) -> None:
        try:
            append_line(path, entry.model_dump_json())
        except OSError as error:
            if storage_problem(error) is not None:
                raise
            raise RunError(f"{str(path)!r} can't be written ({error.strerror}): move it away, and resume") from error

    def set_aside(self, key: str, seconds: float, *, at: float = 0.0, node: str = "", tries: int = 1) -> None:
        """Write down a job that was done before it is asked for; its time is used when it is."""
        entry = Entry(key=key, seconds=round(seconds, 3), up_to=0.0, at=at, node=node[:MAX_NODE], tries=tries)
        self._append(entry, self._aside_path)
        self._aside[key] = entry

    def is_aside(self, key: str) -> bool:
        """Return whether a job was done ahead, and nobody has asked for it yet."""
        return key in self._aside and key not in self._up_to

    def reach(self, key: str) -> None:
        """Take a job for asked: the run has used the time up to it."""
        if self.is_aside(key):
            entry = self._aside[key]
            self.note(key, entry.seconds, at=entry.at, node=entry.node, tries=entry.tries)
        self.go_on_from(self._up_to.get(key, 0.0))

    def go_on_from(self, spent_s: float) -> None:
        """Take so much for used, as by the stages before the one that is gone on with."""
        self.spent_s = max(self.spent_s, spent_s)

    def by_kind(self) -> dict[str, tuple[int, float]]:
        """Return for each kind of job how many were done, and the seconds that they took."""
        told: dict[str, tuple[int, float]] = {}
        for entry in _entries(self._path):
            kind = entry.key.partition("-")[0]
            count, seconds = told.get(kind, (0, 0.0))
            told[kind] = count + 1, seconds + entry.seconds
        return dict(sorted(told.items(), key=lambda item: -item[1][1]))

    def by_node(self) -> dict[str, NodeWork]:
        """Return what each machine of a cluster did; nothing where there was none."""
        told: dict[str, NodeWork] = {}
        for entry in _entries(self._path):
            if entry.node:
                known = told.get(entry.node, NodeWork(jobs=0, seconds=0.0, again=0))
                told[entry.node] = NodeWork(
                    jobs=known.jobs + 1, seconds=known.seconds + entry.seconds, again=known.again + entry.tries - 1
                )
        return dict(sorted(told.items()))


def _entries(path: Path) -> list[Entry]:
    found: list[Entry] = []
    try:
        lines = [] if path.is_symlink() else read_bytes(path).splitlines()
    except OSError:
        # Not there yet, or nobody's to read: the time before counts nothing.
        return found
    for line in lines:
        with suppress(DocumentError):
            found.append(parse_record(Entry, line))
    return found
