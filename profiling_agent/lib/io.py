"""Files: writing that leaves a whole file or folder or nothing, and paths that stay in their folder."""

import errno
import glob
import hashlib
import os
import shutil
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from uuid import uuid4

# Prefix of what is half-written; whatever has it once the folder's lock is held was left by a killed process.
TEMPORARY = ".tmp-"
# The disk is full, the user's quota is, or the file is larger than files may be.
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Why the disk can't be written, and what helps, by the system's number and by SQLite's primary one.
FULL = "there is no space left: free some"
LOCKED = "it is read-only: choose a folder that can be written"
FOREIGN = "it isn't yours to write: take it over, or choose another folder"
FAILING = "the disk reports an input/output error: look at the disk"
STORAGE = {
    **dict.fromkeys(NO_SPACE, FULL),
    errno.EROFS: LOCKED,
    errno.EACCES: FOREIGN,
    errno.EPERM: FOREIGN,
    errno.EIO: FAILING,
}
SQLITE_STORAGE = {
    sqlite3.SQLITE_FULL: FULL,
    sqlite3.SQLITE_READONLY: LOCKED,
    sqlite3.SQLITE_CANTOPEN: FOREIGN,
    sqlite3.SQLITE_IOERR: FAILING,
}


class FileRefusedError(OSError):
    """A path that isn't used; `strerror` is the reason, as in the system's own errors."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(errno.EPERM, reason, str(path))


def expanded(named: str) -> Path:
    """Return a path given by a user, `~` followed; FileRefusedError where there is no such home folder, or a NUL in it."""
    path = Path(named)
    if "\0" in named:
        raise FileRefusedError(path, "it holds a NUL character")
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise FileRefusedError(path, f"it names a home folder that can't be found ({error})") from error


def storage_problem(error: BaseException) -> str | None:
    """Return why the disk can't be written, and what helps; None for an error of another kind."""
    if isinstance(error, FileRefusedError):
        return None
    if isinstance(error, sqlite3.Error):
        # An extended code has the primary one in its low byte.
        return SQLITE_STORAGE.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
    return STORAGE.get(error.errno or 0) if isinstance(error, OSError) else None


def resolved(path: Path) -> Path:
    """Return `path` with all links followed; FileRefusedError where it holds a NUL or links that form a loop."""
    try:
        return path.resolve()
    except (ValueError, RuntimeError) as error:
        raise FileRefusedError(path, f"it is no path ({error})") from error


def inside(path: Path, folder: Path) -> Path:
    """Return `path` with all links followed; FileRefusedError where that is not under `folder`, or no path at all."""
    found = resolved(path)
    if not found.is_relative_to(resolved(folder)):
        raise FileRefusedError(path, f"it leads out of {str(folder)!r}")
    return found


def files_root(folder: Path) -> Path:
    """Return the folder that links in `folder` may lead to: itself, or the repository of a snapshot in the Hub's cache."""
    is_snapshot = folder.parent.name == "snapshots" and (folder.parent.parent / "blobs").is_dir()
    return folder.parent.parent if is_snapshot else folder


def file_sha256(path: Path) -> str:
    """Return the hex sha256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def make_folders(folder: Path) -> None:
    """Make a folder and those above it, where they aren't there; FileExistsError where there is something else of that name."""
    folder.mkdir(parents=True, exist_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f"{TEMPORARY}{path.name[:50]}-{uuid4().hex[:12]}")


@contextmanager
def replacing(path: Path) -> Generator[IO[bytes], None, None]:
    """Give a new file beside `path`, which it replaces when the block ends; it is removed if the block raises."""
    temporary = _beside(path)
    try:
        with temporary.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write so that a reader and a crash leave the old file or the new one, and nothing between."""
    with replacing(path) as stream:
        stream.write(data)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text as `write_bytes` does; what can't be encoded is escaped."""
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"))


def append_line(path: Path, line: str) -> None:
    """Add a line to a file, which is made where it isn't there; a line that doesn't fit on the disk is not begun."""
    with path.open("a+b", buffering=0) as stream:
        size = stream.seek(0, os.SEEK_END)
        data = line.encode("utf-8", errors="backslashreplace") + b"\n"
        # A line that was cut off by a kill must not take this one with it.
        if size and os.pread(stream.fileno(), 1, size - 1) != b"\n":
            data = b"\n" + data
        if stream.write(data) != len(data):
            stream.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(stream.fileno())


@contextmanager
def appearing(folder: Path) -> Generator[Path, None, None]:
    """Give a new folder beside `folder`, whose name it takes when the block ends; it is removed if the block raises.

    Raises:
        FileExistsError: there is something of that name.
    """
    if os.path.lexists(folder):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
    try:
        make_folders(folder.parent)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder.parent)) from error
    temporary = _beside(folder)
    temporary.mkdir()
    try:
        yield temporary
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sweep(folder: Path, name: str = "") -> None:
    """Remove what a killed process left half-written in a folder, of files so named alone; for the holder of their lock."""
    for leftover in folder.glob(f"{TEMPORARY}{glob.escape(name[:50])}*"):
        if leftover.is_dir() and not leftover.is_symlink():
            # Another process may be removing it too.
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)
