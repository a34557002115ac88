"""Job store: finished jobs in a run folder, each with what it was asked and the hash of everything that it left.

A process believes what it saw being made. What an earlier one left is compared with its hashes before it is used, because a
power cut, a full disk or somebody else may have been at it; where it differs it is removed, and done again from its order.
"""

import shutil
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel

from profiling_agent.documents import DocumentError, read_record
from profiling_agent.errors import RunError
from profiling_agent.files import file_sha256, inside, make_folders, write_text
from profiling_agent.jobs.table import Table
from profiling_agent.jobs.tasks import Task
from profiling_agent.records import ArtifactRef, Record
from profiling_agent.workspace import ORDERS, Workspace

RESULT, HASHES = "result.json", "hashes.json"
# Written anew when a run ends: the card of the model that it returns.
REWRITTEN = frozenset({"README.md"})
# Holds times, so that no two of them are equal.
TIMED = frozenset({"profile", "trace"})


class Hashes(Record):
    """The sha256 of each file that a job left, by its path in the job's folder."""

    files: dict[str, str]


class KeptOrder(Record):
    """What a job was asked, kept beside it: the task's class, which has to be in the table, and its fields."""

    task: str
    fields: dict[str, Any]


def write_hashes(folder: Path) -> None:
    """Seal a job's folder: hash everything in it."""
    files = {path.relative_to(folder).as_posix(): file_sha256(path) for path in _files(folder)}
    write_text(folder / HASHES, Hashes(files=files).model_dump_json(indent=1) + "\n")


def holds(folder: Path) -> bool:
    """Return whether a folder holds a job as it was left."""
    try:
        hashes = read_record(Hashes, folder / HASHES).files
        return RESULT in hashes and all(
            file_sha256(inside(folder / name, folder)) == sha256 for name, sha256 in hashes.items()
        )
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

    def __init__(self, workspace: Workspace, table: Table) -> None:
        """Look into `workspace`; tasks that aren't in `table` are nobody's."""
        self._workspace = workspace
        self._tasks = {kind.__name__: kind for kind in table}
        self._whole: set[str] = set()

    def folder(self, key: str) -> Path:
        """Return where a job lies, or will lie."""
        return self._workspace.jobs / key

    def is_whole(self, key: str) -> bool:
        """Return whether a job is there as it was left; it is looked at once."""
        if key not in self._whole and holds(self.folder(key)):
            self._whole.add(key)
        return key in self._whole

    def is_foreign(self, key: str) -> bool:
        """Return whether a folder was put here by a caller of ours, as a job that nobody ordered; it is taken as it is."""
        names = (self.folder(key) / HASHES, self._order_path(key))
        return self.folder(key).is_dir() and not any(path.exists() for path in names)

    def _order_path(self, key: str) -> Path:
        return self._workspace.root / ORDERS / f"{key}.json"

    def believe(self, key: str) -> None:
        """Take a job that this process has just seen done as whole."""
        self._whole.add(key)

    def remove(self, key: str) -> None:
        """Remove a job that is damaged; its order stays."""
        self._whole.discard(key)
        folder = self.folder(key)
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        shutil.rmtree(folder, ignore_errors=True)

    def forget(self, key: str, name: str) -> None:
        """Remove one file of a job, which is done again where it is asked for; what is said of it stays."""
        self._whole.discard(key)
        if not self.folder(key).is_symlink():
            (self.folder(key) / name).unlink(missing_ok=True)

    def keep_order(self, key: str, task: Task[Any]) -> None:
        """Note what a job is asked, before it is done, so that it can be done again."""
        path = self._order_path(key)
        make_folders(path.parent)
        kept = KeptOrder(task=type(task).__name__, fields=task.model_dump(mode="json"))
        write_text(path, kept.model_dump_json(indent=1) + "\n")

    def order(self, key: str) -> Task[Any]:
        """Return what a job was asked; RunError where that isn't known any more."""
        try:
            kept = read_record(KeptOrder, self._order_path(key))
            return self._tasks[kept.task].model_validate(kept.fields)
        except (OSError, KeyError, ValueError) as error:
            raise RunError(
                f"{str(self.folder(key))!r} is gone or damaged, and so is the note of what it was made from: start a new run"
            ) from error

    def result(self, key: str, task: Task[Any]) -> Any:
        """Return what a whole job came to; OSError or DocumentError where it can't be read."""
        return read_record(task.result, self.folder(key) / RESULT)
