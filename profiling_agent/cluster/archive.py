"""Archive: whole jobs of a run by their keys, at an address where machines that share no folder hand them to each other.

Any address that fsspec knows: a bucket, a file server, a folder. A job is there once its list of hashes is, which is written last; what
comes back is compared with it.
"""

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, cast

import fsspec
import tenacity

from profiling_agent.documents import DocumentError, first_line, parse_record, read_record
from profiling_agent.errors import RunError
from profiling_agent.files import appearing, file_sha256, make_folders, write_text
from profiling_agent.foreign import foreign_code, on_behalf
from profiling_agent.jobs.store import HASHES, Hashes, artifacts_of, key_of
from profiling_agent.jobs.wire import Order

# A bucket refuses now and then, and a file server hangs.
MAX_TRIES, MAX_WAIT_S = 5, 10.0
# In the address, beside the runs.
SIGNS = "signs"

T = TypeVar("T")


class Archive:
    """One run's jobs at an address."""

    def __init__(self, address: str, run: str) -> None:
        """Use `address`; RunError where fsspec doesn't know its kind."""
        self.address = address
        try:
            found: Any = fsspec.core.url_to_fs(address)
        except (ValueError, ImportError, OSError) as error:
            raise RunError(f"{address!r} is no place that can be used ({first_line(error)}): name another") from error
        self._files, root = found
        self._root, self._run = str(root).rstrip("/"), run
        self._known: set[str] = set()

    def _path(self, key: str, name: str) -> str:
        return f"{self._root}/{self._run}/jobs/{key}/{name}"

    def put(self, jobs: Path, key: str, *, anew: bool = False) -> None:
        """Copy a job that lies whole in `jobs` to the archive, unless it is there and isn't done `anew`; RunError where that can't be."""
        if not anew and (key in self._known or self._tried(lambda: self._files.exists(self._path(key, HASHES)))):
            self._known.add(key)
            return
        folder = jobs / key
        names = read_record(Hashes, folder / HASHES, under=folder).files
        for name in (*sorted(names), HASHES):
            path = self._path(key, name)
            self._tried(lambda path=path, name=name: self._put(folder / name, path))
        self._known.add(key)

    def _put(self, file: Path, path: str) -> None:
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(file), path)

    def get(self, jobs: Path, key: str) -> None:
        """Copy a job from the archive into `jobs`, unless it is there.

        Raises RunError where that can't be, or what comes isn't what was put there.
        """
        if (jobs / key).exists():
            return
        with appearing(jobs / key) as folder:
            text = self._tried(lambda: self._files.cat_file(self._path(key, HASHES)))
            for name, sha256 in _names(text, key).items():
                target = folder / name
                make_folders(target.parent)
                self._tried(lambda name=name, target=target: self._files.get_file(self._path(key, name), str(target)))
                if file_sha256(target) != sha256:
                    raise RunError(f"{self._path(key, name)!r} is damaged: empty {self.address!r}, and resume")
            write_text(folder / HASHES, cast("bytes", text).decode())
        self._known.add(key)

    def sign(self, name: str, text: str) -> str:
        """Leave a text for whoever reads the archive to show that it does; return its address."""
        path = f"{self._root}/{SIGNS}/{name}"
        self._tried(lambda: self._files.makedirs(f"{self._root}/{SIGNS}", exist_ok=True))
        self._tried(lambda: self._files.pipe_file(path, text.encode()))
        return f"{self.address.rstrip('/')}/{SIGNS}/{name}"

    def unsign(self, name: str) -> None:
        """Take a sign away."""
        # What was wrong is said by whoever put it there.
        with suppress(RunError):
            self._tried(lambda: self._files.rm_file(f"{self._root}/{SIGNS}/{name}"))

    def _tried(self, call: Callable[[], T]) -> T:
        """Return what `call` does, tried again where the other side fails; RunError where it goes on failing."""
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(OSError),
            stop=tenacity.stop_after_attempt(MAX_TRIES),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=MAX_WAIT_S),
            reraise=True,
        )
        # Each kind of store has errors of its own, as of keys that are missing.
        with foreign_code(lambda said: RunError(f"{self.address!r} can't be used, {said}: mend that, and resume")):
            return on_behalf(retrying, call)


def _names(text: Any, key: str) -> dict[str, str]:
    """Return a job's files and their hashes; RunError where they would lead out of its folder."""
    try:
        names = parse_record(Hashes, text).files
    except DocumentError as error:
        raise RunError(f"the archive's list of {key!r} is damaged ({error}): empty the archive, and resume") from error
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name:
            raise RunError(f"the archive's list of {key!r} names {name!r}, which leads out of it: empty the archive")
    return names


def read_sign(address: str) -> str:
    """Return the text of a sign; OSError where it isn't seen."""
    with fsspec.open(address, "rb") as stream:
        return cast("bytes", cast("Any", stream).read(1000)).decode(errors="replace")


def needed_by(orders: Iterable[Order]) -> list[str]:
    """Return the keys of the jobs whose folders orders read, those that they need and those that made their artifacts."""
    found: dict[str, None] = {}
    for order in orders:
        found |= dict.fromkeys(key for keys in order.given.values() for key in keys)
        found |= dict.fromkeys(key for ref in artifacts_of(order.read()) if (key := key_of(ref)) is not None)
    return list(found)
