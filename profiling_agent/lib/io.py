"""Files: atomic writes, paths confined to a folder, JSON records, and the cache."""

import errno
import glob
import hashlib
import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

# Not from pydantic, whose import takes a fifth of a second that `--help` doesn't need.
from pydantic_core import ValidationError

from profiling_agent.errors import AcquisitionError

if TYPE_CHECKING:
    from pydantic import BaseModel

ModelT = TypeVar("ModelT", bound="BaseModel")

# Prefix of half-written files; one that exists once the folder's lock is taken was left by a killed process.
TEMPORARY = ".tmp-"
# The disk is full, the user's quota is, or the file exceeds the size limit; or the disk fails.
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
DISK_FAILURES = NO_SPACE | {errno.EROFS, errno.EIO}
SQLITE_FAILURES = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR}
MAX_QUOTED = 80
CACHE_VARIABLE = "PROFILING_AGENT_CACHE"


class FileRefusedError(OSError):
    """A path that is refused; `strerror` is the reason, as in the system's own errors."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(errno.EINVAL, reason, str(path))


class DocumentError(ValueError):
    """JSON that can't be read; the message follows "the file is damaged: "."""


def storage_problem(error: BaseException) -> str | None:
    """Return the system's reason why the disk can't be written; None for other errors."""
    if isinstance(error, sqlite3.Error):
        # The low byte of an extended code is the primary one.
        return str(error) if getattr(error, "sqlite_errorcode", 0) & 0xFF in SQLITE_FAILURES else None
    if isinstance(error, OSError) and not isinstance(error, FileRefusedError):
        return error.strerror if error.errno in DISK_FAILURES | {errno.EACCES, errno.EPERM} else None
    return None


def expanded(text: str) -> Path:
    """Return a user's path with `~` expanded; FileRefusedError if there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise FileRefusedError(Path(text), f"it names a home folder that can't be found ({error})") from error


def inside(path: Path, folder: Path) -> Path:
    """Return `path` with all links followed; FileRefusedError if it is not under `folder`."""
    target = path.resolve()
    if not target.is_relative_to(folder.resolve()):
        raise FileRefusedError(path, f"it leads out of {str(folder)!r}")
    return target


def files_root(folder: Path) -> Path:
    """Return where links in `folder` may lead: the folder itself, or the repository of a Hub cache's snapshot."""
    is_snapshot = folder.parent.name == "snapshots" and (folder.parent.parent / "blobs").is_dir()
    return folder.parent.parent if is_snapshot else folder


def file_sha256(path: Path) -> str:
    """Return the hex sha256 of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def replacing(path: Path) -> Generator[IO[bytes], None, None]:
    """Yield a new file next to `path`, which it replaces when the block ends; remove it on an error."""
    temporary = path.with_name(f"{TEMPORARY}{path.name[:50]}-{uuid4().hex[:12]}")
    try:
        with temporary.open("xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes) -> None:
    """Write atomically: a reader or a crash finds the old file or the new one."""
    with replacing(path) as stream:
        stream.write(data)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text as `write_bytes` does; characters that can't be encoded are escaped."""
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"))


def append_line(path: Path, line: str) -> None:
    """Append a line to a file, created if missing; a line that doesn't fit on the disk is removed."""
    with path.open("a+b", buffering=0) as stream:
        size = stream.seek(0, os.SEEK_END)
        # A line that a kill cut off must not take this one with it.
        start = b"\n" if size and os.pread(stream.fileno(), 1, size - 1) != b"\n" else b""
        data = start + line.encode("utf-8", errors="backslashreplace") + b"\n"
        if stream.write(data) != len(data):
            stream.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(stream.fileno())


@contextmanager
def appearing(folder: Path) -> Generator[Path, None, None]:
    """Yield a new folder next to `folder`, whose name it takes when the block ends; remove it on an error.

    Raises:
        FileExistsError: something has that name.
    """
    if os.path.lexists(folder):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
    if not folder.parent.exists():
        folder.parent.mkdir(parents=True)
    temporary = folder.with_name(f"{TEMPORARY}{folder.name[:50]}-{uuid4().hex[:12]}")
    temporary.mkdir()
    try:
        yield temporary
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_partial_files(folder: Path, name: str = "") -> None:
    """Remove half-written files of killed processes, by default of any name; the caller holds their lock."""
    for leftover in folder.glob(f"{TEMPORARY}{glob.escape(name[:50])}*"):
        # Another process may be removing it too.
        shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink(missing_ok=True)


