"""Run folder: its layout, its manifest, its lock and its timesheet.

`request.json` is the request; `jobs/<key>/` one finished job each, its `task.json`, `result.json` and artifacts, never overwritten;
`timesheet.jsonl` how long each took; `checkpoints.sqlite` the graph's checkpoints; `best` a pointer to the model to deploy, replaced
atomically; `report.json` and `report.md` the result.

A resumed run must repeat what it decided by its used time. So time is counted along the timesheet, up to the latest job that was requested,
whichever process did it and when.
"""

import os
import re
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import Field

from profiling_agent.errors import ArtifactError, RequestError, RunError, StorageError
from profiling_agent.lib import io
from profiling_agent.lib.machine import environment
from profiling_agent.request import Request
from profiling_agent.schemas import ArtifactRef, Record

# Of a run folder with its checkpoints.
RUN_VERSION = 9
# The file that marks a run folder.
MANIFEST = "request.json"
LOCK, TIMESHEET_FILE = "run.lock", "timesheet.jsonl"


class Manifest(Record):
    """Content of `request.json`."""

    schema_version: int
    request: Request
    machine: str = Field(default="", description="where the run was begun: processor and threads")


@contextmanager
def storage_errors(root: Path) -> Generator[None]:
    """Turn a failed write of the run's disk into a StorageError of one line; the run can be resumed."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        if (problem := io.storage_problem(error)) is None:
            raise
        raise storage_error(root, problem) from error


def storage_error(root: Path, problem: str) -> StorageError:
    """Return the StorageError of a run whose disk can't be written, with the command that resumes it."""
    advice = f"mend that, then go on with `profiling-agent resume {root}`"
    return StorageError(f"run folder {str(root)!r} can't be written ({problem}): {advice}")


