"""Sweep folder: the runs of one sweep, which runs those are, and the page of what they came to."""

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from profiling_agent.documents import DocumentError, read_record
from profiling_agent.errors import RequestError, StorageError
from profiling_agent.files import make_folders, storage_problem, write_text
from profiling_agent.holder import holder_said, note_holder
from profiling_agent.records import Record
from profiling_agent.reproducibility import environment
from profiling_agent.request import Request
from profiling_agent.sweep.page import render_sweep
from profiling_agent.sweep.results import RunResult

MANIFEST, PAGE, RESULTS = "sweep.json", "sweep.html", "results.json"
LOCK, HOLDER = "sweep.lock", "sweep-holder.json"
# Runs that are read back come faster than a page of megabytes is drawn.
MOMENT_S = 2.0


class SweepManifest(Record):
    """What `sweep.json` holds: which runs the folder is for, and the machine whose times they are."""

    machine: str
    run_ids: tuple[str, ...]


class SweepResults(Record):
    """What `results.json` holds: what was done so far, in the sweep's order."""

    results: tuple[RunResult, ...]


class SweepFolder:
    """The folder of one sweep, whose results are written down as they come."""

    def __init__(self, root: Path, requests: Sequence[Request]) -> None:
        """Take the folder for these runs, with what was done of them before; `locked` is the way in."""
        self.root = root
        self._order = [str(request.run_id) for request in requests]
        self._results = {result.run_id: result for result in _kept(root)}
        self._written_s = 0.0

    def note(self, result: RunResult) -> None:
        """Keep what a run came to, and write all down, unless that was done a moment ago; StorageError where it can't be."""
        self._results[result.run_id] = result
        if time.monotonic() - self._written_s >= MOMENT_S:
            self.write()

    def write(self) -> None:
        """Write down what was done so far, and draw the page anew; StorageError where it can't be."""
        done = tuple(self._results[name] for name in self._order if name in self._results)
        try:
            write_text(self.root / RESULTS, SweepResults(results=done).model_dump_json(indent=1) + "\n")
            write_text(self.root / PAGE, render_sweep(done, len(self._order)))
        except OSError as error:
            problem = storage_problem(error) or f"{error.strerror}: mend that"
            raise StorageError(
                f"sweep folder {str(self.root)!r} can't be written, {problem}, then give the same command again"
            ) from error
        self._written_s = time.monotonic()


def _kept(root: Path) -> tuple[RunResult, ...]:
    """Return what an earlier call has written down; nothing where that can't be read, as each run has it too."""
    try:
        return read_record(SweepResults, root / RESULTS, under=root).results
    except (OSError, DocumentError):
        return ()


@contextmanager
def locked(root: Path, requests: Sequence[Request]) -> Generator[SweepFolder]:
    """Give the folder of a sweep to this process, and write down at the end what was done.

    Raises:
        RequestError: another process sweeps there, it holds another sweep's runs or another machine's, or it can't be written.
    """
    try:
        make_folders(root)
        lock = FileLock(root / LOCK, thread_local=False)
        lock.acquire(timeout=0)
    except Timeout as error:
        holder = holder_said(root / HOLDER)
        raise RequestError(
            f"sweep folder {str(root)!r} is in use by {holder}: wait for it, or choose another output"
        ) from error
    except OSError as error:
        raise _unwritable(root, error) from error
    try:
        note_holder(root / HOLDER, f"sweep {root.name!r}")
        _claim(root, [str(request.run_id) for request in requests])
        folder = SweepFolder(root, requests)
        try:
            yield folder
        finally:
            folder.write()
    finally:
        lock.release()


def _claim(root: Path, run_ids: Sequence[str]) -> None:
    """Note which runs the folder is for; a sweep that was given more of them since goes on."""
    path, here = root / MANIFEST, environment().machine
    if path.exists():
        try:
            begun = read_record(SweepManifest, path, under=root)
        except (OSError, DocumentError) as error:
            raise RequestError(f"{str(path)!r} can't be read: remove it, or choose another output") from error
        if begun.machine != here:
            raise RequestError(
                f"sweep folder {str(root)!r} was begun on {begun.machine!r} and this is {here!r}: times of both would be mixed, so choose another output"
            )
        if gone := [name for name in begun.run_ids if name not in set(run_ids)]:
            raise RequestError(
                f"sweep folder {str(root)!r} holds another sweep, {len(gone)} of whose {len(begun.run_ids)} runs aren't asked for here "
                f"(such as {gone[0]!r}): choose another output"
            )
    try:
        write_text(path, SweepManifest(machine=here, run_ids=tuple(run_ids)).model_dump_json(indent=1) + "\n")
    except OSError as error:
        raise _unwritable(root, error) from error


def _unwritable(root: Path, error: OSError) -> RequestError:
    return RequestError(f"output {str(root)!r} can't be written ({error.strerror}): choose another")
