"""Started process: a program of ours that runs, whether the system started it anew or a fork server copied itself."""

import contextlib
import itertools
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO

from profiling_agent.processes.forking import MAX_BYTES, OWN, Asked, control

# AMD's driver, which a library may wake up when it is imported, works in no copy. NVIDIA's does as long as it is asleep,
# which each copy looks at itself (`forking.become`).
DRIVERS = ("/dev/kfd",)


def can_fork() -> bool:
    """Say whether this machine stands copies: Linux from 5.3, where a file names a process, and without an AMD GPU.

    macOS forbids what its libraries do in a copy.
    """
    is_amd = any(Path(driver).exists() for driver in DRIVERS)
    return sys.platform == "linux" and hasattr(os, "pidfd_open") and not is_amd


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs one of our modules."""
    # -P: a file of the user's called torch.py in the working folder is not to be imported.
    return [sys.executable, "-P", "-m", module, *arguments]


class Executed(subprocess.Popen[str]):
    """A process that the system started anew, with this environment and no other."""

    stdin: IO[str]  # pyright: ignore[reportIncompatibleVariableOverride] - a pipe
    stdout: IO[str]  # pyright: ignore[reportIncompatibleVariableOverride] - a pipe

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], stderr: IO[bytes]) -> None:
        super().__init__(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment,
            text=True,
            encoding="utf-8",
        )


class ForkServer:
    """Whom a process asks for copies of one that has imported modules: a twentieth of what starting them anew takes."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._numbers = itertools.count()
        # Whether it has ever made a copy: one that can't import doesn't come as far.
        self.has_started = False

    def serves(self, environment: Mapping[str, str]) -> bool:  # noqa: ARG002 - a copy's own programs begin with what it did
        """Say whether its programs begin with what one would that is started now; our own variables may be any."""
        return True

    def start(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], stderr: IO[bytes]
    ) -> "Forked":
        """Have a copy run `module` as a program; OSError where the server is gone, or was told too much."""
        own = {name: value for name, value in environment.items() if name.startswith(OWN)}
        return Forked(self, Asked(next(self._numbers), module, arguments, str(Path.cwd()), own), stderr)

    def ask(self, asked: Asked, descriptors: Sequence[int] = ()) -> None:
        """Send one message; OSError where the server is gone, or the message is too long."""
        message = asked.encoded()
        if len(message) > MAX_BYTES:
            raise OSError(f"a message of {len(message)} bytes is too long")
        socket.send_fds(self._control, [message], descriptors)


class OwnForkServer(ForkServer):
    """A fork server that this process started, and has to end."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(ours)
        self._passed_on = _passed_on(environment)
        command = child_command("profiling_agent.processes", *modules)
        with theirs:
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
            )

    @property
    def is_alive(self) -> bool:
        """Say whether it can be asked."""
        return self._process.poll() is None

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Say whether it is alive, and its programs begin with what one would that is started now."""
        return self.is_alive and self._passed_on == _passed_on(environment)

    def end(self) -> None:
        """End it; what it started goes on."""
        self._control.close()
        self._process.kill()
        self._process.wait()


@cache
def inherited() -> ForkServer | None:
    """Return the fork server that this process is a copy of, None where it was started anew."""
    own = control()
    return ForkServer(socket.socket(fileno=own)) if own is not None else None


def start(
    command: Sequence[str], environment: Mapping[str, str], stderr: IO[bytes], server: ForkServer | None
) -> "Started":
    """Start a command with this environment: a module of ours as a copy where there is a server for it, else anew."""
    beginning = child_command("")[:-1]
    if server is not None and list(command[: len(beginning)]) == beginning and server.serves(environment):
        module, *arguments = command[len(beginning) :]
        # A server that dies at this moment, or an environment too long for a message, costs a few seconds.
        with contextlib.suppress(OSError):
            return server.start(module, arguments, environment, stderr)
    return Executed(command, environment, stderr)