@dataclass(frozen=True, slots=True)
class Workspace:
    """One run's folder."""

    root: Path

    @property
    def jobs(self) -> Path:
        """Return the folder of finished jobs."""
        return self.root / "jobs"

    @property
    def checkpoints(self) -> Path:
        """Return the file of the graph's checkpoints."""
        return self.root / "checkpoints.sqlite"

    def path(self, ref: ArtifactRef) -> Path:
        """Return an artifact's path; ArtifactError if its reference leads out of the run folder, RunError if it is missing."""
        path = self.root / ref.path
        try:
            io.inside(path, self.root)
        except OSError as error:
            raise ArtifactError(f"{ref.path!r} isn't in the run folder ({error.strerror}): start a new run") from error
        if not path.exists():
            raise RunError(
                f"{str(path)!r} is missing: delete {str(self.checkpoints)!r} and go on with `profiling-agent resume "
                f"{self.root}`, which does again only what is missing"
            )
        return path

    def lock(self) -> FileLock:
        """Lock the run for this process until release or exit; RunError if it is taken or can't be locked."""
        lock = FileLock(self.root / LOCK, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise RunError(f"run {self.root.name!r} is in use by another process: wait for it, or end it") from error
        except OSError as error:
            raise RunError(f"run folder {str(self.root)!r} can't be locked ({error.strerror}): copy it") from error
        return lock

    def point_best(self, ref: ArtifactRef, folder: Path) -> None:
        """Make `best` in the run folder, or a fork's own within, point to this artifact."""
        temporary = folder / f"{io.TEMPORARY}best-{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(os.path.relpath(self.path(ref), folder), target_is_directory=True)
        temporary.replace(folder / "best")

    def remove_partial_files(self) -> None:
        """Remove half-written files of killed processes; only the holder of the lock may call this."""
        for folder in (self.root, self.jobs):
            io.remove_partial_files(folder)


def read_manifest(root: Path) -> Manifest:
    """Return a run folder's manifest; RunError if it is no run folder of this version."""
    path = root / MANIFEST
    if not path.is_file():
        reason = "it has no request.json" if root.is_dir() else "there is no such folder"
        raise RunError(f"{str(root)!r} is no run folder: {reason}; give a folder under the output folder")
    try:
        document = io.read_json(path)
        if (version := document["schema_version"]) != RUN_VERSION:
            advice = "use the version that wrote it, or start a new run"
            raise RunError(
                f"{str(root)!r} was written with schema version {version!r}, this version reads {RUN_VERSION}: {advice}"
            )
        return Manifest.model_validate(document)
    # Neither JSON nor a manifest: DocumentError and ValidationError are ValueErrors.
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(f"{str(path)!r} is damaged or can't be read: start a new run") from error


def slug(text: str) -> str:
    """Return text in the form of a part of a folder's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def changed_fields(original: Request, requested: Request) -> list[str]:
    """Return the fields that differ from the original request, except `output`: the run may have been moved."""
    names = [name for name in Request.model_fields if name != "output"]
    return [name for name in names if getattr(original, name) != getattr(requested, name)]


def create_workspace(request: Request, run_id: str) -> Workspace:
    """Create a run folder, complete or not at all; RunError if anything has that name."""
    root = request.output_dir / run_id
    if os.path.lexists(root):
        raise RunError(f"run {run_id!r} exists in {request.output!r}: resume it, or choose another run_id")
    with _writable(request), io.appearing(root) as temporary:
        _write_manifest(temporary, request, run_id)
    return Workspace(root)


def open_workspace(request: Request, run_id: str) -> Workspace:
    """Create the run folder, or open the one of the same request; RunError if its request differs."""
    root = request.output_dir / run_id
    if not (root / MANIFEST).exists():
        with _writable(request):
            _write_manifest(root, request, run_id)
        return Workspace(root)
    original, requested = read_manifest(root).request, request.model_copy(update={"run_id": run_id})
    if changed := changed_fields(original, requested):
        was, now = getattr(original, changed[0]), getattr(requested, changed[0])
        difference = f"{changed[0]} was {was!r}, is now {now!r}"
        raise RunError(f"run {run_id!r} was begun with another request ({difference}): choose another run_id")
    return Workspace(root)


def _write_manifest(root: Path, request: Request, run_id: str) -> None:
    (root / "jobs").mkdir(parents=True, exist_ok=True)
    named_request, machine = request.model_copy(update={"run_id": run_id}), environment(request.device).machine
    manifest = Manifest(schema_version=RUN_VERSION, request=named_request, machine=machine)
    io.write_text(root / MANIFEST, manifest.model_dump_json(indent=2))


@contextmanager
def _writable(request: Request) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise RequestError(f"output {request.output!r} can't be written ({error.strerror}): choose another") from error


class Entry(Record):
    """One job: its key, seconds from request to end (start of the process included), and the run's seconds up to its end."""

    key: str
    seconds: float
    up_to: float


class Timesheet:
    """Timesheet of one run folder; a line that can't be read counts nothing."""

    def __init__(self, path: Path) -> None:
        self._path, self.spent_s = path, 0.0
        self._entries: list[Entry] = []
        for line in path.read_bytes().splitlines() if path.is_file() else ():
            with suppress(io.DocumentError):
                self._entries.append(io.parse_record(Entry, line))

    @property
    def _up_to(self) -> dict[str, float]:
        return {entry.key: entry.up_to for entry in self._entries}

    def note(self, key: str, seconds: float) -> None:
        """Record the time of a job that ended or failed.

        A job that is done again, as its folder was deleted, isn't counted again, unless it is the last: that adds to its time.
        """
        up_to = self._up_to
        if key not in up_to or key == self._entries[-1].key:
            ended = max(self.spent_s, up_to.get(key, 0.0)) + seconds
            self._entries.append(Entry(key=key, seconds=round(seconds, 3), up_to=round(ended, 3)))
            io.append_line(self._path, self._entries[-1].model_dump_json())
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
        for entry in self._entries:
            kind = entry.key.partition("-")[0]
            count, seconds = totals.get(kind, (0, 0.0))
            totals[kind] = count + 1, seconds + entry.seconds
        return dict(sorted(totals.items(), key=lambda item: -item[1][1]))
