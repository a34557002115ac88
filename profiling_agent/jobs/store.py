"""Results of jobs on disk, by key, and the messages between a run and its worker."""

import shutil
from pathlib import Path, PurePosixPath
from pkgutil import resolve_name
from typing import Any, Literal

from pydantic import BaseModel, Field

from profiling_agent import errors
from profiling_agent.documents import DocumentError, read_record
from profiling_agent.files import file_sha256, write_text
from profiling_agent.jobs.tasks import Task
from profiling_agent.records import ArtifactRef, Record
from profiling_agent.workspace import Workspace

ERRORS: dict[str, type[errors.ProfilingAgentError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.ProfilingAgentError)
}


class Order(Record):
    """Parent to child: do this task in the run folder `root`, under `key`; `record` and `handler` are "module:name".

    `given` has the keys of the finished jobs that the task needs, by name.
    """

    root: str
    key: str
    record: str
    task: dict[str, Any]
    handler: str
    given: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    torch: bool = True

    def read(self) -> Any:
        """Return the task."""
        return resolve_name(self.record).model_validate(self.task)


class Message(Record):
    """Child to parent: where the job is, that it is done, or why it failed."""

    kind: Literal["progress", "done", "failed"]
    text: str = ""
    done: int = 0
    total: int = 0
    error: str = ""


TASK, RESULT, HASHES = "task.json", "result.json", "hashes.json"
# Written anew when a run ends: the card of the model that it returns.
REWRITTEN = frozenset({"README.md"})


class Hashes(Record):
    """The sha256 of each file that a job left, by its path in the job's folder."""

    files: dict[str, str]


def write_hashes(folder: Path) -> None:
    """Seal a job's folder: hash everything in it."""
    files = {path.relative_to(folder).as_posix(): file_sha256(path) for path in _files(folder)}
    write_text(folder / HASHES, Hashes(files=files).model_dump_json(indent=1) + "\n")


def holds(folder: Path) -> bool:
    """Return whether a folder holds a job as it was left."""
    try:
        hashes = read_record(Hashes, folder / HASHES).files
        return RESULT in hashes and all(file_sha256(folder / name) == sha256 for name, sha256 in hashes.items())
    except (OSError, DocumentError):
        return False


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in REWRITTEN]


def artifacts_of(value: Any) -> list[ArtifactRef]:
    """Return every reference to an artifact in a record, however deep."""
    if isinstance(value, ArtifactRef):
        return [value]
    if isinstance(value, BaseModel):
        # A record that came out of a checkpoint may lack a field.
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
        """Return where a job lies, or will lie."""
        return self._workspace.jobs / key

    def is_complete(self, key: str) -> bool:
        """Return whether a job is there as it was left; each job is compared with its hashes once."""
        if key not in self._complete and holds(self.folder(key)):
            self._complete.add(key)
        return key in self._complete

    def is_unsealed(self, key: str) -> bool:
        """Return whether a caller put this folder here without a job, so that it has no hashes."""
        return self.folder(key).is_dir() and not (self.folder(key) / HASHES).exists()

    def mark_complete(self, key: str) -> None:
        """Trust a job that this process has just seen done."""
        self._complete.add(key)

    def remove(self, key: str) -> None:
        """Remove a job that is damaged."""
        self._complete.discard(key)
        shutil.rmtree(self.folder(key), ignore_errors=True)

    def delete_output(self, key: str, name: str) -> None:
        """Remove one file of a job, which is done again when it is next needed."""
        self._complete.discard(key)
        (self.folder(key) / name).unlink(missing_ok=True)

    def result(self, key: str, task: Task[Any]) -> Any:
        """Return the result of a complete job."""
        return read_record(task.result, self.folder(key) / RESULT)