def _passed_on(environment: Mapping[str, str]) -> tuple[object, ...]:
    """Return what a process that is started now begins with, but for our own variables: environment, cores, the size of a file."""
    others = sorted((name, value) for name, value in environment.items() if not name.startswith(OWN))
    return (*others, *sorted(os.sched_getaffinity(0)), resource.getrlimit(resource.RLIMIT_FSIZE))


class Forked:
    """A process that is a copy of a fork server."""

    def __init__(self, server: ForkServer, asked: Asked, stderr: IO[bytes]) -> None:
        self._server, self._number = server, asked.number
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            ends = [_pipe(ours, theirs, to_child=to_child) for to_child in (True, False, False)]
            (write_in, read_in), (read_out, write_out), (read_status, write_status) = ends
            server.ask(asked, [read_in, write_out, stderr.fileno(), write_status])
            ours.pop_all()
        self.stdin = os.fdopen(write_in, "w", encoding="utf-8")
        self.stdout = os.fdopen(read_out, encoding="utf-8")
        self._status = os.fdopen(read_status, encoding="utf-8")
        self._pid: int | None = None
        self._handle: int | None = None
        self._code: int | None = None
        self._is_killed = False
        self._ended = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def pid(self) -> int | None:
        """Return its process id; None before the server has told it."""
        return self._pid

    def poll(self) -> int | None:
        """Return how it ended; None while it runs."""
        return self._code

    def wait(self) -> int:
        """Wait for its end and return how it ended."""
        self._ended.wait()
        assert self._code is not None, "it has ended"
        return self._code

    def kill(self) -> None:
        """Kill it, if it still runs; one that wasn't started yet ends as soon as it is, as nobody speaks to it."""
        self._is_killed = True
        try:
            self._server.ask(Asked(self._number))
        except OSError:
            self._kill_alone()
        if self._pid is None:
            self._end(-signal.SIGKILL)

    def _kill_alone(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._handle is not None and not self._ended.is_set():
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def _listen(self) -> None:
        """Keep what the server tells: the process id, and how it ended."""
        with self._status as told:
            pid = int(told.readline() or 0)
            if pid:
                # It names this process as long as it is open, whoever has its number by then.
                with contextlib.suppress(ProcessLookupError):
                    self._handle = os.pidfd_open(pid)
                self._pid, self._server.has_started = pid, True
            code = told.readline()
        if not code and self._handle is not None:
            # The server went first, perhaps with an order to kill that it had not read. Nobody tells how this one ends.
            if self._is_killed:
                self._kill_alone()
            select.select([self._handle], [], [])
        self._end(int(code) if code else -signal.SIGKILL)
        if self._handle is not None:
            os.close(self._handle)

    def _end(self, code: int) -> None:
        if not self._ended.is_set():
            self._code = code
            self._ended.set()


Started = Executed | Forked


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack, *, to_child: bool) -> tuple[int, int]:
    read, write = os.pipe()
    own, other = (write, read) if to_child else (read, write)
    ours.callback(os.close, own)
    theirs.callback(os.close, other)
    return own, other


@dataclass(slots=True)
class _Use:
    server: OwnForkServer
    num_users: int = 0


_in_use: dict[tuple[object, ...], _Use] = {}
_lock = threading.Lock()


@contextmanager
def fork_server(modules: Sequence[str], environment: Mapping[str, str]) -> Generator[OwnForkServer | None]:
    """Give the server of these modules and this environment, which all of this process share; it ends with its last user.

    One that died is followed by another. None where the system doesn't stand copies.
    """
    if not can_fork():
        yield None
        return
    key = (tuple(modules), *_passed_on(environment))
    with _lock:
        use = _in_use.get(key)
        if use is None or not use.server.serves(environment):
            use = _in_use[key] = _Use(OwnForkServer(modules, environment))
        use.num_users += 1
    try:
        yield use.server
    finally:
        with _lock:
            use.num_users -= 1
            if not use.num_users:
                use.server.end()
                if _in_use.get(key) is use:
                    del _in_use[key]
