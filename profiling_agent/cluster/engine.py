"""Ray engine: a run's jobs on the machines of a cluster, which share its folder; without Ray in this process."""

import itertools
import math
import os
import secrets
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import psutil

from profiling_agent.cluster.archive import Archive, needed_by
from profiling_agent.cluster.kind import kind_of
from profiling_agent.cluster.wire import Join, Said, Submit
from profiling_agent.deployment.protocol import missing_packages
from profiling_agent.errors import JobError, ProfilingAgentError, RequestError, RunError
from profiling_agent.files import TEMPORARY, expanded, read_text, write_text
from profiling_agent.holder import remove_left
from profiling_agent.jobs.engine import Batch, Ended, Listener
from profiling_agent.jobs.store import RESULT
from profiling_agent.jobs.wire import ERRORS
from profiling_agent.processes.child import Child, Wording
from profiling_agent.processes.environment import child_environment
from profiling_agent.processes.started import Started, child_command, start
from profiling_agent.progress import Progress
from profiling_agent.reproducibility import environment
from profiling_agent.request import Request
from profiling_agent.workspace import Workspace

PROGRAM, RAY_LOG, TOKEN = "profiling_agent.cluster", "ray.log", "ray-store"
# Where `ray get-auth-token` keeps it.
RAYS_TOKEN = "~/.ray/auth_token"
# Ray's own start takes seconds, and the first process of each machine imports all of us.
JOIN_S = 300.0
# How long what a machine has written may take to be seen here: file servers keep names for a while.
APPEARS_S, LOOK_S = 60.0, 0.1
# Beside the system's other temporary folders, as Ray's sockets have no room for longer paths.
FOLDER = "pa-ray-"
# How long Ray's processes have to end after the one that started them.
END_S = 10.0
WORDING = Wording(
    process="the process that joined the cluster",
    work="joining the cluster",
    too_slow="look at what Ray says in ray.log",
    too_large="use engine=local",
)


# The machines that this process has found fit, by cluster, folder and store: runs side by side look at each once.
_known: dict[tuple[str | None, str, str | None], tuple[str, ...]] = {}


@contextmanager
def joined(workspace: Workspace, request: Request) -> "Generator[RayEngine | None]":
    """Give the cluster that a request asks for, None where its work is done here.

    Raises RequestError where Ray isn't installed, or the cluster can't be joined, has no machine of this one's kind, or one that doesn't
    see the run folder; RunError, which keeps the run, where it has done anything.
    """
    if request.engine != "ray":
        yield None
        return
    if line := missing_packages(("ray",), extra="ray"):
        raise RequestError(f"engine is 'ray', and {line}")
    try:
        engine = RayEngine(workspace, request.ray_address, store=request.ray_store)
    except RequestError as error:
        if not any(workspace.jobs.glob("*")):
            raise RequestError(str(error)) from error
        raise RunError(
            f"{error}; go on with `profiling-agent resume {workspace.root}` then, or with --engine local"
        ) from error
    try:
        yield engine
    finally:
        engine.close()


def count_machines(folder: Path, request: Request) -> int:
    """Return how many machines work for a request whose runs lie in `folder`: one where its work is done here.

    Raises RequestError as `joined`.
    """
    with joined(Workspace(folder), request) as cluster:
        return 1 if cluster is None else cluster.num_at_once


