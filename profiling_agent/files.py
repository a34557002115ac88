"""Files: the one door for reading what somebody named or left, and the one way of writing.

What is read is a regular file of bounded size, opened without waiting: no device, no FIFO, no folder; inside a folder that
was given, no link that leaves it. What is written appears whole, on disk, under its name, or not at all.
"""

import contextlib
import errno
import glob
import hashlib
import io
import os
import shutil
import sqlite3
import stat
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

# What begins so was left half-written by a process that ended; whoever holds the folder's lock may sweep it away.
TEMPORARY = ".tmp-"
# A report of a hundred attempts has 3 MB, the profile of a ViT-L about 10.
MAX_DOCUMENT = 64 * 2**20
# The weights of no image classifier are as large; a sparse file of any size takes no room and hours to hash.
MAX_HASHED = 64 * 2**30
# The disk is full, the user's share of it is, or the file is larger than files may be.
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# What the disk has against being written, and what helps, by the system's number and by SQLite's primary one.
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

# What file systems say that know no sync of a folder.
NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP})


class FileRefusedError(OSError):
    """A file that isn't opened for what it is; `strerror` says why, as the system's own errors do."""

    def __init__(self, path: Path, reason: str) -> None:
        """Refuse `path`."""
        super().__init__(errno.EPERM, reason, str(path))


def expanded(named: str) -> Path:
    """Return a path that somebody named, `~` followed; FileRefusedError where there is no such user, or a NUL in it."""
    path = Path(named)
    if "\0" in named:
        raise FileRefusedError(path, "it holds a NUL character")
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise FileRefusedError(path, f"it names a home folder that can't be found ({error})") from error


def storage_problem(error: BaseException) -> str | None:
    """Return what a disk has against being written, and what helps; None where an error says nothing of the kind."""
    if isinstance(error, FileRefusedError):
        return None
    if isinstance(error, sqlite3.Error):
        # An extended code has the primary one in its low byte.
        return SQLITE_STORAGE.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
    return STORAGE.get(error.errno or 0) if isinstance(error, OSError) else None


def resolved(path: Path) -> Path:
    """Return `path` with all links followed; FileRefusedError where it is no path: a NUL in it, or links that go round."""
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


def is_snapshot(folder: Path) -> bool:
    """Say whether a folder is one of the Hub's cache, whose files are links to its repository's blobs."""
    return folder.parent.name == "snapshots" and (folder.parent.parent / "blobs").is_dir()


def open_regular(path: Path, *, max_bytes: int | None, under: Path | None = None) -> io.BufferedReader:
    """Open a regular file of at most `max_bytes` (None for any size) for reading, below `under` where that is given.

    Raises:
        OSError: it can't be read, or isn't such a file (FileRefusedError).
    """
    found = inside(path, under) if under is not None else path
    # Nothing waits for a FIFO's writer; below a folder every link was followed, so that another is an exchange.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_NOFOLLOW if under is not None else 0)
    try:
        descriptor = os.open(found, flags)
    except ValueError as error:
        raise FileRefusedError(path, f"it is no path ({error})") from error
    _check_regular(descriptor, path, max_bytes)
    return os.fdopen(descriptor, "rb")


def _check_regular(descriptor: int, path: Path, max_bytes: int | None = None) -> None:
    """Let what was opened without waiting be waited for; FileRefusedError, and it is closed, where it is no such file."""
    status = os.fstat(descriptor)
    refused = None
    if not stat.S_ISREG(status.st_mode):
        refused = f"it is {_kind(status.st_mode)}, not a regular file"
    elif max_bytes is not None and status.st_size > max_bytes:
        refused = f"it is larger than {max_bytes:,} bytes"
    if refused:
        os.close(descriptor)
        raise FileRefusedError(path, refused)
    os.set_blocking(descriptor, True)


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"))
    return next((name for test, name in kinds if test(mode)), "a device")


def read_bytes(path: Path, *, max_bytes: int = MAX_DOCUMENT, under: Path | None = None) -> bytes:
    """Return what a regular file holds; OSError as `open_regular`, also where it grew past `max_bytes` meanwhile."""
    with open_regular(path, max_bytes=max_bytes, under=under) as stream:
        held = stream.read(max_bytes + 1)
    if len(held) > max_bytes:
        raise FileRefusedError(path, f"it is larger than {max_bytes:,} bytes")
    return held


def read_text(path: Path, *, max_bytes: int = MAX_DOCUMENT, under: Path | None = None) -> str:
    """Return a regular file's UTF-8 text; OSError as `read_bytes`, UnicodeDecodeError where it is none."""
    return read_bytes(path, max_bytes=max_bytes, under=under).decode("utf-8")


