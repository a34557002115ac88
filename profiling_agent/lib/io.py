"""Files: written whole or not at all, paths that stay in their folder, JSON as records, and the cache.

A value is quoted in an error only where the document is the reader's own.
"""

import errno
import glob
import hashlib
import json
import os
import shutil
import sqlite3
import time
import unicodedata
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeVar
from uuid import uuid4

import platformdirs
from filelock import FileLock
from pydantic import BaseModel, ValidationError

from profiling_agent.errors import AcquisitionError

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


MAX_QUOTED = 80
# What moves a terminal's cursor or turns the direction of text round; a line break and a tab are layout.
LAYOUT = frozenset("\n\t")
HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})

ModelT = TypeVar("ModelT", bound=BaseModel)


class DocumentError(ValueError):
    """JSON that isn't read, in words that follow "the file is damaged: "."""


def parse_json(text: str | bytes) -> Any:
    """Return the content of a JSON document; DocumentError where it is none."""
    try:
        return json.loads(text)
    # JSONDecodeError, UnicodeDecodeError, and a whole number of thousands of digits.
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"it is no JSON ({error})") from None


def first_problem(error: ValidationError, *, quotes: bool = True) -> str:
    """Return the first thing wrong as `where: what (got value)`, on one line; without the value unless it `quotes`."""
    problem = error.errors(include_url=False, include_context=False)[0]
    if problem["type"] == "json_invalid":
        return f"it is no JSON ({problem['msg'].removeprefix('Invalid JSON: ')})"
    worded = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"] and problem["type"] == "value_error" and quotes:
        # From a rule of ours over several fields, which names them and their values.
        return worded
    where = clean(".".join(str(part) for part in problem["loc"])[:MAX_QUOTED]) or "document"
    # Only rules of ours put values into their messages.
    what = worded if quotes or problem["type"] != "value_error" else "not a value that is allowed"
    return f"{where}: {what} (got {str(problem['input'])[:MAX_QUOTED]!r})" if quotes else f"{where}: {what}"


def parse_record(kind: type[ModelT], text: str | bytes, *, strict: bool | None = None, quotes: bool = False) -> ModelT:
    """Return the record in a JSON document; DocumentError where it holds none."""
    try:
        return kind.model_validate_json(text, strict=strict)
    except ValidationError as error:
        raise DocumentError(first_problem(error, quotes=quotes)) from None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; OSError where it can't be opened, DocumentError where it is no JSON."""
    return parse_json(path.read_bytes())


def read_record(kind: type[ModelT], path: Path) -> ModelT:
    """Return the record in a JSON file; OSError and DocumentError as `read_json`."""
    return parse_record(kind, path.read_bytes())


def first_line(error: BaseException) -> str:
    """Return the first line of what an exception says, the name of its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def clean(text: str, *, layout: bool = False) -> str:
    """Return text that shows as it reads: control, format and unassigned characters as escapes, in `layout` but for \\n and \\t."""
    if text.isprintable():
        return text
    kept = LAYOUT if layout else frozenset[str]()
    return "".join(
        character
        if character in kept or unicodedata.category(character) not in HIDDEN
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def inert(text: str) -> str:
    """Return text for a Markdown page in which it opens no link, fetches no picture and is no HTML; other marks stay."""
    return clean(text, layout=True).replace("](", "] (").replace("![", "! [").replace("<", "&lt;")


VARIABLE = "PROFILING_AGENT_CACHE"


def cache_folder() -> Path:
    """Return the folder named by PROFILING_AGENT_CACHE, or the user's cache folder; OSError as `user_folder`."""
    return user_folder(VARIABLE, platformdirs.user_cache_path)


def kept_folder(name: str) -> Path | None:
    """Return where what a later run may use again is kept, in the cache folder; None where that isn't known, and nothing is."""
    try:
        return cache_folder() / name
    except OSError:
        return None


def user_folder(variable: str, default: Callable[[str], Path]) -> Path:
    """Return the folder that a variable of the environment names, or the `default` one of a program of our name.

    Raises:
        OSError: it lies in a home folder that can't be found, as in a container whose user has neither HOME nor an
            entry among the system's users; `strerror` names the variable.
    """
    named = os.environ.get(variable)
    try:
        return Path(named).expanduser().absolute() if named else default("profiling-agent")
    except RuntimeError as error:
        reason = f"the home folder can't be found: set {variable} to an absolute path"
        raise FileRefusedError(Path(named or "~"), reason) from error


def cached(name: str, build: Callable[[Path], None]) -> Path:
    """Return the cache's folder `name`, built once by `build`, which is given an empty folder to fill.

    Processes that ask at the same time wait for one another. A folder is there whole or not at all.

    Raises:
        AcquisitionError: the cache can't be written.
    """
    try:
        folder = cache_folder() / name
    except OSError as error:
        raise AcquisitionError(f"the cache folder isn't known ({error.strerror})") from error
    if folder.is_dir():
        return folder
    try:
        make_folders(folder.parent)
        with FileLock(folder.parent / f"{name}.lock"):
            if not folder.is_dir():
                sweep(folder.parent, name)
                with appearing(folder) as made:
                    build(made)
    except OSError as error:
        raise AcquisitionError(
            f"cache folder {str(folder.parent)!r} can't be written ({error.strerror}): set {VARIABLE} to another"
        ) from error
    return folder


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
