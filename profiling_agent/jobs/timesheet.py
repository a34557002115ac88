"""Timesheet of a run: how long each job took, in the order in which they were done, and so how much of its time a run has used.

What a run decides by the time that it has used has to come out the same when it is resumed. So that is counted along the sheet: up to the
latest job that was asked for, whoever did it and when.
"""

from contextlib import suppress
from pathlib import Path

from profiling_agent.documents import DocumentError, parse_record
from profiling_agent.errors import RunError
from profiling_agent.files import append_line, storage_problem
from profiling_agent.records import Record

SHEET = "timesheet.jsonl"


class Entry(Record):
    """One job: its key, the seconds from its order to its end, the start of its process included, and what the run had used by then."""

    key: str
    seconds: float
    up_to: float


class Timesheet:
    """The timesheet of one run folder; a line that can't be read counts nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._up_to: dict[str, float] = {}
        self.spent_s = 0.0
        for entry in _entries(path):
            self._up_to[entry.key] = entry.up_to

    def note(self, key: str, seconds: float) -> None:
        """Write down that a job was done, or tried.

        One that is done again, as its artifact was damaged, was counted; one that failed last of all and is tried again takes longer.
        """
        if key not in self._up_to or key == next(reversed(self._up_to)):
            before = max(self.spent_s, self._up_to.get(key, 0.0))
            up_to = round(before + seconds, 3)
            entry = Entry(key=key, seconds=round(seconds, 3), up_to=up_to)
            try:
                append_line(self._path, entry.model_dump_json())
            except OSError as error:
                if storage_problem(error) is not None:
                    raise
                raise RunError(
                    f"{str(self._path)!r} can't be written ({error.strerror}): move it away, and resume"
                ) from error
            self._up_to[key] = entry.up_to
        self.reach(key)

    def reach(self, key: str) -> None:
        """Take a job for asked: the run has used the time up to it."""
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


def _entries(path: Path) -> list[Entry]:
    found: list[Entry] = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        # Not there yet, or nobody's to read: the time before counts nothing.
        return found
    for line in lines:
        with suppress(DocumentError):
            found.append(parse_record(Entry, line))
    return found
