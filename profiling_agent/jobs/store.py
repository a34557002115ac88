"""Results of jobs on disk, by key, and the timesheet of a run.

A resumed run must repeat what it decided by its used time. So time is counted along the timesheet, up to the latest job that was requested,
whichever process did it and when.
"""

import shutil
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from pydantic import BaseModel, Field

from profiling_agent import errors
from profiling_agent.errors import RunError
from profiling_agent.jobs.tasks import Task
from profiling_agent.lib.io import (
    DocumentError,
    append_line,
    file_sha256,
    parse_record,
    read_record,
    storage_problem,
    write_text,
)
from profiling_agent.schemas import ArtifactRef, Record
from profiling_agent.workspace import Workspace

ERRORS: dict[str, type[errors.ProfilingAgentError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.ProfilingAgentError)
}


class Order(Record):
    """Order from parent to child: do `task` in the run folder `root`, under `key`; `record` and `handler` are "module:name".

    `given` has the keys of the finished jobs that the task needs, by name.
    """

    root: str
    key: str
    record: str
    task: dict[str, Any]
    handler: str
    given: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    torch: bool = True


class Message(Record):
    """Message from child to parent: a job's progress, its end, or its error."""

    kind: Literal["progress", "done", "failed"]
    text: str = ""
    done: int = 0
    total: int = 0
    error: str = ""


TASK, RESULT, HASHES = "task.json", "result.json", "hashes.json"
# The model card, written again when a run ends, so that it isn't hashed.
REWRITTEN = frozenset({"README.md"})


class Hashes(Record):
    """The sha256 of each file of a job, by its path in the job's folder."""

    files: dict[str, str]


def write_hashes(folder: Path) -> None:
    """Seal a job's folder by hashes of all its files."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in REWRITTEN]
    files = {path.relative_to(folder).as_posix(): file_sha256(path) for path in paths}
    write_text(folder / HASHES, Hashes(files=files).model_dump_json(indent=1) + "\n")


def is_finished_job(folder: Path) -> bool:
    """Return whether a folder holds a finished, unchanged job."""
    try:
        hashes = read_record(Hashes, folder / HASHES).files
        return RESULT in hashes and all(file_sha256(folder / name) == sha256 for name, sha256 in hashes.items())
    except (OSError, DocumentError):
        return False


def artifacts_of(value: Any) -> list[ArtifactRef]:
    """Return every reference to an artifact in a record, at any depth."""
    if isinstance(value, ArtifactRef):
        return [value]
    if isinstance(value, BaseModel):
        # A record from a checkpoint may lack a field.
        return [ref for name in type(value).model_fields for ref in artifacts_of(getattr(value, name, None))]
    if isinstance(value, dict):
        return [ref for item in value.values() for ref in artifacts_of(item)]
    if isinstance(value, (tuple, list)):
        return [ref for item in value for ref in artifacts_of(item)]
    return []


def key_of(ref: ArtifactRef) -> str | None:
    """Return the key of the job that made an artifact; None for a file that no job made."""
    parts = PurePosixPath(ref.path).parts
    return parts[1] if len(parts) > 2 and parts[0] == "jobs" else None


class JobStore:
    """The finished jobs of one run folder."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._complete: set[str] = set()

    def folder(self, key: str) -> Path:
        """Return the folder of a job, which need not exist yet."""
        return self._workspace.jobs / key

    def is_complete(self, key: str) -> bool:
        """Return whether a job is finished and unchanged; each is compared with its hashes once."""
        if key not in self._complete and is_finished_job(self.folder(key)):
            self._complete.add(key)
        return key in self._complete

    def is_unsealed(self, key: str) -> bool:
        """Return whether a caller put this folder here without a job, so that it has no hashes."""
        return self.folder(key).is_dir() and not (self.folder(key) / HASHES).exists()

    def mark_complete(self, key: str) -> None:
        """Mark a job that has just ended as complete, without comparing hashes."""
        self._complete.add(key)

    def remove(self, key: str) -> None:
        """Remove a damaged job."""
        self._complete.discard(key)
        shutil.rmtree(self.folder(key), ignore_errors=True)

    def delete_output(self, key: str, name: str) -> None:
        """Delete one file of a job, which is then done again when next needed."""
        self._complete.discard(key)
        (self.folder(key) / name).unlink(missing_ok=True)

    def result(self, key: str, task: Task[Any]) -> Any:
        """Return the result of a complete job."""
        return read_record(task.result, self.folder(key) / RESULT)


TIMESHEET_FILE = "timesheet.jsonl"


class Entry(Record):
    """One job: its key, seconds from order to end (start of the process included), and the run's seconds up to its end."""

    key: str
    seconds: float
    up_to: float


class Timesheet:
    """Timesheet of one run folder; a line that can't be read counts nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._up_to: dict[str, float] = {}
        self.spent_s = 0.0
        for entry in _read_entries(path):
            self._up_to[entry.key] = entry.up_to

    def note(self, key: str, seconds: float) -> None:
        """Record the time of a job that ended or failed.

        A job that is done again because its artifact was damaged isn't counted again, unless it is the last: that adds to its time.
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
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        # Missing or unreadable: earlier time counts nothing.
        return entries
    for line in lines:
        with suppress(DocumentError):
            entries.append(parse_record(Entry, line))
    return entries
