"""Messages between a run and its workers, and the timesheet of a run.

A resumed run must repeat what it decided by its used time. So time is counted along the timesheet, up to the latest job that was requested,
whichever process did it and when.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from profiling_agent.lib.io import DocumentError, append_line, parse_record
from profiling_agent.schemas import ArtifactRef, Record

TASK, RESULT = "task.json", "result.json"


class JobRequest(Record):
    """Request of a run to its worker: do `task`, a record of the class `record` ("module:name"), in the folder `root` under `key`.

    `given` has the keys of the finished jobs that the task needs, by name.
    """

    root: str
    key: str
    record: str
    task: dict[str, Any]
    given: dict[str, tuple[str, ...]] = Field(default_factory=dict)


class Message(Record):
    """Message from a worker: a job's progress, its end, or its error."""

    kind: Literal["progress", "done", "failed"]
    text: str = ""
    done: int = 0
    total: int = 0
    error: str = ""


def artifacts_of(value: Any) -> list[ArtifactRef]:
    """Return every reference to an artifact in a record, at any depth."""
    if isinstance(value, ArtifactRef):
        return [value]
    if isinstance(value, BaseModel):
        # A record from a checkpoint may lack a field.
        value = [getattr(value, name, None) for name in type(value).model_fields]
    elif isinstance(value, dict):
        value = list(value.values())
    return [ref for item in value for ref in artifacts_of(item)] if isinstance(value, (tuple, list)) else []


TIMESHEET_FILE = "timesheet.jsonl"


class Entry(Record):
    """One job: its key, seconds from request to end (start of the process included), and the run's seconds up to its end."""

    key: str
    seconds: float
    up_to: float


class Timesheet:
    """Timesheet of one run folder; a line that can't be read counts nothing."""

    def __init__(self, path: Path) -> None:
        self._path, self.spent_s = path, 0.0
        self._up_to = {entry.key: entry.up_to for entry in _read_entries(path)}

    def note(self, key: str, seconds: float) -> None:
        """Record the time of a job that ended or failed.

        A job that is done again, as its folder was deleted, isn't counted again, unless it is the last: that adds to its time.
        """
        if key not in self._up_to or key == next(reversed(self._up_to)):
            up_to = round(max(self.spent_s, self._up_to.get(key, 0.0)) + seconds, 3)
            append_line(self._path, Entry(key=key, seconds=round(seconds, 3), up_to=up_to).model_dump_json())
            self._up_to[key] = up_to
        self.reach(key)

    def reach(self, key: str) -> None:
        """Count the time up to a requested job as used."""
        self.resume_at(self._up_to.get(key, 0.0))

    def resume_at(self, spent_s: float) -> None:
        """Count `spent_s` as used, as by the stages before the one that is resumed."""
        self.spent_s = max(self.spent_s, spent_s)

    def by_kind(self) -> dict[str, tuple[int, float]]:
        """Return the count and the seconds of each kind of job, longest first."""
        totals: dict[str, tuple[int, float]] = {}
        for entry in _read_entries(self._path):
            kind = entry.key.partition("-")[0]
            count, seconds = totals.get(kind, (0, 0.0))
            totals[kind] = count + 1, seconds + entry.seconds
        return dict(sorted(totals.items(), key=lambda item: -item[1][1]))


def _read_entries(path: Path) -> list[Entry]:
    entries: list[Entry] = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(DocumentError):
            entries.append(parse_record(Entry, line))
    return entries