def file_sha256(path: Path, *, under: Path | None = None) -> str:
    """Return the hex sha256 of a regular file's bytes; OSError as `open_regular`, also where it has more than 64 GiB."""
    with open_regular(path, max_bytes=MAX_HASHED, under=under) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Have the system put a file's bytes on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_names(folder: Path) -> None:
    """Have the system put a folder's names on the disk, where it can; the folder may be named by a link."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        # It may be written and not listed; what was to be written is.
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def make_folders(folder: Path) -> None:
    """Make a folder and those above it, where they aren't there, their names on the disk.

    Raises:
        FileExistsError: there is something else of that name.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync_names(path.parent)


def sync_tree(folder: Path) -> None:
    """Put everything in a folder on the disk, the folder last; links are left alone."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            continue
        if path.is_dir():
            sync_tree(path)
        elif path.is_file():
            sync(path)
    sync_names(folder)


@contextmanager
def replacing(path: Path) -> Generator[IO[bytes], None, None]:
    """Give a new file to write to, beside `path`, which it replaces when the block ends; it vanishes if the block raises.

    Its name can't be foreseen and it is created anew, so that nothing which lies there is written through.
    """
    descriptor, name = tempfile.mkstemp(prefix=f"{TEMPORARY}{path.name[:50]}-", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
            stream.flush()
            # As any file that a program of the user's makes, and not for the user alone, as mkstemp has it.
            os.fchmod(stream.fileno(), 0o666 & ~_umask())
            os.fsync(stream.fileno())
        temporary.replace(path)
        sync_names(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    """Return the process's mask of file modes, which can only be read by setting it, or in Linux's list of facts."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(next(line for line in status.splitlines() if line.startswith("Umask:")).split()[1], 8)
    return 0o077


def write_bytes(path: Path, data: bytes) -> None:
    """Write so that a reader, a crash and a power cut leave the old file or the new one, and nothing between."""
    with replacing(path) as stream:
        stream.write(data)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text as `write_bytes` does; what can't be encoded is escaped."""
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"))


def append_line(path: Path, line: str) -> None:
    """Add a line to a regular file, which is made where it isn't there; OSError where `path` is something else, or a link."""
    with open_log(path) as stream:
        descriptor, size = stream.fileno(), os.fstat(stream.fileno()).st_size
        data = line.encode("utf-8", errors="backslashreplace") + b"\n"
        # The line that a kill cut off must not take this one with it.
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data
        if os.write(descriptor, data) != len(data):
            os.ftruncate(descriptor, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.fsync(descriptor)


def open_log(path: Path) -> IO[bytes]:
    """Open a regular file that only grows, for reading too; OSError where `path` is something else, or a link."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    _check_regular(descriptor, path)
    return os.fdopen(descriptor, "a+b")


@contextmanager
def appearing(folder: Path) -> Generator[Path, None, None]:
    """Give a new folder to fill, beside `folder`, whose name it takes when the block ends; it vanishes if the block raises.

    Raises:
        FileExistsError: there is something of that name.
    """
    if os.path.lexists(folder):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder))
    try:
        make_folders(folder.parent)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder.parent)) from error
    temporary = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}{folder.name[:50]}-", dir=folder.parent))
    try:
        temporary.chmod(0o777 & ~_umask())
        yield temporary
        sync_tree(temporary)
        temporary.rename(folder)
        sync_names(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


# Of two that overlap the second would find what the first had set, and put that back for good.
_SCRATCH = threading.RLock()


@contextmanager
def scratch_in(folder: Path) -> Generator[Path, None, None]:
    """Give a temporary folder inside `folder`, for what libraries leave in temporary files too; it is gone when the block ends.

    The disk that what is made goes to has room for it: /tmp may be a container's 64 MB, or memory. One thread at a time; all
    threads' temporary files go there meanwhile, and with it.
    """
    with _SCRATCH, tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=resolved(folder)) as scratch:
        before, tempfile.tempdir = tempfile.tempdir, scratch
        try:
            yield Path(scratch)
        finally:
            tempfile.tempdir = before


def sweep(folder: Path, name: str = "") -> None:
    """Remove what a killed process left half-written in a folder, of files so named alone; for the holder of their lock."""
    for leftover in folder.glob(f"{TEMPORARY}{glob.escape(name)}*"):
        if leftover.is_dir() and not leftover.is_symlink():
            # Somebody may still be at it, or have been faster.
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)