def parse_json(text: str | bytes) -> Any:
    """Return the content of a JSON document; DocumentError if it is none."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise DocumentError(f"it is no JSON ({error})") from None


def first_problem(error: ValidationError, *, quotes: bool = True) -> str:
    """Return the first error as `where: what (got value)`, on one line; without the value unless it `quotes`."""
    problem = error.errors(include_url=False, include_context=False)[0]
    if problem["type"] == "json_invalid":
        return f"it is no JSON ({problem['msg'].removeprefix('Invalid JSON: ')})"
    message, is_ours = problem["msg"].removeprefix("Value error, "), problem["type"] == "value_error"
    if is_ours and quotes and not problem["loc"]:
        # From our validator of several fields, which names them and their values.
        return message
    location = clean(".".join(map(str, problem["loc"]))[:MAX_QUOTED]) or "document"
    if quotes:
        return f"{location}: {message} (got {str(problem['input'])[:MAX_QUOTED]!r})"
    # Only our own validators put values into their messages.
    return f"{location}: {'not a value that is allowed' if is_ours else message}"


def parse_record(kind: type[ModelT], text: str | bytes, *, strict: bool | None = None, quotes: bool = False) -> ModelT:
    """Return the record in a JSON document, DocumentError if it holds none; the error `quotes` a user's own document only."""
    try:
        return kind.model_validate_json(text, strict=strict)
    except ValidationError as error:
        raise DocumentError(first_problem(error, quotes=quotes)) from None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; OSError if it can't be opened, DocumentError if it is no JSON."""
    return parse_json(path.read_bytes())


def read_record(kind: type[ModelT], path: Path) -> ModelT:
    """Return the record in a JSON file; OSError and DocumentError as in `read_json`."""
    return parse_record(kind, path.read_bytes())


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type's name if there is none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def clean(text: str, *, layout: bool = False) -> str:
    """Escape control, format and other unprintable characters, which move a cursor or reverse text; `layout` keeps \\n and \\t."""
    return "".join(
        char if char.isprintable() or (layout and char in "\n\t") else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def inert(text: str) -> str:
    """Escape text for a Markdown page so that it holds no link, picture or HTML; other marks stay."""
    return clean(text, layout=True).replace("](", "] (").replace("![", "! [").replace("<", "&lt;")


def user_folder(variable: str, default: Callable[[str], Path]) -> Path:
    """Return the folder that an environment variable names, or the `default` one for our program's name."""
    value = os.environ.get(variable)
    try:
        return expanded(value).absolute() if value else default("profiling-agent")
    except RuntimeError as error:
        reason = f"the home folder can't be found: set {variable} to an absolute path"
        raise FileRefusedError(Path("~"), reason) from error


def cache_folder() -> Path:
    """Return the folder named by PROFILING_AGENT_CACHE, or the user's cache folder."""
    import platformdirs

    return user_folder(CACHE_VARIABLE, platformdirs.user_cache_path)


def cached(name: str, build: Callable[[Path], None]) -> Path:
    """Return the cache's folder `name`, built once by `build`, which gets an empty folder to fill.

    Concurrent callers wait for one another. The folder is complete or absent.

    Raises:
        AcquisitionError: the cache can't be written.
    """
    from filelock import FileLock

    try:
        root = cache_folder()
        if not (root / name).is_dir():
            root.mkdir(parents=True, exist_ok=True)
            with FileLock(root / f"{name}.lock"):
                if not (root / name).is_dir():
                    remove_partial_files(root, name)
                    with appearing(root / name) as temporary:
                        build(temporary)
    except OSError as error:
        raise AcquisitionError(
            f"cache folder {error.filename or name!r} can't be written ({error.strerror}): set {CACHE_VARIABLE} to another"
        ) from error
    return root / name