class RayEngine:
    """The machines of a cluster, each of which does one batch at a time."""

    def __init__(self, workspace: Workspace, address: str | None, *, store: str | None = None) -> None:
        """Join the cluster at `address`, or start one of this machine alone; RequestError as `joined`.

        Its machines share the run folder, or where they don't read and write jobs at the address `store`.
        """
        self._root, self._jobs, self._address = workspace.root.resolve(), workspace.jobs.resolve(), address
        self._run, self._store = self._root.name, store
        if store is not None:
            self._run = f"{self._run}-{_token(self._root / TOKEN)}"
        self._archive = None if store is None else _archive(store, self._run)
        self._numbers = itertools.count()
        with ExitStack() as started:
            remove_left(Path(tempfile.gettempdir()).glob(f"{FOLDER}*"))
            suffix = f"-{os.getpid()}"
            folder = started.enter_context(
                tempfile.TemporaryDirectory(prefix=FOLDER, suffix=suffix, ignore_cleanup_errors=True)
            )
            self._gateway = self._start(Path(folder))
            started.callback(self._end)
            self.nodes = self._join(folder)
            self._started = started.pop_all()

    @property
    def num_at_once(self) -> int:
        """Return how many machines there were when the run joined."""
        return len(self.nodes)

    def _start(self, folder: Path) -> Child[Said]:
        own = {name: value for name, value in os.environ.items() if name.startswith("RAY_")}
        if self._address != "auto" or "://" in own.get("RAY_ADDRESS", ""):
            own.pop("RAY_ADDRESS", None)
        # A machine's neighbours at a higher priority would be in its times.
        told = child_environment() | own | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        if self._address is None:
            token = folder / "token"
            write_text(token, secrets.token_hex(32))
            # The last keeps Ray to loopback: it takes 127.0.0.1 for a wish to be reached, else.
            told |= {
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN_PATH": str(token),
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            }
            told.pop("RAY_AUTH_TOKEN", None)
        elif "RAY_AUTH_TOKEN" in told or _is_there(told.get("RAY_AUTH_TOKEN_PATH") or RAYS_TOKEN):
            # A cluster is taken to be locked by the token that is here, as one has to be whose machines others can reach.
            told.setdefault("RAY_AUTH_MODE", "token")

        def begin(stderr: IO[bytes]) -> Started:
            return start(child_command(PROGRAM), told, stderr, None)

        return Child(begin, Said, WORDING, log=self._root / RAY_LOG)

    def _join(self, folder: str) -> tuple[str, ...]:
        with self._signed() as (sign, text):
            try:
                kind = kind_of(environment())
                known = _known.get(place := (self._address, str(self._root.parent), self._store), ())
                self._gateway.send(
                    Join(address=self._address, folder=folder, kind=kind, sign=sign, text=text, known=known)
                )
                said = self._gateway.receive(time.monotonic() + JOIN_S, f"took longer than {JOIN_S:.0f} s")
            except JobError as error:
                raise RequestError(f"Ray doesn't work here ({error}): use engine=local") from error
        if said.kind != "joined":
            raise RequestError(said.text)
        # Of a cluster that was started here nothing is known to the next.
        if self._address is not None:
            _known[place] = said.machines
        return said.nodes

    @contextmanager
    def _signed(self) -> Generator[tuple[str, str]]:
        """Give where a text lies that every machine has to see, and the text, for as long as it is looked for."""
        name, text = f"{TEMPORARY}sign-{secrets.token_hex(4)}", secrets.token_hex(16)
        if self._archive is not None:
            try:
                yield self._archive.sign(name, text), text
            finally:
                self._archive.unsign(name)
            return
        sign = self._root / name
        write_text(sign, text)
        try:
            yield str(sign), text
        finally:
            sign.unlink(missing_ok=True)

    def carry_out(self, batches: Sequence[Batch], progress: Progress, ended: Listener) -> None:
        """Do all side by side; RunError where the cluster is gone, or a machine can't work."""
        refused: dict[int, ProfilingAgentError] = {}
        left: set[int] = set()
        for batch in batches:
            left.add(number := next(self._numbers))
            address = None
            if self._archive is not None:
                address = self._archive.address
                for key in needed_by(batch.orders):
                    self._archive.put(self._jobs, key)
            self._tell(Submit(number=number, root=str(self._root), run=self._run, archive=address, batch=batch))
        if left:
            progress(f"waiting for a machine of the cluster: {batches[0].orders[0].key}", 0, 0)
        while left:
            said = self._hear()
            # Another number is of batches that were left, as the run was interrupted.
            if said.number in left:
                self._take(said, progress, ended, refused)
                left -= {said.number} if said.kind == "over" else set()
        for number in sorted(refused):
            raise refused[number]

    def _take(self, said: Said, progress: Progress, ended: Listener, refused: dict[int, ProfilingAgentError]) -> None:
        if said.kind == "progress":
            progress(f"{said.node}: {said.text}" if said.node else said.text, said.done, said.total)
        elif said.kind == "ended":
            self._end_job(said, ended)
        elif said.kind == "gone":
            refused[said.number] = self._lost(said.text)
        elif said.kind == "refused":
            refused[said.number] = _error(said)

    def _end_job(self, said: Said, ended: Listener) -> None:
        error = _error(said) if said.error else None
        if error is None:
            self._await(said)
        ended(Ended(key=said.key, seconds=said.seconds, at=said.at, node=said.node, tries=said.tries, error=error))

    def _await(self, said: Said) -> None:
        """Wait until what a machine says it has written is seen here, or fetch it."""
        if self._archive is not None:
            self._archive.get(self._jobs, said.key)
            return
        path, deadline = self._jobs / said.key / RESULT, time.monotonic() + APPEARS_S
        while not path.exists():
            if time.monotonic() > deadline:
                raise RunError(
                    f"{said.node} has done {said.key}, and {str(path)!r} isn't there after {APPEARS_S:.0f} s: look at what the machines share, "
                    "and resume"
                )
            time.sleep(LOOK_S)
            # A file server's client keeps what it knows of a folder until that is listed.
            os.listdir(self._jobs)  # noqa: PTH208 - for the call, not the names

    def _tell(self, submit: Submit) -> None:
        try:
            self._gateway.send(submit)
        except JobError as error:
            raise self._lost(str(error)) from error

    def _hear(self) -> Said:
        try:
            return self._gateway.receive(math.inf, "")
        except JobError as error:
            raise self._lost(str(error)) from error

    def _lost(self, why: str) -> RunError:
        where = self._address or "of this machine"
        return RunError(
            f"the cluster {where} is gone ({why}): go on with `profiling-agent resume {self._root}` when it is back, or with --engine local"
        )

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        self._started.close()

    def _end(self) -> None:
        started: list[Any] = []
        if self._gateway.pid is not None and self._gateway.is_alive:
            started = psutil.Process(self._gateway.pid).children(recursive=True)
        self._gateway.end()
        _, alive = psutil.wait_procs(started, END_S)
        for process in alive:
            process.kill()


def _is_there(named: str) -> bool:
    """Say whether a file is there; not, where it lies in a home folder that can't be found."""
    try:
        return expanded(named).exists()
    except OSError:
        return False


def _token(path: Path) -> str:
    """Return a run's own part of its name in an archive, where another run may have had the same name."""
    if not path.exists():
        write_text(path, secrets.token_hex(4))
    return read_text(path)[:8]


def _archive(address: str, run: str) -> Archive:
    try:
        return Archive(address, run)
    except RunError as error:
        raise RequestError(f"ray_store can't be used: {error}") from error


def _error(said: Said) -> ProfilingAgentError:
    return ERRORS.get(said.error, JobError)(said.text)
